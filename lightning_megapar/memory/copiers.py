"""How saved activations get to host memory and back: what :mod:`lightning_megapar.memory.offload` is built on."""

from __future__ import annotations

import mmap
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megapar.config import ConfigError
from lightning_megapar.memory.allocator import ArenaFullError, BestFitAllocator, Block

_ALIGNMENT = 512


class HostStore:
    """Host memory in a few large pieces, whose places are given out by best fit.

    On the CPU it lies outside of torch's allocator, so that what is moved into it counts as gone there; for CUDA it is
    pinned, which is slow to make and fast to copy to.

    Args:
        piece_bytes: size of a piece; one is added when nothing fits, larger if it has to be.
        pinned: page-locked, for copies that run beside computation.

    Raises:
        ConfigError: a size below 512 bytes.
    """

    def __init__(self, piece_bytes: int = 64 << 20, pinned: bool = False) -> None:
        if not isinstance(piece_bytes, int) or piece_bytes < _ALIGNMENT:
            raise ConfigError(f"piece_bytes={piece_bytes!r}: expected at least {_ALIGNMENT} bytes")
        self._piece_bytes, self._pinned = piece_bytes, pinned
        self._pieces: list[tuple[BestFitAllocator, Tensor]] = []

    def allocate(self, size: int) -> HostBuffer:
        """A place for ``size`` bytes."""
        for number, (places, _) in enumerate(self._pieces):
            try:
                return HostBuffer(number, places.allocate(size), size)
            except ArenaFullError:
                continue
        room = max(self._piece_bytes, -(-size // _ALIGNMENT) * _ALIGNMENT)
        self._pieces.append((BestFitAllocator(room, _ALIGNMENT), self._memory(room)))
        return HostBuffer(len(self._pieces) - 1, self._pieces[-1][0].allocate(size), size)

    def bytes_of(self, buffer: HostBuffer) -> Tensor:
        """The place as uint8."""
        start = buffer.block.offset
        return self._pieces[buffer.piece][1][start : start + buffer.size]

    def free(self, buffer: HostBuffer) -> None:
        """Give a place back."""
        self._pieces[buffer.piece][0].free(buffer.block)

    @property
    def held_bytes(self) -> int:
        """In use, in multiples of 512 for each tensor."""
        return sum(places.stats().allocated_bytes for places, _ in self._pieces)

    @property
    def reserved_bytes(self) -> int:
        """Of all pieces."""
        return sum(memory.numel() for _, memory in self._pieces)

    def _memory(self, size: int) -> Tensor:
        if self._pinned:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


@dataclass(frozen=True)
class HostBuffer:
    """A place in a :class:`HostStore`.

    Args:
        piece: its number.
        block: within the piece.
        size: bytes that are used.
    """

    piece: int
    block: Block
    size: int


class Copier(Protocol):
    """Moves bytes between a device and the host. What ``store`` and ``fetch`` return is handed back as it is."""

    def store(self, values: Tensor) -> Any:
        """Start to copy (n) uint8 to the host. The caller may let go of ``values`` at once."""

    def fetch(self, stored: Any) -> Any:
        """Start to copy back what was stored; more than once, if need be."""

    def wait(self, arriving: Any) -> Tensor:
        """(n) uint8 on the device, ready for what is launched from now on."""

    def release(self, stored: Any) -> None:
        """Let go of the host's copy, when what reads it is done."""


class HostCopier:
    """For tensors of the CPU: copies at once, within host memory.

    Args:
        store: where to.
    """

    def __init__(self, store: HostStore | None = None) -> None:
        self.host = store or HostStore()

    def store(self, values: Tensor) -> HostBuffer:
        buffer = self.host.allocate(values.numel())
        self.host.bytes_of(buffer).copy_(values)
        return buffer

    def fetch(self, stored: HostBuffer) -> Tensor:
        return self.host.bytes_of(stored).clone()

    def wait(self, arriving: Tensor) -> Tensor:
        return arriving

    def release(self, stored: HostBuffer) -> None:
        self.host.free(stored)


@dataclass(eq=False)
class _Stored:
    buffer: HostBuffer
    done: Any
    """Event: the last copy that reads or writes the buffer."""
    device: torch.device


class CudaCopier:
    """For tensors of a CUDA device: pinned memory and a stream for each direction, beside the computation.

    Memory of the device is let go of when the copy to the host is done (``record_stream``), and a place on the host
    when the last copy from it is.

    Args:
        store: pinned.
    """

    def __init__(self, store: HostStore | None = None) -> None:
        self.host = store or HostStore(pinned=True)
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        self._leaving: deque[_Stored] = deque()

    def store(self, values: Tensor) -> _Stored:
        self._collect()
        out, _ = self._streams_of(values.device)
        buffer = self.host.allocate(values.numel())
        out.wait_stream(torch.cuda.current_stream(values.device))  # what computes the values
        with torch.cuda.stream(out):
            self.host.bytes_of(buffer).copy_(values, non_blocking=True)
            done = out.record_event()
        values.record_stream(out)
        return _Stored(buffer, done, values.device)

    def fetch(self, stored: _Stored) -> tuple[Tensor, Any]:
        _, back = self._streams_of(stored.device)
        back.wait_event(stored.done)
        with torch.cuda.stream(back):
            values = torch.empty(stored.buffer.size, dtype=torch.uint8, device=stored.device)
            values.copy_(self.host.bytes_of(stored.buffer), non_blocking=True)
            stored.done = back.record_event()
        return values, stored.done

    def wait(self, arriving: tuple[Tensor, Any]) -> Tensor:
        values, done = arriving
        current = torch.cuda.current_stream(values.device)
        current.wait_event(done)
        values.record_stream(current)  # it was allocated on the stream of the copy
        return values

    def release(self, stored: _Stored) -> None:
        self._leaving.append(stored)
        self._collect()

    def _collect(self) -> None:
        while self._leaving and self._leaving[0].done.query():
            self.host.free(self._leaving.popleft().buffer)

    def _streams_of(self, device: torch.device) -> tuple[Any, Any]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]


def copier_for(device: torch.device) -> Copier:
    """The copier of a device.

    Raises:
        ConfigError: a device other than the CPU and CUDA.
    """
    if device.type == "cpu":
        return HostCopier()
    if device.type == "cuda":
        return CudaCopier()
    raise ConfigError(
        f"saved activations of a {device.type!r} device cannot be moved to the host; expected cuda or cpu"
    )
