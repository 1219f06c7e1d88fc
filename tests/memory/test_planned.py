"""Places planned from a recorded step, for the steps that come after it."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_megapar.config import ConfigError
from lightning_megapar.memory import ArenaFullError, Block, Layout, PlannedAllocator, Trace, plan_offline
from lightning_megapar.memory.trace import Event

SIZES = (1, 16, 40, 100, 300, 700)


def step(seed: int, count: int) -> Trace:
    """Buffers of few sizes, some of which stay until the end."""
    draw = random.Random(seed)
    events: list[Event] = []
    alive: dict[int, int] = {}
    for buffer in range(count):
        alive[buffer] = draw.choice(SIZES)
        events.append(Event(buffer, alive[buffer]))
        while alive and draw.random() < 0.5:
            gone = draw.choice(sorted(alive))
            events.append(Event(gone, -alive.pop(gone)))
    return Trace(events)


def run(trace: Trace, allocator: PlannedAllocator) -> list[Block]:
    """One step; what it allocated, in order."""
    allocator.begin_step()
    placed: list[Block] = []
    held: dict[int, Block] = {}
    for event in trace.events:
        if event.size > 0:
            placed.append(allocator.allocate(event.size))
            held[event.buffer] = placed[-1]
        else:
            allocator.free(held.pop(event.buffer))
    for block in held.values():
        allocator.free(block)
    return placed


@pytest.mark.parametrize("seed", range(20))
def test_a_step_that_repeats_has_the_arena_of_its_layout(seed: int) -> None:
    trace = step(seed, 60)
    layout = plan_offline(trace, 16)
    allocator = PlannedAllocator(trace, layout, alignment=16)
    for _ in range(3):
        assert tuple(block.offset for block in run(trace, allocator)) == layout.offsets
    stats = allocator.stats()
    assert stats.high_water == layout.arena_bytes == allocator.capacity
    assert stats.peak_bytes == layout.max_live_bytes
    assert stats.allocated_bytes == stats.live_blocks == 0


class Machine(RuleBasedStateMachine):
    """Steps that are like the recorded one at best, against what is held."""

    @initialize(seed=st.integers(0, 50), room=st.sampled_from([0, 16, 500, 3000]))
    def plan(self, seed: int, room: int) -> None:
        trace = step(seed, 25)
        layout = plan_offline(trace, 16)
        self.allocator = PlannedAllocator(trace, layout, layout.arena_bytes + room, alignment=16)
        self.layout = layout
        self.held: list[Block] = []
        self.peak = 0

    @rule()
    def begin(self) -> None:
        self.allocator.begin_step()

    @rule(size=st.one_of(st.sampled_from(SIZES), st.integers(0, 900)))
    def allocate(self, size: int) -> None:
        needed = max(16, -(-size // 16) * 16)
        try:
            block = self.allocator.allocate(size)
        except ArenaFullError as told:
            assert told.requested == needed
            assert told.largest_free_block < needed
            return
        assert block.size == needed and block.offset % 16 == 0
        self.held.append(block)
        self.peak = max(self.peak, sum(one.size for one in self.held))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.allocator.free(block)
        with pytest.raises(ValueError, match="is not allocated here"):
            self.allocator.free(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        fixed = data.draw(st.sets(st.sampled_from(sorted(self.held)), max_size=2))
        moved = self.allocator.compact(lambda source, target, size: None, fixed)
        assert not fixed & set(moved)
        assert all(old.offset > new.offset >= self.layout.arena_bytes for old, new in moved.items())
        self.held = [moved.get(block, block) for block in self.held]

    @invariant()
    def nothing_overlaps_or_is_lost(self) -> None:
        if not hasattr(self, "allocator"):
            return
        end = 0
        for block in sorted(self.held):
            assert block.offset >= end
            end = block.offset + block.size
        assert end <= self.allocator.capacity
        assert self.allocator.live() == sorted(self.held)
        stats = self.allocator.stats()
        assert stats.allocated_bytes == sum(block.size for block in self.held)
        assert stats.allocated_bytes + stats.free_bytes == self.allocator.capacity
        assert (stats.live_blocks, stats.peak_bytes) == (len(self.held), self.peak)
        assert end <= stats.high_water and 0 <= stats.fragmentation <= 1


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=50, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_another_order_of_sizes_keeps_its_places() -> None:
    trace = Trace([Event(0, 16), Event(1, 32), Event(2, 64)])
    layout = plan_offline(trace, 16)
    allocator = PlannedAllocator(trace, layout, alignment=16)
    assert [allocator.allocate(size).offset for size in (64, 16, 32)] == [layout.offsets[n] for n in (2, 0, 1)]


def test_plans_that_do_not_fit() -> None:
    trace = Trace([Event(0, 16), Event(1, 32)])
    with pytest.raises(ConfigError, match="a layout of 0 buffers does not fit a trace of 2"):
        PlannedAllocator(trace, Layout((), 0, 0))
    with pytest.raises(ConfigError, match="capacity=32: the layout needs 48 bytes"):
        PlannedAllocator(trace, plan_offline(trace, 16), 32, alignment=16)
    with pytest.raises(ValueError, match="size=-1"):
        PlannedAllocator(trace, plan_offline(trace, 16), alignment=16).allocate(-1)
