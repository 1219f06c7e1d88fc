"""The one error of this package and how a failure on one rank becomes the same error on every rank."""

from __future__ import annotations

import errno
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """What went wrong on one rank: plain values, so that it travels between ranks.

    Args:
        rank: the rank in the process group that raised.
        message: one line naming path or tensor.
        code: the ``errno`` of an ``OSError``, else ``None``.
    """

    rank: int
    message: str
    code: int | None = None


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be saved or loaded; every rank of the call raises it with the same message.

    Attributes:
        failures: the :class:`Failure` of each rank that raised; empty for an error found by all ranks alike.
    """

    def __init__(self, message: str, failures: tuple[Failure, ...] = ()) -> None:
        super().__init__(message)
        self.failures = failures

    @property
    def failing_rank(self) -> int | None:
        """The first rank that raised, for whoever reports the failure; ``None`` when all found it alike."""
        return self.failures[0].rank if self.failures else None

    def __reduce__(self) -> tuple[type[CheckpointError], tuple[str, tuple[Failure, ...]]]:
        return type(self), (str(self), self.failures)


def describe(error: BaseException) -> tuple[str, int | None]:
    """One line for ``error`` and its errno. ``[ENOSPC] No space left on device: '/path'``, ``KeyError: 'x'``."""
    if isinstance(error, CheckpointError):
        return str(error), next((f.code for f in error.failures), None)
    if isinstance(error, OSError) and error.errno is not None:
        name = errno.errorcode.get(error.errno, str(error.errno))
        where = f": {error.filename!r}" if error.filename is not None else ""
        return f"[{name}] {error.strerror}{where}", error.errno
    return f"{type(error).__name__}: {error}", None


def human_bytes(count: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
