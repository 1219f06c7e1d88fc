"""The three matrix products of a linear layer, by name, so that another arithmetic can stand in for them.

A layer's collectives, waiting weight gradients and dtypes are the layer's; what multiplies is a :class:`Products`.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class Products(Protocol):
    """Products of ``y = x W^T + b`` and of its backward; all operands of one dtype, none tracked by autograd."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """(..., in), (out, in), (out) -> (..., out)."""

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """(n, out), (out, in) -> (n, in)."""

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """(n, out), (n, in) -> (out, in)."""


class PlainProducts:
    """Torch's own, in the operands' dtype."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        return gradient @ weight

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        return gradient.t() @ x


PLAIN: Products = PlainProducts()
