"""The ranks that this process forked, or the rank that this process was forked as.

A forked child goes on with the caller's script as if it had been started as that rank. What a process must not share
with its parent is put right here, once, at the fork: threads (one per rank: a pool of OpenMP threads does not survive a
fork and hangs), standard input, the parent's ``atexit`` handlers and child processes, Hydra's console lines.

Life of a set of ranks::

    rank 0    fork ------- launch ------- script ends: waits for the children, exits non-zero when one failed
    rank r      \\--------- launch ------- script ends: flushes, leaves with its own exit code, runs no parent's handler

A process holds at most one set (:func:`current_ranks`), just as it has one environment and one process id; a later
launch, in another Trainer perhaps, must find it.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from lightning_megapar.launch.preemption import EXIT_CODE as PREEMPTED
from lightning_megapar.launch.preemption import die_with_parent
from lightning_megapar.launch.slot import SLOT_PREFIX, FileSlot, report_of

NOTICE_WITHIN = 3.0
"""Seconds that rank 0 has to notice by itself that a child has failed, before the watch ends the run."""
LEAVE_WITHIN = 60.0
"""Seconds that children have to finish their script after rank 0 has finished its own."""
_POLL = 0.2
_VARIABLES = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")

_current: ForkedRanks | None = None
_late_exit_code = 0


def current_ranks() -> ForkedRanks | None:
    """The set of forked ranks that this process belongs to, or ``None``."""
    return _current


class ForkedRanks:
    """A set of ranks on this host, made by :meth:`fork`.

    Attributes:
        size: number of ranks.
        rank: this process's rank.
        children: rank -> process id (rank 0 only).
        ended: rank -> exit code of children that are gone; negative is a signal (rank 0 only).
        directory: private to this user (0700), shared by the ranks: process-group store, failure reports.
        groups: process groups made so far, counted alike on every rank.
        scoped: children run one function only and never return to the caller.
    """

    def __init__(self, size: int, scoped: bool) -> None:
        self.size = size
        self.rank = 0
        self.scoped = scoped
        self.groups = 0
        self.children: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.uid = uuid.uuid4().hex
        self.directory = Path(tempfile.mkdtemp(prefix=f"{SLOT_PREFIX}fork-"))
        self.slot = FileSlot(self.directory)
        self._threads = torch.get_num_threads()
        self._environment = {name: os.environ.get(name) for name in _VARIABLES}
        self._noticed = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._code = _ExitCode()

    # ------------------------------------------------------------------ fork

    @classmethod
    def fork(cls, size: int, scoped: bool = False) -> ForkedRanks:
        """Fork ``size - 1`` children in place; returns in every rank, ``ranks.rank`` tells which.

        Raises:
            RuntimeError: when this process has a set of ranks already.
        """
        global _current
        if _current is not None:
            raise RuntimeError("this process has forked its ranks already")
        ranks = cls(size, scoped)
        ranks._publish_environment()
        torch.set_num_threads(1)
        python_random = random.getstate()  # Python reseeds `random` in a forked child; torch and numpy do not
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python >= 3.12: "multi-threaded, use of fork()"
            for rank in range(1, size):
                child = os.fork()
                if child == 0:
                    random.setstate(python_random)
                    ranks._become(rank, parent)
                    _current = ranks
                    return ranks
                ranks.children[rank] = child
        _current = ranks
        if not scoped:
            ranks._code.watch()
            atexit.register(ranks._finish)
        threading.Thread(target=ranks._watch, name="megapar-ranks", daemon=True).start()
        return ranks

    def _publish_environment(self) -> None:
        from lightning.fabric.plugins.environments.lightning import find_free_network_port

        # Our own group meets in a file; address and port are for others who read the environment (a plain DDP run
        # later in the same script). A fresh port per fork: never one that an earlier set of ranks may still hold.
        os.environ.update(
            LOCAL_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(find_free_network_port()),
            WORLD_SIZE=str(self.size),
        )
        if sys.platform.startswith("linux"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: no need to listen to the network

    def _become(self, rank: int, parent: int) -> None:
        die_with_parent(parent)
        self.rank = rank
        self.children = {}
        torch.set_num_threads(1)
        os.environ["LOCAL_RANK"] = str(rank)
        _forget_parents_children()
        _close_stdin()
        _quiet_hydra()
        self._closed, self._noticed, self._lock = threading.Event(), threading.Event(), threading.Lock()
        if not self.scoped:
            self._code.watch()
            sys.excepthook = self._child_excepthook
            atexit.register(self._leave_at_exit)
        threading.Thread(target=self._follow_parent, args=(parent,), name="megapar-parent", daemon=True).start()

    def _follow_parent(self, parent: int) -> None:
        # Where the kernel does not do it for us, and for a parent that launched from a thread.
        while not self._closed.wait(1.0):
            if os.getppid() != parent:
                os._exit(1)

    # ------------------------------------------------------------- a child's end

    def leave(self, code: int) -> NoReturn:
        """End this child now: streams flushed, its own DataLoader workers ended, nothing of the parent's run."""
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        try:
            import multiprocessing

            for process in multiprocessing.active_children():
                process.terminate()
        finally:
            os._exit(code)

    def leave_silently(self, code: int = 1) -> NoReturn:
        """As :meth:`leave`, with standard error closed first: C++ threads write to it while the process dies."""
        _flush(sys.stdout)
        silence_stderr()
        self.leave(code)

    def note_exit(self, code: int) -> None:
        """Remember the code of a SystemExit that passes through a launch."""
        self._code.value = code

    def _leave_at_exit(self) -> None:
        if self._code.value == 0:
            self.leave(0)
        self.leave_silently(self._code.value)

    def _child_excepthook(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        self._code.value = 130 if issubclass(kind, KeyboardInterrupt) else 1
        if not issubclass(kind, KeyboardInterrupt):
            self.slot.claim(report_of(value.with_traceback(trace), self.rank, f"rank {self.rank}", "the script", False))

    # ------------------------------------------------------------------ rank 0

    def reap(self) -> None:
        """Collect the exit codes of children that are gone."""
        with self._lock:
            for rank, pid in self.children.items():
                if rank in self.ended:
                    continue
                try:
                    done, status = os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:  # somebody else's wait got it
                    self.ended[rank] = 0
                    continue
                if done:
                    self.ended[rank] = os.waitstatus_to_exitcode(status)

    @property
    def alive(self) -> dict[int, int]:
        """Rank -> process id of the children that still run."""
        self.reap()
        return {rank: pid for rank, pid in self.children.items() if rank not in self.ended}

    @property
    def complete(self) -> bool:
        """Whether every rank is still there. Only rank 0 can tell; a child says yes."""
        return self.rank != 0 or len(self.alive) == self.size - 1

    @property
    def failed(self) -> dict[int, int]:
        """Rank -> exit code of children that failed; leaving after SIGTERM (143) is no failure."""
        self.reap()
        return {rank: code for rank, code in self.ended.items() if code not in (0, PREEMPTED)}

    def notice(self) -> None:
        """Rank 0 deals with the failure itself: the watch stands down."""
        self._noticed.set()

    def signal(self, signum: int) -> None:
        """Send a signal to every child that still runs."""
        for pid in self.alive.values():
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                pass

    def wait(self, seconds: float) -> bool:
        """Wait for the children to end; returns whether all did."""
        deadline = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def kill(self) -> None:
        """End every child at once."""
        self.notice()
        self.signal(signal.SIGKILL)
        self.wait(5.0)

    def close(self, seconds: float = 0.0) -> None:
        """End the set: children get ``seconds`` to leave, then are killed; environment and threads as before it."""
        global _current
        self.notice()
        if not self.wait(seconds):
            self.kill()
        self._closed.set()
        atexit.unregister(self._finish)
        self._code.restore()
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        torch.set_num_threads(self._threads)
        shutil.rmtree(self.directory, ignore_errors=True)
        if _current is self:
            _current = None

    def describe_failed(self) -> str:
        """One line per failed child: how it ended."""
        return "\n".join(f"rank {rank} {how_it_ended(code)}" for rank, code in sorted(self.failed.items()))

    def _watch(self) -> None:
        since: float | None = None
        while not self._closed.wait(_POLL):
            if self._noticed.is_set() or self.scoped:
                continue
            if not self.failed:
                continue
            since = since or time.monotonic()
            if time.monotonic() - since >= NOTICE_WITHIN and not self._noticed.is_set():
                self._end_run()

    def _end_run(self) -> NoReturn:
        # Rank 0 is blocked or busy and nobody else may speak: say what happened, leave nothing behind.
        self.kill()
        self._say_failure()
        _flush(sys.stdout)
        shutil.rmtree(self.directory, ignore_errors=True)
        os._exit(1)

    def _say_failure(self) -> None:
        report = self.slot.first()
        text = report.text() if report is not None and not report.lost else self.describe_failed()
        _flush(sys.stdout)
        print(f"\n{text}", file=sys.stderr, flush=True)

    def _finish(self) -> None:
        # atexit, rank 0: nothing is left behind, and a failed child fails the run.
        global _late_exit_code
        if self._code.value not in (0, PREEMPTED):
            self.kill()
        elif not self.wait(2.0):
            discard_process_group()  # a child that waits for us in a collective gets an error instead of a hang
            if not self.wait(LEAVE_WITHIN):
                late = ", ".join(map(str, self.alive))
                print(f"ranks {late} still run {LEAVE_WITHIN:.0f} s after rank 0: ended", file=sys.stderr)
        failed = dict(self.failed) or dict(self.alive)
        delivered = self._noticed.is_set()
        if failed and not delivered:
            if self.failed:
                self._say_failure()
            if self._code.value == 0:
                _late_exit_code = 1
        self.close()


class _ExitCode:
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


def how_it_ended(code: int) -> str:
    """``was killed by SIGKILL`` or ``left with exit code 3``."""
    if code >= 0:
        return f"left with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


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


def silence_stderr() -> None:
    """Point file descriptor 2 at nothing."""
    _flush(sys.stderr)
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
    except OSError:
        pass


def _flush(stream: Any) -> None:
    try:
        stream.flush()
    except (OSError, ValueError, AttributeError):  # closed, a broken pipe, or None under pythonw
        pass


def _close_stdin() -> None:
    try:
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.close(nowhere)
    except OSError:
        pass


def _forget_parents_children() -> None:
    # What multiprocessing's own fork does in its child: the parent's DataLoader workers are not ours to end.
    from multiprocessing import process, util

    children = getattr(process, "_children", None)
    if isinstance(children, set):
        children.clear()
    registry = getattr(util, "_finalizer_registry", None)
    if isinstance(registry, dict):
        registry.clear()


def _quiet_hydra() -> None:
    # A filter outlives the logging reconfiguration that Hydra does between the jobs of a sweep.
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in ("hydra", "hydra_plugins"):
            logging.getLogger(name).addFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _leave_late() -> None:
    # Registered at import, so it runs after the handlers of everything that started later (trackers, loggers).
    if _late_exit_code:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        os._exit(_late_exit_code)


atexit.register(_leave_late)
