"""Norms of gradients over small and big batches, taken while a window's gradients are not summed yet.

A *small batch* is what one data rank saw of a window, one of its batches, or one of their microbatches. ``c_i`` is
what it contributed to the window's gradient, and ``f_i`` its share of it (its part of the samples, or of the valid
tokens): the gradient over the small batch is ``c_i / f_i``. Whatever else scales a gradient on its way (a loss scale,
the unit in which losses are weighted) scales both alike and drops out.

Norms are those of whole parameters: addends of tensor ranks and of stages that share a parameter are summed before they
are squared, and each parameter counts once in a replica.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megapar.data_parallel.norm import counts_in_replica, local_squares
from lightning_megapar.data_parallel.parameters import LogicalParameter, local_tensor
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.step.watching import Pair

SOURCES = ("data", "accumulation", "microbatches")


@dataclass(frozen=True)
class Observation:
    """Of one window, the same on every rank: the arguments of :func:`~lightning_megapar.optim.noise.moments`."""

    small_sq: float
    small: float
    big_sq: float
    big: float


class NoiseObserver:
    """Watches windows for a :class:`~lightning_megapar.step.stepper.Stepper`, as its ``GradientObserver``.

    Args:
        mesh: the ranks.
        device: of this rank.
        source: which small batches: one of :data:`SOURCES`.
        every: watch one window of so many.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device, source: str, every: int = 1) -> None:
        self.mesh, self.device, self.source, self.every = mesh, device, source, every
        self.windows = 0
        """Windows that have begun."""
        self._due = False
        self._samples = 0
        self._squares: list[Tensor] = []  # of each small batch of this rank, in units of this rank's stash
        self._shares: list[Tensor] = []
        self._microbatch = 0
        self._hooks: list[Any] = []
        self._found: dict[int, list[Tensor]] = {}
        self._waiting: dict[int, dict[str, Tensor]] = {}
        self._latest: Observation | None = None

    def take(self) -> Observation | None:
        """What the last window has given, once; ``None`` when it was not watched or had one small batch only."""
        latest, self._latest = self._latest, None
        return latest

    # -- called by the stepper, on all ranks alike -------------------------------------------------------------------

    def begin_batch(self, parameters: Sequence[LogicalParameter], is_first: bool, samples: int) -> None:
        if is_first:
            self._due = self.windows % self.every == 0
            self.windows += 1
            self._latest, self._samples = None, 0
            self._squares, self._shares = [], []
        self._samples += samples
        if self._due and self.source == "microbatches":
            self._found, self._waiting = {}, {}
            for record in parameters:
                if record.parameter.requires_grad and not record.data_sharded:
                    self._hooks.append(record.parameter.register_hook(partial(self._see, record)))

    def before_backward(self, microbatch: int) -> None:
        self._microbatch = microbatch

    def before_unit(self, gradients: Iterable[Pair]) -> None:
        """Gradients that are about to be summed over the data ranks during the schedule.

        They are of the window at stage 1 of ZeRO, and of a microbatch at stages 2 and 3.
        """
        if self._due and self.source != "accumulation":
            self._keep(-1 if self.source == "data" else self._microbatch, gradients)

    @torch.no_grad()
    def end_batch(
        self,
        gradients: Sequence[Pair],
        weights: Mapping[int, Tensor],
        microbatches: int,
        per_weight: float,
        per_batch: float,
    ) -> None:
        """A batch's schedule has run.

        Args:
            gradients: of this batch, in the canonical order of parameters, equal on ranks that share them.
            weights: on ranks with the loss, microbatch -> what it counts for.
            microbatches: of this rank's batch.
            per_weight: what a weight of one is multiplied with in ``gradients``.
            per_batch: by what ``gradients`` are multiplied when they join the window's.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if not self._due:
            return
        each = [self._on_device(weights.get(i, 0.0)) * (per_weight * per_batch) for i in range(microbatches)]
        if self.source == "microbatches":
            for index, share in enumerate(each):
                waiting = self._waiting.pop(index, {})
                pairs = [(record, waiting.get(record.name)) for record, _ in gradients if _waits(record)]
                found = self._completed(pairs) + sum(self._found.pop(index, []), self._on_device(0.0))
                self._squares.append(found * per_batch**2)
                self._shares.append(share)
            return
        share = sum(each, self._on_device(0.0))
        if self.source == "accumulation":
            plain = [g for record, g in gradients if g is not None and self._counts_plainly(record)]
            found = local_squares(plain, self.device) + self._completed([p for p in gradients if _waits(p[0])])
            self._squares.append(found * per_batch**2)
            self._shares.append(share)
        else:  # one small batch in the whole window
            self._shares = [sum(self._shares, share)]

    @torch.no_grad()
    def before_sum(self, parameters: Sequence[LogicalParameter], names: Collection[str]) -> None:
        """The window's gradients are complete in this replica, but for those that waited; the data ranks come next."""
        if not self._due or self.source != "data":
            return
        here = [p for p in parameters if not p.data_sharded and counts_in_replica(p, self.mesh)]
        found = local_squares([g for p in here if (g := p.local_gradient) is not None], self.device)
        waiting = self._waiting.pop(-1, {})
        pairs = [(p, waiting.get(p.name)) for p in parameters if p.data_sharded and _waits(p) and p.name in names]
        found = found + self._completed(pairs) + sum(self._found.pop(-1, []), self._on_device(0.0))
        self._squares = [found]

    @torch.no_grad()
    def end_window(self, parameters: Sequence[LogicalParameter], factor: float) -> None:
        """Gradients are complete on all ranks, and were multiplied by ``factor`` at the last."""
        if not self._due:
            return
        shares = torch.stack(self._shares)
        if self.mesh.size("pipeline") > 1:
            dist.all_reduce(shares, group=self.mesh.group("pipeline"))
        squares = torch.stack(self._squares)
        live = shares > 0
        ones = float(self.mesh.coordinate("pipeline") == self.mesh.coordinate("tensor") == 0)
        sums = torch.stack(
            [
                torch.where(live, squares / torch.where(live, shares, 1.0), 0.0).sum(),
                live.sum() * ones,
                shares.sum() * ones,
                self._on_device(self._samples) * ones,
                local_squares(self._counted(parameters), self.device),
            ]
        )
        if self.mesh.layout.world_size > 1:
            dist.all_reduce(sums)
        weighted, count, share, samples, big = sums.tolist()
        if count >= 2:
            self._latest = Observation(weighted / share, samples / count, big / (share * factor) ** 2, samples)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _on_device(self, value: Any) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64, device=self.device)

    def _counted(self, parameters: Sequence[LogicalParameter]) -> list[Tensor]:
        first = self.mesh.coordinate("data") == 0
        here = (p for p in parameters if counts_in_replica(p, self.mesh) and (first or p.data_sharded))
        return [g for p in here if (g := p.local_gradient) is not None]

    def _counts_plainly(self, record: LogicalParameter) -> bool:
        return not _waits(record) and counts_in_replica(record, self.mesh)

    def _see(self, record: LogicalParameter, gradient: Tensor) -> None:
        """One microbatch's gradient, before it is added to ``.grad``."""
        local = local_tensor(gradient)
        assert local is not None
        with torch.no_grad():
            self._keep(self._microbatch, [(record, local)])

    def _keep(self, key: int, pairs: Iterable[Pair]) -> None:
        """Square what is whole here; keep a copy of what must be summed over ranks first."""
        plain = []
        for record, gradient in pairs:
            if gradient is None:
                continue
            if _waits(record):
                kept = self._waiting.setdefault(key, {})
                # A parameter may be used by several chunks of a rank: its gradient then comes in parts.
                kept[record.name] = kept[record.name] + gradient if record.name in kept else gradient.detach().clone()
            elif counts_in_replica(record, self.mesh):
                plain.append(gradient.detach())
        if plain:
            self._found.setdefault(key, []).append(local_squares(plain, self.device))

    def _completed(self, pairs: Sequence[Pair]) -> Tensor:
        """Squares of gradients that are addends: summed over tensor ranks and over stages on copies."""
        total = self._on_device(0.0)
        if not pairs:
            return total
        whole = [(record, torch.zeros_like(_local(record)) if g is None else g.detach().clone()) for record, g in pairs]
        _sum_over([g for record, g in whole if record.partial_over_tensor], self.mesh.group("tensor"))
        for stages in sorted({record.stages for record, _ in whole if len(record.stages) > 1}):
            line = next(line for line in self.mesh.lines("pipeline") if self.mesh.rank in line)
            group = self.mesh.group_of([line[stage] for stage in stages])
            _sum_over([g for record, g in whole if record.stages == stages], group)
        return total + local_squares([g for record, g in whole if counts_in_replica(record, self.mesh)], self.device)


def _waits(record: LogicalParameter) -> bool:
    """Whether gradients of a replica's ranks have to be summed before they are squared."""
    return record.partial_over_tensor or len(record.stages) > 1


def _local(record: LogicalParameter) -> Tensor:
    local = local_tensor(record.parameter)
    assert local is not None
    return local.detach()


def _sum_over(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum tensors over a group in place: one collective for each dtype."""
    if group is None:
        return
    for dtype in sorted({g.dtype for g in gradients}, key=str):
        same = [g for g in gradients if g.dtype == dtype]
        flat = torch.cat([g.reshape(-1) for g in same])
        dist.all_reduce(flat, group=group)
        start = 0
        for g in same:
            g.copy_(flat[start : start + g.numel()].view_as(g))
            start += g.numel()
