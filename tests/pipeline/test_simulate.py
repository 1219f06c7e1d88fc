from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_megapar
from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline import StageCosts, build_schedule, simulate
from lightning_megapar.pipeline.schedules import SCHEDULE_NAMES, v_placement

# Qi et al. 2023, tables 5 and 6, on 8 stages: microbatches, F, B, W, communication in ms; bubble rates of 1F1B, its
# interleaved form, ZB-H1 and ZB-H2. The chunks of the interleaved form are those that put one layer into each.
ZERO_BUBBLE_TABLE = [
    ("1.5B", 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055, 0.1585, 0.1083),
    ("1.5B", 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818, 0.1242, 0.0837),
    ("1.5B", 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443, 0.0674, 0.0444),
    ("6.2B", 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.0808, 0.1323, 0.0698),
    ("6.2B", 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.0628, 0.1045, 0.0559),
    ("6.2B", 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0320, 0.0554, 0.0294),
]
CHUNKS_OF = {"1.5B": 3, "6.2B": 4}  # 22 + 2 and 30 + 2 layers on 8 stages


@pytest.mark.parametrize("row", ZERO_BUBBLE_TABLE, ids=lambda row: f"{row[0]}-{row[1]}")
def test_published_bubble_rates(row: tuple) -> None:
    model, microbatches, forward, backward_input, backward_weight, communication, *published = row
    costs = StageCosts(forward, backward_input, backward_weight, communication)

    def bubble(name: str, chunks: int) -> float:
        return simulate(build_schedule(name, 8, microbatches, chunks), costs).bubble_fraction

    found = [round(bubble(name, 1), 4) for name in ("1f1b", "zb_h1", "zb_h2")]
    assert found == [published[0], published[2], published[3]]
    assert bubble("interleaved_1f1b", CHUNKS_OF[model]) == pytest.approx(published[1], rel=0.05)


def test_the_example_of_the_documentation() -> None:
    schedule = build_schedule("zb_h1", num_stages=8, num_microbatches=24, num_chunks=1)
    costs = StageCosts(forward=18.522, backward_input=18.086, backward_weight=9.337, communication=0.601)
    timeline = simulate(schedule, costs)
    assert round(timeline.bubble_fraction, 4) == 0.1585
    assert timeline.peak_activations == (8,) * 8
    assert simulate(schedule, StageCosts(forward=[18.522] * 8, backward_input=[18.086] * 8, backward_weight=9.337,
                                         communication=[0.601] * 7)).events == timeline.events  # fmt: skip


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
def test_closed_forms(stages: int, microbatches: int, chunks: int, forward: int, backward: int) -> None:
    """(S - 1) / M is bubble over ideal time, (S - 1) / (M + S - 1) bubble over total time."""
    costs = StageCosts(chunks * forward, chunks * backward, 0)
    ideal = microbatches * chunks * (forward + backward)
    for name in ("gpipe", "1f1b"):
        timeline = simulate(build_schedule(name, stages, microbatches, 1), costs)
        assert timeline.makespan == timeline.step_time
        assert timeline.makespan / ideal - 1 == pytest.approx((stages - 1) / microbatches)
        assert timeline.bubble_fraction == pytest.approx((stages - 1) / (microbatches + stages - 1))
    if microbatches >= stages:
        for name in ("gpipe", "interleaved_1f1b"):
            if name == "gpipe" or chunks > 1:
                timeline = simulate(build_schedule(name, stages, microbatches, chunks), costs)
                assert timeline.makespan / ideal - 1 == pytest.approx((stages - 1) / (chunks * microbatches))


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 8), (5, 11), (8, 24)])
def test_closed_forms_of_halved_backwards(stages: int, microbatches: int) -> None:
    for forward, inputs, weights in ((1, 1, 1), (3, 2, 1), (4, 4, 2)):
        costs, work = StageCosts(forward, inputs, weights), microbatches * (forward + inputs + weights)
        h1 = simulate(build_schedule("zb_h1", stages, microbatches), costs)
        assert h1.makespan - work == pytest.approx((stages - 1) * (forward + inputs - weights))
        # DeepSeek-V3's table, a chunk of DualPipeV being half of a rank's share, is an upper bound: there a forward and
        # a backward begin together.
        dual = simulate(build_schedule("dualpipe_v", stages, 2 * microbatches), costs)
        bound = (stages - 1) * (forward + 2 * (inputs + weights) - 3 * weights) / 2
        assert dual.step_time - 2 * work <= bound + 1e-9
    # With equal lengths, a step that follows without a barrier wastes nothing under ZB-H2 and ZB-V.
    if microbatches >= 2 * stages:
        equal = StageCosts(1, 1, 1)
        assert simulate(build_schedule("zb_h2", stages, microbatches), equal).bubble_fraction == pytest.approx(0)
        assert simulate(build_schedule("zbv", stages, microbatches), equal).bubble_fraction == pytest.approx(0)
        one = simulate(build_schedule("zbv", stages, microbatches), equal)
        assert one.makespan == pytest.approx(3 * microbatches + (stages - 1) / 2)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 6), st.integers(1, 12), st.integers(0, 9999), st.booleans())
