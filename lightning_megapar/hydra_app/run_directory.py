"""One run, one directory: claimed by one process, never written over by another run.

The claim is the exclusive creation of ``run.json`` in the directory, so of any number of jobs that start in the same
second exactly one gets a name. While the run lives, a lock on that file is held by the claiming process and by every
rank forked from it: a directory whose lock is free and whose state says ``running`` belongs to a run that was killed.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hydra.errors import InstantiationException

from lightning_megapar.config import ConfigError

CLAIM = "run.json"
CONFIG = "config.yaml"
OVERRIDES = "overrides.yaml"
CHECKPOINTS = "checkpoints"
_MOST_SUFFIXES = 10_000


def is_first_process() -> bool:
    """Whether this process is global rank 0, as far as the environment of a launcher tells."""
    for name in ("RANK", "SUBMITIT_LOCAL_GLOBALID", "SLURM_PROCID", "LOCAL_RANK"):
        if name in os.environ:
            return os.environ[name] == "0"
    return True


class RunDirectory:
    """A claimed directory, as a context manager that records how the run ended.

    Attributes:
        path: absolute.
        claimed: ``False`` on ranks other than 0, which write nothing here.
    """

    def __init__(self, path: Path, handle: int | None) -> None:
        self.path = path
        self._handle = handle
        self._owner = os.getpid()
        self._state: dict[str, Any] = {}
        self._written: list[Path] = []
        self._resumed = False

    @property
    def claimed(self) -> bool:
        return self._handle is not None

    @classmethod
    def claim(cls, path: str | os.PathLike[str], automatic: bool) -> RunDirectory:
        """Claim a new directory.

        Args:
            path: wanted; relative to the working directory.
            automatic: the name was not chosen by anybody: when it is taken, ``_1``, ``_2``, ... is appended.

        Raises:
            ConfigError: when a chosen directory holds a run (finished, interrupted or live) or other files.
        """
        wanted = Path(os.path.abspath(path))
        if not is_first_process():
            return cls(wanted, None)
        for attempt in range(_MOST_SUFFIXES):
            candidate = wanted if attempt == 0 else wanted.with_name(f"{wanted.name}_{attempt}")
            claimed = cls._try(candidate)
            if claimed is not None:
                return claimed
            if not automatic:
                raise ConfigError(_why_taken(wanted))
        raise ConfigError(f"run_dir={str(wanted)!r}: no free name after {_MOST_SUFFIXES} attempts")

    @classmethod
    def _try(cls, path: Path) -> RunDirectory | None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run_dir={str(path)!r} cannot be made: {error.strerror}") from error
        try:
            try:
                path.mkdir()
            except FileExistsError:
                # A directory that Hydra made for a job of a sweep, or that somebody made and left empty, is free.
                if not path.is_dir() or any(path.iterdir()):
                    return None
            handle = os.open(path / CLAIM, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return None
        except OSError as error:
            raise ConfigError(f"run_dir={str(path)!r} cannot be made: {error.strerror}") from error
        _lock(handle)
        run = cls(path, handle)
        run._written.append(path / CLAIM)
        run._begin()
        return run

    @classmethod
    def reopen(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """Claim the directory of a run that has ended, to go on with it.

        Raises:
            ConfigError: when there is no run, or it still lives.
        """
        directory = Path(os.path.abspath(path))
        if not is_first_process():
            return cls(directory, None)
        try:
            handle = os.open(directory / CLAIM, os.O_RDWR)
        except OSError as error:
            raise ConfigError(f"resume={str(directory)!r} holds no run ({CLAIM}: {error.strerror})") from error
        if not _lock(handle):
            os.close(handle)
            raise ConfigError(f"resume={str(directory)!r}: {_describe(directory)} and cannot be resumed yet")
        run = cls(directory, handle)
        run._resumed = True
        run._begin()
        return run

    def _begin(self) -> None:
        self._state = {
            "state": "running",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": shlex.join([sys.executable, *sys.argv]),
        }
        self._record()

    def _record(self, **changes: Any) -> None:
        if self._handle is None:
            return
        self._state.update(changes)
        text = (json.dumps(self._state, indent=1) + "\n").encode()
        os.lseek(self._handle, 0, os.SEEK_SET)
        os.write(self._handle, text)
        os.ftruncate(self._handle, len(text))

    def write(self, name: str, text: str) -> None:
        """Write a small file of the run; a no-op on ranks that claimed nothing."""
        if not self.claimed:
            return
        target = self.path / name
        scratch = target.with_name(f".{name}.{os.getpid()}")
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(target)
        self._written.append(target)

    def keep_older(self, name: str) -> None:
        """Move a file aside as ``stem_1.ext`` (or the next free number), so that its successor does not hide it."""
        older = self.path / name
        if not self.claimed or not older.exists():
            return
        number = 1
        while (aside := older.with_name(f"{older.stem}_{number}{older.suffix}")).exists():
            number += 1
        older.rename(aside)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is None or os.getpid() != self._owner:
            return  # a rank forked from the claiming process: the owner records the end
        if isinstance(value, (ConfigError, InstantiationException)) and not self._resumed and self._only_own_files():
            # Refused before anything was trained: leave no directory behind.
            for path in self._written:
                path.unlink(missing_ok=True)
            for directory in (self.path / CHECKPOINTS, self.path):
                try:
                    directory.rmdir()
                except OSError:
                    pass
        elif value is None or (isinstance(value, SystemExit) and value.code in (None, 0)):
            self._record(state="finished", ended=time.strftime("%Y-%m-%d %H:%M:%S"))
        else:
            stopped = isinstance(value, (KeyboardInterrupt, SystemExit))
            state = "interrupted" if stopped else "failed"
            self._record(state=state, ended=time.strftime("%Y-%m-%d %H:%M:%S"))
        os.close(self._handle)
        self._handle = None

    def _only_own_files(self) -> bool:
        return all(path in self._written or path.name == CHECKPOINTS for path in self.path.iterdir())


def state_of(path: str | os.PathLike[str]) -> str | None:
    """``"live"``, ``"finished"``, ``"interrupted"`` or ``"failed"``; ``None`` when no run was ever here."""
    claim = Path(path) / CLAIM
    try:
        handle = os.open(claim, os.O_RDONLY)
    except OSError:
        return None
    try:
        if not _lock(handle, shared=True):  # shared: to look twice at once is no conflict
            return "live"
        recorded = json.loads(claim.read_text(encoding="utf-8") or "{}").get("state", "running")
    except ValueError:
        recorded = "running"
    finally:
        os.close(handle)
    return "interrupted" if recorded == "running" else str(recorded)


def overrides_of(path: str | os.PathLike[str]) -> list[str]:
    """The overrides that a run was started with."""
    import yaml

    try:
        found = yaml.safe_load((Path(path) / OVERRIDES).read_text(encoding="utf-8"))
    except OSError:
        return []
    return [str(entry) for entry in found or []]


def merged_overrides(saved: Sequence[str], given: Sequence[str], dropped: Sequence[str] = ()) -> list[str]:
    """A run's own overrides, then those given now; the last one of a key counts."""

    def key(override: str) -> str:
        return override.lstrip("+~").split("=", 1)[0]

    later = {key(override) for override in given} | set(dropped)
    return [override for override in saved if key(override) not in later] + list(given)


def _describe(directory: Path) -> str:
    state = state_of(directory)
    return {
        "live": "a run is still writing here",
        "finished": "it holds a finished run",
        "interrupted": "it holds an interrupted run",
        "failed": "it holds a run that failed",
    }.get(state or "", "it holds other files" if directory.is_dir() else "there is a file of this name")


def _why_taken(directory: Path) -> str:
    shown = os.path.relpath(directory)
    shown = str(directory) if shown.startswith("..") else shown
    advice = "choose another run_dir, or leave it out for a new name"
    if state_of(directory) in ("finished", "interrupted", "failed"):
        advice = f"go on with it by resume={shown}, or choose another run_dir"
    return f"run_dir={shown}: {_describe(directory)}; {advice}"


def _lock(handle: int, shared: bool = False) -> bool:
    """Take the lock that every process forked from this one shares; ``False`` when a live run holds it."""
    try:
        import fcntl
    except ImportError:  # Windows: the state in the file is all there is
        return True
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True
