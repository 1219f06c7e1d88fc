"""What would make a step shorter, by how much, and whether it is worth it. Pure functions over the simulator."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline.balance.estimate import Estimate
from lightning_megapar.pipeline.planning.partition import partition
from lightning_megapar.pipeline.planning.simulate import StageCosts, simulate
from lightning_megapar.pipeline.schedules import Schedule, build_schedule

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Situation:
    """How the work lies now.

    Args:
        ranges: blocks of each virtual stage.
        shares: microbatches of each data rank.
        schedule: its name, or the schedule of a whole batch.
        placement: for each pipeline rank the virtual stage of each chunk.
    """

    ranges: Ranges
    shares: tuple[int, ...]
    schedule: str | Schedule
    placement: tuple[tuple[int, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    def of(self, microbatches: int) -> Schedule:
        """The schedule of a replica that works on so many microbatches.

        Raises:
            ConfigError: when the schedule cannot have so many.
        """
        if isinstance(self.schedule, Schedule):
            whole = microbatches == self.schedule.num_microbatches
            return self.schedule if whole else self.schedule.restricted(microbatches)
        return _built(self.schedule, self.num_stages, microbatches, len(self.placement[0]))


@lru_cache(maxsize=256)
def _built(name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
    return build_schedule(name, stages, microbatches, chunks)


@dataclass(frozen=True)
class Proposal:
    """One change.

    Args:
        lever: ``"layers"`` or ``"replicas"``.
        ranges, shares: how the work would lie.
        seconds_now, seconds_then: of a step's forwards and backwards, predicted by the same costs.
    """

    lever: Literal["layers", "replicas"]
    ranges: Ranges
    shares: tuple[int, ...]
    seconds_now: float
    seconds_then: float

    @property
    def gain(self) -> float:
        """Share of the step's time that is saved."""
        return 1 - self.seconds_then / self.seconds_now if self.seconds_now > 0 else 0.0

    def pays(self, price: float, within: int) -> bool:
        """Whether ``within`` steps save more than ``price`` seconds."""
        return (self.seconds_now - self.seconds_then) * within > price


def step_seconds(now: Situation, found: Estimate, ranges: Ranges, shares: Sequence[int]) -> float:
    """Of the slowest replica: makespan of its schedule."""
    return max(_replica_seconds(now, found, ranges, data, count) for data, count in enumerate(shares))


def _replica_seconds(now: Situation, found: Estimate, ranges: Ranges, data: int, microbatches: int) -> float:
    if not microbatches:
        return 0.0
    return simulate(now.of(microbatches), found.costs(ranges, now.placement, data)).makespan


def move_layers(now: Situation, found: Estimate) -> Ranges:
    """The split with the smallest largest load of a rank, each stage as fast as the slowest of its replicas."""
    speeds = [1 / slowness for slowness in found.stage_slowness(now.num_stages)]
    return partition(found.blocks, now.placement, found.before, found.after, speeds).ranges


def share_microbatches(seconds: Callable[[int, int], float], total: int, replicas: int) -> tuple[int, ...]:
    """Whole microbatches for each replica, at least one, so that the slowest is done as early as possible.

    One by one to whoever is then done first: exact, since a replica's time grows with its number. Of equals to the one
    with fewer, so that little has to be sent.

    Args:
        seconds: of (replica, number of microbatches).
        total: microbatches of all replicas together.
        replicas: how many.
    """
    shares = [1] * replicas
    done = [(seconds(data, 2), 1, data) for data in range(replicas)]
    heapq.heapify(done)
    for _ in range(total - replicas):
        _, _, data = heapq.heappop(done)
        shares[data] += 1
        heapq.heappush(done, (seconds(data, shares[data] + 1), shares[data], data))
    return tuple(shares)