def test_events_obey_what_they_need(name: str, stages: int, microbatches: int, seed: int, occupies: bool) -> None:
    schedule = build_schedule(name, stages, microbatches)
    chunks = schedule.num_chunks
    draw = Random(seed)
    tables = [[[draw.randint(1, 9) for _ in range(chunks)] for _ in range(stages)] for _ in range(3)]
    boundaries = [draw.randint(0, 9) for _ in range(stages * chunks - 1)]
    costs = StageCosts(*tables, boundaries, occupies)
    timeline = simulate(schedule, costs)
    ranks = [rank for rank, _ in schedule.holders]
    ended = {}
    for rank in range(stages):
        row = timeline.of_rank(rank)
        assert all(before.end <= after.start for before, after in pairwise(row))
        work = [event for event in row if event.is_work]
        assert [(e.kind, e.microbatch, e.chunk) for e in work] == [
            (a.kind, a.microbatch, a.chunk) for a in schedule.ranks[rank]
        ]
        for event in work:
            if event.kind != "backward_weight":
                ended[event.kind[:8], schedule.placement[rank][event.chunk], event.microbatch] = event.end
            if event.kind == "backward":
                expected = costs.backward_input[rank][event.chunk] + costs.backward_weight[rank][event.chunk]
            else:
                expected = getattr(costs, event.kind)[rank][event.chunk]
            assert event.duration == expected
        assert timeline.peak_activations[rank] == max(alive for _, alive in timeline.activations(rank))
    last = stages * chunks - 1
    for event in timeline.events:
        k = schedule.placement[event.rank][event.chunk]
        if event.kind == "forward" and k:
            delay = boundaries[k - 1] if ranks[k] != ranks[k - 1] else 0
            assert event.start >= ended["forward", k - 1, event.microbatch] + delay
        if event.kind in ("backward", "backward_input") and k < last:
            delay = boundaries[k] if ranks[k] != ranks[k + 1] else 0
            assert event.start >= ended["backward", k + 1, event.microbatch] + delay
    total = sum(timeline.busy)
    assert timeline.bubble_fraction == pytest.approx(
        1 - total / (stages * timeline.step_time) if timeline.step_time else 0
    )
    assert timeline.step_time <= timeline.makespan


def test_messages_that_occupy_the_ranks() -> None:
    """A microbatch on its own takes as long; ranks that have other work to do are held up."""
    one = build_schedule("1f1b", 2, 1)
    beside, blocking = (simulate(one, StageCosts(10, 6, 4, 3, occupies)) for occupies in (False, True))
    assert beside.makespan == blocking.makespan == 10 + 3 + 20 + 3 + 10
    spans = [(e.kind, e.start, e.end) for e in blocking.of_rank(1)]
    assert spans == [("receive", 10, 13), ("forward", 13, 23), ("backward", 23, 33), ("send", 33, 36)]
    assert [e.kind for e in beside.of_rank(1)] == ["forward", "backward"]
    many = build_schedule("1f1b", 4, 16)
    beside, blocking = (simulate(many, StageCosts(10, 6, 4, 3, occupies)) for occupies in (False, True))
    assert blocking.makespan >= 16 * (20 + 4 * 3)  # a middle rank handles four messages per microbatch
    assert beside.makespan < 16 * (20 + 4 * 3)
    assert blocking.busy == beside.busy
    # The two halves of a V meet on the last rank, without a message.
    meeting = simulate(build_schedule("forward", 1, 3), StageCosts(communication=5, occupies=True))
    assert meeting.makespan == 3


