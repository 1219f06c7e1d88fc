"""A multiple-choice knapsack: one option of each block, a sum of bytes below a capacity, the least sum of seconds.

Solved exactly by dynamic programming over partial plans, of which those are dropped that another one dominates (fewer
bytes and seconds) or that cannot come below the best whole plan, by the bound of the linear relaxation (Dudzinski and
Walukiewicz, European Journal of Operational Research 28 (1987); Pisinger, ibid. 83 (1995)).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

UNIT = 2.0**50
"""Units of time in a second: whole numbers, so that equal plans are equal whatever the order of their blocks."""

Option = tuple[int, int, str]
"""Bytes, units of time, name."""


def frontier(options: Iterable[Option]) -> list[Option]:
    """Those that no other one is better than: from few bytes to many, each faster than the one before."""
    kept: list[Option] = []
    for option in sorted(options):
        if not kept or option[1] < kept[-1][1]:
            kept.append(option)
    return kept


class Relaxation:
    """Bounds of the least time of some blocks.

    The lower one is that of options which could be mixed: each block's are replaced by their lower convex hull, and the
    steps along all hulls taken from the steepest on, as far as the bytes reach. Without the last step, which reaches
    only in part, it is a plan, and the upper bound.
    """

    def __init__(self, options: Sequence[Sequence[Option]]) -> None:
        self._bytes = self._units = 0
        steps: list[tuple[float, int, int]] = []
        for some in options:
            hull = _hull(some)
            self._bytes += hull[0][0]
            self._units += hull[0][1]
            steps += [((y1 - y0) / (x1 - x0), x1 - x0, y1 - y0) for (x0, y0), (x1, y1) in pairwise(hull)]
        self._ends, self._values = [0], [self._units]
        for _, more, less in sorted(steps):
            self._ends.append(self._ends[-1] + more)
            self._values.append(self._values[-1] + less)

    def bounds(self, capacity: int) -> tuple[float, float]:
        """Lower and upper bound; infinite if the blocks do not fit."""
        left = capacity - self._bytes
        if left < 0:
            return float("inf"), float("inf")
        at = bisect_right(self._ends, left) - 1
        value = self._values[at]
        if at == len(self._ends) - 1:
            return value, value
        part = (left - self._ends[at]) / (self._ends[at + 1] - self._ends[at])
        return value + part * (self._values[at + 1] - value), value


def exceeds(lowest: float, best: float) -> bool:
    """Whether a lower bound is above a time, by more than rounding explains."""
    return lowest > best * (1 + 1e-12) + 1


def _hull(some: Sequence[Option]) -> list[tuple[int, int]]:
    """The lower convex hull of options that are sorted by bytes, with falling times."""
    hull: list[tuple[int, int]] = []
    for x, y, _ in some:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def knapsack(
    options: Sequence[Sequence[Option]], capacity: int, ceiling: int | None
) -> tuple[int, int, tuple[str, ...]] | None:
    """One option of each block: the least time whose bytes are within the capacity, and of equals the fewest bytes.

    Args:
        options: as :func:`frontier` gives them.
        capacity: bytes.
        ceiling: a time that need not be exceeded.

    Returns:
        units of time, bytes and names; ``None`` if nothing is within both.
    """
    # Blocks that differ most first: what they decide is decided on few states.
    order = sorted(range(len(options)), key=lambda i: options[i][0][1] - options[i][-1][1], reverse=True)
    ordered = [options[i] for i in order]
    best = float("inf") if ceiling is None else float(ceiling)
    states: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    for index, some in enumerate(ordered):
        rest = Relaxation(ordered[index + 1 :])
        grown = sorted(
            (saved + more, units + longer, (*picks, number))
            for saved, units, picks in states
            for number, (more, longer, _) in enumerate(some)
        )
        states = []
        for saved, units, picks in grown:
            if states and units >= states[-1][1]:
                continue  # another one has no more bytes and takes no longer
            lower, upper = rest.bounds(capacity - saved)
            if not exceeds(units + lower, best):
                best = min(best, units + upper)
                states.append((saved, units, picks))
    if not states:
        return None
    saved, units, picks = min(states, key=lambda state: (state[1], state[0]))
    names = [""] * len(options)
    for place, number, some in zip(order, picks, ordered):
        names[place] = some[number][2]
    return units, saved, tuple(names)
