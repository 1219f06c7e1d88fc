"""What the ranks took for their actions, as numbers that travel, and medians over steps. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

Place = tuple[int, int]
"""(pipeline rank, data rank)."""


@dataclass(frozen=True)
class RankTimes:
    """One rank's seconds per microbatch in one step, or their medians over some steps.

    Args:
        microbatches: how many it worked on.
        forward, backward_input, backward_weight: one number per chunk; a whole backward counts as one of the inputs.
        blocks: index of each of the rank's blocks -> seconds of its forward.
    """

    microbatches: int
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    blocks: Mapping[int, float]

    @property
    def total(self) -> float:
        """Seconds per microbatch."""
        return sum(self.forward) + sum(self.backward_input) + sum(self.backward_weight)

    def packed(self, num_blocks: int) -> list[float]:
        """As ``1 + 3 x chunks + num_blocks`` numbers; 0 for blocks of other ranks."""
        blocks = [self.blocks.get(index, 0.0) for index in range(num_blocks)]
        return [float(self.microbatches), *self.forward, *self.backward_input, *self.backward_weight, *blocks]

    @classmethod
    def unpacked(cls, numbers: Sequence[float], num_chunks: int) -> RankTimes:
        """The inverse of :meth:`packed`."""
        parts = [tuple(numbers[1 + k * num_chunks : 1 + (k + 1) * num_chunks]) for k in range(3)]
        blocks = {i: seconds for i, seconds in enumerate(numbers[1 + 3 * num_chunks :]) if seconds > 0}
        return cls(round(numbers[0]), parts[0], parts[1], parts[2], blocks)


StepTimes = Mapping[Place, RankTimes]
"""What every place took in a step. Tensor ranks of a place work in lockstep: the slowest of them has its times."""


def slowest(times: Sequence[RankTimes]) -> RankTimes:
    """Of ranks that share their work."""
    return max(times, key=lambda one: one.total)


class History:
    """The steps that decisions look at.

    Args:
        window: how many.
    """

    def __init__(self, window: int) -> None:
        self._steps: deque[StepTimes] = deque(maxlen=window)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: StepTimes) -> None:
        self._steps.append(step)

    def clear(self) -> None:
        """Forget: something was moved."""
        self._steps.clear()

    @property
    def is_full(self) -> bool:
        return len(self._steps) == self._steps.maxlen

    def medians(self) -> StepTimes:
        """The median of each number over the steps that are kept; of an even number of them the lower one."""
        return {place: _median([step[place] for step in self._steps]) for place in self._steps[-1]}


def _median(times: Sequence[RankTimes]) -> RankTimes:
    def over(name: str) -> tuple[float, ...]:
        return tuple(median_low(column) for column in zip(*(getattr(one, name) for one in times)))

    blocks = {index: median_low(one.blocks.get(index, 0.0) for one in times) for index in times[-1].blocks}
    parts = over("forward"), over("backward_input"), over("backward_weight")
    return RankTimes(times[-1].microbatches, *parts, blocks)


class SlowRanks:
    """Which places are slow, with hysteresis: who is called slow stays so until well below the factor.

    Args:
        factor: see :class:`~lightning_megapar.pipeline.balance.options.Rebalance`.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.slow: dict[Place, float] = {}
        """Places that are slow now, and how many times as long they take."""

    def update(self, slowness: Mapping[Place, float]) -> dict[Place, float]:
        """Take in relative times for the same work.

        Returns:
            the places that were not slow before and are now.
        """
        middle = _lower_median(list(slowness.values()))
        leave = 1 + (self.factor - 1) / 2
        now: dict[Place, float] = {}
        for place, value in slowness.items():
            ratio = value / middle
            if ratio >= (leave if place in self.slow else self.factor):
                now[place] = ratio
        fresh = {place: ratio for place, ratio in now.items() if place not in self.slow}
        self.slow = now
        return fresh


def _lower_median(values: list[float]) -> float:
    """Of two ranks the faster one is the measure of the other."""
    return sorted(values)[(len(values) - 1) // 2]
