"""Executes a schedule on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megapar.memory.arena import Arena
from lightning_megapar.mesh import ParallelMesh, new_group
from lightning_megapar.pipeline.engine.exchange import (
    BoundaryReceiver,
    BoundarySender,
    GradientReceiver,
    GradientSender,
    Link,
    LocalBoundaries,
    LocalGradients,
)
from lightning_megapar.pipeline.engine.stopwatch import Stopwatch
from lightning_megapar.pipeline.schedules import Action, Schedule

ForwardStep = Callable[[int, int, Any], tuple[bool, Any]]
"""``(chunk, microbatch, received boundary or None) -> (finished, value)``: ``finished`` with the step's result on the
last virtual stage, else the boundary to send."""
BackwardStep = Callable[[int, Any], None]
"""``(microbatch, result)``: the backward of that microbatch's loss, on the last virtual stage."""


class Postponed(Protocol):
    """Weight gradients computed apart from the backward: a :class:`~lightning_megapar.layers.deferral.Deferral`."""

    def collecting(self, key: tuple[int, int]) -> AbstractContextManager[None]:
        """While active, layers leave their weight gradients under ``key``."""

    def compute(self, key: tuple[int, int]) -> None:
        """Compute what was left under ``key``."""


class Reduction(Protocol):
    """What happens to complete gradients, see :mod:`lightning_megapar.data_parallel.reduction`."""

    def before(self, chunk: int, is_last: bool) -> None:
        """A whole backward of a chunk comes next; ``is_last``: it completes the chunk's gradients of the step."""

    def after(self, chunk: int, is_last: bool) -> bool:
        """A microbatch's gradients of a chunk are complete; whether something was done about it."""

    def finish(self) -> None:
        """The step's actions have run."""


@dataclass(frozen=True)
class Span:
    """When an action ran on this rank: seconds of :func:`time.perf_counter`, without the wait for what it needs.

    On a GPU it is the time of the work, not of its launch: see :meth:`PipelineRuntime.now`.
    """

    action: Action
    start: float
    end: float


class PipelineError(RuntimeError):
    """A neighbour did not send what an action needs; the text names the action, the cause is the transport's."""


class _Ends:
    """What one chunk receives from and sends to its neighbours; ``None`` at the ends of the model."""

    def __init__(self) -> None:
        self.boundary_in: BoundaryReceiver | LocalBoundaries | None = None
        self.boundary_out: BoundarySender | LocalBoundaries | None = None
        self.gradient_in: GradientReceiver | LocalGradients | None = None
        self.gradient_out: GradientSender | LocalGradients | None = None

    @property
    def senders(self) -> list[Any]:
        return [sender for sender in (self.boundary_out, self.gradient_out) if sender is not None]


