"""A chain under budgets, its rivals, and what each of them takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from chains import Chain, by_turns, counted

from lightning_megapar.memory.blocks import ALL, INPUTS, NO_ATTENTION, PRODUCTS
from lightning_megapar.memory.chain import ChainCosts, chain_peak, plan_chain, smallest_peak

CLOSE = 0.05
"""Largest part of the planned peak that the measured one may lie apart from it."""


def spread(costs: Sequence[ChainCosts], in_flight: int, shares: Sequence[float]) -> list[int]:
    """Budgets between the smallest possible one (share 0) and everything (1)."""
    low = smallest_peak([costs], [in_flight])
    high = chain_peak([costs], [ALL] * len(costs), [in_flight])
    return [round(low + share * (high - low)) for share in shares]


def points(chain: Chain, costs: list[ChainCosts], shares: Sequence[float]) -> list[dict[str, Any]]:
    """What is planned for each budget, and the peak that is measured then."""
    found = []
    chain.choose([INPUTS] * len(costs))
    chain.step()  # as in training, where this is what blocks do before there is a plan
    for share, budget in zip(shares, spread(costs, chain.shape.in_flight, shares)):
        plan = plan_chain([costs], budget, [chain.shape.in_flight])
        chain.choose(plan.choices)
        first, measured = chain.first_peak(), chain.first_peak()
        found.append(
            {
                "share": share,
                "budget_bytes": budget,
                "planned_bytes": plan.peak_bytes,
                "first_bytes": first,
                "measured_bytes": measured,
                "is_within": max(first, measured) <= budget,
                "is_close": abs(measured - plan.peak_bytes) <= CLOSE * plan.peak_bytes,
                "keeps": counted(plan.choices),
                "choices": list(plan.choices),
            }
        )
    return found


def rivals(layers: int) -> dict[str, list[str]]:
    """Choices by rule: some first blocks recomputed, and one option for all blocks."""
    counts = sorted({max(1, round(layers * part / 4)) for part in (1, 2, 3, 4)})
    found = {f"first {k} of {layers} recomputed": [INPUTS] * k + [ALL] * (layers - k) for k in counts}
    found["products kept in all (torch's selective policy)"] = [PRODUCTS] * layers
    found["all but attention kept in all (Megatron's)"] = [NO_ATTENTION] * layers
    return found


def compare(chain: Chain, shares: Sequence[float], rounds: int) -> dict[str, Any]:
    """Budgets, and beside each rival the plan whose budget is what the rival takes by the same model of the peak.

    Args:
        chain: any.
        shares: of budgets, see :func:`spread`.
        rounds: of timed steps.
    """
    costs = chain.costs()
    in_flight, layers = chain.shape.in_flight, len(costs)
    found = points(chain, costs, shares)
    by_rule: list[dict[str, Any]] = []
    for name, choices in rivals(layers).items():
        if not all(option in one.saved_bytes for option, one in zip(choices, costs)):
            continue
        planned = chain_peak([costs], choices, [in_flight])
        plan = plan_chain([costs], planned, [in_flight])
        both = {}
        for who, chosen in (("rival", choices), ("ours", list(plan.choices))):
            chain.choose(chosen)
            both[who] = {"measured_bytes": chain.peak(), "choices": chosen, "keeps": counted(chosen)}
        by_rule.append({"name": name, "planned_bytes": planned, "ours_planned_bytes": plan.peak_bytes, **both})
    works: dict[str, Callable[[], object]] = {"all": partial(_step, chain, [ALL] * layers)}
    works |= {f"point {n}": partial(_step, chain, one["choices"]) for n, one in enumerate(found)}
    for number, one in enumerate(by_rule):
        for who in ("rival", "ours"):
            works[f"{who} {number}"] = partial(_step, chain, one[who]["choices"])
    times = by_turns(works, rounds, chain.device)
    for number, one in enumerate(found):
        one["step"] = times[f"point {number}"].ratio_to(times["all"])
    for number, one in enumerate(by_rule):
        for who in ("rival", "ours"):
            one[who]["step"] = times[f"{who} {number}"].ratio_to(times["all"])
        one["ours_to_rival"] = times[f"ours {number}"].ratio_to(times[f"rival {number}"])
    return {"points": found, "rivals": by_rule, "is_monotone": is_monotone([one["measured_bytes"] for one in found])}


def is_monotone(peaks: Sequence[int]) -> bool:
    """Whether no peak is below that of a smaller budget."""
    return all(before <= after for before, after in pairwise(peaks))


def _step(chain: Chain, choices: list[str]) -> None:
    chain.choose(choices)
    chain.step()
