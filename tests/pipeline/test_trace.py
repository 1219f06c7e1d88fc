from __future__ import annotations

import json
from random import Random

import pytest

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline import StageCosts, build_schedule, simulate
from lightning_megapar.pipeline.planning.measured import costs_of, schedule_of
from lightning_megapar.pipeline.planning.trace import (
    TraceEvent,
    activation_steps,
    from_chrome,
    one_step,
    read_trace,
    to_chrome,
    write_trace,
)
from lightning_megapar.pipeline.schedules import SCHEDULE_NAMES

EVENTS = (
    TraceEvent("forward", 0, 0.001, 0.003, 0, 0, step=4),
    TraceEvent("backward_input", 0, 0.004, 0.005, 0, 1, step=4),
    TraceEvent("forward", 1, 0.002, 0.004, 0, 0, step=4),
    TraceEvent("optimizer", 0, 0.001, 0.009, step=9),
)


def test_there_and_back(tmp_path) -> None:
    assert tuple(TraceEvent.from_json(json.loads(json.dumps(event.to_json()))) for event in EVENTS) == EVENTS
    write_trace(tmp_path / "trace.json", reversed(EVENTS))
    assert read_trace(tmp_path / "trace.json") == EVENTS
    assert from_chrome(to_chrome(EVENTS)["traceEvents"]) == EVENTS  # the bare list is a Chrome trace too


def test_what_a_viewer_sees() -> None:
    entries = to_chrome(EVENTS, "my run")["traceEvents"]
    spans = [entry for entry in entries if entry["ph"] == "X"]
    assert [(s["name"], s["pid"], s["tid"]) for s in spans] == [
        ("F0", 4, 0),
        ("I0.1", 4, 0),
        ("F0", 4, 1),
        ("optimizer", 9, 0),
    ]
    assert (spans[0]["ts"], spans[0]["dur"]) == (pytest.approx(1000), pytest.approx(2000))  # microseconds
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["ph"] == "M"}
    assert names["process_name", 9, 0] == "my run, step 9" and names["thread_name", 4, 1] == "stage 1"


def test_events_of_others_are_left_alone(tmp_path) -> None:
    document = to_chrome(EVENTS)
    document["traceEvents"] += [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1}, {"ph": "i"}]
    assert from_chrome(document) == EVENTS
    (tmp_path / "other.json").write_text('{"traceEvents": [{"ph": "X", "cat": "cpu_op"}]}')
    with pytest.raises(ConfigError, match=r"other\.json: the trace has 1 events, none of a pipeline"):
        read_trace(tmp_path / "other.json")


@pytest.mark.parametrize("text", ["{", "[1]", "{}", '"x"'])
def test_files_that_are_no_trace(tmp_path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.json"):
        read_trace(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "forwards", "rank": 0, "start": 0, "end": 1}, "kind 'forwards'; valid kinds: forward, backward"),
        ({"kind": "forward", "rank": -1, "start": 0, "end": 1}, "rank=-1"),
        ({"kind": "forward", "rank": 0, "start": 2, "end": 1}, "before it starts"),
        ({"kind": "forward", "rank": 0, "start": "a", "end": 1}, "start='a'"),
        ({"kind": "forward", "rank": 0, "start": 0}, "without end"),
        ({"kind": "forward", "rank": 0, "start": 0, "end": 1, "micro": 1}, "unknown argument 'micro'"),
        (3, "expected a mapping"),
    ],
)
def test_events_that_are_none(values: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TraceEvent.from_json(values)


def test_one_step() -> None:
    chosen = one_step(EVENTS, 4)
    assert min(event.start for event in chosen) == 0 and len(chosen) == 3
    assert chosen[0].duration == pytest.approx(0.002)
    assert one_step(EVENTS) == (TraceEvent("optimizer", 0, 0, 0.008, step=9),)
    with pytest.raises(ConfigError, match="step=5 is not in the trace; it has steps 4, 9"):
        one_step(EVENTS, 5)


def test_activations_come_and_go() -> None:
    steps = activation_steps(simulate(build_schedule("zb_h1", 2, 2)).events, 1)
    assert [change for _, _, change in steps] == [1, 1, -1, -1]
    assert [change for _, _, change in activation_steps(EVENTS[2:3], 1)] == [1, -1]  # forward only


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_trace_explains_itself(name: str) -> None:
    """From the events of a run alone: its schedule, costs per rank and chunk, and the time it should have taken."""
    schedule = build_schedule(name, 3, 7)
    draw = Random(3)
    table = [[[draw.uniform(0.04, 0.06) for _ in range(schedule.num_chunks)] for _ in range(3)] for _ in range(3)]
    messages = [
        0.0 if b % 3 == 2 and name in ("zbv", "dualpipe_v") else 0.003 for b in range(3 * schedule.num_chunks - 1)
    ]
    timeline = simulate(schedule, StageCosts(*table, messages))
    events = [TraceEvent(**{**e.to_json(), "start": e.start + 5, "end": e.end + 5, "step": 2}) for e in timeline.events]
    events = one_step([*events, TraceEvent("optimizer", 1, 7.0, 7.5, step=2)])
    found = schedule_of(events, name)
    assert found == schedule
    again = simulate(found, costs_of(events, found))
    if name != "dualpipe_v":  # it mixes whole and halved backwards of one chunk
        assert again.makespan == pytest.approx(timeline.makespan, rel=0.02)


def test_traces_that_are_no_whole_step() -> None:
    events = simulate(build_schedule("zbv", 2, 2)).events
    with pytest.raises(ConfigError, match=r"no forward of microbatch 0 on \(rank, chunk\) \[\(0, 1\)\]"):
        schedule_of([e for e in events if (e.rank, e.chunk) != (0, 1)])
    with pytest.raises(ConfigError, match="misses the backward_weight of microbatch 1"):
        schedule_of([e for e in events if (e.kind, e.microbatch) != ("backward_weight", 1)])
    with pytest.raises(ConfigError, match="no forward of microbatch 0"):
        schedule_of([])
