"""Linear layers that are not this package's: what they are, how wide, and whether their weight is their own."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import parametrize


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' ``Conv1D``: a linear layer whose weight lies (in, out)."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def computed_weight(module: nn.Module) -> str:
    """By what a linear layer's weight or bias is computed before each call; ``""`` where both are own parameters."""
    for name in ("weight", "bias"):
        if module._parameters.get(name) is not None or getattr(module, name, None) is None:
            continue
        if parametrize.is_parametrized(module, name):
            chain: Any = module.parametrizations[name]  # type: ignore[index]
            return f"torch.nn.utils.parametrize ({', '.join(type(step).__name__.lstrip('_') for step in chain)})"
        if f"{name}_g" in module._parameters:
            return "torch.nn.utils.weight_norm"
        if f"{name}_orig" in module._parameters:
            return "torch.nn.utils (spectral_norm or prune)"
        return "the module itself"
    return ""


def is_plain_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer whose own parameters can be cut."""
    return is_linear(module) and not computed_weight(module)


def output_dim(module: nn.Module) -> int:
    """Dimension of a linear layer's weight that counts its outputs."""
    return 1 if is_conv1d(module) else 0


def widths(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer that is whole."""
    weight: Any = module.weight
    out = output_dim(module)
    return int(weight.shape[1 - out]), int(weight.shape[out])
