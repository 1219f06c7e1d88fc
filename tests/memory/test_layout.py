"""Layouts planned from traces: what is alive together does not overlap, and the arena is hardly more than needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_megapar.config import ConfigError
from lightning_megapar.memory import Layout, Trace, plan_offline
from lightning_megapar.memory.trace import Event


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    events: list[Event] = []
    alive: dict[int, int] = {}
    for _ in range(draw(st.integers(0, 60))):
        if alive and draw(st.booleans()):
            buffer = draw(st.sampled_from(sorted(alive)))
            events.append(Event(buffer, -alive.pop(buffer)))
        else:
            size = draw(st.integers(1, 5000))
            buffer = sum(event.size > 0 for event in events)
            events.append(Event(buffer, size))
            alive[buffer] = size
    return Trace(events)


def check(trace: Trace, layout: Layout, alignment: int) -> None:
    placed = list(zip(trace.aligned(alignment).lifetimes, layout.offsets, strict=True))
    for number, (one, at) in enumerate(placed):
        assert at % alignment == 0
        for other, there in placed[:number]:
            if one.start < other.end and other.start < one.end:
                assert at + one.size <= there or there + other.size <= at
    assert layout.arena_bytes == max((at + one.size for one, at in placed), default=0)
    assert layout.max_live_bytes == trace.aligned(alignment).max_live_bytes <= layout.arena_bytes


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(traces(), st.sampled_from([1, 64, 512]))
def test_nothing_overlaps(trace: Trace, alignment: int) -> None:
    check(trace, plan_offline(trace, alignment), alignment)


def test_what_order_of_allocation_would_waste() -> None:
    """First fit in the order of time puts the long-lived buffer on top of two short ones."""
    trace = Trace([Event(0, 10), Event(1, 10), Event(2, 5), Event(0, -10), Event(1, -10), Event(3, 20)])
    layout = plan_offline(trace, 1)
    assert layout.arena_bytes == layout.max_live_bytes == 25


def test_of_a_training_step(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)])
    x = torch.randn(128, 64)
    model(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model.zero_grad()
        model(x).sum().backward()
    trace = Trace.of_profile(recorded)
    activation = 128 * 64 * 4
    assert sum(one.size == activation for one in trace.lifetimes) >= 8
    assert sum(one.size == 64 * 64 * 4 and one.end == len(trace) for one in trace.lifetimes) == 4  # the gradients
    assert 4 * activation <= trace.max_live_bytes <= 8 * activation  # what each ReLU keeps, and little else
    layout = plan_offline(trace, 64)
    check(trace, layout, 64)
    assert layout.arena_bytes <= 1.03 * layout.max_live_bytes
    trace.save(tmp_path / "trace.json")
    again = Trace.load(tmp_path / "trace.json")
    assert again.events == trace.events and again.max_live_bytes == trace.max_live_bytes


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([Event(0, 4), Event(0, 4)], "trace event 1: buffer 0 is allocated twice"),
        ([Event(0, 4), Event(0, -4), Event(0, -4)], "trace event 2: 4 bytes of buffer 0 .*released already"),
        ([Event(0, 4), Event(0, -3)], "trace event 1: 3 bytes of buffer 0 released, which has 4"),
        ([Event(1, -3)], "3 bytes of buffer 1 released, which has 0 and is unknown"),
        ([Event(0, 0)], "trace event 0: 0 bytes"),
    ],
)
def test_events_that_cannot_be(events: list[Event], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Trace(events)


@pytest.mark.parametrize("records", [True, False])
def test_profiles_without_memory(records: bool) -> None:
    recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=records)
    if not records:
        with recorded:
            torch.ones(8)
    with pytest.raises(ConfigError, match="profile_memory=True, and stop it first"):
        Trace.of_profile(recorded)  # not started, or started without


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"format": "other", "events": []})])
def test_files_that_are_no_traces(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is no memory trace"):
        Trace.load(path)
