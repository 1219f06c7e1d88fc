"""When each action of a schedule runs, given what it costs: an event simulation with one lane per rank. No torch.

An action starts when its rank is free and all that it needs is there; what comes from another rank is there
``communication`` after its producer's end. That is the model by which the Zero Bubble paper's table of bubble rates
follows from its profiled times to every printed digit (Qi et al. 2023, tables 5 and 6).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline.planning.trace import TraceEvent, activation_steps
from lightning_megapar.pipeline.schedules.data import Node, Schedule

Cost = float | Sequence[float] | Sequence[Sequence[float]]


@dataclass(frozen=True)
class StageCosts:
    """What a microbatch costs. Any one unit of time, any one unit of memory.

    ``forward``, ``backward_input``, ``backward_weight`` and ``activation`` are each

    * a number: of a rank's whole share of the model, the same on every rank; its chunks take equal parts of it, so that
      schedules with different numbers of chunks are compared on the same work;
    * one number per rank: likewise, of that rank's share;
    * for each rank one number per chunk: of exactly that chunk.

    Args:
        forward, backward_input, backward_weight: time per microbatch; a whole backward takes the sum of the latter two.
        communication: time from the end of an action to the arrival of its result on another rank: one number, or one
            per boundary between consecutive virtual stages (for both directions).
        occupies: whether messages occupy the ranks. If so, the sender is busy for ``communication`` after the action,
            and the receiver before the action that uses it, as with blocking sends and with receives that are posted
            when they are needed. If not, they travel beside the computation.
        activation: memory that a microbatch keeps from its forward to the end of its backward.
        kept_for_weight: memory between backward_input and backward_weight, as a share of ``activation``: the inputs of
            linear layers and the gradients of their outputs. More than 1 where linear layers are most of a chunk; 1
            is what :meth:`~lightning_megapar.pipeline.schedules.data.Schedule.peak_activations` counts by.

    Raises:
        ConfigError: on a negative or infinite number.
    """

    forward: Cost = 1.0
    backward_input: Cost = 1.0
    backward_weight: Cost = 1.0
    communication: float | Sequence[float] = 0.0
    occupies: bool = False
    activation: Cost = 1.0
    kept_for_weight: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "occupies":
                if not isinstance(value, bool):
                    raise ConfigError(f"occupies={value!r}: expected true or false")
                continue
            depth = {"communication": 1, "kept_for_weight": 0}.get(field.name, 2)
            object.__setattr__(self, field.name, _frozen(field.name, value, depth))

    def per_chunk(self, name: str, schedule: Schedule) -> tuple[tuple[float, ...], ...]:
        """A cost for each rank and chunk of a schedule.

        Args:
            name: ``"forward"``, ``"backward_input"``, ``"backward_weight"`` or ``"activation"``.
            schedule: whose ranks and chunks.

        Raises:
            ConfigError: when there are not as many numbers as ranks or chunks.
        """
        value: Any = getattr(self, name)
        stages, chunks = schedule.num_stages, schedule.num_chunks
        if isinstance(value, float):
            return ((value / chunks,) * chunks,) * stages
        if len(value) != stages:
            raise ConfigError(f"costs: {name} has {len(value)} entries but the schedule has {stages} ranks")
        if isinstance(value[0], float):
            return tuple((cost / chunks,) * chunks for cost in value)
        wrong = next((len(row) for row in value if len(row) != chunks), None)
        if wrong is not None:
            raise ConfigError(f"costs: a rank of {name} has {wrong} entries but the schedule has {chunks} chunks")
        return value

    def per_boundary(self, schedule: Schedule) -> tuple[float, ...]:
        """Time of a message between virtual stages ``k`` and ``k + 1``, for each ``k``; 0 within a rank.

        Raises:
            ConfigError: when there are not as many numbers as boundaries.
        """
        count = schedule.num_virtual_stages - 1
        value: Any = (self.communication,) * count if isinstance(self.communication, float) else self.communication
        if len(value) != count:
            raise ConfigError(f"costs: communication has {len(value)} entries but there are {count} boundaries")
        ranks = [rank for rank, _ in schedule.holders]
        return tuple(0.0 if ranks[k] == ranks[k + 1] else value[k] for k in range(count))


@dataclass(frozen=True)
class Timeline:
    """A schedule in time.

    Args:
        schedule: what was simulated.
        costs: with what.
        events: every action with its start and end, and, when they occupy the ranks, every send and receive; in an
            order in which each comes after what it needs. Times from 0, in the unit of the costs.
    """

    schedule: Schedule
    costs: StageCosts
    events: tuple[TraceEvent, ...]

    @cached_property
    def makespan(self) -> float:
        """From the first start of any rank to the last end of any: one step on its own."""
        return max(event.end for event in self.events) - min(event.start for event in self.events)

    @cached_property
    def step_time(self) -> float:
        """The longest time that a rank needs from its own first start to its own last end.

        What a step takes when the next one follows without a barrier: ranks that start late then also end late.
        """
        return max(
            max(event.end for event in own) - min(event.start for event in own)
            for own in (self.of_rank(rank) for rank in range(self.schedule.num_stages))
        )

    def of_rank(self, rank: int) -> tuple[TraceEvent, ...]:
        """The events of a rank, in order."""
        return self._by_rank[rank]

    @cached_property
    def _by_rank(self) -> tuple[tuple[TraceEvent, ...], ...]:
        rows: list[list[TraceEvent]] = [[] for _ in range(self.schedule.num_stages)]
        for event in self.events:
            rows[event.rank].append(event)
        return tuple(tuple(row) for row in rows)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank the time that it computes; sends and receives do not count."""
        return tuple(math.fsum(e.duration for e in row if e.is_work) for row in self._by_rank)

    @property
    def idle_share(self) -> tuple[float, ...]:
        """For each rank the share of :attr:`step_time` in which it does not compute."""
        return tuple(1 - busy / self.step_time if self.step_time else 0.0 for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """The mean idle share: bubble over the *total* time, as in Qi et al. 2023, ``1 - M (F + B + W) / cost``."""
        return math.fsum(self.idle_share) / self.schedule.num_stages

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank the largest number of (microbatch, chunk) pairs whose activations are alive at once."""
        return self.schedule.peak_activations()

    @property
    def peak_boundaries(self) -> tuple[int, ...]:
        """For each rank the largest number of boundaries that it holds at once, received and sent ones together."""
        return self.schedule.peak_boundaries()

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """For each rank the largest activation memory, in the unit of :attr:`StageCosts.activation`.

        Between actions: what a backward needs only while it runs does not count.
        """
        return tuple(max(held for _, held in self.memory(rank)) for rank in range(self.schedule.num_stages))

    def activations(self, rank: int) -> tuple[tuple[float, int], ...]:
        """``(time, pairs alive from then on)`` of a rank, in order of time."""
        return tuple(_running((time, change) for time, _, change in activation_steps(self.of_rank(rank), rank)))

    def memory(self, rank: int) -> tuple[tuple[float, float], ...]:
        """``(time, activation memory from then on)`` of a rank, in order of time."""
        sizes = self.costs.per_chunk("activation", self.schedule)[rank]
        kept = self.costs.kept_for_weight
        changes = [(time, sizes[chunk] * change) for time, chunk, change in activation_steps(self.of_rank(rank), rank)]
        if kept != 1:
            for event in self.of_rank(rank):
                share = {"backward_input": -(1 - kept), "backward_weight": 1 - kept}.get(event.kind)
                if share is not None:
                    changes.append((event.end, sizes[event.chunk] * share))
        return tuple(_running(sorted(changes)))


def simulate(schedule: Schedule, costs: StageCosts | None = None) -> Timeline:
    """Run a schedule on paper.

    A schedule that deadlocks does not get here: :class:`~lightning_megapar.pipeline.schedules.data.Schedule` refuses
    it and names the cycle.

    Args:
        schedule: actions per rank.
        costs: what they cost; by default forward, backward_input and backward_weight take 1 each and messages nothing.

    Raises:
        ConfigError: when the costs are not for as many ranks and chunks.
    """
    costs = costs or StageCosts()
    forward = costs.per_chunk("forward", schedule)
    inputs = costs.per_chunk("backward_input", schedule)
    weights = costs.per_chunk("backward_weight", schedule)
    costs.per_chunk("activation", schedule)
    boundary = costs.per_boundary(schedule)
    whole = tuple(tuple(map(sum, zip(a, b))) for a, b in zip(inputs, weights))
    duration = {"forward": forward, "backward": whole, "backward_input": inputs, "backward_weight": weights}
    free = [0.0] * schedule.num_stages
    ended: dict[Node, float] = {}
    events: list[TraceEvent] = []

    def message(kind: str, rank: int, node: Node, start: float, length: float) -> float:
        events.append(
            TraceEvent(kind, rank, start, start + length, node.microbatch, schedule.holders[node.virtual_stage][1])
        )
        return start + length

    for rank, action in schedule.order:
        node = schedule.node(rank, action)
        start = free[rank]
        for need in schedule.needs(rank, action):
            travel = _travel(need, node, boundary)
            if travel and costs.occupies:
                start = message("receive", rank, node, max(start, ended[need]), travel)
            else:
                start = max(start, ended[need] + travel)
        end = start + duration[action.kind][rank][action.chunk]
        events.append(TraceEvent(action.kind, rank, start, end, action.microbatch, action.chunk))
        ended[node] = free[rank] = end
        if costs.occupies:
            following = {"F": node.virtual_stage, "B": node.virtual_stage - 1, "W": -1}[node.phase]
            if 0 <= following < len(boundary) and boundary[following]:
                free[rank] = message("send", rank, node, end, boundary[following])
    return Timeline(schedule, costs, tuple(events))


def _travel(need: Node, node: Node, boundary: Sequence[float]) -> float:
    if need.virtual_stage == node.virtual_stage:
        return 0.0
    return boundary[min(need.virtual_stage, node.virtual_stage)]


def _running(changes: Any) -> list[tuple[float, Any]]:
    """Sums so far, one entry per point in time. What goes and what comes at one moment count together."""
    steps: list[tuple[float, Any]] = []
    held: Any = 0
    for time, change in changes:
        held += change
        if steps and steps[-1][0] == time:
            steps[-1] = (time, held)
        else:
            steps.append((time, held))
    return steps


def _frozen(name: str, value: Any, depth: int) -> Any:
    """``value`` with floats and tuples in place of any numbers and sequences."""
    if isinstance(value, bool | str):
        raise ConfigError(f"costs: {name}={value!r}: expected a number")
    if isinstance(value, Sequence) and depth:
        parts = tuple(_frozen(name, part, depth - 1) for part in value)
        if len({type(part) for part in parts}) > 1 or (not parts and name != "communication"):
            raise ConfigError(f"costs: {name}={value!r}: expected numbers per rank, or per rank one number per chunk")
        return parts
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ConfigError(f"costs: {name}={value!r}: expected a number of 0 or more")
    return number
