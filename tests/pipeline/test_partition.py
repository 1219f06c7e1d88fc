from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline import split_blocks
from lightning_megapar.pipeline.partition import given_split


def brute_force(costs: list[float], stages: int, before: float, after: float) -> float:
    best = float("inf")
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        points = (0, *cuts, len(costs))
        loads = [sum(costs[a:b]) for a, b in itertools.pairwise(points)]
        loads[0] += before
        loads[-1] += after
        best = min(best, max(loads))
    return best


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(0, 80),
    st.integers(0, 80),
)
def test_split_is_exact(costs: list[int], stages: int, before: int, after: int) -> None:
    if len(costs) < stages:
        with pytest.raises(ConfigError, match=f"only {len(costs)} blocks; valid values: 1 to {len(costs)}"):
            split_blocks(costs, stages, before, after)
        return
    ranges = split_blocks(costs, stages, before, after)
    assert ranges[0][0] == 0 and ranges[-1][1] == len(costs)
    assert all(a < b for a, b in ranges)
    assert all(x[1] == y[0] for x, y in itertools.pairwise(ranges))
    loads = [sum(costs[a:b]) for a, b in ranges]
    loads[0] += before
    loads[-1] += after
    assert max(loads) == brute_force([float(c) for c in costs], stages, before, after)


def test_equal_blocks_are_spread_evenly() -> None:
    assert split_blocks([1.0] * 10, 4) in [((0, 3), (3, 6), (6, 8), (8, 10)), ((0, 2), (2, 4), (4, 7), (7, 10))] or (
        sorted(b - a for a, b in split_blocks([1.0] * 10, 4)) == [2, 2, 3, 3]
    )


def test_thirty_layers_on_four_stages_lose_none() -> None:
    assert sum(b - a for a, b in split_blocks([1.0] * 30, 4)) == 30
    with pytest.raises(ConfigError, match="adds up to 28 but the stack has 30 blocks"):
        given_split((7, 7, 7, 7), 30)
