"""Where the first failing rank of a run leaves its report, and where the others look for it.

A report is either *primary* (the rank's own exception) or *lost* (the rank only noticed that a peer is gone). The two
are kept apart, so that a rank whose connection broke never takes the place of the rank that broke it.

Two slots exist. :class:`FileSlot` is a private directory on one host. :class:`StoreSlot` is the TCPStore of the run,
reached over a connection of its own because a store client that blocks in the main thread blocks every thread that
shares it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist


@dataclass(frozen=True)
class Report:
    """What a failing rank says.

    Attributes:
        rank: global rank.
        place: the rank with its coordinates, such as ``rank 3 (data 0, pipeline 1, tensor 1)``.
        where: the stage, such as ``training step 12``.
        kind: qualified name of the exception's type.
        message: its text.
        traceback: the formatted traceback; its last lines hold the message.
        time: seconds since the epoch.
        lost: the exception only says that a peer is gone.
    """

    rank: int
    place: str
    where: str
    kind: str
    message: str
    traceback: str
    time: float
    lost: bool = False

    def text(self) -> str:
        """For the terminal; the exception's message stands in it once."""
        body = self.traceback.strip() or (f"{self.kind}: {self.message}" if self.kind else self.message)
        return f"{self.place} failed in {self.where}\n\n{body}"


class Slot(Protocol):
    def claim(self, report: Report) -> bool:
        """Leave a report. Returns whether it is the first of its sort (primary or lost)."""

    def first(self) -> Report | None:
        """The first primary report, else the first lost one, else ``None``. Never raises."""

    def say_spoken(self) -> None:
        """The report stands on the terminal. Never raises."""

    def spoken(self) -> bool:
        """Whether it does. Never raises."""


class FileSlot:
    """Reports as files created with O_EXCL in a directory that only this user can enter."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def _path(self, lost: bool) -> Path:
        return self.directory / ("lost.json" if lost else "failure.json")

    def claim(self, report: Report) -> bool:
        try:
            handle = os.open(self._path(report.lost), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        except FileNotFoundError:  # the run is over and its directory gone: nobody is left to tell
            return True
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(report), file)
        return True

    def first(self) -> Report | None:
        for lost in (False, True):
            try:
                return Report(**json.loads(self._path(lost).read_text()))
            except (OSError, ValueError, TypeError):  # absent, or still being written
                continue
        return None

    def say_spoken(self) -> None:
        try:
            (self.directory / "spoken").touch()
        except OSError:
            pass

    def spoken(self) -> bool:
        return (self.directory / "spoken").exists()


class StoreSlot:
    """Reports in the run's TCPStore, for ranks that share no disk.

    Args:
        host, port: where the store listens.
        prefix: key prefix of this run and attempt.
        exists: whether the store has been set up; before that each rank is on its own.
        timeout: seconds that one attempt to reach the store may take.
    """

    def __init__(
        self, host: str, port: int, prefix: str, exists: Callable[[], bool] = lambda: True, timeout: float = 2.0
    ) -> None:
        self._address = (host, port)
        self._prefix = prefix
        self._exists = exists
        self._timeout = timedelta(seconds=timeout)
        self._store: dist.Store | None = None

    def _connect(self) -> dist.Store:
        if self._store is None:
            host, port = self._address
            client = dist.TCPStore(host, port, is_master=False, timeout=self._timeout, wait_for_workers=False)
            self._store = dist.PrefixStore(self._prefix, client)
        return self._store

    def claim(self, report: Report) -> bool:
        mine = json.dumps(asdict(report))
        if not self._exists():
            return True
        try:
            kept = self._connect().compare_set("lost" if report.lost else "failure", "", mine)
        except Exception:  # the store went with its host: every rank speaks for itself
            return True
        return bool(kept == mine.encode())

    def first(self) -> Report | None:
        for key in ("failure", "lost") if self._exists() else ():
            try:
                store = self._connect()
                if store.check([key]):
                    return Report(**json.loads(store.get(key)))
            except Exception:
                return None
        return None

    def say_spoken(self) -> None:
        try:
            self._connect().set("spoken", "yes")
        except Exception:
            pass

    def spoken(self) -> bool:
        try:
            return bool(self._connect().check(["spoken"]))
        except Exception:  # the store is gone and so is the speaker that hosted it
            return True


def report_of(exception: BaseException, rank: int, place: str, where: str, lost: bool) -> Report:
    """The report on an exception that is being handled."""
    import traceback

    kind = type(exception)
    chain: dict[str, Any] = {}
    try:
        chain["traceback"] = "".join(traceback.format_exception(kind, exception, exception.__traceback__))
        chain["message"] = str(exception)
    except Exception as broken:  # an exception whose __str__ raises must not hide that it happened
        chain = {"traceback": f"{kind.__qualname__} (its text raised {broken!r})\n", "message": ""}
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return Report(rank, place, where, name, chain["message"], chain["traceback"], time.time(), lost)
