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
from zoo.sizes import LEAVE, SPECIAL, VOCABULARY, sizes

LARGEST = 20_000_000

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
    special = {k: v(hidden) if callable(v) else v for k, v in SPECIAL.get(architecture.name, {}).items()}
    settings = {**sizes(hidden, layers), **special}
    made = []
    for kind in [*kinds, whole]:
        try:
            default = kind()
        except Exception:  # refused by the configuration itself: only what is set for it then
            default = None
        try:
            chosen = {k: v for k, v in settings.items() if v is not LEAVE and (k in special or _has(default, k))}
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
        hidden: hidden size, divisible by ``zoo.sizes.HEADS``.
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
