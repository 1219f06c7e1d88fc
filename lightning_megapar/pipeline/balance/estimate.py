"""What blocks cost and how fast ranks are, from what the blocks took where they ran. Pure functions.

A stage that takes long may hold costly layers or sit on a slow rank, and only in the second case does a layer get
cheaper when it moves. Blocks of one kind (same class, same shapes) cost the same wherever they run; so the time of
block ``b`` on rank ``r`` is ``cost[kind of b] x slowness[r]``, whose logarithms are a least-squares problem. Where no
kind is found on two ranks, nothing can be told apart, and the ranks count as equally fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

from lightning_megapar.pipeline.balance.measured import Place, StepTimes
from lightning_megapar.pipeline.planning.simulate import StageCosts

_RIDGE = 1e-6  # ranks are equally fast unless something says otherwise


@dataclass(frozen=True)
class Estimate:
    """What a step's parts take.

    Args:
        blocks: seconds of each block per microbatch, forward and backward, on a rank of slowness 1.
        before, after: likewise, of what runs before the first and after the last block.
        slowness: relative time for the same work, of every place; 1 on average (geometric mean).
        parts: shares of forward, backward of the inputs and backward of the weights; their sum is 1.
    """

    blocks: tuple[float, ...]
    before: float
    after: float
    slowness: Mapping[Place, float]
    parts: tuple[float, float, float]

    def stage_slowness(self, num_stages: int) -> list[float]:
        """Of each pipeline rank the slowest of its replicas: the step waits for it."""
        return [max(s for (stage, _), s in self.slowness.items() if stage == rank) for rank in range(num_stages)]

    def pieces(self, ranges: Sequence[tuple[int, int]]) -> list[float]:
        """Seconds of each virtual stage per microbatch, with what runs before and after the stack."""
        pieces = [math.fsum(self.blocks[start:stop]) for start, stop in ranges]
        pieces[0] += self.before
        pieces[-1] += self.after
        return pieces

    def costs(
        self, ranges: Sequence[tuple[int, int]], placement: Sequence[Sequence[int]], data_rank: int
    ) -> StageCosts:
        """For the simulator: seconds of each chunk of a replica, if the blocks lay like that."""
        pieces = self.pieces(ranges)
        rows = [[pieces[k] * self.slowness[rank, data_rank] for k in row] for rank, row in enumerate(placement)]
        forward, inputs, weights = ([[share * cost for cost in row] for row in rows] for share in self.parts)
        return StageCosts(forward, inputs, weights)


def estimate(
    times: StepTimes,
    ranges: Sequence[tuple[int, int]],
    placement: Sequence[Sequence[int]],
    kinds: Sequence[str],
) -> Estimate:
    """Costs and speeds that explain what was measured.

    Args:
        times: medians of every place.
        ranges: blocks of each virtual stage.
        placement: for each pipeline rank the virtual stage of each chunk.
        kinds: of each block; equal for blocks that cost the same.
    """
    scales = {
        place: [
            (f + b + w) / f if f > 0 else 0.0 for f, b, w in zip(one.forward, one.backward_input, one.backward_weight)
        ]
        for place, one in times.items()
    }
    chunk_of = {k: (rank, chunk) for rank, row in enumerate(placement) for chunk, k in enumerate(row)}
    seconds: dict[tuple[int, Place], float] = {}
    rests: dict[tuple[int, Place], float] = {}
    for k, (start, stop) in enumerate(ranges):
        rank, chunk = chunk_of[k]
        for place in (place for place in times if place[0] == rank):
            scale = scales[place][chunk]
            held = {i: times[place].blocks.get(i, 0.0) for i in range(start, stop)}
            seconds.update({(i, place): value * scale for i, value in held.items()})
            rests[k, place] = max(0.0, times[place].forward[chunk] - sum(held.values())) * scale
    cost_of, slowness = _fit(seconds, list(times), kinds)
    if not seconds or not any(value > 0 for value in seconds.values()):
        slowness = _by_totals(times)
    blocks = tuple(cost_of.get(kind, 0.0) for kind in kinds)
    last = len(ranges) - 1

    def end(k: int) -> float:
        values = [value / slowness[place] for (stage, place), value in rests.items() if stage == k]
        return sum(values) / len(values) if values else 0.0

    sums = [sum(sum(getattr(one, name)) for one in times.values()) for name in _PARTS]
    whole = sum(sums) or 1.0
    before, after = (end(0), end(last)) if last else (end(0), 0.0)
    return Estimate(blocks, before, after, slowness, (sums[0] / whole, sums[1] / whole, sums[2] / whole))


_PARTS = ("forward", "backward_input", "backward_weight")


def _by_totals(times: StepTimes) -> dict[Place, float]:
    """Without blocks: replicas do the same work; stages cannot be compared."""
    slowness: dict[Place, float] = {}
    for stage in {stage for stage, _ in times}:
        own = {place: one.total for place, one in times.items() if place[0] == stage}
        middle = math.exp(sum(math.log(max(value, 1e-12)) for value in own.values()) / len(own))
        slowness.update({place: max(value, 1e-12) / middle for place, value in own.items()})
    return slowness


def _fit(
    seconds: Mapping[tuple[int, Place], float], places: Sequence[Place], kinds: Sequence[str]
) -> tuple[dict[str, float], dict[Place, float]]:
    names = sorted(set(kinds))
    column = {name: i for i, name in enumerate(names)}
    row_of = {place: len(names) + i for i, place in enumerate(places)}
    rows, values = [], []
    for (block, place), taken in seconds.items():
        if taken > 0:
            row = numpy.zeros(len(names) + len(places))
            row[column[kinds[block]]] = row[row_of[place]] = 1.0
            rows.append(row)
            values.append(math.log(taken))
    for place in places:
        row = numpy.zeros(len(names) + len(places))
        row[row_of[place]] = _RIDGE
        rows.append(row)
        values.append(0.0)
    found = numpy.linalg.lstsq(numpy.array(rows), numpy.array(values), rcond=None)[0]
    measured = {kinds[block] for (block, _), taken in seconds.items() if taken > 0}
    cost_of = {name: float(numpy.exp(found[column[name]])) for name in names if name in measured}
    return cost_of, {place: float(numpy.exp(found[row_of[place]])) for place in places}
