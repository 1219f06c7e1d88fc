"""A best-fit allocator of offsets in an arena, with coalescing, alignment and compaction.

An allocation takes the smallest free block that it fits in, and of equals the one with the lowest address; what is left
of that block stays free. A freed block is joined with the free blocks before and behind it at once (boundary tags,
Knuth, The Art of Computer Programming 1, section 2.5), so that no two free blocks ever touch. Nothing here knows of
memory: :mod:`lightning_megapar.memory.arena` puts tensors behind the offsets.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from lightning_megapar.config import ConfigError

Move = Callable[[int, int, int], None]
"""(from offset, to offset, bytes): moves bytes within the arena; both places may overlap."""


class Block(NamedTuple):
    """A piece of the arena.

    Args:
        offset: of its first byte, a multiple of the alignment.
        size: bytes that are reserved, a multiple of the alignment.
    """

    offset: int
    size: int


_new_block = tuple.__new__
"""Half of the time of the named tuple's own constructor, which is a function in Python."""


class ArenaFullError(MemoryError):
    """No free block is large enough.

    Attributes:
        requested: bytes, aligned.
        largest_free_block, free_bytes: what there was.
    """

    def __init__(self, requested: int, largest_free_block: int, free_bytes: int, capacity: int) -> None:
        super().__init__(
            f"no free block of {requested} bytes: the largest of {free_bytes} free bytes has {largest_free_block} "
            f"(capacity {capacity})" + (", compact() would make room" if free_bytes >= requested else "")
        )
        self.requested, self.largest_free_block, self.free_bytes = requested, largest_free_block, free_bytes


@dataclass(frozen=True)
class AllocatorStats:
    """What an allocator holds.

    Args:
        allocated_bytes, free_bytes: their sum is the capacity.
        largest_free_block: bytes.
        free_blocks, live_blocks: their numbers.
        peak_bytes: most bytes that were allocated at once.
        high_water: end of the highest block that was ever allocated: the arena that would have been enough.
        fragmentation: share of the free bytes outside of the largest free block, 0 when nothing is free.
    """

    allocated_bytes: int
    free_bytes: int
    largest_free_block: int
    free_blocks: int
    live_blocks: int
    peak_bytes: int
    high_water: int
    fragmentation: float


class BestFitAllocator:
    """Allocates blocks of an arena.

    Args:
        capacity: bytes; rounded down to the alignment.
        alignment: of offsets and sizes, a power of two. 512 is that of CUDA's allocators.

    Raises:
        ConfigError: values out of their range.
    """

    def __init__(self, capacity: int, alignment: int = 512) -> None:
        if not _is_whole(alignment) or alignment < 1 or alignment & (alignment - 1):
            raise ConfigError(f"alignment={alignment!r}: expected a power of two, such as 64 or 512")
        if not _is_whole(capacity) or capacity < alignment:
            raise ConfigError(f"capacity={capacity!r}: expected a whole number of bytes >= alignment={alignment}")
        self.alignment = alignment
        self.capacity = capacity - capacity % alignment
        self._mask = alignment - 1
        self._live: dict[int, int] = {}
        self._allocated = self._peak = self._high = 0
        # Free blocks: sorted by (size, offset), and by both of their ends. The pair is one number, the size above the
        # bits of an offset: half of the time would go into comparing tuples.
        self._bits = self.capacity.bit_length()
        self._below = (1 << self._bits) - 1
        self._free: list[int] = []
        self._size_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._add_free(0, self.capacity)

    def allocate(self, size: int) -> Block:
        """Reserve at least ``size`` bytes (one alignment for 0).

        Raises:
            ArenaFullError: no free block is large enough.
            ValueError: a negative size.
        """
        if size < 0:
            raise ValueError(f"size={size}: expected at least 0 bytes")
        size = (size + self._mask) & ~self._mask or self.alignment
        free, bits = self._free, self._bits
        at = bisect_left(free, size << bits)
        if at == len(free):
            raise ArenaFullError(size, free[-1] >> bits if free else 0, self.capacity - self._allocated, self.capacity)
        key = free.pop(at)
        offset = key & self._below
        rest = (key >> bits) - size
        del self._size_at[offset]
        behind = offset + size
        if rest:
            insort(free, rest << bits | behind, 0, at)
            self._size_at[behind] = rest
            self._start_before[behind + rest] = behind
        else:
            del self._start_before[behind]
        self._live[offset] = size
        self._allocated = allocated = self._allocated + size
        if allocated > self._peak:
            self._peak = allocated
        if behind > self._high:
            self._high = behind
        return _new_block(Block, (offset, size))

    def free(self, block: Block) -> None:
        """Give a block back.

        Raises:
            ValueError: it is not allocated (freed already, moved, or of another allocator).
        """
        offset, size = block
        if self._live.get(offset) != size:
            raise ValueError(f"{block} is not allocated here: freed already, or moved by compact()")
        del self._live[offset]
        self._allocated -= size
        free, sizes, bits = self._free, self._size_at, self._bits
        end = offset + size
        behind = sizes.pop(end, 0)
        if behind:
            del free[bisect_left(free, behind << bits | end)]
            end += behind
        before = self._start_before.pop(offset, None)
        if before is not None:
            del free[bisect_left(free, offset - before << bits | before)]
            offset = before
        size = end - offset
        insort(free, size << bits | offset)
        sizes[offset] = size
        self._start_before[end] = offset

    def compact(self, move: Move, fixed: Collection[Block] = ()) -> dict[Block, Block]:
        """Slide live blocks down to where the one before ends, so that what is free comes together.

        Args:
            move: called for each block that changes its place, in the order of addresses.
            fixed: blocks that must stay.

        Returns:
            old -> new for every block that was moved; the old ones are no longer allocated.
        """
        stays = set(fixed)
        moved: dict[Block, Block] = {}
        target = 0
        for offset, size in sorted(self._live.items()):
            block = Block(offset, size)
            if block not in stays and target < offset:
                move(offset, target, size)
                moved[block] = Block(target, size)
                target += size
            else:
                target = offset + size
        for old in moved:
            del self._live[old.offset]
        self._live.update(moved.values())
        self._free.clear()
        self._size_at.clear()
        self._start_before.clear()
        end = 0
        for offset, size in [*sorted(self._live.items()), (self.capacity, 0)]:
            if end < offset:
                self._add_free(end, offset - end)
            end = offset + size
        return moved

    def live(self) -> list[Block]:
        """Allocated blocks in the order of addresses."""
        return [Block(offset, size) for offset, size in sorted(self._live.items())]

    def free_blocks(self) -> list[Block]:
        """Free blocks in the order of addresses; no two of them touch."""
        return [Block(offset, size) for offset, size in sorted(self._size_at.items())]

    def stats(self) -> AllocatorStats:
        """What is allocated and free now."""
        free = self.capacity - self._allocated
        largest = self._free[-1] >> self._bits if self._free else 0
        return AllocatorStats(
            self._allocated,
            free,
            largest,
            len(self._free),
            len(self._live),
            self._peak,
            self._high,
            1.0 - largest / free if free else 0.0,
        )

    def _add_free(self, offset: int, size: int) -> None:
        insort(self._free, size << self._bits | offset)
        self._size_at[offset] = size
        self._start_before[offset + size] = offset


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
