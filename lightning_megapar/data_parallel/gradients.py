"""Gradients after the schedule: sums over tensor ranks, over stages that share a parameter, over data ranks.

Each sum is one collective per dtype and bucket, once per optimizer step (accumulation adds none). Nothing here divides:
the loss carries the scale. A parameter that has no gradient anywhere keeps ``None``; one that has it on some ranks
only counts as zero on the others. Parameters may be frozen and unfrozen, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megapar.data_parallel.parameters import (
    LogicalParameter,
    local_tensor,
    set_local_gradient,
    trainable,
)
from lightning_megapar.marks import communicating
from lightning_megapar.mesh import ParallelMesh

BUCKET_BYTES = 25 * 1024 * 1024
"""Bytes per all-reduce: torch DDP's default bucket."""


@dataclass(frozen=True)
class _Bucket:
    records: tuple[LogicalParameter, ...]
    group: dist.ProcessGroup


class GradientReducer:
    """Plans the sums once, runs them after each accumulation window for what is trainable then.

    Args:
        parameters: this rank's logical parameters.
        mesh: the ranks.
    """

    def __init__(self, parameters: Sequence[LogicalParameter], mesh: ParallelMesh) -> None:
        self.parameters = list(parameters)
        self._rounds: list[list[_Bucket]] = []
        tensor = mesh.group("tensor")
        if tensor is not None:
            partial = [p for p in self.parameters if p.partial_over_tensor]
            self._rounds.append(list(_buckets(partial, tensor)))
        if mesh.size("pipeline") > 1:
            self._rounds.append(self._shared_buckets(mesh))
        data = mesh.group("data")
        self._data_round = len(self._rounds)
        if data is not None:
            replicated = [p for p in self.parameters if not p.data_sharded]
            self._rounds.append(list(_buckets(replicated, data)))

    @property
    def has_sums(self) -> bool:
        """Whether anything is summed over ranks here (what FSDP2 shards is not)."""
        return any(self._rounds)

    def _shared_buckets(self, mesh: ParallelMesh) -> list[_Bucket]:
        """Buckets of parameters that live on more than one stage, one group per set of stages.

        Making a group is collective over all ranks, so every rank must make every group: the sets of stages are first
        gathered from all of them.
        """
        shared = [p for p in trainable(self.parameters) if len(p.stages) > 1]
        mine = sorted({p.stages for p in shared})
        everyone: list[list[tuple[int, ...]]] = [[] for _ in range(mesh.layout.world_size)]
        dist.all_gather_object(everyone, mine)
        buckets: list[_Bucket] = []
        for stages in sorted({s for one in everyone for s in one}):
            group = None
            for line in mesh.lines("pipeline"):
                members = [line[stage] for stage in stages]
                made = mesh.group_of(members)
                if mesh.rank in members:
                    group = made
            if group is not None and stages in mine:
                buckets += _buckets([p for p in shared if p.stages == stages], group)
        return buckets

    @torch.no_grad()
    def reduce(
        self,
        factor: float = 1.0,
        names: Collection[str] | None = None,
        before_data: Callable[[], None] | None = None,
    ) -> None:
        """Complete every ``.grad`` and multiply it by ``factor``.

        Args:
            factor: of all gradients.
            names: of the parameters to sum, the same on all ranks; by default those that are trainable now.
            before_data: called when gradients are complete in this replica, before they are summed over the data ranks.
        """
        asked = {p.name for p in trainable(self.parameters)} if names is None else names
        for number, buckets in enumerate(self._rounds):
            if before_data is not None and number == self._data_round:
                before_data()
            kept = ((tuple(r for r in b.records if r.name in asked), b.group) for b in buckets)
            live = [_Bucket(records, group) for records, group in kept if records]
            started = [(bucket, *_start_sum(bucket)) for bucket in live]
            for bucket, buffer, work in started:
                work.wait()
                _install(bucket, buffer)
        if factor != 1.0:
            gradients = [g for p in self.parameters if p.name in asked and (g := p.local_gradient) is not None]
            if gradients:
                torch._foreach_mul_(gradients, factor)


def _buckets(records: Iterable[LogicalParameter], group: dist.ProcessGroup) -> Iterable[_Bucket]:
    """Group records by dtype, in order, into buckets of at most :data:`BUCKET_BYTES`."""
    by_dtype: dict[torch.dtype, list[LogicalParameter]] = {}
    for record in records:
        by_dtype.setdefault(record.parameter.dtype, []).append(record)
    for same in by_dtype.values():
        current: list[LogicalParameter] = []
        size = 0
        for record in same:
            local = local_tensor(record.parameter)
            assert local is not None
            current.append(record)
            size += local.numel() * local.element_size()
            if size >= BUCKET_BYTES:
                yield _Bucket(tuple(current), group)
                current, size = [], 0
        if current:
            yield _Bucket(tuple(current), group)


def _start_sum(bucket: _Bucket) -> tuple[Tensor, dist.Work]:
    pieces: list[Tensor] = []
    present: list[float] = []
    for record in bucket.records:
        gradient = record.local_gradient
        present.append(0.0 if gradient is None else 1.0)
        if gradient is None:
            local = local_tensor(record.parameter)
            assert local is not None
            gradient = torch.zeros_like(local)
        pieces.append(gradient.reshape(-1))
    # The flags ride behind the values: whoever has no gradient must still take part in the same collective.
    pieces.append(torch.tensor(present, dtype=pieces[0].dtype, device=pieces[0].device))
    with communicating():
        buffer = torch.cat(pieces)
    return buffer, dist.all_reduce(buffer, group=bucket.group, async_op=True)


def _install(bucket: _Bucket, buffer: Tensor) -> None:
    count = len(bucket.records)
    present = buffer[-count:].tolist() if any(r.local_gradient is None for r in bucket.records) else [1.0] * count
    start = 0
    for record, here in zip(bucket.records, present):
        gradient = record.local_gradient
        local = local_tensor(record.parameter)
        assert local is not None
        stop = start + local.numel()
        if gradient is not None:
            gradient.copy_(buffer[start:stop].view_as(gradient))
        elif here > 0:
            set_local_gradient(record, buffer[start:stop].view_as(local).clone())
        start = stop
