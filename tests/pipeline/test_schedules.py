from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline import Action, Schedule, build_schedule, split_blocks
from lightning_megapar.pipeline.partition import given_split


@settings(deadline=None, derandomize=True)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 12))
def test_every_schedule_runs_and_holds_what_the_papers_say(name: str, stages: int, microbatches: int) -> None:
    schedule = build_schedule(name, stages, microbatches)  # construction refuses gaps, repeats and deadlock
    peaks = schedule.peak_activations()
    if name == "gpipe":
        assert peaks == (microbatches,) * stages
    else:
        assert peaks == tuple(min(stages - stage, microbatches) for stage in range(stages))
    # With unit costs both take M + S - 1 slots forward and as many backward: bubble (S - 1) / (M + S - 1) of the total.
    slots = len(schedule.grid().splitlines()[0].split(": ")[1].split())
    assert slots == 2 * (microbatches + stages - 1)


def test_forward_only() -> None:
    schedule = build_schedule("forward", 3, 4)
    assert all(a.kind == "forward" for actions in schedule.ranks for a in actions)
    assert schedule.num_stages == 3


def test_grid_is_readable() -> None:
    assert build_schedule("1f1b", 2, 2).grid().splitlines() == [
        "stage 0: F0 F1 .  B0 .  B1",
        "stage 1: .  F0 B0 F1 B1 .",
    ]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (((Action("forward", 0),), ()), "stage 1 runs forward of microbatches []"),
        (((Action("backward", 0), Action("forward", 0)),), "stage 0 runs B0 before its forward"),
        (
            (
                (Action("forward", 0), Action("backward", 0), Action("forward", 1), Action("backward", 1)),
                (Action("forward", 1), Action("backward", 1), Action("forward", 0), Action("backward", 0)),
            ),
            "deadlocks: stage 0 at B0, stage 1 at F1",
        ),
    ],
)
def test_broken_schedules_are_refused(ranks: tuple[tuple[Action, ...], ...], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Schedule("mine", 2 if "deadlock" in message else 1, ranks)
    assert message in str(error.value)


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gpipe'"):
        build_schedule("gpip", 2, 2)


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
