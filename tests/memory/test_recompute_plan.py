"""Plans of recomputation: the best there is, within the budget, and monotone in it."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_megapar.config import ConfigError
from lightning_megapar.memory import BlockCosts, RecomputePlan, plan_recompute

UNIT = 2.0**50


def costs_of(blocks: list[BlockCosts], choices: tuple[str, ...], in_flight: int) -> tuple[int, int]:
    """Units of time and peak of a plan, by the definition."""
    pairs = list(zip(blocks, choices, strict=True))
    peak = in_flight * sum(b.saved_bytes[o] for b, o in pairs) + max(b.transient_bytes[o] for b, o in pairs)
    return sum(round(b.recompute_seconds[o] * UNIT) for b, o in pairs), peak


def brute_force(blocks: list[BlockCosts], budget: int, in_flight: int) -> tuple[int, int] | None:
    every = (costs_of(blocks, choices, in_flight) for choices in product(*(b.saved_bytes for b in blocks)))
    return min((one for one in every if one[1] <= budget), default=None)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[BlockCosts], int, int]:
    def block() -> BlockCosts:
        names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
        seconds = st.one_of(st.sampled_from([0.0, 0.001, 0.002, 0.003]), st.floats(0, 1))
        return BlockCosts(
            {name: draw(st.integers(0, 30)) for name in names},
            {name: draw(seconds) for name in names},
            {name: draw(st.integers(0, 40)) for name in names},
        )

    blocks = [block() for _ in range(draw(st.integers(1, 5)))]
    in_flight = draw(st.integers(1, 5))
    return blocks, draw(st.integers(0, in_flight * 30 * len(blocks) + 40)), in_flight


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_equals_brute_force(case: tuple[list[BlockCosts], int, int]) -> None:
    blocks, budget, in_flight = case
    best = brute_force(blocks, budget, in_flight)
    if best is None:
        smallest = min(costs_of(blocks, c, in_flight)[1] for c in product(*(b.saved_bytes for b in blocks)))
        with pytest.raises(ConfigError, match=f"budget_bytes={budget}: .*smallest possible budget is {smallest}$"):
            plan_recompute(blocks, budget, in_flight)
        assert plan_recompute(blocks, smallest, in_flight).peak_bytes == smallest
        return
    plan = plan_recompute(blocks, budget, in_flight)
    assert costs_of(blocks, plan.choices, in_flight) == best and plan.peak_bytes == best[1]
    assert plan.recompute_seconds == pytest.approx(best[0] / UNIT)


def realistic(draw: random.Random, count: int) -> list[BlockCosts]:
    """Blocks of about a hundred megabytes, none like another."""
    made = []
    for _ in range(count):
        whole = draw.randint(10**8, 2 * 10**8)
        made.append(
            BlockCosts(
                {"all": whole, "no_attention": int(whole * draw.uniform(0.4, 0.7)), "inputs": whole // 10},
                {"all": 0.0, "no_attention": draw.uniform(0.001, 0.003), "inputs": draw.uniform(0.006, 0.012)},
                {"all": 0, "no_attention": int(whole * 0.4), "inputs": int(whole * 0.9)},
            )
        )
    return made


def test_ten_blocks_equal_brute_force() -> None:
    draw = random.Random(0)
    blocks = realistic(draw, 10)
    for share in (0.2, 0.4, 0.7):
        budget = int(share * 3 * sum(b.saved_bytes["all"] for b in blocks))
        plan = plan_recompute(blocks, budget, 3)
        assert costs_of(blocks, plan.choices, 3) == brute_force(blocks, budget, 3)


def test_peak_and_time_are_monotone_in_the_budget() -> None:
    blocks = realistic(random.Random(1), 40)
    whole = 4 * sum(b.saved_bytes["all"] for b in blocks)
    plans = [plan_recompute(blocks, int(whole * part / 20), 4) for part in range(4, 22)]
    for (part, plan), after in zip(enumerate(plans, 4), plans[1:]):
        assert plan.peak_bytes <= whole * part / 20
        assert plan.peak_bytes <= after.peak_bytes and plan.recompute_seconds >= after.recompute_seconds
    assert plans[-1] == RecomputePlan(("all",) * 40, whole, whole // 4, 0.0)


def test_the_documented_example() -> None:
    block = BlockCosts(
        saved_bytes={"all": 900, "no_attention": 500, "inputs": 100},
        recompute_seconds={"all": 0.0, "no_attention": 0.002, "inputs": 0.009},
        transient_bytes={"all": 0, "no_attention": 400, "inputs": 800},
    )
    plan = plan_recompute([block] * 32, budget_bytes=20_000, in_flight=4)
    assert sorted(plan.choices) == ["inputs"] * 28 + ["no_attention"] * 4
    assert plan.peak_bytes == 4 * (28 * 100 + 4 * 500) + 800 == 20_000
    assert plan.recompute_seconds == pytest.approx(28 * 0.009 + 4 * 0.002)


def test_nothing_to_plan() -> None:
    assert plan_recompute([], 0) == RecomputePlan((), 0, 0, 0.0)


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        (({}, {}, {}), "at least one option"),
        (({"a": 1}, {"b": 0.0}, {"a": 0}), r"\['a', 'b'\] in one of saved_bytes and recompute_seconds only"),
        (({"a": -1}, {"a": 0.0}, {"a": 0}), r"saved_bytes\['a'\]=-1: expected a whole number"),
        (({"a": 1}, {"a": float("nan")}, {"a": 0}), r"recompute_seconds\['a'\]=nan: expected a number"),
        (({"a": 1}, {"a": 0.0}, {"a": 0.5}), r"transient_bytes\['a'\]=0.5: expected a whole number"),
    ],
)
def test_costs_that_cannot_be(costs: tuple[dict[str, int], dict[str, float], dict[str, int]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        BlockCosts(*costs)


@pytest.mark.parametrize(
    ("budget", "in_flight", "says"), [(-1, 1, "budget_bytes=-1"), (1, 0, "in_flight=0"), (1, True, "in_flight=True")]
)
def test_arguments_that_cannot_be(budget: int, in_flight: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_recompute([BlockCosts({"a": 0}, {"a": 0.0}, {"a": 0})], budget, in_flight)
