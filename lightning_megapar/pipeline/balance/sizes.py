"""How many microbatches a batch is cut into: two numbers are run, the rest follows from a straight line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_megapar.config import divisors
from lightning_megapar.pipeline.balance.decide import Situation, choose_microbatches
from lightning_megapar.pipeline.balance.measured import StepTimes
from lightning_megapar.pipeline.planning.simulate import StageCosts

_PARTS = ("forward", "backward_input", "backward_weight")


class SizeTrial:
    """Finds the number of microbatches of a run.

    The seconds of an action are a fixed part (launches, messages, the user's step itself) and one that grows with the
    samples of a microbatch. Two numbers of microbatches tell them apart; the second one that is run has more, smaller
    microbatches, which need no more memory.

    Args:
        min_gain: share of the step's time that another number must be predicted to save.
    """

    def __init__(self, min_gain: float) -> None:
        self._min_gain = min_gain
        self._seen: dict[int, StepTimes] = {}
        self.is_settled = False

    def next(self, now: Situation, samples: int, medians: StepTimes) -> int | None:
        """What to run with from now on; ``None`` to go on as it is.

        Args:
            now: its shares are all alike.
            samples: of a batch.
            medians: of the steps so far with this number.
        """
        number = now.shares[0]
        self._seen[number] = medians
        candidates = _possible(now, divisors(samples))
        if len(self._seen) == 1:
            more = [one for one in candidates if one > number]
            self.is_settled = not more
            return min(more) if more else None
        self.is_settled = True
        first = next(iter(self._seen))
        before = Situation(now.ranges, (first,) * len(now.shares), now.schedule, now.placement)
        best, seconds_now, seconds_then = choose_microbatches(before, candidates, self._costs(samples, now))
        if not seconds_now or 1 - seconds_then / seconds_now < self._min_gain:
            best = first
        return best if best != number else None

    def _costs(self, samples: int, now: Situation) -> Callable[[int], StageCosts]:
        (one, times_one), (other, times_other) = list(self._seen.items())[:2]
        sizes = samples / one, samples / other

        def at(name: str, rank: int, chunk: int, size: float) -> float:
            first, second = (_longest(times, name, rank, chunk) for times in (times_one, times_other))
            slope = max(0.0, (first - second) / (sizes[0] - sizes[1]))
            fixed = max(0.0, first - slope * sizes[0])
            return fixed + slope * size

        def costs(number: int) -> StageCosts:
            forward, inputs, weights = (
                [[at(name, rank, chunk, samples / number) for chunk in range(len(row))] for rank, row in stages]
                for name in _PARTS
            )
            return StageCosts(forward, inputs, weights)

        stages = list(enumerate(now.placement))
        return costs


def _longest(times: StepTimes, name: str, rank: int, chunk: int) -> float:
    """Of the replicas of a stage."""
    return max(getattr(one, name)[chunk] for (stage, _), one in times.items() if stage == rank)


def _possible(now: Situation, numbers: Sequence[int]) -> list[int]:
    """Numbers of microbatches that the schedule can have."""
    found = []
    for number in numbers:
        try:
            now.of(number)
        except ValueError:
            continue
        found.append(number)
    return found
