"""Best fit with coalescing: nothing overlaps, nothing is lost, no two free blocks touch."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lightning_megapar.config import ConfigError
from lightning_megapar.memory import ArenaFullError, BestFitAllocator, Block


def check(allocator: BestFitAllocator) -> None:
    """Live and free blocks tile the arena, and the free ones are as few as can be."""
    live, free = allocator.live(), allocator.free_blocks()
    everything = sorted([*((b, True) for b in live), *((b, False) for b in free)])
    end, was_free = 0, False
    for block, is_live in everything:
        assert block.offset == end and block.size > 0
        assert is_live or not was_free, "two free blocks touch"
        assert not block.offset % allocator.alignment and not block.size % allocator.alignment
        end, was_free = block.offset + block.size, not is_live
    assert end == allocator.capacity
    stats = allocator.stats()
    assert stats.allocated_bytes == sum(b.size for b in live) and stats.free_bytes == sum(b.size for b in free)
    assert stats.largest_free_block == max((b.size for b in free), default=0)
    assert (stats.live_blocks, stats.free_blocks) == (len(live), len(free))
    by_size = [Block(key & allocator._below, key >> allocator._bits) for key in allocator._free]
    assert by_size == sorted(free, key=lambda block: (block.size, block.offset))
    assert allocator._start_before == {b.offset + b.size: b.offset for b in free}


class Machine(RuleBasedStateMachine):
    """Against a plain list of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BestFitAllocator(4096 + 5, alignment=16)
        self.bytes = bytearray(4096)
        self.held: dict[Block, bytes] = {}
        self.count = 0

    @rule(size=st.integers(0, 1200))
    def allocate(self, size: int) -> None:
        free = self.allocator.free_blocks()
        needed = max(16, -(-size // 16) * 16)
        fits = [(b.size, b.offset) for b in free if b.size >= needed]
        if not fits:
            with pytest.raises(ArenaFullError) as told:
                self.allocator.allocate(size)
            assert told.value.requested == needed
            assert ("compact() would" in str(told.value)) == (sum(b.size for b in free) >= needed)
            return
        block = self.allocator.allocate(size)
        assert (block.offset, block.size) == (min(fits)[1], needed)
        self.count += 1
        held = self.count.to_bytes(4, "big") * (block.size // 4)
        self.bytes[block.offset : block.offset + block.size] = held
        self.held[block] = held

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.allocator.free(block)
        del self.held[block]
        with pytest.raises(ValueError, match="is not allocated here"):
            self.allocator.free(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        fixed = data.draw(st.sets(st.sampled_from(sorted(self.held)), max_size=2))

        def move(source: int, target: int, size: int) -> None:
            assert target < source
            self.bytes[target : target + size] = bytes(self.bytes[source : source + size])

        moved = self.allocator.compact(move, fixed)
        assert not fixed & set(moved)
        self.held = {moved.get(block, block): held for block, held in self.held.items()}
        if not fixed:
            assert self.allocator.stats().fragmentation == 0 and len(self.allocator.free_blocks()) <= 1

    @invariant()
    def nothing_is_lost(self) -> None:
        check(self.allocator)
        assert self.allocator.live() == sorted(self.held)
        for block, held in self.held.items():
            assert self.bytes[block.offset : block.offset + block.size] == held


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_a_hundred_thousand_operations() -> None:
    draw = random.Random(3)
    allocator = BestFitAllocator(1 << 24)
    held: list[Block] = []
    for number in range(100_000):
        if held and (draw.random() < 0.5 or len(held) > 400):
            held[-1], held[at] = held[(at := draw.randrange(len(held)))], held[-1]
            allocator.free(held.pop())
        else:
            try:
                held.append(allocator.allocate(int(draw.paretovariate(0.9) * 300)))
            except ArenaFullError:
                continue
        if number % 2000 == 0:
            check(allocator)
    check(allocator)
    assert sorted(held) == allocator.live()
    for block in held:
        allocator.free(block)
    assert allocator.free_blocks() == [Block(0, allocator.capacity)] and allocator.stats().allocated_bytes == 0


@pytest.mark.parametrize(
    ("capacity", "alignment", "says"),
    [
        (1024, 24, "alignment=24: expected a power of two"),
        (1024, True, "alignment=True"),
        (100, 512, "capacity=100: expected a whole number of bytes >= alignment=512"),
        (1e9, 512, "capacity=1000000000.0: expected a whole number"),
    ],
)
def test_values_that_cannot_be(capacity: int, alignment: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        BestFitAllocator(capacity, alignment)


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="size=-1"):
        BestFitAllocator(1024).allocate(-1)
