"""What a process must see to when it becomes one rank of several: its exit code, its streams, its noise."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist


class ExitCode:
    """The code that this process is about to exit with, as far as Python lets one know before it does."""

    def __init__(self) -> None:
        self.value = 0
        self._exit: Callable[..., Any] | None = None
        self._hook: Callable[..., Any] | None = None

    def watch(self) -> None:
        self.restore()
        self._exit, self._hook = original_exit, original_hook = sys.exit, sys.excepthook

        def exit_and_note(status: Any = None, /) -> NoReturn:
            self.value = code_of(status)
            original_exit(status)
            raise AssertionError("unreachable")

        def note_exception(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            self.value = 1
            original_hook(kind, value, trace)

        self._mine = (exit_and_note, note_exception)
        sys.exit, sys.excepthook = exit_and_note, note_exception  # type: ignore[assignment]

    def restore(self) -> None:
        if self._exit is None:
            return
        if sys.exit is self._mine[0]:
            sys.exit = self._exit  # type: ignore[assignment]
        if sys.excepthook is self._mine[1] and self._hook is not None:
            sys.excepthook = self._hook
        self._exit = None


def code_of(status: Any) -> int:
    """The exit code that ``sys.exit(status)`` means."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1


def discard_process_group() -> None:
    """Drop the default process group without waiting for anybody; no error leaves here."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    try:
        abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if abort is not None and "nccl" in str(dist.get_backend()):
            abort()  # destroy would wait for kernels that never finish
        else:
            dist.destroy_process_group()
    except Exception:
        traceback.clear_frames(sys.exc_info()[2])


def process_groups_alive() -> list[Any]:
    """Every process group, store and pending work that something in this process still refers to.

    For the parent, before a fork: a child must keep them for ever. Their destructors join threads that only the parent
    has, and crash or hang in a child that drops the last reference (an earlier Trainer, say, that the script rebinds).
    """
    wanted = (dist.ProcessGroup, dist.Store, dist.Work)
    known: dict[type, bool] = {}
    found = {}
    for holder in gc.get_objects():
        for held in gc.get_referents(holder):
            kind = type(held)
            # A dictionary or tuple of nothing but groups is unknown to the collector: look into it as well.
            inner = gc.get_referents(held) if kind in (dict, tuple) and not gc.is_tracked(held) else ()
            for one in (held, *inner):
                kind = type(one)
                if kind not in known:
                    known[kind] = any(base in wanted for base in kind.__mro__)
                if known[kind]:
                    found[id(one)] = one
    return list(found.values())


def silence_stderr() -> None:
    """Point file descriptor 2 at nothing."""
    flush(sys.stderr)
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
    except OSError:
        pass


def flush(stream: Any) -> None:
    try:
        stream.flush()
    except (OSError, ValueError, AttributeError):  # closed, a broken pipe, or None under pythonw
        pass


def flush_files() -> None:
    """Write out whatever this process has buffered for files that are open, for an end that does not close them.

    A forked child sees only files of its own: what it inherited is frozen (:func:`gc.freeze`), and still its parent's
    to write.
    """
    # Archives write their directory when they are closed, and text goes through bytes.
    archive = getattr(sys.modules.get("zipfile"), "ZipFile", io.TextIOWrapper)
    order = (archive, io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)
    files: Any = [found for found in gc.get_objects() if issubclass(type(found), order)]
    for file in sorted(files, key=lambda file: next(i for i, kind in enumerate(order) if isinstance(file, kind))):
        with contextlib.suppress(Exception):  # whatever somebody's file raises: the others have still to be written
            file.close() if hasattr(file, "writestr") else file.flush()


def close_stdin() -> None:
    try:
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.close(nowhere)
    except OSError:
        pass


def forget_parents_children() -> None:
    # What multiprocessing's own fork does in its child: the parent's DataLoader workers are not ours to end.
    from multiprocessing import process, util

    children = getattr(process, "_children", None)
    if isinstance(children, set):
        children.clear()
    registry = getattr(util, "_finalizer_registry", None)
    if isinstance(registry, dict):
        registry.clear()


def quiet_hydra() -> None:
    # A filter outlives the logging reconfiguration that Hydra does between the jobs of a sweep.
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in ("hydra", "hydra_plugins"):
            logging.getLogger(name).addFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


class WarnOnce:
    """Shows each Python warning on one of the ranks: the one that gets to it first.

    Args:
        directory: shared by the ranks and private to them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mine: set[str] = set()
        self._original: Callable[..., Any] | None = None

    def install(self) -> None:
        self._original, warnings.showwarning = warnings.showwarning, self._show

    def restore(self) -> None:
        if self._original is not None and warnings.showwarning == self._show:
            warnings.showwarning = self._original
        self._original = None

    def _show(
        self, message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        key = hashlib.sha256(f"{category.__name__} {filename}:{lineno}".encode()).hexdigest()[:20]
        if key not in self._mine:
            try:
                os.close(os.open(self._directory / f"warned-{key}", os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                return
            except OSError:  # the run is over: better twice than never
                pass
            self._mine.add(key)
        assert self._original is not None
        self._original(message, category, filename, lineno, file, line)


class HydraErrors:
    """Standard error of a child under ``@hydra.main``, which prints the traceback of its job itself.

    What Hydra writes from "Error executing job" on is kept for the report instead of standing on the terminal once per
    rank. Everything else passes through.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._kept: list[str] | None = None

    @property
    def kept(self) -> str:
        return "".join(self._kept or ())

    def release(self) -> None:
        """A new job begins."""
        self._kept = None

    def write(self, text: str) -> int:
        if self._kept is None and text.startswith("Error executing job with overrides"):
            self._kept = []
        if self._kept is not None:
            self._kept.append(text)
            return len(text)
        return int(self._stream.write(text) or 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
