"""Which activations to keep and which to recompute, within a budget of bytes: an exact plan.

A stage holds some microbatches in flight. Of each it keeps what a block's option saves; in the backward one block at a
time is recomputed, which needs bytes of its own meanwhile. With option ``o_b`` for block ``b``

    peak = in_flight x sum_b saved(o_b) + max_b transient(o_b)

and the plan has the least sum of recompute seconds whose peak is within the budget; of several, the one with the lowest
peak. Hence the peak rises with the budget and the seconds fall, without exception. (torch's own knob,
``activation_memory_budget``, limits what crosses from forward to backward, and its peak is not monotone.)

For a bound on the transients the rest is a multiple-choice knapsack: one option of each block, a sum of bytes below a
capacity, the least sum of seconds (:mod:`lightning_megapar.memory.knapsack`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from lightning_megapar.config import ConfigError
from lightning_megapar.memory.knapsack import UNIT, Option, Relaxation, exceeds, frontier, knapsack


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
        check_costs(self, "recompute_seconds")


def check_costs(costs: Any, seconds: str) -> None:
    """Refuse what cannot be costs.

    Args:
        costs: a dataclass of mappings from the same options to bytes, and in one case to seconds.
        seconds: name of that one.

    Raises:
        ConfigError: options that differ between the mappings, none at all, negative or other than whole bytes, negative
            seconds.
    """
    kind, (first, *others) = type(costs).__name__, [field.name for field in fields(costs)]
    options = getattr(costs, first).keys()
    if not options:
        raise ConfigError(f"{kind}: a block needs at least one option")
    for name in others:
        if getattr(costs, name).keys() != options:
            apart = sorted(getattr(costs, name).keys() ^ options)
            raise ConfigError(f"{kind}: {apart} in one of {first} and {name} only")
    for name in (first, *others):
        whole = name != seconds
        for option, number in getattr(costs, name).items():
            is_number = isinstance(number, int if whole else int | float) and not isinstance(number, bool)
            if not is_number or not 0 <= number < float("inf"):
                expected = "whole number" if whole else "number"
                raise ConfigError(f"{kind} {name}[{option!r}]={number!r}: expected a {expected} >= 0")


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
    bounded: list[tuple[float, int, list[list[Option]]]] = []
    for bound in sorted({number for block in blocks for number in block.transient_bytes.values()}):
        options = [_within(block, bound) for block in blocks]
        if not all(options):
            continue
        least = in_flight * sum(some[0][0] for some in options) + bound
        smallest = least if smallest is None else min(smallest, least)
        if least <= budget_bytes:
            lowest, _ = Relaxation(options).bounds((budget_bytes - bound) // in_flight)
            bounded.append((lowest, bound, options))
    best: tuple[int, int, tuple[str, ...]] | None = None
    for lowest, bound, options in sorted(bounded, key=lambda one: one[:2]):
        if best is not None and exceeds(lowest, best[0]):
            break
        found = knapsack(options, (budget_bytes - bound) // in_flight, None if best is None else best[0])
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


def _within(block: BlockCosts, bound: int) -> list[Option]:
    """The options worth having whose transient is within a bound."""
    names = (name for name, number in block.transient_bytes.items() if number <= bound)
    return frontier((block.saved_bytes[n], round(block.recompute_seconds[n] * UNIT), n) for n in names)
