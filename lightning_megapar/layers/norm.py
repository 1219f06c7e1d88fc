"""Normalisation layers: replicated weights, whose gradients are addends where activations are cut by sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megapar.layers.base import ParallelLayer
from lightning_megapar.layers.local import local


class _Norm(ParallelLayer):
    def __init__(
        self,
        hidden_size: int,
        eps: float,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def initial_value(self, name: str, generator: torch.Generator) -> Tensor:
        make = torch.ones if name == "weight" else torch.zeros
        return make(self.full_shape(name), dtype=torch.float32, device="cpu")

    def partial_gradients(self) -> tuple[str, ...]:
        if self.sequence_ranks is None:
            return ()
        return ("weight",) if self.bias is None else ("weight", "bias")

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


class LayerNorm(_Norm):
    """``nn.LayerNorm`` over the last dimension: (..., hidden) -> (..., hidden), also on a slice of the sequence.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the variance.
        bias: add a learned offset.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else local(self.bias)
        return F.layer_norm(x, (self.hidden_size,), local(self.weight), bias, self.eps)


class RMSNorm(_Norm):
    """``nn.RMSNorm`` over the last dimension (arXiv 1910.07467): (..., hidden) -> (..., hidden).

    Args:
        hidden_size: size of the last dimension.
        eps: added to the mean square.
        device, dtype: of the parameter.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, False, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.hidden_size,), local(self.weight), self.eps)