def test_a_slow_stage_sets_the_pace() -> None:
    timeline = simulate(build_schedule("1f1b", 4, 32), StageCosts(forward=[1, 1, 2, 1], backward_input=[1, 1, 2, 1]))
    assert timeline.makespan > 32 * 5
    assert timeline.idle_share[2] == min(timeline.idle_share)
    assert timeline.idle_share[0] == pytest.approx(1 - 32 * 3 / timeline.step_time)


def test_memory_over_time() -> None:
    timeline = simulate(build_schedule("1f1b", 2, 3), StageCosts(1, 1, 1))
    # rank 0: F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
    # rank 1: .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
    assert timeline.activations(0) == ((0, 1), (1, 2), (6, 2), (9, 1), (12, 0))
    assert timeline.activations(1) == ((1, 1), (4, 1), (7, 1), (10, 0))
    assert timeline.peak_activations == (2, 1)
    assert timeline.peak_memory == (2.0, 1.0)
    # Half of what is kept for the weights: the inputs' half goes with backward_input.
    schedule, v_shape = build_schedule("zb_h1", 3, 8), build_schedule("zbv", 3, 8)
    full, half = (simulate(schedule, StageCosts(activation=10, kept_for_weight=share)) for share in (1, 0.5))
    assert full.peak_memory == (30, 30, 30)
    # Rank r holds S - r microbatches whole, and halves of as many as its weights lag behind.
    assert half.peak_memory == (30, 25, 20)
    assert simulate(v_shape, StageCosts(activation=10)).peak_memory == (30, 30, 30)
    for rank in range(3):
        assert half.memory(rank)[-1][1] == pytest.approx(0)
        assert min(held for _, held in half.memory(rank)) >= -1e-9
        times = [time for time, _ in full.memory(rank)]
        assert times == sorted(set(times))
    per_chunk = StageCosts(activation=[[1, 2], [3, 4], [5, 6]])
    assert simulate(v_shape, per_chunk).peak_memory[2] > simulate(v_shape, per_chunk).peak_memory[0]


def test_chunks_share_the_cost_of_their_rank() -> None:
    """So that schedules with different numbers of chunks do the same work."""
    costs = StageCosts(forward=[4, 8], backward_input=6)
    busy = {name: simulate(build_schedule(name, 2, 4), costs).busy for name in ("1f1b", "zbv", "interleaved_1f1b")}
    assert busy["1f1b"] == busy["zbv"] == busy["interleaved_1f1b"] == (4 * (4 + 6 + 1), 4 * (8 + 6 + 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": -1}, "forward=-1: expected a number of 0 or more"),
        ({"forward": math.inf}, "expected a number of 0 or more"),
        ({"backward_input": "x"}, "backward_input='x': expected a number"),
        ({"forward": [1, [1]]}, "per rank"),
        ({"forward": []}, "per rank"),
        ({"communication": [[1]]}, "communication"),
        ({"occupies": 1}, "occupies=1: expected true or false"),
        ({"kept_for_weight": -0.5}, "kept_for_weight=-0.5: expected a number of 0 or more"),
    ],
)
def test_costs_that_are_none(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StageCosts(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": [1, 1, 1]}, "forward has 3 entries but the schedule has 2 ranks"),
        ({"activation": [[1], [1]]}, "a rank of activation has 1 entries but the schedule has 2 chunks"),
        ({"communication": [1, 1]}, "communication has 2 entries but there are 3 boundaries"),
    ],
)
def test_costs_of_another_schedule(arguments: dict, message: str) -> None:
    schedule = build_schedule("zbv", 2, 4)
    assert schedule.placement == v_placement(2)
    with pytest.raises(ConfigError, match=message):
        simulate(schedule, StageCosts(**arguments))


def test_none_of_it_needs_torch() -> None:
    """The package's root imports Lightning; a planner elsewhere that takes the pure modules alone gets them alone."""
    root = Path(lightning_megapar.__file__).parent
    program = f"""
import sys, types
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "lightning"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
package = types.ModuleType("lightning_megapar")
package.__path__ = [{str(root)!r}]
sys.modules["lightning_megapar"] = package
from lightning_megapar.pipeline import StageCosts, build_schedule, choose_schedule, simulate
import lightning_megapar.pipeline.planning.measured, lightning_megapar.pipeline.picture
print(simulate(build_schedule("1f1b", 2, 3), StageCosts()).makespan, choose_schedule(2, 3).name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["12.0", "zbv"], done.stderr
