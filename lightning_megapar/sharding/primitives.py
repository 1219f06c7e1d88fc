"""The five primitives that every sharding style is made of.

========================= ============================= ==============================
primitive                 forward                       backward
========================= ============================= ==============================
``enter`` (copy-in)       identity                      all-reduce
``reduce_out``            all-reduce                    identity
``gather``                every rank's indices, whole   own indices
``split``                 own indices                   every rank's indices, whole
sum-gradient              identity                      (a parameter's: once per step)
========================= ============================= ==============================

``gather`` and ``split`` speak of indices (:class:`~lightning_megapar.shards.IndexRuns`), so that contiguous, packed and
uneven cuts are one code path. Sums of parameter gradients are not made here: a module names the parameters whose
gradients are addends (``partial_gradients``), and the data-parallel room sums them once per optimizer step.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megapar.layers.collectives import TensorRanks, copy_in, gather_last, reduce_out
from lightning_megapar.layers.linear import autocast_dtype
from lightning_megapar.shards import IndexRuns

__all__ = ["enter", "enter_all", "gather", "reduce_all", "reduce_out", "split"]

_ENTERED = "_megapar_entered"


def enter(x: Tensor, ranks: TensorRanks, *, cast: bool = False) -> Tensor:
    """A replicated ``x`` enters a sharded region: its gradients are summed over the ranks.

    Layers that read the same tensor (query, key and value; gate and up) share one entrance and hence one sum.

    Args:
        x: any tensor; one that is not floating point passes.
        ranks: the tensor ranks.
        cast: convert to autocast's dtype first, so that the sum is made in it (matrix products do so anyway).
    """
    if not x.is_floating_point() and not x.is_complex():
        return x
    dtype = autocast_dtype(x) if cast else None
    if not torch.is_grad_enabled():
        return x if dtype is None else x.to(dtype)
    if torch.compiler.is_compiling():
        return copy_in(x if dtype is None else x.to(dtype), ranks)
    key = (x._version, dtype, id(ranks))
    earlier = vars(x).get(_ENTERED)
    # Weak: the entrance is a view of x, and a strong reference would close a circle that keeps activations alive.
    if earlier is not None and earlier[0] == key and (shared := earlier[1]()) is not None:
        return shared
    entered = copy_in(x if dtype is None else x.to(dtype), ranks)
    setattr(x, _ENTERED, (key, weakref.ref(entered)))
    return entered


def enter_all(value: Any, ranks: TensorRanks) -> Any:
    """:func:`enter` every tensor in an argument (nests of tuples, lists and dicts)."""
    if isinstance(value, Tensor):
        return enter(value, ranks)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(enter_all(one, ranks) for one in value)
    if isinstance(value, list):
        return [enter_all(one, ranks) for one in value]
    if isinstance(value, dict):
        return {key: enter_all(one, ranks) for key, one in value.items()}
    return value


def reduce_all(value: Any, ranks: TensorRanks) -> Any:
    """:func:`reduce_out` of a region's output.

    Raises:
        TypeError: for anything but one tensor (or ``None``): which of several outputs is an addend cannot be known.
    """
    if value is None:
        return None
    if isinstance(value, tuple) and len(value) == 1:
        return (reduce_all(value[0], ranks),)
    if not isinstance(value, Tensor):
        raise TypeError(f"the region returned a {type(value).__name__}; an all-reduced region returns one tensor")
    return reduce_out(value, ranks)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: IndexRuns, ranks: TensorRanks) -> Tensor:
        ctx.index, ctx.rank = index, ranks.rank
        return _assemble(x, index, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.index.take(gradient, -1, ctx.rank), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: IndexRuns, ranks: TensorRanks) -> Tensor:
        ctx.index, ctx.ranks = index, ranks
        return index.take(x, -1, ranks.rank)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _assemble(gradient, ctx.index, ctx.ranks), None, None


def _assemble(piece: Tensor, index: IndexRuns, ranks: TensorRanks) -> Tensor:
    widest = max(index.length(rank) for rank in range(index.size))
    padded = torch.nn.functional.pad(piece, (0, widest - piece.shape[-1])) if piece.shape[-1] < widest else piece
    pieces = ranks.all_gather(padded.contiguous())()
    full = piece.new_empty((*piece.shape[:-1], index.width))
    for rank in range(index.size):
        index.place(full, pieces[rank], -1, rank)
    return full


def gather(x: Tensor, index: IndexRuns, ranks: TensorRanks) -> Tensor:
    """(..., own indices) on each rank -> (..., width), the same on every rank. It must be used alike on every rank."""
    if index.is_contiguous and index.is_even:
        return gather_last(x, ranks)
    return _Gather.apply(x, index, ranks)


def split(x: Tensor, index: IndexRuns, ranks: TensorRanks) -> Tensor:
    """(..., width), replicated -> this rank's (..., own indices)."""
    return _Split.apply(x, index, ranks)
