"""Which activations to keep and which to recompute, within a budget of bytes: an exact plan.

A stage holds some microbatches in flight. Of each it keeps what a block's option saves; in the backward one block at a
time is recomputed, which needs bytes of its own meanwhile. With option ``o_b`` for block ``b``

    peak = in_flight x sum_b saved(o_b) + max_b transient(o_b)

and the plan has the least sum of recompute seconds whose peak is within the budget; of several, the one with the lowest
peak. Hence the peak rises with the budget and the seconds fall, without exception. (torch's own knob,
``activation_memory_budget``, limits what crosses from forward to backward, and its peak is not monotone.)

For a bound on the transients the rest is a multiple-choice knapsack: one option of each block, a sum of bytes below a
capacity, the least sum of seconds. It is solved exactly by dynamic programming over partial plans, of which those are
dropped that another one dominates (fewer bytes and seconds) or that cannot come below the best whole plan, by the bound
of the linear relaxation (Dudzinski and Walukiewicz, European Journal of Operational Research 28 (1987); Pisinger, ibid.
83 (1995)). Seconds are counted in units of 2^-50 s, so that equal plans are equal whatever the order of their blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_megapar.config import ConfigError

_UNIT = 2.0**50


@dataclass(frozen=True)
class BlockCosts:
    """What a block's options cost.

    Args:
        saved_bytes: option -> bytes that are kept for each microbatch from its forward to its backward.
        recompute_seconds: option -> seconds that a microbatch's backward takes longer.
        transient_bytes: option -> bytes that are alive only while the block is recomputed.

    Raises:
        ConfigError: options that differ between the three, none at all, negative or other than whole bytes, negative
            seconds.
    """

    saved_bytes: Mapping[str, int]
    recompute_seconds: Mapping[str, float]
    transient_bytes: Mapping[str, int]

    def __post_init__(self) -> None:
        if not self.saved_bytes:
            raise ConfigError("BlockCosts: a block needs at least one option")
        for name in ("recompute_seconds", "transient_bytes"):
            if getattr(self, name).keys() != self.saved_bytes.keys():
                apart = sorted(getattr(self, name).keys() ^ self.saved_bytes.keys())
                raise ConfigError(f"BlockCosts: {apart} in one of saved_bytes and {name} only")
        for name in ("saved_bytes", "transient_bytes"):
            for option, number in getattr(self, name).items():
                if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                    raise ConfigError(f"BlockCosts {name}[{option!r}]={number!r}: expected a whole number >= 0")
        for option, seconds in self.recompute_seconds.items():
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
                raise ConfigError(f"BlockCosts recompute_seconds[{option!r}]={seconds!r}: expected a number >= 0")


@dataclass(frozen=True)
class RecomputePlan:
    """An option for each block.

    Args:
        choices: in the order of the blocks.
        peak_bytes: of kept activations and the largest recomputation.
        saved_bytes: kept for one microbatch.
        recompute_seconds: that one microbatch's backward takes longer.
    """

    choices: tuple[str, ...]
    peak_bytes: int
    saved_bytes: int
    recompute_seconds: float


def plan_recompute(blocks: Sequence[BlockCosts], budget_bytes: int, in_flight: int = 1) -> RecomputePlan:
    """The plan with the least recomputation whose peak is within the budget; of several, that with the lowest peak.

    Args:
        blocks: of a stage.
        budget_bytes: for kept activations and the block that is being recomputed.
        in_flight: microbatches that the stage holds at once.

    Raises:
        ConfigError: no plan is within the budget (the message has the smallest budget that one is in), or an argument
            out of its range.
    """
    for name, value in (("budget_bytes", budget_bytes), ("in_flight", in_flight)):
        if isinstance(value, bool) or not isinstance(value, int) or value < (name == "in_flight"):
            raise ConfigError(f"plan_recompute {name}={value!r}: expected a whole number >= {int(name == 'in_flight')}")
    if not blocks:
        return RecomputePlan((), 0, 0, 0.0)
    smallest: int | None = None
    bounded: list[tuple[float, int, list[list[_Option]]]] = []
    for bound in sorted({number for block in blocks for number in block.transient_bytes.values()}):
        options = [_within(block, bound) for block in blocks]
        if not all(options):
            continue
        least = in_flight * sum(some[0][0] for some in options) + bound
        smallest = least if smallest is None else min(smallest, least)
        if least <= budget_bytes:
            lowest, _ = _Suffix(options).bounds((budget_bytes - bound) // in_flight)
            bounded.append((lowest, bound, options))
    best: tuple[int, int, tuple[str, ...]] | None = None
    for lowest, bound, options in sorted(bounded, key=lambda one: one[:2]):
        if best is not None and _exceeds(lowest, best[0]):
            break
        found = _knapsack(options, (budget_bytes - bound) // in_flight, None if best is None else best[0])
        if found is None:
            continue
        units, saved, choices = found
        peak = in_flight * saved + max(block.transient_bytes[name] for block, name in zip(blocks, choices))
        if best is None or (units, peak) < best[:2]:
            best = units, peak, choices
    if best is None:
        raise ConfigError(
            f"budget_bytes={budget_bytes}: no choice for {len(blocks)} blocks with {in_flight} microbatches in flight "
            f"is within it; the smallest possible budget is {smallest}"
        )
    _, peak, choices = best
    pairs = list(zip(blocks, choices))
    return RecomputePlan(
        choices,
        peak,
        sum(block.saved_bytes[name] for block, name in pairs),
        sum(block.recompute_seconds[name] for block, name in pairs),
    )


_Option = tuple[int, int, str]
"""Bytes, units of time, name."""


def _within(block: BlockCosts, bound: int) -> list[_Option]:
    """The options whose transient is within a bound: from few bytes to many, each faster than the one before."""
    names = (name for name, number in block.transient_bytes.items() if number <= bound)
    some = sorted((block.saved_bytes[n], round(block.recompute_seconds[n] * _UNIT), n) for n in names)
    kept: list[_Option] = []
    for option in some:
        if not kept or option[1] < kept[-1][1]:
            kept.append(option)
    return kept


class _Suffix:
    """Bounds of the least time of some blocks.

    The lower one is that of options which could be mixed: each block's are replaced by their lower convex hull, and the
    steps along all hulls taken from the steepest on, as far as the bytes reach. Without the last step, which reaches
    only in part, it is a plan, and the upper bound.
    """

    def __init__(self, options: Sequence[Sequence[_Option]]) -> None:
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


def _exceeds(lowest: float, best: float) -> bool:
    """Whether a lower bound is above a time, by more than rounding explains."""
    return lowest > best * (1 + 1e-12) + 1


def _hull(some: Sequence[_Option]) -> list[tuple[int, int]]:
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


def _knapsack(
    options: Sequence[Sequence[_Option]], capacity: int, ceiling: int | None
) -> tuple[int, int, tuple[str, ...]] | None:
    """One option of each block: the least time whose bytes are within the capacity, and of equals the fewest bytes.

    Args:
        options: as :func:`_within` gives them.
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
        rest = _Suffix(ordered[index + 1 :])
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
            if not _exceeds(units + lower, best):
                best = min(best, units + upper)
                states.append((saved, units, picks))
    if not states:
        return None
    saved, units, picks = min(states, key=lambda state: (state[1], state[0]))
    names = [""] * len(options)
    for place, number, some in zip(order, picks, ordered):
        names[place] = some[number][2]
    return units, saved, tuple(names)
