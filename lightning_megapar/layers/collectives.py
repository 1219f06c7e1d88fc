"""Collectives with hand-written gradients over the ranks that share one layer (the tensor axis).

A tensor-parallel region is entered and left through pairs whose gradients mirror each other:

====================== ========================== ==========================
function               forward                    backward
====================== ========================== ==========================
``copy_in``            identity                   all-reduce
``reduce_out``         all-reduce                 identity
``gather_last``        all-gather, last dim       own slice
``split_last``         own slice, last dim        all-gather
``sequence_gather``    all-gather, dim -2         reduce-scatter
``sequence_scatter``   reduce-scatter, dim -2     all-gather
``sequence_split``     own slice, dim -2          all-gather
====================== ========================== ==========================

The pairs and their names follow Megatron-LM (arXiv 1909.08053, section 3; sequence parallelism: arXiv 2205.05198,
section 4.2). Every function takes the tensors in any floating dtype and keeps it. Gradients are first order only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from lightning_megapar.config import ConfigError
from lightning_megapar.mesh import all_gather_single, reduce_scatter_single

Pending = Callable[[], Tensor]
"""A collective in flight: call it to wait for the result."""


@dataclass(frozen=True, eq=False)
class TensorRanks:
    """The ranks that share a layer, as seen by one of them.

    Args:
        mesh: one-dimensional mesh of the tensor axis, two ranks or more.
        sequence_parallel: activations between the sharded regions hold a slice of the sequence.

    Raises:
        ConfigError: when the mesh is not one-dimensional.
    """

    mesh: DeviceMesh
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.mesh.ndim != 1:
            raise ConfigError(f"a layer is sharded over a one-dimensional mesh, got one with {self.mesh.ndim} axes")
        # Looked up once: a mesh finds its group by name on each call, which costs as much as a small kernel.
        object.__setattr__(self, "group", self.mesh.get_group())
        object.__setattr__(self, "rank", self.mesh.get_local_rank())
        object.__setattr__(self, "size", self.mesh.size())

    group: Any = None
    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Pending:
        """Start to sum ``x`` over the ranks, in place."""
        work = dist.all_reduce(x, group=self.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return x

        return finish

    def all_gather(self, x: Tensor) -> Pending:
        """Start to collect every rank's ``x``: (size, *x.shape)."""
        pieces = x.new_empty((self.size, *x.shape))
        # gloo knows only the concatenated form: flat along the first dimension.
        flat = pieces.flatten(0, 1) if x.ndim else pieces
        work = all_gather_single(flat, x.contiguous(), group=self.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return pieces

        return finish

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorRanks:
        return self  # a copied module still talks to the same ranks


def check_sequence(length: int, ranks: TensorRanks) -> None:
    """Raise :class:`ConfigError` when sequence parallelism cannot cut ``length`` evenly."""
    if length % ranks.size:
        below = length - length % ranks.size
        valid = ", ".join(str(n) for n in (below, below + ranks.size) if n > 0)
        raise ConfigError(
            f"sequence length {length} is not divisible by tensor_parallel_size={ranks.size}, which "
            f"sequence_parallel=True needs; nearest valid lengths: {valid}"
        )


# ---- the collectives themselves, without gradients; "start" variants overlap with what the caller computes next ----


def start_all_reduce(x: Tensor, ranks: TensorRanks) -> Pending:
    """Sum ``x`` over the ranks, in place."""
    return ranks.all_reduce(x)


def start_sequence_gather(x: Tensor, ranks: TensorRanks) -> Pending:
    """(..., s / ranks, h) on each rank -> (..., s, h) on all."""
    *lead, length, width = x.shape
    gathering = ranks.all_gather(x)

    def finish() -> Tensor:
        pieces = gathering()
        # One sequence per rank: the pieces lie in order already and nothing is copied.
        return pieces.movedim(0, -3).reshape(*lead, ranks.size * length, width)

    return finish


def start_sequence_scatter(x: Tensor, ranks: TensorRanks) -> Pending:
    """(..., s, h) addends on each rank -> this rank's (..., s / ranks, h) of their sum."""
    *lead, length, width = x.shape
    check_sequence(length, ranks)
    pieces = x.reshape(*lead, ranks.size, length // ranks.size, width).movedim(-3, 0).contiguous()
    result = x.new_empty((*lead, length // ranks.size, width))
    work = reduce_scatter_single(result, pieces.flatten(0, 1), group=ranks.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return result

    return finish


def all_gather_stacked(x: Tensor, ranks: TensorRanks) -> Tensor:
    """Every rank's ``x`` along a new first dimension of size ``ranks.size``."""
    return ranks.all_gather(x)()


def _gather_last(x: Tensor, ranks: TensorRanks) -> Tensor:
    return all_gather_stacked(x, ranks).movedim(0, -2).reshape(*x.shape[:-1], ranks.size * x.shape[-1])


def _own_slice(x: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
    length = x.shape[dim] // ranks.size
    return x.narrow(dim, ranks.rank * length, length).contiguous()


# ---- with gradients ----


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # The engine may hand the same gradient to a second consumer: never reduce it in place.
        return start_all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.ranks)(), None


class _ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        return start_all_reduce(x.clone(memory_format=torch.contiguous_format), ranks)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _gather_last(x, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _own_slice(gradient, -1, ctx.ranks), None


class _SplitLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _own_slice(x, -1, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gather_last(gradient, ctx.ranks), None


class _SequenceGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return start_sequence_gather(x, ranks)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return start_sequence_scatter(gradient, ctx.ranks)(), None


class _SequenceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return start_sequence_scatter(x, ranks)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return start_sequence_gather(gradient, ctx.ranks)(), None


class _SequenceSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _own_slice(x, -2, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return start_sequence_gather(gradient, ctx.ranks)(), None


def copy_in(x: Tensor, ranks: TensorRanks | None) -> Tensor:
    """Enter a sharded region with a replicated ``x``: the ranks' gradients of it are summed."""
    return x if ranks is None else _CopyIn.apply(x, ranks)


def reduce_out(x: Tensor, ranks: TensorRanks | None) -> Tensor:
    """Leave a sharded region: the sum of the ranks' ``x``, replicated."""
    return x if ranks is None else _ReduceOut.apply(x, ranks)


def gather_last(x: Tensor, ranks: TensorRanks | None) -> Tensor:
    """(..., n) on each rank -> (..., ranks * n). The result must be used alike on every rank."""
    return x if ranks is None else _GatherLast.apply(x, ranks)


def split_last(x: Tensor, ranks: TensorRanks | None) -> Tensor:
    """(..., n) replicated -> this rank's (..., n / ranks).

    Raises:
        ConfigError: when the ranks do not divide n.
    """
    if ranks is None:
        return x
    if x.shape[-1] % ranks.size:
        raise ConfigError(f"last dimension {x.shape[-1]} is not divisible by tensor_parallel_size={ranks.size}")
    return _SplitLast.apply(x, ranks)


def sequence_gather(x: Tensor, ranks: TensorRanks | None) -> Tensor:
    """(..., s / ranks, h) -> (..., s, h); the ranks' gradients are summed and scattered."""
    return x if ranks is None else _SequenceGather.apply(x, ranks)


def sequence_scatter(x: Tensor, ranks: TensorRanks | None) -> Tensor:
    """(..., s, h) addends -> this rank's (..., s / ranks, h) of their sum.

    Raises:
        ConfigError: when the ranks do not divide s.
    """
    return x if ranks is None else _SequenceScatter.apply(x, ranks)


def sequence_split(x: Tensor, ranks: TensorRanks | None) -> Tensor:
    """(..., s, h) replicated -> this rank's (..., s / ranks, h).

    Raises:
        ConfigError: when the ranks do not divide s.
    """
    if ranks is None:
        return x
    check_sequence(x.shape[-2], ranks)
    return _SequenceSplit.apply(x, ranks)
