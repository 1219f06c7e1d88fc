"""Which box of a global tensor a rank holds: plain tensors, and DTensors under any placements and uneven sizes.

A *box* is ``(offsets, sizes)`` in the global tensor. Everything that moves tensor values between layouts (saving,
loading, gathering) is written on boxes, so no code elsewhere knows about placements.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from lightning_megapar.checkpoint.errors import CheckpointError
from lightning_megapar.shards import IndexedTensor, Value

Runs = list[tuple[int, int]]
"""Stretches (start, length) of one dimension, in the order in which a rank holds them."""


@dataclass(frozen=True, order=True)
class Box:
    """A block of a global tensor: per dimension where it starts and how long it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        return prod(self.sizes)

    def slices(self, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
        """Index of this box in a tensor whose first element stands at ``origin`` of the global tensor."""
        origin = origin or (0,) * len(self.offsets)
        return tuple(slice(o - b, o - b + n) for o, b, n in zip(self.offsets, origin, self.sizes))

    def overlap(self, other: Box) -> Box | None:
        """The common part, or ``None`` when it is empty."""
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets))
        ends = tuple(min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes))
        if any(e <= s for s, e in zip(starts, ends)):
            return None
        return Box(starts, tuple(e - s for s, e in zip(starts, ends)))

    def inside(self, shape: tuple[int, ...]) -> bool:
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            o >= 0 and n >= 0 and o + n <= s for o, n, s in zip(self.offsets, self.sizes, shape)
        )


def full_box(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True)
class LocalPiece:
    """A box of the global tensor and where it starts in this rank's local tensor."""

    box: Box
    start: tuple[int, ...]

    def view(self, local: Tensor) -> Tensor:
        """The piece as a view of the local tensor, same number of dimensions."""
        return local[tuple(slice(s, s + n) for s, n in zip(self.start, self.box.sizes))] if self.start else local


def local_tensor(tensor: Value) -> Tensor:
    """This rank's storage of ``tensor`` as a plain detached tensor that shares memory with it.

    Writing into the result writes into the parameter, DTensor or buffer itself.
    """
    if isinstance(tensor, IndexedTensor):
        return local_tensor(tensor.local)
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.detach()


def local_pieces(name: str, tensor: Value) -> list[LocalPiece]:
    """The non-empty pieces of the global ``tensor`` that this rank holds, in ascending order.

    One piece for a plain tensor, for a replica and for every usual sharding; several for a strided shard whose rows do
    not lie next to each other. A rank outside the DTensor's mesh holds none.

    Args:
        name: for messages.
        tensor: a plain tensor, a DTensor of any placements except ``Partial``, or a piece that is cut by indices.

    Raises:
        CheckpointError: on partial sums, or when the local tensor's shape is not what the placements say.
    """
    shape: tuple[int, ...] = tuple(tensor.shape)
    # Per dimension the runs (global start, length) that this rank holds.
    held: list[Runs] = [[(0, size)] for size in shape]
    if isinstance(tensor, IndexedTensor):
        held[tensor.shard.dim] = list(tensor.shard.runs)
        tensor = tensor.local
    if not isinstance(tensor, DTensor):
        return _pieces(name, held, tensor, "its cut")
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    # Refined by each placement in mesh order.
    for mesh_dim, placement in enumerate(tensor.placements):
        ranks, mine = tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim]
        if isinstance(placement, _StridedShard):
            dim = placement.dim % len(shape)
            blocks = [_take(held[dim], *span) for span in _spans(_length(held[dim]), int(placement.split_factor))]
            held[dim] = [run for block in blocks for run in _chunk(block, ranks, mine)]
        elif isinstance(placement, Shard):
            dim = placement.dim % len(shape)
            held[dim] = _chunk(held[dim], ranks, mine)
        elif not isinstance(placement, Replicate):
            raise CheckpointError(f"{name}: placement {placement} holds partial sums, not values; reduce it first")
    return _pieces(name, held, local_tensor(tensor), f"placements {tensor.placements} of {shape}")


def _pieces(name: str, held: list[Runs], local: Tensor, why: str) -> list[LocalPiece]:
    """The pieces of a local tensor whose dimensions hold these runs."""
    lengths: tuple[int, ...] = tuple(_length(runs) for runs in held)
    local_shape: tuple[int, ...] = tuple(local.shape)
    volume = prod(lengths)
    if volume != prod(local_shape) or (volume and lengths != local_shape):
        raise CheckpointError(f"{name}: local tensor has shape {local_shape}, {why} says {lengths}")
    if not volume:
        return []
    pieces = []
    for runs in product(*(_with_starts(_merge(runs)) for runs in held)):
        box = Box(tuple(r[1] for r in runs), tuple(r[2] for r in runs))
        pieces.append(LocalPiece(box, tuple(r[0] for r in runs)))
    return pieces


def _length(runs: Runs) -> int:
    return sum(n for _, n in runs)


def _spans(length: int, parts: int) -> list[tuple[int, int]]:
    """``torch.chunk``'s division of ``length`` into ``parts`` (start, end); the last ones may be empty."""
    each = -(-length // parts) if length else 0
    return [(min(i * each, length), min((i + 1) * each, length)) for i in range(parts)]


def _take(runs: Runs, start: int, end: int) -> Runs:
    """The elements ``start..end`` of the concatenated runs."""
    taken, position = [], 0
    for first, n in runs:
        low, high = max(start, position), min(end, position + n)
        if high > low:
            taken.append((first + low - position, high - low))
        position += n
    return taken


def _chunk(runs: Runs, parts: int, index: int) -> Runs:
    return _take(runs, *_spans(_length(runs), parts)[index])


def _merge(runs: Runs) -> Runs:
    merged: Runs = []
    for first, n in runs:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + n)
        else:
            merged.append((first, n))
    return merged


def _with_starts(runs: Runs) -> list[tuple[int, int, int]]:
    """(start in the local tensor, start in the global tensor, length)."""
    placed, position = [], 0
    for first, n in runs:
        placed.append((position, first, n))
        position += n
    return placed


def coverage_fault(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    """Why ``boxes`` do not cover a tensor of ``shape`` exactly once, or ``None`` when they do.

    ``O(n log n)`` for the usual sharding along one dimension: boxes are swept along the dimension with the most
    distinct starts.
    """
    outside = next((b for b in boxes if not b.inside(shape)), None)
    if outside is not None:
        return f"piece at {outside.offsets} of size {outside.sizes} lies outside the shape {shape}"
    missing = prod(shape) - sum(b.volume for b in boxes)
    if missing > 0:
        return f"{missing} of {prod(shape)} elements are in no piece"
    if shape:
        sweep = max(range(len(shape)), key=lambda d: len({b.offsets[d] for b in boxes}))
        ordered = sorted((b for b in boxes if b.volume), key=lambda b: b.offsets[sweep])
        active: list[Box] = []
        for box in ordered:
            active = [a for a in active if a.offsets[sweep] + a.sizes[sweep] > box.offsets[sweep]]
            clash = next((a for a in active if a.overlap(box)), None)
            if clash is not None:
                return f"pieces at {clash.offsets} (size {clash.sizes}) and {box.offsets} (size {box.sizes}) overlap"
            active.append(box)
    elif len(boxes) > 1:
        return f"{len(boxes)} pieces of one scalar"
    return None if missing == 0 else f"pieces hold {-missing} elements too many"
