"""A decoder-only transformer from the parallel layers: GPT-2 and Llama are two settings of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megapar.config import ConfigError, nearest_name
from lightning_megapar.layers.attention import ParallelAttention, RotaryPositions, check_heads
from lightning_megapar.layers.dropout import SequenceDropout
from lightning_megapar.layers.embedding import LearnedPositions, VocabParallelEmbedding, VocabParallelHead
from lightning_megapar.layers.mlp import GeluMLP, SwiGLU
from lightning_megapar.layers.norm import LayerNorm, RMSNorm
from lightning_megapar.sharding.initialise import initialise_by_name

INIT_STD = 0.02
"""Standard deviation of initial weights; layers that write into the residual stream have it over sqrt(2 x layers)."""

_CHOICES = {"position": ("learned", "rope"), "norm": ("layernorm", "rmsnorm"), "mlp": ("gelu", "swiglu")}


@dataclass(frozen=True)
class GPTConfig:
    """Shape and style of a :class:`GPT`.

    Args:
        vocab_size: tokens; the tables are padded to a multiple of ``vocab_multiple`` rows.
        num_layers: blocks.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of ``num_heads``; ``None`` means ``num_heads``.
        hidden_size: width of the residual stream.
        ffn_hidden_size: inner width of the MLP; ``None`` means 4 x hidden for gelu, 8/3 x hidden rounded up to a
            multiple of 64 for swiglu.
        max_sequence_length: longest sequence.
        position: ``"learned"`` or ``"rope"``.
        norm: ``"layernorm"`` or ``"rmsnorm"``.
        mlp: ``"gelu"`` or ``"swiglu"``.
        tied_head: the output head shares the embedding's table.
        bias: in linear layers and LayerNorm.
        dropout: probability, on the embedding's output and on what each sublayer adds to the residual stream.
        rope_theta: base of the rotary wavelengths.
        norm_eps: added to the variance or mean square.
        vocab_multiple: see ``vocab_size``.
        seed: of the initial values.

    Raises:
        ConfigError: on a value outside its range, naming the setting, the value and the nearest valid ones.
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    hidden_size: int
    max_sequence_length: int
    num_kv_heads: int | None = None
    ffn_hidden_size: int | None = None
    position: str = "learned"
    norm: str = "layernorm"
    mlp: str = "gelu"
    tied_head: bool = True
    bias: bool = True
    dropout: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    vocab_multiple: int = 64
    seed: int = 1234

    def __post_init__(self) -> None:
        optional = ("num_kv_heads", "ffn_hidden_size")
        for name in (
            "vocab_size", "num_layers", "num_heads", "hidden_size", "max_sequence_length", "vocab_multiple", *optional
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}: expected a positive integer (nearest valid: 1)")
        for name, valid in _CHOICES.items():
            value = getattr(self, name)
            if value not in valid:
                near = nearest_name(str(value).lower(), valid)
                hint = f"; did you mean {near!r}?" if near else ""
                raise ConfigError(f"{name}={value!r} is not one of {', '.join(valid)}{hint}")
        for name in ("tied_head", "bias"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected true or false")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout={self.dropout}: expected 0 <= dropout < 1 (nearest valid: 0.0, 0.99)")
        if not self.norm_eps > 0 or not self.rope_theta > 0:
            raise ConfigError(f"norm_eps={self.norm_eps} and rope_theta={self.rope_theta} must be above 0")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ConfigError(f"seed={self.seed!r}: expected an integer (nearest valid: 0)")
        check_heads(self.hidden_size, self.num_heads, self.kv_heads)
        if self.position == "rope" and self.head_dim % 2:
            raise ConfigError(
                f"position='rope' needs an even head size, but hidden_size={self.hidden_size} / "
                f"num_heads={self.num_heads} = {self.head_dim}"
            )

    @classmethod
    def gpt2(cls, **settings: Any) -> GPTConfig:
        """GPT-2: learned positions, LayerNorm, GELU, tied head, biases."""
        style = {"position": "learned", "norm": "layernorm", "mlp": "gelu", "tied_head": True, "bias": True}
        return cls(**{**style, **settings})

    @classmethod
    def llama(cls, **settings: Any) -> GPTConfig:
        """Llama: rotary positions, RMSNorm, SwiGLU, untied head, no biases; set ``num_kv_heads`` for grouped heads."""
        style = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "tied_head": False, "bias": False}
        return cls(**{**style, **settings})

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.mlp == "gelu":
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // (3 * 64)) * 64