def worth_a_look(now: Situation, found: Estimate, lever: str, least: float) -> bool:
    """Whether a lever may save ``least`` of the step's time: costs little, so that it can be asked after every step.

    Layers: whether the slowest rank takes so much longer than all would with layers that could be divided at will.
    Replicas: whether a step with microbatches that could be divided would be so much shorter. With whole backwards of
    one chunk, a replica takes at least ``n x stage + the stages before it once`` for every stage.
    """
    pieces = found.pieces(now.ranges)
    loads = [sum(pieces[k] for k in row) for row in now.placement]
    stages, replicas = range(now.num_stages), range(len(now.shares))
    taken = [[loads[rank] * found.slowness[rank, data] for rank in stages] for data in replicas]
    slowest = [max(row) for row in taken]
    if not min(slowest) > 0:
        return False
    if lever == "layers":
        even = sum(loads) / sum(1 / slowness for slowness in found.stage_slowness(now.num_stages))
        return max(slowest) > even * (1 + least / 2)
    schedule = now.of(now.shares[0])
    is_whole = schedule.num_chunks == 1 and not schedule.splits_backward
    present = step_seconds(now, found, now.ranges, now.shares)
    # Of every bound by one stage of each replica: n microbatches take n x stage + ramp.
    bounds = []
    for places in zip(*(_ramps(row) if is_whole else [(max(row), 0.0)] for row in taken)):
        rates = [1 / stage for stage, _ in places]
        bounds.append((sum(now.shares) + sum(ramp * rate for (_, ramp), rate in zip(places, rates))) / sum(rates))
    return 1 - max(bounds) / present >= least


def _ramps(row: Sequence[float]) -> list[tuple[float, float]]:
    """``(stage, what the stages before it take)`` of each stage."""
    return [(stage, sum(row[:rank])) for rank, stage in enumerate(row)]


def propose(now: Situation, found: Estimate, levers: Mapping[str, bool], least: float = 0.0) -> Proposal | None:
    """The best change of those that are allowed; ``None`` when nothing saves enough.

    Args:
        now: how the work lies.
        found: what it costs.
        levers: ``"layers"`` and ``"replicas"``: whether they may be pulled.
        least: share of the step's time that has to be saved.
    """
    levers = {lever: allowed and worth_a_look(now, found, lever, least) for lever, allowed in levers.items()}
    if not any(levers.values()):
        return None
    present = step_seconds(now, found, now.ranges, now.shares)
    options: list[tuple[float, Any]] = []
    if levers.get("layers"):
        ranges = move_layers(now, found)
        if ranges != now.ranges:
            options.append((step_seconds(now, found, ranges, now.shares), ("layers", ranges, now.shares)))
    if levers.get("replicas"):
        shares = _even_times(now, found)
        if shares is not None and shares != now.shares:
            options.append((step_seconds(now, found, now.ranges, shares), ("replicas", now.ranges, shares)))
    if not options:
        return None
    then, (lever, ranges, shares) = min(options, key=lambda option: option[0])
    best = Proposal(lever, ranges, shares, present, then)
    return best if then < present and best.gain >= least else None


def _even_times(now: Situation, found: Estimate) -> tuple[int, ...] | None:
    @cache
    def seconds(data: int, count: int) -> float:
        return _replica_seconds(now, found, now.ranges, data, count)

    try:
        return share_microbatches(seconds, sum(now.shares), len(now.shares))
    except ConfigError:  # a schedule that cannot have every number of microbatches
        return None


def choose_microbatches(
    now: Situation,
    candidates: Sequence[int],
    costs: Callable[[int], StageCosts],
) -> tuple[int, float, float]:
    """How many microbatches a batch is cut into best, without more memory than now.

    Args:
        now: its shares are all alike.
        candidates: numbers of microbatches.
        costs: for a number of microbatches, what one of them costs; its activations take ``1 / number``.

    Returns:
        (number, seconds now, seconds then).
    """
    present = now.shares[0]

    def run(number: int) -> tuple[float, float]:
        timeline = simulate(now.of(number), costs(number))
        return timeline.makespan, max(timeline.peak_activations) / number

    seconds_now, memory = run(present)
    best, seconds_then = present, seconds_now
    for number in candidates:
        try:
            seconds, needed = run(number)
        except ConfigError:
            continue
        if seconds < seconds_then and needed <= memory * (1 + 1e-9):
            best, seconds_then = number, seconds
    return best, seconds_now, seconds_then