class PipelineRuntime:
    """Runs the actions of a rank and moves boundaries and their gradients between virtual stages.

    Making one is collective over all ranks: every connection is opened here, in one fixed order.

    Args:
        mesh: the ranks; with pipeline size 1 nothing is sent.
        device: where boundaries live.
        arena: of the device; boundaries and gradients that are sent, received or handed on are made in it. Without one
            they are torch's.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device, arena: Arena | None = None) -> None:
        self.arena = arena
        self.rank = mesh.coordinate("pipeline")
        self.placement = mesh.placement
        self.spans: list[Span] | None = None
        """When it is a list, every action that has run is appended."""
        self.reductions: list[tuple[float, float]] | None = None
        """When it is a list, start and end of every reduction of gradients are appended, on the clock of ``spans``."""
        self.stopwatch: Stopwatch | None = None
        """Is told of every action, when there is one."""
        self._device = device
        self._holders = {k: (r, c) for r, row in enumerate(self.placement) for c, k in enumerate(row)}
        self._ends = [_Ends() for _ in self.placement[self.rank]]
        self._connect(mesh, device)

    def now(self) -> float:
        """Seconds of :func:`time.perf_counter`; while spans are recorded, not before a GPU has done what it was given.

        Only the stream of the computation is waited for: receives that were posted early wait on streams of their own.
        """
        if self.spans is not None and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if self.stopwatch is not None:
            self.stopwatch.begin()
        return time.perf_counter()

    def _connect(self, mesh: ParallelMesh, device: torch.device) -> None:
        """Link by link in the order of the model, so that no two ranks wait for each other."""
        groups = _Groups(mesh)
        for k in range(len(self._holders) - 1):
            (rank, chunk), (next_rank, next_chunk) = self._holders[k], self._holders[k + 1]
            if rank == next_rank:
                if rank == self.rank:
                    before, after = self._ends[chunk], self._ends[next_chunk]
                    before.boundary_out = after.boundary_in = LocalBoundaries(self.arena)
                    before.gradient_in = after.gradient_out = LocalGradients()
                continue
            forward = groups.of("forward", rank, next_rank)
            backward = groups.of("backward", next_rank, rank)
            if self.rank == rank:
                peer = mesh.stage_rank(next_rank)
                out, back = Link(peer, forward, device, self.arena), Link(peer, backward, device, self.arena)
                out.warm_up(send=True)
                back.warm_up(send=False)
                self._ends[chunk].boundary_out, self._ends[chunk].gradient_in = (
                    BoundarySender(out),
                    GradientReceiver(back),
                )
            elif self.rank == next_rank:
                peer = mesh.stage_rank(rank)
                into, back = Link(peer, forward, device, self.arena), Link(peer, backward, device, self.arena)
                into.warm_up(send=False)
                back.warm_up(send=True)
                mine = self._ends[next_chunk]
                mine.boundary_in, mine.gradient_out = BoundaryReceiver(into), GradientSender(back)

    def run(
        self,
        schedule: Schedule,
        forward: ForwardStep,
        backward: BackwardStep | None = None,
        *,
        reduction: Reduction | None = None,
        before_backward: Callable[[int], None] | None = None,
        postponed: Postponed | None = None,
    ) -> None:
        """Run one step.

        Args:
            schedule: its placement is this runtime's.
            forward: runs one microbatch through one chunk.
            backward: see :data:`BackwardStep`; not needed by a schedule of forwards alone.
            reduction: told of each chunk whose gradients get complete.
            before_backward: called with the microbatch before each of its backwards.
            postponed: where weight gradients wait; needed by schedules that split the backward.

        Raises:
            PipelineError: when a neighbour is gone or late; it names the action that waits.
        """
        with nullcontext() if self.arena is None else self.arena.step():
            _Step(self, schedule, forward, backward, reduction, before_backward, postponed).run()


class _Groups:
    """Process groups so that each has one link at most between any two ranks: NCCL matches messages by order alone."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._taken: dict[str, list[set[frozenset[int]]]] = {"forward": [], "backward": []}
        self._groups: dict[str, list[dist.ProcessGroup]] = {"forward": [], "backward": []}

    def of(self, direction: str, source: int, target: int) -> dist.ProcessGroup:
        """A group of the direction that has no link between the two stages yet; the same on every rank."""
        pair = frozenset((source, target))
        taken, groups = self._taken[direction], self._groups[direction]
        index = next((i for i, pairs in enumerate(taken) if pair not in pairs), len(taken))
        if index == len(taken):
            taken.append(set())
            groups.append(self._mesh.direction_group(direction) if index == 0 else self._new())
        taken[index].add(pair)
        return groups[index]

    def _new(self) -> dist.ProcessGroup:
        mine: Any = None
        for line in self._mesh.lines("pipeline"):
            group = new_group(line)
            if self._mesh.rank in line:
                mine = group
        return mine


