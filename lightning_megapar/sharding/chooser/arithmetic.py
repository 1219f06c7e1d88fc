"""In what arithmetic a trial runs: float64 throughout where that is possible, and without dropout.

Models convert parts of themselves to float32 (norms, routers, losses). Rounding there hides small mistakes (a penalty
of 1e-5) and decides on which side of a kink a value falls, so that right layouts look wrong. While a module in float64
is tried, conversions to a shorter type are conversions to float64, and constants are made in it; what is computed
shorter all the same is noted, and widens the tolerance.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megapar.data_parallel.agreement import TOLERANCE

_SHORT = {torch.float32, torch.float16, torch.bfloat16}
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}
_BITS = {Tensor.view, torch.frombuffer}  # they read bits, not values
_DROPOUTS = {
    torch.dropout,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
}
_DROPOUT_OF_ATTENTION = 4
"""Position of ``dropout_p`` in the arguments of ``scaled_dot_product_attention``."""

MIXED = 1e-5
"""What rounding explains where a module in float64 computes a part in float32 (its weights and inputs are exact); a
wrong layout is off by 1e-2 to 1."""


class Arithmetic(TorchFunctionMode):
    """The arithmetic of one run; a context. Each thread enters one of its own.

    Args:
        dtype: of the module's parameters.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.shortest = dtype

    @classmethod
    def of(cls, module: nn.Module) -> Arithmetic:
        """The longest floating-point type among a module's parameters."""
        dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
        return cls(max(dtypes, key=lambda d: torch.finfo(d).bits, default=torch.float32))

    @property
    def tolerance(self) -> float:
        """What rounding explains, after what has run so far."""
        if self.dtype is torch.float64 and self.shortest is torch.float32:
            return MIXED
        return TOLERANCE.get(self.shortest, TOLERANCE[torch.float32])

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            kwargs = {key: value for key, value in kwargs.items() if key != "dropout_p"}
            args = (*args[:_DROPOUT_OF_ATTENTION], *((0.0,) if len(args) > _DROPOUT_OF_ATTENTION else ()), *args[5:])
        if self.dtype is torch.float64 and func not in _BITS:
            if func in _CASTS:
                return args[0].to(torch.float64)
            args = tuple(self._longer(one) for one in args)
            kwargs = {key: self._longer(value) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        if self.dtype is torch.float64 and func not in _BITS and _is_constant(result, args, kwargs):
            return result.to(torch.float64)
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, Tensor) and one.dtype in _SHORT:
                self._note(one.dtype)
        return result

    @staticmethod
    def _longer(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value in _SHORT else value

    def _note(self, dtype: torch.dtype) -> None:
        if torch.finfo(dtype).eps > torch.finfo(self.shortest).eps:
            self.shortest = dtype


def _is_constant(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a shorter tensor was made from numbers."""
    if not isinstance(result, Tensor) or result.dtype not in _SHORT or result.requires_grad:
        return False
    return not any(isinstance(one, Tensor) for one in (*args, *kwargs.values()))
