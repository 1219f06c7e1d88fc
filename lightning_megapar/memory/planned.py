"""An allocator for steps that repeat: what a recorded step asked for gets the place that was planned for it.

Requests are told apart by their size and by how many of that size came before in the step, so that another order of
sizes, or buffers more and less, disturb those of their own size alone. A step that repeats exactly therefore has the
arena of the layout, and one that does not is served all the same: what has no planned place, or finds it taken, gets
the best fit in the room behind the layout, or else the smallest gap within it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

from lightning_megapar.config import ConfigError
from lightning_megapar.memory.allocator import AllocatorStats, ArenaFullError, BestFitAllocator, Block, Move
from lightning_megapar.memory.layout import Layout
from lightning_megapar.memory.trace import Trace


class PlannedAllocator:
    """Allocates blocks of an arena whose first bytes are planned. :meth:`begin_step` comes before each step.

    Args:
        trace: of the step.
        layout: of the trace, with the same alignment.
        capacity: bytes, rounded down to the alignment; by default those of the layout.
        alignment: of offsets and sizes, a power of two.

    Raises:
        ConfigError: a layout of another trace, or larger than the capacity.
    """

    def __init__(self, trace: Trace, layout: Layout, capacity: int | None = None, alignment: int = 512) -> None:
        if len(layout.offsets) != len(trace.lifetimes):
            raise ConfigError(
                f"a layout of {len(layout.offsets)} buffers does not fit a trace of {len(trace.lifetimes)}"
            )
        capacity = layout.arena_bytes if capacity is None else capacity
        if capacity < layout.arena_bytes:
            raise ConfigError(f"capacity={capacity}: the layout needs {layout.arena_bytes} bytes")
        self.alignment = alignment
        self.capacity = capacity - capacity % alignment
        self._mask = alignment - 1
        self._planned_bytes = layout.arena_bytes
        behind = self.capacity - self._planned_bytes
        self._behind = BestFitAllocator(behind, alignment) if behind else None
        self._places: dict[int, list[int]] = {}
        for one, offset in zip(trace.aligned(alignment).lifetimes, layout.offsets, strict=True):
            self._places.setdefault(one.size, []).append(offset)
        self._next: dict[int, int] = {}
        # Live blocks within the layout, their offsets sorted.
        self._live: dict[int, int] = {}
        self._sorted: list[int] = []
        self._allocated = self._peak = self._high = 0

    def begin_step(self) -> None:
        """A step starts: its first request of each size is the recorded step's first one. Live blocks stay."""
        self._next.clear()

    def allocate(self, size: int) -> Block:
        """Reserve at least ``size`` bytes (one alignment for 0).

        Raises:
            ArenaFullError: no planned place is free, and no gap is large enough.
            ValueError: a negative size.
        """
        if size < 0:
            raise ValueError(f"size={size}: expected at least 0 bytes")
        size = (size + self._mask) & ~self._mask or self.alignment
        offset = self._place(size)
        if offset < 0:
            offset = self._elsewhere(size)
        self._allocated += size
        self._peak = max(self._peak, self._allocated)
        self._high = max(self._high, offset + size)
        return Block(offset, size)

    def _place(self, size: int) -> int:
        """The planned offset, or -1."""
        places = self._places.get(size, ())
        number = self._next.get(size, 0)
        if number >= len(places):
            return -1
        self._next[size] = number + 1
        offset = places[number]
        live = self._sorted
        at = bisect_left(live, offset)
        if at < len(live) and live[at] < offset + size:
            return -1
        if at and live[at - 1] + self._live[live[at - 1]] > offset:
            return -1
        live.insert(at, offset)
        self._live[offset] = size
        return offset

    def _elsewhere(self, size: int) -> int:
        if self._behind is not None:
            try:
                return self._planned_bytes + self._behind.allocate(size).offset
            except ArenaFullError:
                pass
        gaps = [gap for gap in self._gaps() if gap.size >= size]
        if not gaps:
            stats = self.stats()
            raise ArenaFullError(size, stats.largest_free_block, stats.free_bytes, self.capacity)
        offset = min(gaps, key=lambda gap: (gap.size, gap.offset)).offset
        self._sorted.insert(bisect_left(self._sorted, offset), offset)
        self._live[offset] = size
        return offset

    def _gaps(self) -> list[Block]:
        """Free blocks within the layout."""
        found, end = [], 0
        for offset in (*self._sorted, self._planned_bytes):
            if end < offset:
                found.append(Block(end, offset - end))
            end = offset + self._live.get(offset, 0)
        return found

    def free(self, block: Block) -> None:
        """Give a block back.

        Raises:
            ValueError: it is not allocated (freed already, or of another allocator).
        """
        offset, size = block
        if offset >= self._planned_bytes and self._behind is not None:
            self._behind.free(Block(offset - self._planned_bytes, size))
        elif self._live.get(offset) != size:
            raise ValueError(f"{block} is not allocated here: freed already, or of another allocator")
        else:
            del self._live[offset]
            del self._sorted[bisect_left(self._sorted, offset)]
        self._allocated -= size

    def compact(self, move: Move, fixed: Collection[Block] = ()) -> dict[Block, Block]:
        """As :meth:`BestFitAllocator.compact`, behind the layout alone: what lies within it stays."""
        if self._behind is None:
            return {}
        base = self._planned_bytes

        def shifted(block: Block, by: int) -> Block:
            return Block(block.offset + by, block.size)

        stays = [shifted(block, -base) for block in fixed]
        moved = self._behind.compact(lambda source, target, size: move(base + source, base + target, size), stays)
        return {shifted(old, base): shifted(new, base) for old, new in moved.items()}

    def live(self) -> list[Block]:
        """Allocated blocks in the order of addresses."""
        behind = self._behind.live() if self._behind is not None else []
        within = [Block(offset, self._live[offset]) for offset in self._sorted]
        return within + [Block(self._planned_bytes + offset, size) for offset, size in behind]

    def stats(self) -> AllocatorStats:
        """What is allocated and free now; the end of the layout parts free blocks."""
        gaps = [gap.size for gap in self._gaps()]
        behind = self._behind.stats() if self._behind is not None else None
        free = self.capacity - self._allocated
        largest = max([*gaps, behind.largest_free_block if behind else 0])
        return AllocatorStats(
            self._allocated,
            free,
            largest,
            len(gaps) + (behind.free_blocks if behind else 0),
            len(self._live) + (behind.live_blocks if behind else 0),
            self._peak,
            self._high,
            1.0 - largest / free if free else 0.0,
        )
