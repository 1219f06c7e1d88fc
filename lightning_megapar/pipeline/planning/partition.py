"""Contiguous split of a stack of blocks into stages, or into the chunks of stages. Pure functions, no torch.

A rank's load is the cost of all of its chunks divided by its speed. In the steady state every rank works through all
of its chunks for every microbatch, so that the largest load is what a step takes per microbatch: that is what a split
has to keep small. Among splits that do, one with a small largest chunk is better, because ranks work on different
chunks at one time and wait for the slowest; then one with evenly loaded ranks. (Simulated with 4 ranks, 2 chunks and
64 microbatches: equal loads in chunks of 1.25 and 0.75 cost 4 % under interleaving and 1 % under ZB-V; one load larger
by 12.5 % costs 11 and 12 %.)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline.schedules.data import loop_placement, v_placement

if TYPE_CHECKING:
    from rich.table import Table

_SLACK = 1e-9  # sums of the same numbers in another order count as equal


@dataclass(frozen=True)
class Partition:
    """Which blocks each virtual stage holds.

    Args:
        ranges: ``(start, stop)`` per virtual stage, in the order of the model.
        placement: for each rank the virtual stage of each chunk.
        costs: cost of each block.
        before, after: cost of what runs before the first and after the last block.
        speeds: per rank, relative; costs are divided by them.
        bound: no split has a smaller largest load.

    Raises:
        ConfigError: unless the ranges are not empty and their union is the whole stack, each block once, in order.
    """

    ranges: tuple[tuple[int, int], ...]
    placement: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...]
    before: float
    after: float
    speeds: tuple[float, ...]
    bound: float

    def __post_init__(self) -> None:
        place = 0
        for start, stop in self.ranges:
            if start != place or stop <= start:
                raise ConfigError(f"stages {self.ranges} are not the {len(self.costs)} blocks, each once and in order")
            place = stop
        if place != len(self.costs) or len(self.ranges) != sum(map(len, self.placement)):
            raise ConfigError(f"stages {self.ranges} are not the {len(self.costs)} blocks, each once and in order")

    @property
    def piece_costs(self) -> tuple[float, ...]:
        """Cost of each virtual stage, with what runs before and after the stack."""
        return _piece_costs(_Problem.of(self), [stop for _, stop in self.ranges])

    @property
    def loads(self) -> tuple[float, ...]:
        """For each rank the cost of its chunks divided by its speed."""
        pieces = self.piece_costs
        return tuple(math.fsum(pieces[k] for k in row) / speed for row, speed in zip(self.placement, self.speeds))

    @property
    def is_proven(self) -> bool:
        """Whether no split can have a smaller largest load. Always so with one chunk per rank and for the V shape."""
        return max(self.loads) <= self.bound * (1 + _SLACK)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(rank, blocks of its chunks, cost, share of the mean load) for a table."""
        loads, pieces = self.loads, self.piece_costs
        mean = math.fsum(loads) / len(loads) or 1.0
        rows = []
        for rank, row in enumerate(self.placement):
            blocks = ", ".join(f"{self.ranges[k][0]}-{self.ranges[k][1] - 1}" for k in row)
            ends = [name for name, k in (("before", 0), ("after", len(self.ranges) - 1)) if k in row]
            extra = [name for name in ends if getattr(self, name)]
            what = f"{blocks} + {' + '.join(extra)}" if extra else blocks
            cost = math.fsum(pieces[k] for k in row)
            rows.append((str(rank), what, f"{cost:,.6g}", f"{loads[rank] / mean:.3f}"))
        return rows

    def table(self) -> Table:
        """The same for the terminal."""
        from rich.table import Table

        worst = max(self.loads)
        gap = "" if self.is_proven else f" (at most {worst / self.bound - 1:.1%} above the best)"
        table = Table(title=f"pipeline stages: largest load {worst:,.6g}{gap}")
        for column in ("rank", "blocks", "cost", "load / mean"):
            table.add_column(column, justify="left" if column == "blocks" else "right")
        for row in self.rows():
            table.add_row(*row)
        return table


