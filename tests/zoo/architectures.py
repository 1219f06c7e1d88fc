"""Every causal-LM class of transformers as a tiny random model: the material of the zoo's tests.

``architectures()`` lists them by model type, ``build`` makes one (no dropout, no cache, pad id 0, perturbed parameters)
and ``reference`` runs its loss and backward in one process. What cannot run alone, or is larger than
``LARGEST`` parameters however small its settings, raises :class:`CannotRunAlone` with the reason.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LARGEST = 20_000_000
HEADS = 4
VOCABULARY = 128

KINDS: tuple[str, ...] = (
    "llama",  # the common case
    "qwen3",  # norms over heads
    "mixtral",  # experts, router logits
    "deepseek_v3",  # low-rank attention, dense and sparse blocks
    "gpt2",  # Conv1D, learned positions, tied head
    "gpt_neox",  # parallel attention and MLP, interleaved qkv
    "bloom",  # ALiBi made outside the blocks, tied head
    "falcon",  # one key-value head
    "gpt_bigcode",  # multi-query
    "phi3",  # packed projections
    "gemma3_text",  # two rotary embeddings, two kinds of mask
    "opt",  # offset positions, tied head
    "mpt",  # bias of positions made outside the blocks
    "gpt_oss",  # sinks, experts as bare parameters
    "mamba",  # state space
    "rwkv",  # a state that every block hands on
    "openai-gpt",  # tuples as hidden states
    "xlm",  # several lists of modules side by side instead of blocks
    "ctrl",  # tuples as hidden states, numbered blocks
    "bert",  # encoder with a tied language head
    "cohere",  # logit scale, parallel blocks
    "olmo2",  # norms behind the sublayers
    "gemma3n_text",  # per-layer inputs, four streams, shared key-values
    "zamba2",  # blocks that share weights
    "jamba",  # attention, state space and experts in turn
    "cpmant",  # a shared position bias handed to every block
    "qwen3_next",  # linear attention
)
"""Architectures that differ in kind: what the default tests run."""


class CannotRunAlone(Exception):
    """This class does not train with a tiny configuration even in one process; the message says why."""


@dataclass(frozen=True)
class Architecture:
    """One entry of transformers' causal-LM mapping.

    Args:
        name: model type.
        class_name: the class, as ``GPT2LMHeadModel``.
    """

    name: str
    class_name: str


def architectures() -> dict[str, Architecture]:
    """All of them by model type, in transformers' order. Nothing is imported yet."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {name: Architecture(name, kind) for name, kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}


_HEAD_COUNTS = (
    "num_attention_heads",
    "n_head",
    "num_heads",
    "n_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
    "num_encoder_attention_heads",
    "num_decoder_attention_heads",
)
_LOW_RANK = (
    "axk1",
    "axk2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "longcat_flash",
    "minicpm3",
    "sarvam_mla",
    "youtu",
)


def _sizes(hidden: int, layers: int) -> dict[str, Any]:
    head = hidden // HEADS
    return {
        **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "dim_model"), hidden),
        **dict.fromkeys(
            ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), layers
        ),
        **dict.fromkeys(
            _HEAD_COUNTS,
            HEADS,
        ),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff"), 2 * hidden),
        **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), hidden),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim", "dim_head"), head),
        "vocab_size": VOCABULARY,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
        "num_encoder_layers": layers,
        "num_decoder_layers": layers,
    }


