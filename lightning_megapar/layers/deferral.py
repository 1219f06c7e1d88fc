"""Weight gradients that wait: the half of a linear layer's backward for which no other stage waits.

The backward of ``y = x W^T + b`` gives the gradient of ``x``, which the layer before needs, and those of ``W`` and
``b``, which only the optimizer needs. Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", 2023) run
the second half later, where a stage would be idle. While a :class:`Deferral` collects, linear layers leave a closure
with ``x`` and the gradient of ``y`` instead of computing it; everything else (norms, embeddings, recomputation, which
happens once) belongs to the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_megapar.layers.foreign import is_conv1d, is_plain_linear
from lightning_megapar.layers.products import PLAIN, Products

Key = tuple[int, int]
"""(chunk, microbatch)."""


class Deferral:
    """The weight gradients of one rank that wait, by chunk and microbatch."""

    def __init__(self) -> None:
        self._key: Key | None = None
        self._waiting: dict[Key, list[tuple[nn.Parameter, Callable[[], Tensor]]]] = {}

    @contextmanager
    def collecting(self, key: Key) -> Iterator[None]:
        """While active, backwards of connected layers leave their weight gradients under ``key``."""
        self._key = key
        try:
            yield
        finally:
            self._key = None

    def takes(self, parameter: Any, gradient: Callable[[], Tensor]) -> bool:
        """Leave a gradient for later.

        Args:
            parameter: whose it is.
            gradient: computes it, in the parameter's layout.

        Returns:
            ``False`` when it has to be computed now: nothing collects, the tensor is no leaf that keeps a gradient, or
            somebody waits for the gradient by a hook.
        """
        if self._key is None or not (getattr(parameter, "is_leaf", False) and parameter.requires_grad):
            return False
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return False
        self._waiting.setdefault(self._key, []).append((parameter, gradient))
        return True

    @torch.no_grad()
    def compute(self, key: Key) -> None:
        """Compute what waits under ``key`` and add it to each parameter's ``.grad``."""
        for parameter, gradient in self._waiting.pop(key, ()):
            value = gradient().to(parameter.grad_dtype or parameter.dtype)  # wider than the parameter's, it may be
            parameter.grad = value if parameter.grad is None else parameter.grad.add_(value)

    def connect(self, module: nn.Module) -> None:
        """Let every linear layer in ``module`` use this: torch's, transformers' ``Conv1D`` and this package's own.

        To be called before layers get a sharded forward. Layers with a forward of somebody's own compute as ever.
        """
        for child in module.modules():
            if not can_defer(child):
                continue
            make_own(child)
            vars(child)["deferral"] = self


def make_own(layer: nn.Module) -> None:
    """Give a linear layer of torch's or transformers' the forward of this module.

    Its weight gradients may wait afterwards, and its ``products`` may be other ones. Only where :func:`can_defer`.
    """
    kind: Any = type(layer)
    if not hasattr(kind, "deferral"):
        layer.__class__ = _deferring(kind, transposed=kind.forward is not nn.Linear.forward)


def can_defer(layer: nn.Module) -> bool:
    """Whether a layer's weight gradients can wait: a linear layer of torch's, transformers' or this package's."""
    kind: Any = type(layer)
    if hasattr(kind, "deferral"):
        return True
    if kind.forward is nn.Linear.forward:
        return is_plain_linear(layer)
    return kind.__name__ == "Conv1D" and is_conv1d(layer)


def put_off(deferral: Deferral | None, parameter: Any, gradient: Callable[[], Tensor]) -> Tensor | None:
    """The gradient now, or ``None`` when it waits."""
    if deferral is not None and deferral.takes(parameter, gradient):
        return None
    return gradient()


class _Product(torch.autograd.Function):
    """``x @ weight^T + bias``, or ``x @ weight + bias`` for a weight that lies (in, out)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        deferral: Deferral | None,
        transposed: bool,
        products: Products,
    ) -> Tensor:
        kind = x.device.type
        ctx.input_dtype, ctx.deferral, ctx.transposed, ctx.products = x.dtype, deferral, transposed, products
        ctx.own = weight, bias  # what recomputation saves in their place has no .grad that anybody reads
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        ctx.save_for_backward(x, weight)
        rows = weight.to(x.dtype).t() if transposed else weight.to(x.dtype)
        return products.output(x, rows, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x = x.detach()  # what waits must not keep the graph behind its input, and with it the stage's own input
        (own, bias), transposed, products = ctx.own, ctx.transposed, ctx.products
        flat = gradient.reshape(-1, gradient.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            rows = weight.to(gradient.dtype)
            grad_x = products.input_gradient(flat, rows.t() if transposed else rows)
            grad_x = grad_x.view(x.shape).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            inputs = x.reshape(-1, x.shape[-1])
            grad_weight = put_off(
                ctx.deferral,
                own,
                lambda: _weight_gradient(products, flat, inputs, transposed).to(weight.dtype),
            )
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = put_off(ctx.deferral, bias, lambda: flat.sum(0).to(bias.dtype))
        return grad_x, grad_weight, grad_bias, None, None, None


def _weight_gradient(products: Products, gradient: Tensor, x: Tensor, transposed: bool) -> Tensor:
    if not transposed:
        return products.weight_gradient(gradient, x)
    return x.t() @ gradient if products is PLAIN else products.weight_gradient(gradient, x).t().contiguous()


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    deferral: Deferral | None,
    transposed: bool = False,
    products: Products = PLAIN,
) -> Tensor:
    """``F.linear`` whose weight gradients may wait.

    Args:
        x: (..., in).
        weight: (out, in), or (in, out) when ``transposed``.
        bias: (out), or ``None``.
        deferral: where they wait; without one this is ``F.linear``.
        transposed: see ``weight``.
        products: what multiplies.
    """
    waits = deferral is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if products is PLAIN and not waits:
        return F.linear(x, weight.t() if transposed else weight, bias)
    return _Product.apply(x, weight, bias, deferral if waits else None, transposed, products)


@cache
def _deferring(base: type[nn.Module], transposed: bool) -> type[nn.Module]:
    """The class of a linear layer, with a forward whose weight gradients may wait.

    Args:
        base: its class.
        transposed: whether its weight lies (in, out).
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.deferral, transposed, self.products)

    own = {
        "forward": forward,
        "deferral": None,
        "products": PLAIN,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    return type(base.__name__, (base,), own)
