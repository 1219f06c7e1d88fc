"""Tensors from one piece of memory, each with a storage of its own.

A tensor's place goes back to the allocator when its storage dies, wherever it was held: by a view, by autograd's graph,
by a send that is under way. On the CPU a place is a slice of one array, torch keeps the slice for as long as the
storage lives (``torch.frombuffer``), and a weak reference to the slice tells when it is gone. That may happen in any
thread, and in the middle of an allocation when the garbage collector runs: what is gone is only noted then, and given
back at the next call.

An arena without a capacity learns it. Its first step is served by torch and recorded; the second begins with a plan of
it (:func:`~lightning_megapar.memory.layout.plan_offline`), memory of the plan's size, and requests get their planned
places from then on. What does not fit comes from torch (*overflow*). After a step with overflow the next one that finds
the arena empty begins with a plan of that step; when its layout is no larger than the arena, the arena grows by what
overflowed instead. It never shrinks.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_megapar.memory.allocator import ArenaFullError, BestFitAllocator, Block
from lightning_megapar.memory.layout import plan_offline
from lightning_megapar.memory.planned import PlannedAllocator
from lightning_megapar.memory.trace import Event, Trace


@dataclass(frozen=True)
class ArenaStats:
    """What an arena holds, in bytes where nothing else is said.

    Args:
        capacity: of its memory.
        allocated_bytes: of its tensors that are alive, overflow included.
        peak_bytes: most of them at once.
        fragmentation: share of the free memory outside of the largest free block.
        overflow_bytes, overflow_buffers: what came from torch because it did not fit, over the arena's life.
        planned_bytes: of the layout, the first part of the memory; 0 without one.
    """

    capacity: int
    allocated_bytes: int
    peak_bytes: int
    fragmentation: float
    overflow_bytes: int
    overflow_buffers: int
    planned_bytes: int


class Arena(ABC):
    """Where tensors of one device come from."""

    device: torch.device

    @abstractmethod
    def empty(
        self, shape: Sequence[int], dtype: torch.dtype | None = None, strides: Sequence[int] | None = None
    ) -> Tensor:
        """As ``torch.empty``.

        Args:
            shape: of the tensor.
            dtype: by default torch's.
            strides: in elements, by default contiguous ones.
        """

    @abstractmethod
    def begin_step(self) -> None:
        """A step starts, which is likely to ask for what the last ones asked for. One within another is part of it."""

    @abstractmethod
    def end_step(self) -> None:
        """It has ended; its tensors may live on."""

    @abstractmethod
    def stats(self) -> ArenaStats:
        """What is there now."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Between :meth:`begin_step` and :meth:`end_step`."""
        self.begin_step()
        try:
            yield
        finally:
            self.end_step()

    def movable(self, tensor: Tensor) -> None:  # noqa: B027
        """:meth:`defragment` may give this tensor another place; nobody keeps its address."""

    def defragment(self) -> int:
        """Bring free memory together by moving what may be moved. No step must be running.

        Returns:
            bytes that were moved.
        """
        return 0

    def empty_like(self, tensor: Tensor) -> Tensor:
        """As ``torch.empty_like``, strides included; torch's own for what is no plain tensor of the device."""
        if not self._holds(tensor):
            return torch.empty_like(tensor, requires_grad=False)
        if tensor.is_contiguous():
            return self.empty(tensor.shape, tensor.dtype)
        strides = torch.empty_like(tensor, device="meta").stride()
        return self.empty(tensor.shape, tensor.dtype, strides)

    def clone(self, tensor: Tensor) -> Tensor:
        """As ``tensor.clone()``, which it is for what is no plain tensor of the device; without gradient."""
        tensor = tensor.detach()
        return self.empty_like(tensor).copy_(tensor) if self._holds(tensor) else tensor.clone()

    def _holds(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.device == self.device and type(tensor.detach()) is Tensor

    def zeros(
        self, shape: Sequence[int], dtype: torch.dtype | None = None, strides: Sequence[int] | None = None
    ) -> Tensor:
        """As :meth:`empty`, filled."""
        return self.empty(shape, dtype, strides).zero_()


class _Slice(weakref.ref):  # type: ignore[type-arg]
    """Of a tensor's memory."""

    __slots__ = ("key",)
    key: int


class TensorArena(Arena):
    """An arena of the CPU.

    Args:
        capacity: bytes, by default what the first step needs.
        alignment: of places, a power of two.

    Raises:
        ConfigError: values out of their range.
    """

    def __init__(self, capacity: int | None = None, alignment: int = 512) -> None:
        self.device = torch.device("cpu")
        self._alignment = alignment
        self._learns = capacity is None
        self._allocator: BestFitAllocator | PlannedAllocator | None = None
        self._memory = np.empty(0, dtype=np.uint8)
        self._planned = 0
        if capacity is not None:
            self._allocator = BestFitAllocator(capacity, alignment)
            self._make_memory()
        self._lock = threading.Lock()
        self._dead: deque[int] = deque()
        self._on_death = _noting(self._dead)
        self._slices: dict[int, _Slice] = {}
        self._sizes: dict[int, int] = {}
        self._blocks: dict[int, Block] = {}  # of those that lie in the memory
        self._key_at: dict[int, int] = {}
        self._movable: dict[int, weakref.ref[Tensor]] = {}
        self._count = self._first_of_step = 0
        self._events: list[tuple[int, int]] | None = None
        self._recorded: list[tuple[int, int]] = []
        self._allocated = self._peak = 0
        # What comes from torch although there is memory.
        self._over: dict[int, int] = {}
        self._over_now = self._over_peak = self._over_bytes = self._over_buffers = 0
        self._over_in_step = False
        self._depth = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or a pickle serves others: an arena of its own that knows nothing yet.
        return TensorArena, (None, self._alignment)

    def _make_memory(self) -> None:
        assert self._allocator is not None
        memory = np.empty(self._allocator.capacity + self._alignment, dtype=np.uint8)
        start = -memory.ctypes.data % self._alignment
        self._memory = memory[start : start + self._allocator.capacity]

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype | None = None, strides: Sequence[int] | None = None
    ) -> Tensor:
        """As :meth:`Arena.empty`."""
        dtype = dtype or torch.get_default_dtype()
        if strides is None:
            strides = _contiguous(tuple(shape))
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
        elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        with self._lock:
            piece = self._piece(elements * dtype.itemsize)
        return _over(piece, shape, dtype, strides)

    def _piece(self, size: int) -> np.ndarray:
        self._drain()
        key, self._count = self._count, self._count + 1
        block = None
        if self._allocator is not None:
            try:
                block = self._allocator.allocate(size)
            except ArenaFullError:
                self._note_overflow(key, size)
        if block is None:
            # Through torch, so that it is aligned as torch's own tensors are.
            piece = torch.empty(size, dtype=torch.uint8, device=self.device).numpy()
        else:
            piece = self._memory[block.offset : block.offset + size]
            self._blocks[key] = block
            self._key_at[block.offset] = key
        self._watch(key, piece)
        self._sizes[key] = size
        self._allocated += size
        self._peak = max(self._peak, self._allocated)
        if self._events is not None:
            self._events.append((key, size))
        return piece

    def _note_overflow(self, key: int, size: int) -> None:
        self._over[key] = size
        self._over_now += size
        self._over_peak = max(self._over_peak, self._over_now)
        self._over_bytes += size
        self._over_buffers += 1
        self._over_in_step = self._events is not None

    def _watch(self, key: int, piece: np.ndarray) -> None:
        seen = _Slice(piece, self._on_death)
        seen.key = key
        self._slices[key] = seen

    def _drain(self) -> None:
        """Give back what is gone."""
        while self._dead:
            key = self._dead.popleft()
            del self._slices[key]
            size = self._sizes.pop(key)
            self._allocated -= size
            self._movable.pop(key, None)
            block = self._blocks.pop(key, None)
            if block is not None:
                assert self._allocator is not None
                self._allocator.free(block)
                del self._key_at[block.offset]
            self._over_now -= self._over.pop(key, 0)
            if self._events is not None and key >= self._first_of_step:
                self._events.append((key, -size))

    def begin_step(self) -> None:
        """As :meth:`Arena.begin_step`; plans, when there is something new to plan from."""
        with self._lock:
            self._drain()
            self._depth += 1
            if self._depth > 1:
                return
            if self._learns:
                if self._recorded and not self._blocks:
                    self._plan()
                self._events, self._over_in_step = [], False
                self._first_of_step = self._count
            if isinstance(self._allocator, PlannedAllocator):
                self._allocator.begin_step()

    def end_step(self) -> None:
        """As :meth:`Arena.end_step`."""
        with self._lock:
            self._drain()
            self._depth = max(0, self._depth - 1)
            if self._depth:
                return
            if self._events and (self._allocator is None or self._over_in_step):
                self._recorded = self._events
            self._events = None

    def _plan(self) -> None:
        trace = Trace(Event(key, size) for key, size in self._recorded)
        layout = plan_offline(trace, self._alignment)
        capacity = layout.arena_bytes
        if self._allocator is not None and capacity <= self._allocator.capacity:
            capacity = self._allocator.capacity + -(-self._over_peak // self._alignment) * self._alignment
        self._allocator = PlannedAllocator(trace, layout, capacity, self._alignment)
        self._planned = layout.arena_bytes
        self._make_memory()
        self._recorded = []
        self._over_peak = self._over_now

    def stats(self) -> ArenaStats:
        """As :meth:`Arena.stats`."""
        with self._lock:
            self._drain()
            inner = None if self._allocator is None else self._allocator.stats()
            return ArenaStats(
                0 if self._allocator is None else self._allocator.capacity,
                self._allocated,
                self._peak,
                0.0 if inner is None else inner.fragmentation,
                self._over_bytes,
                self._over_buffers,
                self._planned,
            )

    def movable(self, tensor: Tensor) -> None:
        """As :meth:`Arena.movable`; without effect on a tensor that is not of this memory, or is only a part of one."""
        offset = tensor.untyped_storage().data_ptr() - self._memory.ctypes.data
        with self._lock:
            self._drain()
            key = self._key_at.get(offset)
            if key is not None:
                self._movable[key] = weakref.ref(tensor)

    def defragment(self) -> int:
        """As :meth:`Arena.defragment`: blocks slide down, behind the layout if there is one.

        A movable tensor stays when something else holds its storage, such as a view.
        """
        with self._lock:
            self._drain()
            if self._allocator is None:
                return 0
            tensors = {self._blocks[key]: tensor for key, tensor in self._alone().items()}
            fixed = [block for block in self._blocks.values() if block not in tensors]
            moved = self._allocator.compact(self._move, fixed)
            for old, new in moved.items():
                self._point(tensors[old], self._key_at.pop(old.offset), new)
            self._key_at = {block.offset: key for key, block in self._blocks.items()}
            return sum(block.size for block in moved)

    def _alone(self) -> dict[int, Tensor]:
        """Movable tensors whose storage nobody else holds."""
        found = {}
        for key, seen in self._movable.items():
            tensor = seen()
            # Two hold it: the tensor, and the object that untyped_storage() makes.
            if tensor is not None and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2:
                found[key] = tensor
        return found

    def _move(self, source: int, target: int, size: int) -> None:
        self._memory[target : target + size] = self._memory[source : source + size]  # numpy minds that they overlap

    def _point(self, tensor: Tensor, key: int, block: Block) -> None:
        """Let a tensor use its bytes where they are now."""
        del self._slices[key]  # the old slice goes without being noted
        piece = self._memory[block.offset : block.offset + self._sizes[key]]
        self._watch(key, piece)
        self._blocks[key] = block
        # Not set_(): that would count as a change of the numbers.
        tensor.data = _over(piece, tensor.shape, tensor.dtype, tensor.stride(), int(tensor.storage_offset()))


def _over(
    piece: np.ndarray, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int], offset: int = 0
) -> Tensor:
    """A tensor over all bytes of a slice."""
    return torch.frombuffer(piece, dtype=dtype).as_strided_(tuple(shape), tuple(strides), offset)


@lru_cache(maxsize=1024)
def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def _noting(dead: deque[int]) -> Callable[[Any], None]:
    # Holds on to the queue alone: an arena may be gone before its last tensor.
    def note(seen: Any) -> None:
        dead.append(seen.key)

    return note
