"""A recorded step under several rules of allocation: the arena that each would need. Pure functions of a trace.

``best_fit`` is :class:`~lightning_megapar.memory.allocator.BestFitAllocator` and ``planned`` is
:class:`~lightning_megapar.memory.planned.PlannedAllocator`. The others are there to be compared with: best fit without
joining freed blocks, and the rules of torch's caching allocator for CUDA (``c10/cuda/CUDACachingAllocator.cpp``: sizes
are multiples of 512 bytes; up to 1 MiB from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, else a segment of
its own in multiples of 2 MiB; what is left of a block is split off if it has 512 bytes, or above 1 MiB in large
segments; blocks of one segment are joined). No segment is given back: torch does that only when memory runs out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from lightning_megapar.memory.allocator import BestFitAllocator, Block
from lightning_megapar.memory.layout import plan_offline
from lightning_megapar.memory.planned import PlannedAllocator
from lightning_megapar.memory.trace import Trace

_MIB = 1 << 20
_ALIGNMENT = 512


def best_fit(trace: Trace) -> int:
    """Bytes of the arena that best fit with coalescing needs."""
    allocator = BestFitAllocator(_plenty(trace), _ALIGNMENT)
    _replay(trace, allocator)
    return allocator.stats().high_water


def planned(trace: Trace, first: Trace | None = None) -> int:
    """Bytes of the arena with places planned from an earlier step.

    Args:
        trace: runs twice, so that it is seen as well that nothing of the first time stands in the way of the second.
        first: what the places are planned from, by default the trace itself.
    """
    first = trace if first is None else first
    layout = plan_offline(first, _ALIGNMENT)
    allocator = PlannedAllocator(first, layout, layout.arena_bytes + _plenty(trace), _ALIGNMENT)
    for _ in range(2):
        allocator.begin_step()
        for block in _replay(trace, allocator):
            allocator.free(block)
    return max(layout.arena_bytes, allocator.stats().high_water)


def _plenty(trace: Trace) -> int:
    return max(_ALIGNMENT, 2 * sum(one.size + _ALIGNMENT for one in trace.lifetimes))


def _replay(trace: Trace, allocator: BestFitAllocator | PlannedAllocator) -> list[Block]:
    """What is left at the end."""
    held: dict[int, Block] = {}
    for event in trace.events:
        if event.size > 0:
            held[event.buffer] = allocator.allocate(event.size)
        else:
            allocator.free(held.pop(event.buffer))
    return list(held.values())


def best_fit_without_coalescing(trace: Trace) -> int:
    """Bytes of the arena where a freed block stays as it was cut, and is cut further if less is asked for."""
    free: list[tuple[int, int]] = []
    held: dict[int, tuple[int, int]] = {}
    end = 0
    for event in trace.aligned(_ALIGNMENT).events:
        if event.size < 0:
            insort(free, held.pop(event.buffer))
            continue
        at = bisect_left(free, (event.size, 0))
        if at == len(free):
            held[event.buffer] = event.size, end
            end += event.size
            continue
        size, offset = free.pop(at)
        held[event.buffer] = event.size, offset
        if size > event.size:
            insort(free, (size - event.size, offset + event.size))
    return end


def torch_caching(trace: Trace) -> int:
    """Bytes that torch's caching allocator would reserve."""
    pools: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    sizes: dict[int, int] = {}  # of free blocks by offset; segments lie apart, so that none touches another's
    before: dict[int, int] = {}
    held: dict[int, tuple[int, int, bool]] = {}
    reserved = begin = 0

    def add(is_small: bool, offset: int, size: int) -> None:
        insort(pools[is_small], (size, offset))
        sizes[offset], before[offset + size] = size, offset

    def take(is_small: bool, offset: int) -> int:
        size = sizes.pop(offset)
        del before[offset + size]
        pool = pools[is_small]
        pool.pop(bisect_left(pool, (size, offset)))
        return size

    for event in trace.aligned(_ALIGNMENT).events:
        if event.size < 0:
            offset, size, is_small = held.pop(event.buffer)
            if offset + size in sizes:
                size += take(is_small, offset + size)
            if offset in before:
                first = before[offset]
                size += take(is_small, first)
                offset = first
            add(is_small, offset, size)
            continue
        is_small = event.size <= _MIB
        pool = pools[is_small]
        at = bisect_left(pool, (event.size, 0))
        if at == len(pool):
            segment = _segment(event.size)
            reserved += segment
            add(is_small, begin, segment)
            begin += segment + _ALIGNMENT
            at = bisect_left(pool, (event.size, 0))
        offset = pool[at][1]
        size = take(is_small, offset)
        rest = size - event.size
        if rest >= _ALIGNMENT if is_small else rest > _MIB:
            add(is_small, offset + event.size, rest)
            size = event.size
        held[event.buffer] = offset, size, is_small
    return reserved


def _segment(size: int) -> int:
    """Bytes of the segment that is made for a block which fits in none."""
    if size <= _MIB:
        return 2 * _MIB
    return 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB


RULES: dict[str, Callable[[Trace], int]] = {
    "best fit": best_fit,
    "without coalescing": best_fit_without_coalescing,
    "torch's caching rules": torch_caching,
    "planned": planned,
}
"""Each gives the bytes of the arena that a trace needs."""