def partition(
    costs: Sequence[float],
    placement: Sequence[Sequence[int]],
    before: float = 0.0,
    after: float = 0.0,
    speeds: Sequence[float] | None = None,
) -> Partition:
    """Cut consecutive blocks into the virtual stages of a placement, with the smallest largest load of a rank.

    Exact with one chunk per rank (dynamic programme over prefixes) and for the V shape (ranks take from both ends
    inwards, so that what is left is an interval). For the loop of interleaved schedules, which contains number
    partitioning, a bounded search follows a descent; the result says how far it can be from the best
    (:attr:`Partition.bound`). The same input gives the same split everywhere.

    Args:
        costs: cost of each block (parameters, FLOPs or seconds; any one unit), not negative.
        placement: for each rank the virtual stage of each chunk, as in a schedule.
        before: cost of what the first virtual stage runs before its first block (the embedding).
        after: cost of what the last virtual stage runs after its last block (the head and the loss).
        speeds: of each rank, relative; a rank of speed 0.5 takes twice as long. Default: all the same.

    Raises:
        ConfigError: when there are fewer blocks than virtual stages, or on a negative or infinite number.
    """
    problem = _Problem.of_arguments(costs, placement, before, after, speeds)
    if problem.num_chunks == 1:
        stops = _split_pieces(problem)
        bound = max(_loads(problem, stops))
    else:
        stops = _descend(problem, _split_pieces(problem))
        bound = _lower_bound(problem)
        v_shape = problem.placement == v_placement(len(problem.placement))
        search = _from_both_ends if v_shape else _Search(problem).below
        while max(_loads(problem, stops)) > bound * (1 + _SLACK):
            better = search(problem, max(_loads(problem, stops)))
            if better is None:
                break
            if not better:
                return problem.partition(stops, bound)  # the search gave up: nothing is proven
            stops = _descend(problem, better)
        bound = max(_loads(problem, stops))
    return problem.partition(stops, bound)


def split_blocks(
    costs: Sequence[float], num_stages: int, before: float = 0.0, after: float = 0.0
) -> tuple[tuple[int, int], ...]:
    """Cut ``len(costs)`` consecutive blocks into ``num_stages`` non-empty ranges with the smallest largest cost.

    :func:`partition` with one chunk per rank and equal speeds. Ties go to the smaller sum of squares, so that equal
    blocks are spread evenly.

    Returns:
        ``(start, stop)`` per stage; the ranges cover ``0 .. len(costs)`` without gaps.

    Raises:
        ConfigError: when there are fewer blocks than stages.
    """
    blocks = len(costs)
    if blocks < num_stages:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} but the stack has only {blocks} blocks; valid values: 1 to {blocks}"
        )
    return partition(costs, loop_placement(num_stages, 1), before, after).ranges


def given_split(split: Sequence[int], blocks: int) -> tuple[tuple[int, int], ...]:
    """Ranges for a user's ``pipeline_split`` (blocks per stage).

    Raises:
        ConfigError: when the sum is not the number of blocks (nothing is silently dropped).
    """
    if sum(split) != blocks:
        raise ConfigError(f"pipeline_split={tuple(split)} adds up to {sum(split)} but the stack has {blocks} blocks")
    ranges, start = [], 0
    for count in split:
        ranges.append((start, start + count))
        start += count
    return tuple(ranges)


# -- the searches ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Problem:
    costs: tuple[float, ...]
    placement: tuple[tuple[int, ...], ...]
    before: float
    after: float
    speeds: tuple[float, ...]
    prefix: tuple[float, ...]
    """``prefix[i]``: what runs up to block ``i``; the ends of the model belong to its first and last interval."""
    rank_of: tuple[int, ...]

    @classmethod
    def of(cls, done: Partition) -> _Problem:
        return cls.of_arguments(done.costs, done.placement, done.before, done.after, done.speeds)

    @classmethod
    def of_arguments(
        cls,
        costs: Sequence[float],
        placement: Sequence[Sequence[int]],
        before: float,
        after: float,
        speeds: Sequence[float] | None,
    ) -> _Problem:
        rows = tuple(tuple(row) for row in placement)
        ranks = {k: rank for rank, row in enumerate(rows) for k in row}
        speeds = tuple(speeds) if speeds is not None else (1.0,) * len(rows)
        if len(speeds) != len(rows) or not all(math.isfinite(speed) and speed > 0 for speed in speeds):
            raise ConfigError(f"speeds={speeds}: expected a positive number for each of {len(rows)} ranks")
        for name, values in (("costs", costs), ("before", [before]), ("after", [after])):
            wrong = [value for value in values if not (math.isfinite(value) and value >= 0)]
            if wrong:
                raise ConfigError(f"{name}: {wrong[0]!r} is no cost; expected a number of 0 or more")
        if len(costs) < len(ranks):
            raise ConfigError(f"{len(costs)} blocks cannot be cut into {len(ranks)} virtual stages (one each at least)")
        prefix = [0.0]
        for cost in costs:
            prefix.append(prefix[-1] + cost)
        prefix = [0.0, *(before + part for part in prefix[1:])]
        prefix[-1] += after
        rank_of = tuple(ranks[k] for k in range(len(ranks)))
        return cls(tuple(costs), rows, before, after, speeds, tuple(prefix), rank_of)

    @property
    def num_chunks(self) -> int:
        return len(self.placement[0])

    @property
    def num_pieces(self) -> int:
        return len(self.rank_of)

    def partition(self, stops: Sequence[int], bound: float) -> Partition:
        ranges = tuple(pairwise((0, *stops)))
        return Partition(ranges, self.placement, self.costs, self.before, self.after, self.speeds, bound)


