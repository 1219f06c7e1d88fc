"""One copy in autocast's dtype for several layers that read the same input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which a matrix product runs under ``torch.autocast`` on the device of ``x``, else ``None``."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class _CastForEach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, count: int) -> tuple[Tensor, ...]:
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)
        cast = x.to(dtype)
        return tuple(cast.view_as(cast) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        total: Tensor | None = None
        # Each in full precision before the sum, the last reader's first: as autograd adds those of casts of their own.
        for gradient in reversed(gradients):
            if gradient is not None:
                wide = gradient.to(ctx.dtype)
                total = wide if total is None else total + wide
        return total, None, None


def cast_for_each(x: Tensor, dtype: torch.dtype, count: int) -> tuple[Tensor, ...]:
    """``x.to(dtype)`` for each of several readers, in one piece of memory.

    Values and gradients are bit-equal to a cast for each: autocast makes (and autograd keeps) one copy per layer, and a
    single cast would add the readers' gradients in the narrow dtype.

    Args:
        x: any shape, floating.
        dtype: narrower.
        count: readers.

    Returns:
        ``count`` tensors like ``x`` in ``dtype``, not to be changed in place.
    """
    return _CastForEach.apply(x, dtype, count)
