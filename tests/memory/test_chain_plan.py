"""The plan of a chain: equal to trying everything, within its budget, never slower with more of it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megapar.config import ConfigError
from lightning_megapar.memory.chain import ChainCosts, chain_peak, plan_chain, smallest_peak
from lightning_megapar.memory.moments import Moment, peak_of, plan_for_all, smallest_budget

NAMES = ("all", "no_attention", "inputs")


@st.composite
def blocks(draw: st.DrawFn) -> ChainCosts:
    names = draw(st.sampled_from([NAMES, NAMES[:2], NAMES[::2], NAMES[:1]]))
    size, second = st.integers(0, 1000), st.integers(0, 40)
    return ChainCosts(
        {name: draw(size) for name in names},
        {name: draw(second) / 8 for name in names},
        {name: draw(size) for name in names},
        {name: draw(size) for name in names},
    )


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[list[ChainCosts]], list[int]]:
    shapes = draw(st.sampled_from([(1,), (3,), (6,), (2, 3), (1, 2, 2)]))
    return [[draw(blocks()) for _ in range(length)] for length in shapes], [draw(st.integers(0, 4)) for _ in shapes]


def best_of_all(chunks: list[list[ChainCosts]], in_flight: list[int], budget: int) -> tuple[float, int] | None:
    line = [block for chunk in chunks for block in chunk]
    found = []
    for choices in itertools.product(*(block.saved_bytes for block in line)):
        peak = chain_peak(chunks, choices, in_flight)
        if peak <= budget:
            found.append((sum(block.recompute_seconds[name] for block, name in zip(line, choices)), peak))
    return min(found, default=None)


@settings(max_examples=150, deadline=None)
@given(chains(), st.floats(0, 1))
def test_it_is_the_best_of_all_plans(case: tuple[list[list[ChainCosts]], list[int]], share: float) -> None:
    chunks, in_flight = case
    least = smallest_peak(chunks, in_flight)
    everything = [next(iter(block.saved_bytes)) for chunk in chunks for block in chunk]
    budget = int(least + share * max(0, chain_peak(chunks, everything, in_flight) - least))
    plan = plan_chain(chunks, budget, in_flight)
    assert (plan.recompute_seconds, plan.peak_bytes) == best_of_all(chunks, in_flight, budget)
    assert plan.peak_bytes == chain_peak(chunks, plan.choices, in_flight) <= budget


@settings(max_examples=60, deadline=None)
@given(chains())
def test_the_smallest_peak_is_the_smallest(case: tuple[list[list[ChainCosts]], list[int]]) -> None:
    chunks, in_flight = case
    line = [block for chunk in chunks for block in chunk]
    peaks = (chain_peak(chunks, names, in_flight) for names in itertools.product(*(one.saved_bytes for one in line)))
    least = smallest_peak(chunks, in_flight)
    assert least == min(peaks)
    if least:
        with pytest.raises(ConfigError, match=rf"smallest possible budget is {least}$"):
            plan_chain(chunks, least - 1, in_flight)


@settings(max_examples=40, deadline=None)
@given(chains(), st.lists(st.floats(0, 1), min_size=2, max_size=5))
def test_a_larger_budget_has_the_higher_peak_and_the_shorter_time(
    case: tuple[list[list[ChainCosts]], list[int]], shares: list[float]
) -> None:
    chunks, in_flight = case
    least = smallest_peak(chunks, in_flight)
    plans = [plan_chain(chunks, int(least * (1 + 3 * share)), in_flight) for share in sorted(shares)]
    for one, more in itertools.pairwise(plans):
        assert one.recompute_seconds >= more.recompute_seconds
        assert one.peak_bytes <= more.peak_bytes


def test_peak_by_hand() -> None:
    first = ChainCosts(
        {"all": 10, "inputs": 2}, {"all": 0.0, "inputs": 1.0}, {"all": 14, "inputs": 9}, {"all": 3, "inputs": 11}
    )
    second = ChainCosts({"all": 20}, {"all": 0.0}, {"all": 25}, {"all": 7})
    # One microbatch more keeps 30; behind the first block 10 and then 25 in the second's forward.
    assert chain_peak([[first, second]], ["all", "all"], [2]) == 30 + max(14, 10 + 3, 10 + 25, 30 + 7) == 67
    assert chain_peak([[first, second]], ["inputs", "all"], [1]) == max(9, 2 + 11, 2 + 25, 22 + 7) == 29
    # Two chunks: the other one's microbatches count whole.
    assert chain_peak([[first], [second]], ["all", "all"], [3, 2]) == max(
        40 + 20 + 14, 40 + 30 + 3, 30 + 20 + 25, 30 + 40 + 7
    )


def test_many_blocks_are_planned_at_once() -> None:
    block = ChainCosts(
        {"all": 900, "no_attention": 500, "inputs": 100},
        {"all": 0.0, "no_attention": 0.002, "inputs": 0.009},
        {"all": 1000, "no_attention": 900, "inputs": 800},
        {"all": 300, "no_attention": 700, "inputs": 1200},
    )
    plan = plan_chain([[block] * 96], 200_000, [4])
    # What the last block recomputes lies beside what all others keep: dear ones come first.
    assert plan.peak_bytes <= 200_000
    assert list(plan.choices) == sorted(plan.choices, key=("inputs", "no_attention", "all").index)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (({}, {}, {}, {}), "at least one option"),
        (({"all": 1}, {"all": 0.0}, {"all": 1}, {}), r"\['all'\] in one of saved_bytes and backward_bytes only"),
        (({"all": -1}, {"all": 0.0}, {"all": 1}, {"all": 1}), "saved_bytes"),
        (({"all": 1}, {"all": float("nan")}, {"all": 1}, {"all": 1}), "expected a number >= 0"),
        (({"all": 1}, {"all": 0.0}, {"all": 1.5}, {"all": 1}), "forward_bytes"),
    ],
)
def test_costs_that_are_none(arguments: tuple[dict[str, float], ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ChainCosts(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("budget", "in_flight"), [(-1, [1]), (True, [1]), (10, [-1]), (10, [1, 1]), (10, [])])
def test_arguments_out_of_range(budget: int, in_flight: list[int]) -> None:
    block = ChainCosts({"all": 1}, {"all": 0.0}, {"all": 1}, {"all": 1})
    with pytest.raises(ConfigError, match="expected a whole number"):
        plan_chain([[block]], budget, in_flight)


def test_no_blocks_need_nothing() -> None:
    assert plan_chain([[]], 0, [1]).choices == ()


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[ChainCosts]], list[Moment]]:
    chunks, _ = draw(chains())
    count = st.integers(0, 3)
    moments = [
        Moment(tuple(draw(count) for _ in chunks), draw(st.integers(0, 3000))) for _ in range(draw(st.integers(1, 3)))
    ]
    return chunks, moments


@settings(max_examples=100, deadline=None)
@given(steps(), st.floats(0, 2))
def test_a_plan_for_several_moments(case: tuple[list[list[ChainCosts]], list[Moment]], share: float) -> None:
    chunks, moments = case
    least = smallest_budget(chunks, moments)
    budget = int(least * (1 + share))
    plan = plan_for_all(chunks, budget, moments)
    assert plan.peak_bytes == peak_of(chunks, plan.choices, moments) <= budget
    if least:
        with pytest.raises(ConfigError, match=rf"smallest possible budget is {least}$"):
            plan_for_all(chunks, least - 1, moments)
    if len(moments) == 1:
        line = [block for chunk in chunks for block in chunk]
        every = itertools.product(*(block.saved_bytes for block in line))
        assert least == min(peak_of(chunks, choices, moments) for choices in every)