_DEFAULT = object()
"""In ``_SPECIAL``: leave this setting as the class has it."""
_LEAVE_HEAD = {"head_dim": _DEFAULT}
_WHOLE = {"kv_heads": HEADS, "num_key_value_heads": HEADS}
_GEMMA_3N = {
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
}
_GEMMA_4 = {
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "per_layer_config": {},
}
_QWEN_4 = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "hc_lowrank": 8,
    "ple_embed_dim": 16,
    "ngram_vocab_size_base": 100,
    "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 8,
}
_SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        _LOW_RANK,
        _WHOLE,
    ),
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": lambda hidden: hidden // 2},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    },
    "codegen": {"rotary_dim": 4},
    "dots1": {"n_shared_experts": 1},
    "falcon": _LEAVE_HEAD,
    "gemma3n_text": _GEMMA_3N,
    "gemma4_text": _GEMMA_4,
    "gemma4_unified_text": _GEMMA_4,
    "git": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
        }
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": lambda hidden: hidden // 2},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["full_attention", "conv"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": lambda hidden: hidden // 4, "n_groups": 2, "state_size": 8},
    "prophetnet": {"num_hidden_layers": _DEFAULT, "num_layers": _DEFAULT},
    "qwen4_exp_text": _QWEN_4,
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": lambda hidden: [8, hidden - 8],
        "attention_head_size": 8,
        "feed_forward_size": 64,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 3,
    },
    "xlnet": {"max_position_embeddings": _DEFAULT},
    "xlstm": {"v_head_dim": _DEFAULT, "head_dim": _DEFAULT},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings of single architectures that the common sizes do not fit; functions of the hidden size where it matters."""


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # some configurations raise others than AttributeError
        return False


def configurations(architecture: Architecture, hidden: int, layers: int) -> list[Any]:
    """Tiny configurations to try, the language part of a multimodal one first."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole = CONFIG_MAPPING[architecture.name]
    parts = getattr(whole, "sub_configs", None) or {}
    kinds = [part for key, part in parts.items() if key in ("text_config", "decoder") and isinstance(part, type)]
    special = {k: v(hidden) if callable(v) else v for k, v in _SPECIAL.get(architecture.name, {}).items()}
    settings = {**_sizes(hidden, layers), **special}
    made = []
    for kind in [*kinds, whole]:
        try:
            default = kind()
            chosen = {k: v for k, v in settings.items() if v is not _DEFAULT and (k in special or _has(default, k))}
            made.append(kind(**chosen))
        except Exception as error:
            made.append(error)
    return made


def without_noise(model: Any) -> None:
    """No dropout, no noise in routers."""
    for part in (getattr(model, "config", model), *model.modules()):
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("drop" in name.lower() or "jitter" in name.lower()):
                vars(part)[name] = 0.0


def build(architecture: Architecture, *, hidden: int = 32, layers: int = 4, perturb: float = 0.05) -> nn.Module:
    """The model in float32 and training mode, with parameters of seed 0 and noise of size ``perturb`` on all of them.

    (Zero biases and unit scales would hide an addition made twice and a missing sum.)

    Args:
        architecture: one of :func:`architectures`.
        hidden: hidden size, divisible by ``HEADS``.
        layers: blocks (a few classes need six).

    Raises:
        CannotRunAlone: with the reason.
    """
    import transformers

    kind = getattr(transformers, architecture.class_name)
    reasons = []
    for config in configurations(architecture, hidden, layers):
        if isinstance(config, Exception):
            reasons.append(f"{type(config).__name__}: {config}")
            continue
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(config).parameters())
            if size > LARGEST:
                reasons.append(f"{size:,} parameters")
                continue
            torch.manual_seed(0)
            model = kind(config).float().train()
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        without_noise(model)
        if hasattr(model, "set_default_language"):
            model.set_default_language("en_XX")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(perturb * torch.randn(parameter.shape, generator=generator))
        return model
    raise CannotRunAlone("; ".join(dict.fromkeys(" ".join(r.split())[:160] for r in reasons)))


def tokens(rows: int = 2, length: int = 16, seed: int = 3) -> Tensor:
    """Token ids, none of which is special; int64 of shape (rows, length)."""
    return torch.randint(3, VOCABULARY - 8, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The class's own causal loss; the seed is fixed because a few classes draw numbers in their forward."""
    torch.manual_seed(5)
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return model(input_ids=ids, labels=ids, **extra).loss


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class Reference:
    """One process: its loss and every gradient by name, in the widest precision that the class allows."""

    model: nn.Module
    loss: float
    gradients: dict[str, Tensor]
    dtype: torch.dtype


def reference(architecture: Architecture, *, hidden: int = 32, layers: int = 4, ids: Tensor | None = None) -> Reference:
    """Build the model and run loss and backward once, in float64 if that runs, else in float32.

    Returns:
        the model as it was before, and what came out.

    Raises:
        CannotRunAlone: with the reason.
    """
    ids = tokens() if ids is None else ids
    for dtype in (torch.float64, torch.float32):
        model = build(architecture, hidden=hidden, layers=layers)
        if dtype is torch.float64 and hasattr(model, "set_experts_implementation"):
            model.config._experts_implementation = "eager"  # grouped matrix products have no float64
        model = model.to(dtype)
        untouched = copy.deepcopy(model)  # a run may leave states behind
        try:
            loss = loss_of(model, ids)
            loss.backward()
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            continue
        gradients = gradients_of(model)
        if not torch.isfinite(loss) or len(gradients) <= 5:
            raise CannotRunAlone(f"loss {float(loss.detach())} with {len(gradients)} gradients")
        return Reference(untouched, float(loss.detach()), gradients, dtype)
    raise CannotRunAlone(reason)
