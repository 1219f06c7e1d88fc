from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline import StageCosts, build_schedule, simulate, split_blocks
from lightning_megapar.pipeline.planning.partition import Partition, given_split, partition
from lightning_megapar.pipeline.schedules import loop_placement, v_placement


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


def smallest_largest_load(
    costs: Sequence[float], placement: Sequence[Sequence[int]], before: float, after: float, speeds: Sequence[float]
) -> float:
    """Every way to cut."""
    best = float("inf")
    for cuts in itertools.combinations(range(1, len(costs)), sum(map(len, placement)) - 1):
        pieces = [sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs)))]
        pieces[0] += before
        pieces[-1] += after
        best = min(best, max(sum(pieces[k] for k in row) / speed for row, speed in zip(placement, speeds)))
    return best


@settings(deadline=None, derandomize=True, max_examples=120)
@given(
    st.integers(1, 3),
    st.sampled_from(["one", "loop", "v"]),
    st.lists(st.one_of(st.integers(0, 9), st.floats(0, 9)), min_size=9, max_size=11),
    st.integers(0, 20),
    st.integers(0, 20),
    st.lists(st.sampled_from([0.5, 1, 1, 2]), min_size=3, max_size=3),
)
def test_chunks_are_cut_exactly(
    stages: int, shape: str, costs: list[float], before: int, after: int, speeds: list[float]
) -> None:
    shapes = {"one": loop_placement(stages, 1), "loop": loop_placement(stages, 3), "v": v_placement(stages)}
    placement, speeds = shapes[shape], speeds[:stages]
    found = partition(costs, placement, before, after, speeds)
    assert [i for start, stop in found.ranges for i in range(start, stop)] == list(range(len(costs)))
    best = smallest_largest_load(costs, placement, before, after, speeds)
    assert max(found.loads) == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert found.is_proven
    assert sum(load * speed for load, speed in zip(found.loads, speeds)) == pytest.approx(sum(costs) + before + after)


def test_a_big_head_in_a_v_shape() -> None:
    """The first rank of a V holds both ends of the model; the ranks inside take over its blocks."""
    found = partition([1.0] * 32, v_placement(4), before=2, after=3)
    counts = [sum(found.ranges[k][1] - found.ranges[k][0] for k in row) for row in found.placement]
    assert max(found.loads) == 10 and found.is_proven
    assert counts[0] <= 5 and sum(counts) == 32
    loop = partition([1.0] * 32, loop_placement(4, 2), before=2, after=3)
    assert max(loop.loads) == 10 and loop.is_proven


def test_equal_loads_come_in_equal_chunks() -> None:
    for placement in (loop_placement(4, 2), loop_placement(2, 4), v_placement(4)):
        assert {stop - start for start, stop in partition([1.0] * 32, placement).ranges} == {4}


def test_a_slow_rank_gets_fewer_blocks() -> None:
    """One of four ranks at half speed, 32 blocks: 8/0.5 = 16 becomes 10, the bound of whole blocks (9.14 of any)."""
    found = partition([1.0] * 32, loop_placement(4, 1), speeds=[1, 1, 0.5, 1])
    assert max(found.loads) == 10
    assert found.ranges[2][1] - found.ranges[2][0] <= 5
    assert max(partition([1.0] * 32, v_placement(4), speeds=[1, 1, 0.5, 1]).loads) == 10


def test_the_load_of_a_rank_is_what_its_chunks_cost_together() -> None:
    """The objective: with many microbatches the simulated time follows the largest load, not the largest chunk."""
    even_loads = [[1.25, 0.75], [0.75, 1.25], [1.25, 0.75], [0.75, 1.25]]
    even_chunks = [[1, 1], [1.125, 1.125], [1, 1], [1, 1]]
    for name in ("interleaved_1f1b", "zbv"):
        schedule = build_schedule(name, 4, 64)
        loads, chunks = (simulate(schedule, StageCosts(c, c, c)).makespan for c in (even_loads, even_chunks))
        assert loads < chunks


def test_large_stacks_are_cut_in_time_and_say_how_well() -> None:
    costs = [1 + 0.2 * ((37 * i) % 48) / 48 for i in range(48)]
    v_shape = partition(costs, v_placement(6), 0.7, 2.9)
    assert v_shape.is_proven and max(v_shape.loads) >= sum(costs) / 6
    loop = partition(costs, loop_placement(6, 3), 0.7, 2.9)
    assert loop.bound <= max(loop.loads) <= 1.06 * loop.bound


def test_the_printed_table() -> None:
    found = partition([2.0, 2.0, 2.0, 2.0, 2.0], v_placement(2), before=1, after=3)
    assert found.rows() == [("0", "0-0, 4-4 + before + after", "8", "1.143"), ("1", "1-1, 2-3", "6", "0.857")]
    console = Console(width=100)
    with console.capture() as capture:
        console.print(found.table())
    assert "largest load 8" in capture.get() and "0-0, 4-4 + before + after" in capture.get()


@pytest.mark.parametrize("ranges", [((0, 2), (3, 4)), ((0, 2), (2, 3)), ((0, 3), (2, 4)), ((0, 4), (4, 4)), ((0, 4),)])
def test_a_partition_is_the_whole_model(ranges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ConfigError, match="are not the 4 blocks, each once and in order"):
        Partition(ranges, ((0,), (1,)), (1.0,) * 4, 0.0, 0.0, (1.0, 1.0), 2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0] * 3, v_placement(2)), "3 blocks cannot be cut into 4 virtual stages"),
        (([1.0, -1.0], loop_placement(2, 1)), "costs: -1.0 is no cost"),
        (([1.0, 1.0], loop_placement(2, 1), float("nan")), "before: nan is no cost"),
        (([1.0, 1.0], loop_placement(2, 1), 0, 0, [1, 0]), "a positive number for each of 2 ranks"),
        (([1.0, 1.0], loop_placement(2, 1), 0, 0, [1]), "a positive number for each of 2 ranks"),
    ],
)
def test_no_partition(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partition(*arguments)