def _piece_costs(problem: _Problem, stops: Sequence[int]) -> tuple[float, ...]:
    return tuple(problem.prefix[stop] - problem.prefix[start] for start, stop in pairwise((0, *stops)))


def _loads(problem: _Problem, stops: Sequence[int]) -> list[float]:
    loads = [0.0] * len(problem.placement)
    for rank, cost in zip(problem.rank_of, _piece_costs(problem, stops)):
        loads[rank] += cost / problem.speeds[rank]
    return loads


def _split_pieces(problem: _Problem) -> list[int]:
    """The smallest largest piece, in time, then the smallest sum of squares: O(blocks^2 x pieces)."""
    blocks, pieces, prefix = len(problem.costs), problem.num_pieces, problem.prefix
    # best[stop] = (largest time, sum of squares, cut points) of the first pieces over blocks[:stop]
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for piece, rank in enumerate(problem.rank_of):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for stop in range(piece + 1, blocks - (pieces - piece - 1) + 1):
            options = []
            for start, (worst, squares, cuts) in best.items():
                if start < stop:
                    time = (prefix[stop] - prefix[start]) / problem.speeds[rank]
                    options.append((max(worst, time), squares + time * time, (*cuts, stop)))
            following[stop] = min(options)
        best = following
    return list(best[blocks][2])


def _quality(problem: _Problem, stops: Sequence[int]) -> tuple[float, float, float]:
    """Smaller is better: largest load, largest piece, unevenness of the loads (rounded, so that a descent ends)."""
    loads = _loads(problem, stops)
    times = (cost / problem.speeds[rank] for rank, cost in zip(problem.rank_of, _piece_costs(problem, stops)))
    scale = problem.prefix[-1] or 1.0
    squares = math.fsum((load / scale) ** 2 for load in loads)
    return round(max(loads) / scale, 12), round(max(times) / scale, 12), round(squares, 12)


def _descend(problem: _Problem, stops: Sequence[int]) -> list[int]:
    """Move one cut, or a run of neighbouring cuts, by one block as long as that is better."""
    stops = list(stops)
    quality = _quality(problem, stops)
    inner = len(stops) - 1
    improved = True
    while improved:
        improved = False
        for first in range(inner):
            for last in range(first, inner):
                for step in (-1, 1):
                    moved = [stop + step * (first <= i <= last) for i, stop in enumerate(stops)]
                    if any(b <= a for a, b in pairwise((0, *moved))):
                        continue
                    found = _quality(problem, moved)
                    if found < quality:
                        stops, quality, improved = moved, found, True
    return stops


