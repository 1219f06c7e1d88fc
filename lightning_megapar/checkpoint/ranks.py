"""The ranks that save or load together, and the step that all of them pass or none.

:meth:`Ranks.step` and :meth:`Ranks.first` are the only collectives of saving and loading. Whatever one rank raises
inside them, every rank leaves with the same :class:`~lightning_megapar.checkpoint.errors.CheckpointError`: nobody
waits for a rank that has given up.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_megapar.checkpoint.errors import CheckpointError, Failure, describe

T = TypeVar("T")
R = TypeVar("R")


class Ranks(ABC):
    """A group of processes: ``rank`` of ``size``, with objects gathered to and scattered from rank 0."""

    rank: int = 0
    size: int = 1

    @abstractmethod
    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value in rank order on rank 0, ``None`` elsewhere."""

    @abstractmethod
    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Rank 0 passes one value per rank; every rank gets its own."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        return self.scatter([value] * self.size if self.rank == 0 else None)

    def first(self, what: str, function: Callable[[], T]) -> T:
        """Run ``function`` on rank 0 alone and give every rank its result, or the same error.

        Raises:
            CheckpointError: as for :meth:`step`.
        """
        original: BaseException | None = None
        outcome: Any = None
        if self.rank == 0:
            try:
                outcome = (None, function())
            except BaseException as error:
                original = error
                outcome = (self._deciding_failed(what, error), None)
        with _lost_ranks_named(what):
            fault, value = self.broadcast(outcome)
        _raise_alike(fault, original)
        return value

    def step(self, what: str, local: Callable[[], T], decide: Callable[[list[T]], Sequence[R]]) -> R:
        """Run ``local`` on every rank and ``decide`` on rank 0 over all its results; return this rank's share.

        Args:
            what: for the message, such as ``"saving /runs/last.ckpt"``.
            local: this rank's part. Anything that it raises becomes every rank's error.
            decide: rank 0's part: results in rank order -> one value per rank. Same rule.

        Raises:
            CheckpointError: the same on every rank; on a rank that raised, a note tells where the original exception
                came from (its text stands in the message).
            BaseException: an interrupt (``KeyboardInterrupt``, ``SystemExit``) is raised again on the rank it hit,
                after its peers have been told.
        """
        original: BaseException | None = None
        result: Any = None
        failure: Failure | None = None
        try:
            result = local()
        except BaseException as error:
            original = error
            failure = Failure(self.rank, *describe(error))
        with _lost_ranks_named(what):
            gathered = self.gather((failure, result))
        verdict: list[Any] | None = None
        if gathered is not None:
            failures = tuple(f for f, _ in gathered if f is not None)
            fault: CheckpointError | None = None
            shares: Sequence[Any] = [None] * self.size
            if failures:
                fault = CheckpointError(_message(what, failures, self.size), failures)
            else:
                try:
                    shares = decide([value for _, value in gathered])
                except BaseException as error:
                    original = error
                    fault = self._deciding_failed(what, error)
            verdict = [(fault, share) for share in shares]
        with _lost_ranks_named(what):
            fault, share = self.scatter(verdict)
        _raise_alike(fault, original)
        return share

    def _deciding_failed(self, what: str, error: BaseException) -> CheckpointError:
        """The error of all ranks for what rank 0 found out on behalf of all, or failed to do."""
        text, code = describe(error)
        if isinstance(error, CheckpointError):
            return CheckpointError(f"{what}: {text}", error.failures)
        failures = (Failure(self.rank, text, code),)
        return CheckpointError(_message(what, failures, self.size), failures)


def _raise_alike(fault: CheckpointError | None, original: BaseException | None) -> None:
    if fault is None:
        return
    if original is not None and not isinstance(original, Exception):
        raise original
    if original is not None and not isinstance(original, CheckpointError) and hasattr(fault, "add_note"):
        fault.add_note("raised at\n" + "".join(traceback.format_tb(original.__traceback__)).rstrip())
    raise fault from None


@contextmanager
def _lost_ranks_named(what: str) -> Iterator[None]:
    """torch.distributed reports a dead peer as a closed socket; say what that means here."""
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        raise CheckpointError(f"{what}: another rank has died or left ({str(error).splitlines()[0]})") from error


def _message(what: str, failures: tuple[Failure, ...], size: int) -> str:
    distinct = {f.message for f in failures}
    if size == 1 or (len(failures) == size and len(distinct) == 1):
        return f"{what}: {failures[0].message}"
    named = "; ".join(f"rank {f.rank}: {f.message}" for f in failures[:4])
    more = f" (and {len(failures) - 4} more ranks)" if len(failures) > 4 else ""
    return f"{what} failed on {named}{more}"


class OneRank(Ranks):
    """A single process, with or without torch.distributed."""

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def scatter(self, values: Sequence[Any] | None) -> Any:
        assert values is not None
        return values[0]


class GroupRanks(Ranks):
    """A ``torch.distributed`` process group.

    Objects travel pickled between the ranks of one job: on gloo through CPU tensors, on NCCL through tensors on the
    current CUDA device (which must be set). torch.distributed has no authentication; see the security notes.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.first_rank = 0 if group is None else dist.get_global_rank(group, 0)

    def gather(self, value: Any) -> list[Any] | None:
        received: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, received, dst=self.first_rank, group=self.group)
        return received

    def broadcast(self, value: Any) -> Any:
        shared = [value]
        dist.broadcast_object_list(shared, src=self.first_rank, group=self.group)
        return shared[0]

    def scatter(self, values: Sequence[Any] | None) -> Any:
        received: list[Any] = [None]
        given = None if values is None else list(values)
        dist.scatter_object_list(received, given, src=self.first_rank, group=self.group)  # type: ignore[arg-type]
        return received[0]


def ranks_of(process_group: dist.ProcessGroup | Ranks | None) -> Ranks:
    """The ranks of a process group; ``None`` is the default group, or this one process when there is none."""
    if isinstance(process_group, Ranks):
        return process_group
    if not (dist.is_available() and dist.is_initialized()):
        return OneRank()
    ranks = GroupRanks(process_group)
    return ranks if ranks.size > 1 else OneRank()
