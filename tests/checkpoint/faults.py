"""Broken disks and dying ranks for the checkpoint tests, without torch.distributed: forked processes and threads."""

from __future__ import annotations

import errno
import os
import pickle
import queue
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megapar.checkpoint import CheckpointError, load_sharded, save_sharded
from lightning_megapar.checkpoint.file_system import FileSystem
from lightning_megapar.checkpoint.ranks import Ranks

NEEDS_ROOM = ("make_directory", "create", "write")


class BrokenDisk(FileSystem):
    """Counts operations and breaks at number ``at``.

    Args:
        at: number of the operation, from 0; ``None`` only counts.
        mode: ``"kill"`` (SIGKILL before it), ``"torn"`` (half of a write, then SIGKILL), ``"once"`` (``code`` raised),
            ``"full"`` (it and every later operation that needs room raises ``code``).
        exchange: whether the file system can exchange two names.
    """

    buffer_bytes = 1500  # several writes per file, so that a file can be torn at several places

    def __init__(
        self, at: int | None = None, mode: str = "kill", code: int = errno.ENOSPC, exchange: bool = True
    ) -> None:
        self.at, self.mode, self.code, self.can_exchange = at, mode, code, exchange
        self.log: list[tuple[str, Path]] = []

    def before(self, operation: str, path: Path) -> None:
        number = len(self.log)
        self.log.append((operation, path))
        if self.at is None:
            return
        if self.mode == "kill" and number == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "once" and number == self.at:
            raise OSError(self.code, os.strerror(self.code), str(path))
        if self.mode == "full" and number >= self.at and operation in NEEDS_ROOM:
            raise OSError(self.code, os.strerror(self.code), str(path))

    def write(self, descriptor: int, data: Any, path: Path) -> None:
        if self.mode == "torn" and len(self.log) == self.at:
            os.write(descriptor, memoryview(data).cast("B")[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(descriptor, data, path)

    def exchange(self, first: Path, second: Path) -> None:
        if not self.can_exchange:
            self.before("exchange", second)
            raise OSError(errno.ENOTSUP, "not supported", str(second))
        super().exchange(first, second)


class PipeRanks(Ranks):
    """Ranks connected by pipes through rank 0: the smallest group whose members may die."""

    def __init__(self, rank: int, size: int, up: list[tuple[int, int]], down: list[tuple[int, int]]) -> None:
        self.rank, self.size = rank, size
        for other in range(1, size):
            for descriptor in (up[other][1 if rank == 0 else 0], down[other][0 if rank == 0 else 1]):
                os.close(descriptor)
            if rank not in (0, other):
                os.close(up[other][1])
                os.close(down[other][0])
        self.up = {r: up[r][0] if rank == 0 else up[r][1] for r in (range(1, size) if rank == 0 else (rank,))}
        self.down = {r: down[r][1] if rank == 0 else down[r][0] for r in (range(1, size) if rank == 0 else (rank,))}

    def gather(self, value: Any) -> list[Any] | None:
        if self.rank:
            _put(self.up[self.rank], value)
            return None
        return [value, *(_get(self.up[r]) for r in range(1, self.size))]

    def scatter(self, values: Sequence[Any] | None) -> Any:
        if self.rank:
            return _get(self.down[self.rank])
        assert values is not None
        for r in range(1, self.size):
            _put(self.down[r], values[r])
        return values[0]


def _put(descriptor: int, value: Any) -> None:
    data = pickle.dumps(value)
    os.write(descriptor, struct.pack("q", len(data)) + data)


def _get(descriptor: int) -> Any:
    size = struct.unpack("q", _read(descriptor, 8))[0]
    return pickle.loads(_read(descriptor, size))


def _read(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        got = os.read(descriptor, count - len(data))
        if not got:
            raise EOFError("the pipe was closed")
        data += got
    return data


class QueueRanks(Ranks):
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, up: list[queue.SimpleQueue[Any]], down: list[queue.SimpleQueue[Any]]) -> None:
        self.rank, self.size, self.up, self.down = rank, len(up), up, down

    def gather(self, value: Any) -> list[Any] | None:
        self.up[self.rank].put(value)
        return [q.get(timeout=30) for q in self.up] if self.rank == 0 else None

    def scatter(self, values: Sequence[Any] | None) -> Any:
        for target, value in zip(self.down, values or ()):
            target.put(value)
        return self.down[self.rank].get(timeout=30)


def in_threads(function: Callable[[Ranks], str], size: int) -> list[str]:
    """Run ``function`` on ``size`` ranks that stay alive: much cheaper than :func:`in_ranks`."""
    up: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
    down: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: function(QueueRanks(rank, up, down)), range(size)))


def in_ranks(function: Callable[[Ranks], str], size: int) -> list[str]:
    """Run ``function`` on ``size`` forked ranks; its answer per rank, or ``"killed"``."""
    up = [os.pipe() for _ in range(size)]
    down = [os.pipe() for _ in range(size)]
    answers = [os.pipe() for _ in range(size)]
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                signal.signal(signal.SIGPIPE, signal.SIG_IGN)
                os.write(answers[rank][1], function(PipeRanks(rank, size, up, down)).encode())
            except BaseException as error:
                os.write(answers[rank][1], f"raised {error!r}".encode())
            finally:
                os._exit(0)
        children.append(child)
    for pair in (*up, *down):
        os.close(pair[0])
        os.close(pair[1])
    told = []
    for rank, child in enumerate(children):
        _, status = os.waitpid(child, 0)
        os.close(answers[rank][1])
        text = os.read(answers[rank][0], 1 << 16).decode()
        os.close(answers[rank][0])
        told.append("killed" if os.WIFSIGNALED(status) else text)
    return told


def state(step: int, ranks: int = 2) -> list[dict[str, Tensor]]:
    """What each rank holds at ``step``: own tensors, and one that all hold."""
    shared = torch.full((3, 5), float(step))
    return [
        {
            f"model.blocks.{rank}.weight": torch.full((9, 7), step * 10.0 + rank),
            f"optimizer.0.blocks.{rank}.weight.step": torch.tensor(float(step)),
            "model.shared": shared.clone(),
        }
        for rank in range(ranks)
    ]


def everything(step: int, ranks: int = 2) -> dict[str, Tensor]:
    """What all ranks together hold at ``step``."""
    return {name: value for part in state(step, ranks) for name, value in part.items()}


def save(path: Path, step: int, **more: Any) -> None:
    """Save :func:`everything` from one process."""
    save_sharded(path, everything(step), {"step": step}, step=step, **more)


def memory_directory() -> Iterator[Path]:
    """A directory in memory where there is one: thousands of synced files take seconds there, not minutes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)


def found(path: Path, ranks: int = 2) -> int | None:
    """The step of the checkpoint at ``path`` after comparing every value of it; ``None`` when there is none.

    Raises:
        AssertionError: it is a mix, or damaged.
    """
    held = everything(0, ranks)
    try:
        rest = load_sharded(path, held)
    except CheckpointError as error:
        assert "it does not exist" in str(error), error
        return None
    step = rest["step"]
    for name, value in everything(step, ranks).items():
        assert torch.equal(held[name], value), f"{name} is not of step {step}: a mix of two checkpoints"
    return step