class _Step:
    """One step of a rank: what waits between its actions."""

    def __init__(
        self,
        runtime: PipelineRuntime,
        schedule: Schedule,
        forward: ForwardStep,
        backward: BackwardStep | None,
        reduction: Reduction | None,
        before_backward: Callable[[int], None] | None,
        postponed: Postponed | None,
    ) -> None:
        self.runtime, self.schedule = runtime, schedule
        self.forward, self.backward, self.postponed = forward, backward, postponed
        self.reduction, self.before_backward = reduction, before_backward
        self.actions = schedule.ranks[runtime.rank]
        # Per chunk: microbatch -> received leaves, sent tensors, results.
        self.inputs: list[dict[int, list[Tensor]]] = [{} for _ in runtime._ends]
        self.outputs: list[dict[int, list[Tensor]]] = [{} for _ in runtime._ends]
        self.results: list[dict[int, Any]] = [{} for _ in runtime._ends]
        self.left = [sum(a.kind == "forward" and a.chunk == c for a in self.actions) for c in range(len(runtime._ends))]

    def run(self) -> None:
        senders = [sender for ends in self.runtime._ends for sender in ends.senders]
        for chunk, ends in enumerate(self.runtime._ends):
            if ends.gradient_in is not None:
                ends.gradient_in.begin(self._backward_order(chunk))
            self._post(chunk)
        last = self.schedule.completions(self.runtime.rank) if self.reduction is not None else {}
        for index, action in enumerate(self.actions):
            is_last = last.get(action.chunk) == index
            if self.reduction is not None and action.kind == "backward":
                self.reduction.before(action.chunk, is_last)
            start = self._do(action)
            if self.runtime.stopwatch is not None:
                self.runtime.stopwatch.note(action)
            if self.runtime.spans is not None:
                self.runtime.spans.append(Span(action, start, self.runtime.now()))
            if self.reduction is not None and (is_last or action.kind in ("backward", "backward_weight")):
                self._reduce(self.reduction, action.chunk, is_last)
            for sender in senders:
                sender.collect()
        if self.reduction is not None:
            self.reduction.finish()
        for sender in senders:
            sender.drain()

    def _reduce(self, reduction: Reduction, chunk: int, is_last: bool) -> None:
        start = self.runtime.now()
        if reduction.after(chunk, is_last) and self.runtime.reductions is not None:
            self.runtime.reductions.append((start, self.runtime.now()))

    def _backward_order(self, chunk: int) -> list[int]:
        """The microbatches in the order in which the next virtual stage sends their gradients."""
        k = self.runtime.placement[self.runtime.rank][chunk] + 1
        rank, theirs = self.runtime._holders[k]
        kinds = ("backward", "backward_input")
        return [a.microbatch for a in self.schedule.ranks[rank] if a.chunk == theirs and a.kind in kinds]

    def _post(self, chunk: int) -> None:
        """Receives that can start now: they run while this rank computes."""
        ends = self.runtime._ends[chunk]
        if ends.boundary_in is not None and self.left[chunk]:
            ends.boundary_in.post()
        if ends.gradient_in is not None:
            ends.gradient_in.post(self.outputs[chunk])

    def _do(self, action: Action) -> float:
        """Run an action; when it started, its wait for others left out."""
        if action.kind == "forward":
            return self._forward(action)
        if action.kind == "backward_weight":
            start = self.runtime.now()
            assert self.postponed is not None
            self.postponed.compute((action.chunk, action.microbatch))
            return start
        return self._backward(action)

    def _forward(self, action: Action) -> float:
        chunk, microbatch, ends = action.chunk, action.microbatch, self.runtime._ends[action.chunk]
        received, leaves = None, []
        if ends.boundary_in is not None:
            received, leaves = self._waiting(action, partial(ends.boundary_in.take, microbatch))
        self.left[chunk] -= 1
        self._post(chunk)
        start = self.runtime.now()
        finished, value = self.forward(chunk, microbatch, received)
        training = self.schedule.is_training
        if training and leaves:
            self.inputs[chunk][microbatch] = leaves
        if finished:
            if training:
                self.results[chunk][microbatch] = value
        else:
            assert ends.boundary_out is not None
            sent = ends.boundary_out.send(value, microbatch)
            if training:
                self.outputs[chunk][microbatch] = [t for t in sent if t.requires_grad]
                self._post(chunk)
        return start

    def _backward(self, action: Action) -> float:
        chunk, microbatch, ends = action.chunk, action.microbatch, self.runtime._ends[action.chunk]
        gradients: list[Tensor] = []
        waiting = self.outputs[chunk]
        if ends.gradient_in is not None:
            gradients = self._waiting(action, partial(ends.gradient_in.take, microbatch, waiting))
        tensors = waiting.pop(microbatch, [])
        self._post(chunk)
        start = self.runtime.now()
        if self.before_backward is not None:
            self.before_backward(microbatch)
        if action.kind == "backward_input":
            assert self.postponed is not None
            with self.postponed.collecting((chunk, microbatch)):
                self._run_backward(chunk, microbatch, tensors, gradients)
        else:
            self._run_backward(chunk, microbatch, tensors, gradients)
        del tensors, gradients
        leaves = self.inputs[chunk].pop(microbatch, [])
        if ends.gradient_out is not None:
            ends.gradient_out.send(leaves, microbatch)
        return start

    def _run_backward(self, chunk: int, microbatch: int, tensors: list[Tensor], gradients: list[Tensor]) -> None:
        if self.runtime._ends[chunk].gradient_in is None:
            assert self.backward is not None
            self.backward(microbatch, self.results[chunk].pop(microbatch))
        elif tensors:
            torch.autograd.backward(tensors, gradients)

    def _waiting(self, action: Action, receive: Callable[[], Any]) -> Any:
        try:
            return receive()
        except RuntimeError as error:
            kind = action.kind.replace("_", " ")
            raise PipelineError(
                f"pipeline stage {self.runtime.rank} waits for its input of the {kind} of microbatch "
                f"{action.microbatch}" + (f", chunk {action.chunk}" if action.chunk else "") + f": {error}"
            ) from error
