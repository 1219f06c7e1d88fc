"""Who is slow, what that costs, what helps: pure functions, against brute force and made-up clusters."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_megapar.config import ConfigError, Layout, ParallelConfig
from lightning_megapar.pipeline.balance.decide import (
    Situation,
    move_layers,
    propose,
    share_microbatches,
    step_seconds,
    worth_a_look,
)
from lightning_megapar.pipeline.balance.estimate import estimate
from lightning_megapar.pipeline.balance.measured import History, RankTimes, SlowRanks, StepTimes
from lightning_megapar.pipeline.balance.options import Rebalance, given_rebalance, usable
from lightning_megapar.pipeline.balance.sizes import SizeTrial
from lightning_megapar.pipeline.schedules import loop_placement, placement_of

FOUR = loop_placement(4, 1)
EVEN = ((0, 8), (8, 16), (16, 24), (24, 32))


def times(
    ranges: Any,
    placement: Any,
    slow: dict[tuple[int, int], float] | None = None,
    costs: Any = None,
    data: int = 1,
    ends: tuple[float, float] = (0.0, 0.0),
    noise: float = 0.0,
    source: random.Random | None = None,
    microbatches: int = 8,
) -> StepTimes:
    """What a step would show; the backward of a block takes twice its forward."""
    source = source or random.Random(0)
    found = {}
    for rank, row in enumerate(placement):
        for replica in range(data):
            factor = (slow or {}).get((rank, replica), 1.0)
            blocks, sums = {}, []
            for k in row:
                total = ends[0] * (k == 0) + ends[1] * (k == len(ranges) - 1)
                for index in range(*ranges[k]):
                    cost = 1.0 if costs is None else costs[index]
                    samples = sorted(source.lognormvariate(0, noise) for _ in range(microbatches))
                    blocks[index] = cost * factor * samples[microbatches // 2]
                    total += blocks[index] / factor
                sums.append(total * factor)
            doubled = tuple(2 * one for one in sums)
            found[rank, replica] = RankTimes(microbatches, tuple(sums), doubled, (0.0,) * len(sums), blocks)
    return found


def test_times_travel_as_numbers() -> None:
    one = RankTimes(8, (1.0, 2.0), (3.0, 4.0), (5.0, 6.0), {2: 0.25, 5: 0.5})
    assert RankTimes.unpacked(one.packed(7), 2) == one


def test_four_stages_one_at_half_speed() -> None:
    """32 layers, 16 microbatches: 280 units become 190, where 173.7 would take layers that can be divided."""
    found = estimate(times(EVEN, FOUR, {(1, 0): 2.0}), EVEN, FOUR, ["block"] * 32)
    now = Situation(EVEN, (16,), "1f1b", FOUR)
    ranges = move_layers(now, found)
    sizes = [stop - start for start, stop in ranges]
    assert sizes[1] == 5 and max(sizes) == 9
    proposal = propose(now, found, {"layers": True})
    assert proposal is not None and proposal.lever == "layers"
    unit = found.blocks[0] * found.slowness[0, 0]
    before, after = proposal.seconds_now / unit, proposal.seconds_then / unit
    assert before == pytest.approx(16 * (16 + 3 * 0.5), rel=0.05)
    assert (before - after) / (before - 19 * 32 / 3.5) >= 0.85


def test_costly_layers_are_not_a_slow_rank() -> None:
    """Blocks of another kind cost more wherever they are; moving them to a neighbour does not make them cheap."""
    costs = [1.0] * 8 + [2.0] * 8
    ranges, placement = ((0, 8), (8, 16)), loop_placement(2, 1)
    kinds = ["small"] * 8 + ["large"] * 8
    found = estimate(times(ranges, placement, costs=costs), ranges, placement, kinds)
    assert found.slowness[0, 0] == pytest.approx(found.slowness[1, 0], rel=1e-3)
    assert found.blocks[15] / found.blocks[0] == pytest.approx(2.0, rel=1e-3)
    assert SlowRanks(1.25).update(found.slowness) == {}
    assert move_layers(Situation(ranges, (4,), "1f1b", placement), found) == ((0, 10), (10, 16))


def test_what_surrounds_the_stack_stays_where_it_is() -> None:
    ranges, placement = ((0, 4), (4, 8)), loop_placement(2, 1)
    found = estimate(times(ranges, placement, ends=(0.0, 2.0)), ranges, placement, ["b"] * 8)
    assert found.after / found.blocks[0] == pytest.approx(2.0, rel=1e-2)
    assert move_layers(Situation(ranges, (4,), "1f1b", placement), found) == ((0, 5), (5, 8))


@settings(deadline=None, max_examples=60)
@given(
    slow=st.integers(0, 3),
    factor=st.floats(1.5, 4.0),
    seed=st.integers(0, 2**30),
    schedule=st.sampled_from(["1f1b", "zbv", "interleaved_1f1b"]),
)
def test_a_slow_rank_is_found_within_five_steps(slow: int, factor: float, seed: int, schedule: str) -> None:
    """Noise of 10 % on every block and microbatch, in steps before it and after."""
    placement = placement_of(schedule, 4, None if schedule == "1f1b" else 2)  # type: ignore[arg-type]
    pieces = 4 * len(placement[0])
    ranges = tuple((32 // pieces * k, 32 // pieces * (k + 1)) for k in range(pieces))
    source, history, ranks = random.Random(seed), History(5), SlowRanks(1.25)
    for step in range(15):
        slowness = {(slow, 0): factor} if step >= 10 else {}
        history.add(times(ranges, placement, slowness, noise=0.1, source=source))
        fresh = ranks.update(estimate(history.medians(), ranges, placement, ["b"] * 32).slowness)
        assert not fresh or step >= 10
        if fresh:
            assert list(fresh) == [(slow, 0)] and fresh[slow, 0] == pytest.approx(factor, rel=0.15)
            return
    raise AssertionError("not found within five steps")


@pytest.mark.parametrize(
    ("noise", "seeds"), [(0.05, 4), (0.2, 4), pytest.param(0.2, 60, marks=pytest.mark.slow), (0.3, 2)]
)
def test_a_hundred_noisy_steps_move_nothing(noise: float, seeds: int) -> None:
    for seed in range(seeds):
        source, history, ranks, agreed = random.Random(seed), History(5), SlowRanks(1.25), 0
        now = Situation(EVEN, (8, 8), "1f1b", FOUR)
        for _ in range(100):
            history.add(times(EVEN, FOUR, data=2, noise=noise, source=source))
            if len(history) < 3:
                continue
            found = estimate(history.medians(), EVEN, FOUR, ["b"] * 32)
            assert ranks.update(found.slowness) == {}
            proposal = propose(now, found, {"layers": True, "replicas": True}, 0.1)
            agreed = agreed + 1 if proposal is not None else 0
            assert agreed < 2


def test_who_is_slow_stays_so_until_well_below_the_factor() -> None:
    ranks = SlowRanks(1.4)
    assert ranks.update({(0, 0): 1.0, (1, 0): 1.5, (2, 0): 1.0}) == {(1, 0): 1.5}
    assert ranks.update({(0, 0): 1.0, (1, 0): 1.3, (2, 0): 1.0}) == {} and list(ranks.slow) == [(1, 0)]
    assert ranks.update({(0, 0): 1.0, (1, 0): 1.1, (2, 0): 1.0}) == {} and not ranks.slow
    assert ranks.update({(0, 0): 1.0, (1, 0): 1.3, (2, 0): 1.0}) == {}


@settings(deadline=None, max_examples=80)
@given(
    speeds=st.lists(st.floats(0.25, 4.0), min_size=2, max_size=4),
    fixed=st.floats(0.0, 3.0),
    per_rank=st.integers(1, 4),
)
def test_shares_equal_brute_force(speeds: list[float], fixed: float, per_rank: int) -> None:
    total, replicas = per_rank * len(speeds), len(speeds)

    def seconds(data: int, count: int) -> float:
        return (fixed + count) * speeds[data]

    found = share_microbatches(seconds, total, replicas)
    every = (c for c in itertools.product(range(1, total + 1), repeat=replicas) if sum(c) == total)
    best = min(max(seconds(d, n) for d, n in enumerate(counts)) for counts in every)
    assert sum(found) == total and min(found) >= 1
    assert max(seconds(d, n) for d, n in enumerate(found)) == pytest.approx(best, rel=1e-12)


def test_four_replicas_one_at_half_speed() -> None:
    """64 microbatches: 32 units become 18.3, the bound."""
    shares = share_microbatches(lambda data, count: count * (2.0 if data == 2 else 1.0), 64, 4)
    assert max(n * (2.0 if d == 2 else 1.0) for d, n in enumerate(shares)) <= 19 and sum(shares) == 64


@settings(deadline=None, max_examples=40)
@given(
    slowness=st.lists(st.floats(0.5, 3.0), min_size=8, max_size=8),
    sizes=st.lists(st.integers(1, 6), min_size=4, max_size=4),
    microbatches=st.integers(2, 10),
    schedule=st.sampled_from(["1f1b", "gpipe", "zb_h1"]),
)
@example([1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 1.0], [1, 3, 2, 2], 2, "1f1b")
def test_no_gain_is_overlooked(slowness: list[float], sizes: list[int], microbatches: int, schedule: str) -> None:
    stops = list(itertools.accumulate(sizes))
    ranges = tuple(zip([0, *stops], stops))
    slow = {(rank, data): slowness[2 * rank + data] for rank in range(4) for data in range(2)}
    found = estimate(times(ranges, FOUR, slow, data=2), ranges, FOUR, ["b"] * stops[-1])
    now = Situation(ranges, (microbatches,) * 2, schedule, FOUR)
    for lever in ("layers", "replicas"):
        proposal = propose(now, found, {lever: True})
        if proposal is not None and proposal.gain > 0:
            least = 0.1 if lever == "layers" else 0.0
            assert proposal.gain < least or worth_a_look(now, found, lever, max(least, proposal.gain - 1e-9))


def test_a_replica_or_a_stage_whatever_helps_more() -> None:
    found = estimate(times(EVEN, FOUR, {(1, 2): 2.0}, data=4), EVEN, FOUR, ["b"] * 32)
    now = Situation(EVEN, (16,) * 4, "1f1b", FOUR)
    both = propose(now, found, {"layers": True, "replicas": True})
    assert both is not None
    alone = [propose(now, found, {lever: True}) for lever in ("layers", "replicas")]
    assert both.seconds_then == min(one.seconds_then for one in alone if one is not None)
    assert step_seconds(now, found, both.ranges, both.shares) == both.seconds_then
    assert both.pays(price=both.seconds_now, within=10) and not both.pays(price=both.seconds_now, within=1)


def affine(number: int, fixed: float, per_sample: float, samples: int) -> StepTimes:
    seconds = fixed + per_sample * samples / number
    return {(rank, 0): RankTimes(number, (seconds,), (2 * seconds,), (0.0,), {}) for rank in range(4)}


@pytest.mark.parametrize(("fixed", "per_sample", "best"), [(0.0, 1.0, 64), (8.0, 1.0, 8), (1.0, 1.0, 16)])
def test_the_number_of_microbatches(fixed: float, per_sample: float, best: int) -> None:
    """Without a fixed part the finest cut is best; with a large one the coarsest that needs no more memory."""
    trial, number = SizeTrial(0.02), 8
    for _ in range(4):
        now = Situation(EVEN, (number,), "1f1b", FOUR)
        wanted = trial.next(now, 64, affine(number, fixed, per_sample, 64))
        number = wanted or number
        if trial.is_settled:
            break

    def makespan(count: int) -> float:
        return 3 * (fixed + per_sample * 64 / count) * (count + 3)

    allowed = (8, 16, 32, 64)  # fewer would keep larger microbatches
    assert makespan(number) == min(map(makespan, allowed)) and number == best


def test_options_from_what_a_user_gives() -> None:
    assert given_rebalance(None) is given_rebalance(False) is given_rebalance("off") is None
    assert given_rebalance(True) == given_rebalance("auto") == Rebalance()
    assert given_rebalance("replicas") == Rebalance(layers=False)
    assert given_rebalance(["layers", "microbatches"]) == Rebalance(replicas=False, microbatches=True)
    assert given_rebalance({"window": 7}) == Rebalance(window=7)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("layer", "'layer' is not one of layers, replicas, microbatches, auto, off; did you mean 'layers'"),
        (["layers", "off"], "'off' is not one of layers, replicas, microbatches$"),
        ({1: 2}, "unknown argument '1'"),
        ({"slow_factor": float("inf")}, "rebalance.slow_factor=inf"),
        ({"windw": 3}, "unknown argument 'windw'; did you mean 'window'"),
        ({"window": 0}, "rebalance.window=0: expected a number of steps, 1 or more"),
        ({"slow_factor": 1.0}, "rebalance.slow_factor=1.0: expected a number above 1"),
        ({"min_gain": 1.5}, "below 1"),
        ({"layers": "yes"}, "rebalance.layers='yes': expected true or false"),
        ({"layers": False, "replicas": False}, "all false"),
        (3, "rebalance=3: expected null, true, one or several of"),
        ([], r"rebalance=\[\]"),
    ],
)
def test_wrong_options(value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        given_rebalance(value)


@pytest.mark.parametrize(
    ("value", "options", "layout", "text"),
    [
        ("layers", {}, {"data": 2}, "layers needs pipeline_parallel_size of 2 or more"),
        ("replicas", {}, {"pipeline": 2}, "replicas needs data_parallel_size and num_microbatches of 2 or more"),
        ("replicas", {}, {"data": 2}, "they are 2 and 1"),
        ("layers", {"zero_stage": 1}, {"pipeline": 2, "data": 2}, "cannot be moved under zero_stage=1"),
    ],
)
def test_levers_that_a_layout_has_not(value: Any, options: Any, layout: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        usable(ParallelConfig(rebalance=value, **options), Layout(**layout))


def test_only_the_levers_that_a_layout_has() -> None:
    assert usable(ParallelConfig(rebalance=True), Layout(pipeline=2)) == Rebalance(replicas=False)
    assert usable(ParallelConfig(rebalance=True), Layout()) is None
