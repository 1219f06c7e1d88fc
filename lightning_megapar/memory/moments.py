"""A plan for a step whose memory is tight at several moments.

A pipeline stage holds many microbatches between forward and backward at one moment, and many whose weight gradients
wait at another one. A plan is right if it is within the budget at each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_megapar.config import ConfigError
from lightning_megapar.memory.chain import ChainCosts, chain_peak, plan_chain, smallest_peak
from lightning_megapar.memory.recompute import RecomputePlan


@dataclass(frozen=True)
class Moment:
    """What is alive at once.

    Args:
        microbatches: for each chunk those that are between their forward and their backward, with the one that runs.
        other_bytes: beside them.
    """

    microbatches: tuple[int, ...]
    other_bytes: int = 0


def peak_of(chunks: Sequence[Sequence[ChainCosts]], choices: Sequence[str], moments: Sequence[Moment]) -> int:
    """Bytes at the moment that needs most, if blocks keep what ``choices`` say."""
    return max(chain_peak(chunks, choices, one.microbatches) + one.other_bytes for one in moments)


def plan_for_all(chunks: Sequence[Sequence[ChainCosts]], budget_bytes: int, moments: Sequence[Moment]) -> RecomputePlan:
    """The least recomputation that is within a budget at every moment.

    A plan for one moment that is within the budget at the others is the best there is. If there is none of that kind,
    the moments are taken for one that has the most of each.

    Args:
        chunks: blocks of each chunk of a rank.
        budget_bytes: for everything that is alive at a moment.
        moments: at least one.

    Raises:
        ConfigError: nothing is within it; the message has the smallest budget that something is in.
    """
    least = smallest_budget(chunks, moments)
    if least > budget_bytes:
        raise ConfigError(f"budget_bytes={budget_bytes} is too small; the smallest possible budget is {least}")
    for one in [*moments, _most_of_each(moments)]:
        if budget_bytes < one.other_bytes:
            continue
        try:
            plan = plan_chain(chunks, budget_bytes - one.other_bytes, one.microbatches)
        except ConfigError:
            continue
        peak = peak_of(chunks, plan.choices, moments) if plan.choices else one.other_bytes
        if peak <= budget_bytes:
            return RecomputePlan(plan.choices, peak, plan.saved_bytes, plan.recompute_seconds)
    choices = _leanest(chunks, moments)
    blocks = [block for chunk in chunks for block in chunk]
    return RecomputePlan(
        choices,
        peak_of(chunks, choices, moments),
        sum(block.saved_bytes[name] for block, name in zip(blocks, choices)),
        sum(block.recompute_seconds[name] for block, name in zip(blocks, choices)),
    )


def smallest_budget(chunks: Sequence[Sequence[ChainCosts]], moments: Sequence[Moment]) -> int:
    """The least that :func:`plan_for_all` finds a plan for, in bytes."""
    if not any(chunks):
        return max(one.other_bytes for one in moments)
    return peak_of(chunks, _leanest(chunks, moments), moments)


def _leanest(chunks: Sequence[Sequence[ChainCosts]], moments: Sequence[Moment]) -> tuple[str, ...]:
    """The plan with the lowest peak of those that have the lowest one at a moment, or at all of them taken together."""
    found = []
    for one in [*moments, _most_of_each(moments)]:
        least = smallest_peak(chunks, one.microbatches)
        found.append(plan_chain(chunks, least, one.microbatches).choices)
    return min(found, key=lambda choices: peak_of(chunks, choices, moments))


def _most_of_each(moments: Sequence[Moment]) -> Moment:
    most = tuple(max(counts) for counts in zip(*(one.microbatches for one in moments), strict=True))
    return Moment(most, max(one.other_bytes for one in moments))