def _lower_bound(problem: _Problem) -> float:
    """No split has a smaller largest load. The mean; what the ranks of the ends cannot get rid of; the largest block;
    and with equal speeds and whole costs the mean rounded up to a multiple of their greatest common divisor."""
    prefix, speeds, ranks = problem.prefix, problem.speeds, problem.rank_of
    ends = [0.0] * len(speeds)
    ends[ranks[0]] += prefix[1] / speeds[ranks[0]]
    ends[ranks[-1]] += (prefix[-1] - prefix[-2]) / speeds[ranks[-1]]
    bound = max(prefix[-1] / math.fsum(speeds), max(problem.costs) / max(speeds), *ends)
    values = [*problem.costs, problem.before, problem.after]
    if len(set(speeds)) == 1 and all(value == int(value) for value in values) and prefix[-1]:
        unit = math.gcd(*(int(value) for value in values))
        shares = int(sum(values)) // unit
        bound = max(bound, -(-shares // len(speeds)) * unit / speeds[0])
    return bound


def _from_both_ends(problem: _Problem, limit: float) -> list[int] | None:
    """A split of the V shape with every load below ``limit``, or ``None`` when there is none.

    Rank 0 takes a prefix and a suffix, rank 1 the next ones inwards, and so on: what is left is an interval. All
    intervals that can be reached are kept, except those that are too much for the ranks further in.
    """
    prefix, speeds, ranks, blocks = problem.prefix, problem.speeds, len(problem.placement), len(problem.costs)
    most = limit * (1 - _SLACK)
    reached: list[dict[tuple[int, int], tuple[int, int]]] = [{(0, blocks): (0, 0)}]  # interval -> the one before
    for rank in range(ranks - 1):
        room, room_within = most * speeds[rank], most * math.fsum(speeds[rank + 1 :])
        needed = 2 * (ranks - rank - 1)  # blocks for the ranks further in
        following: dict[tuple[int, int], tuple[int, int]] = {}
        for start, end in reached[-1]:
            for stop in range(start + 1, end - needed):
                if prefix[stop] - prefix[start] > room:
                    break
                longest = bisect_right(prefix, prefix[stop] + room_within) - 1
                for suffix in range(min(end - 1, longest), stop + needed - 1, -1):
                    if prefix[stop] - prefix[start] + prefix[end] - prefix[suffix] > room:
                        break
                    following.setdefault((stop, suffix), (start, end))
        reached.append(following)
    for start, end in reached[-1]:
        if prefix[end] - prefix[start] <= most * speeds[-1]:
            middle = min(range(start + 1, end), key=lambda cut: abs(prefix[cut] * 2 - prefix[start] - prefix[end]))
            stops = [start, middle, end]
            for states in reached[:0:-1]:
                stops = [states[stops[0], stops[-1]][0], *stops, states[stops[0], stops[-1]][1]]
            return stops[1:]
    return None


class _Search:
    """Depth first over the cuts of any placement, with what cannot be completed remembered.

    Args:
        problem: what to split.
        steps: cuts to try before giving up, over all calls.
    """

    def __init__(self, problem: _Problem, steps: int = 30_000) -> None:
        self.problem = problem
        self.steps = steps
        last = {rank: k for k, rank in enumerate(problem.rank_of)}
        self.later = [[r for r, k in last.items() if k >= piece] for piece in range(problem.num_pieces)]

    def below(self, problem: _Problem, limit: float) -> list[int] | None:
        """A split with every load below ``limit``; ``None`` when there is none; empty when the search gave up."""
        self.room = [limit * (1 - _SLACK) * speed for speed in problem.speeds]
        self.failed: set[tuple[int, int, tuple[float, ...]]] = set()
        found = self._extend(0, 0)
        return [] if self.steps <= 0 else found

    def _extend(self, piece: int, start: int) -> list[int] | None:
        prefix, blocks, pieces = self.problem.prefix, len(self.problem.costs), self.problem.num_pieces
        if piece == pieces:
            return []
        key = (piece, start, tuple(round(room, 9) for room in self.room))
        if key in self.failed or prefix[-1] - prefix[start] > math.fsum(self.room[r] for r in self.later[piece]):
            return None
        rank = self.problem.rank_of[piece]
        stops = [blocks] if piece == pieces - 1 else list(range(start + 1, blocks - (pieces - piece - 1) + 1))
        stops = [stop for stop in stops if prefix[stop] - prefix[start] <= self.room[rank]]
        left = 1 + sum(1 for later in self.problem.rank_of[piece + 1 :] if later == rank)
        aim = prefix[start] + self.room[rank] / left  # an even share first
        for stop in sorted(stops, key=lambda stop: abs(prefix[stop] - aim)):
            self.steps -= 1
            if self.steps <= 0:
                return None
            cost = prefix[stop] - prefix[start]
            self.room[rank] -= cost
            rest = self._extend(piece + 1, stop)
            self.room[rank] += cost
            if rest is not None:
                return [stop, *rest]
        self.failed.add(key)
        return None