class GPTEmbedding(nn.Module):
    """Tokens (batch, s) to hidden states (batch, s, hidden), or their slice of the sequence."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, vocab_multiple=config.vocab_multiple, init_std=INIT_STD
        )
        self.positions = None
        if config.position == "learned":
            self.positions = LearnedPositions(config.max_sequence_length, config.hidden_size, init_std=INIT_STD)
        self.dropout = SequenceDropout(config.dropout)
        self.max_sequence_length = config.max_sequence_length

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[-1]
        if length > self.max_sequence_length:
            raise ConfigError(
                f"sequence length {length} is above max_sequence_length={self.max_sequence_length}; nearest valid "
                f"length: {self.max_sequence_length}"
            )
        hidden = self.tokens(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(length)
        return self.dropout(hidden)


def _norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.hidden_size, eps=config.norm_eps)
    return LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)


class GPTBlock(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream: (batch, s, hidden) -> the same."""

    def __init__(self, config: GPTConfig, rotary: RotaryPositions | None) -> None:
        super().__init__()
        stds: dict = {"init_std": INIT_STD, "output_std": INIT_STD / math.sqrt(2 * config.num_layers)}
        self.attention_norm = _norm(config)
        self.attention = ParallelAttention(
            config.hidden_size, config.num_heads, config.num_kv_heads, bias=config.bias, rotary=rotary, **stds
        )
        self.mlp_norm = _norm(config)
        mlp = SwiGLU if config.mlp == "swiglu" else GeluMLP
        self.mlp = mlp(config.hidden_size, config.ffn_size, bias=config.bias, **stds)
        self.dropout = SequenceDropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))


class GPT(nn.Module):
    """Decoder-only language model.

    Built on the default device. On the meta device it stays there for whoever shards it; elsewhere its parameters are
    initialised by name from ``config.seed``, so that every layout starts from the same values. Attention
    probabilities are not dropped, whatever ``config.dropout`` is.

    Args:
        config: shape and style.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.init_seed = config.seed
        self.init_aliases = {"head.weight": "embedding.tokens.weight"} if config.tied_head else {}
        device = torch.get_default_device()
        # Built without values first, or each would be drawn twice.
        with torch.device("meta"):
            rotary = RotaryPositions(config.head_dim, config.rope_theta) if config.position == "rope" else None
            self.embedding = GPTEmbedding(config)
            self.blocks = nn.ModuleList(GPTBlock(config, rotary) for _ in range(config.num_layers))
            self.final_norm = _norm(config)
            self.head = VocabParallelHead(
                config.vocab_size,
                config.hidden_size,
                vocab_multiple=config.vocab_multiple,
                init_std=INIT_STD,
                weight=self.embedding.tokens.weight if config.tied_head else None,
            )
        if device.type != "meta":
            initialise_by_name(self, config.seed, device=device)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Loss or logits.

        Args:
            tokens: (batch, s) int64 in [0, vocab_size).
            labels: (batch, s) int64, the token to predict at each place, -100 for none.

        Returns:
            with ``labels`` the mean cross entropy over those that count, a scalar (0 when there are none); without,
            logits (batch, s, vocab_size).

        Raises:
            ConfigError: for a sequence above ``max_sequence_length``, or not divisible under sequence parallelism.
            ValueError: on the CPU, for tokens or labels outside the vocabulary.
        """
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.final_norm(hidden)
        return self.head(hidden) if labels is None else self.head(hidden, labels)
