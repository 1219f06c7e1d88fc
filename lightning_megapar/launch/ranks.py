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
import gc
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
import warnings
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TextIO, cast

import torch
import torch.distributed as dist

from lightning_megapar.launch.hygiene import (
    ExitCode,
    HydraErrors,
    WarnOnce,
    close_stdin,
    discard_process_group,
    flush,
    flush_files,
    forget_parents_children,
    process_groups_alive,
    quiet_hydra,
    silence_stderr,
)
from lightning_megapar.launch.preemption import EXIT_CODE as PREEMPTED
from lightning_megapar.launch.preemption import die_with_parent
from lightning_megapar.launch.slot import FileSlot, Report, report_of
from lightning_megapar.mesh import forget_cached_meshes

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
        scoped: children run one function only and never return to the caller.
    """

    def __init__(self, size: int, scoped: bool) -> None:
        self.size = size
        self.rank = 0
        self.scoped = scoped
        self.children: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.uid = uuid.uuid4().hex
        self.directory = _private_directory()
        self.slot = FileSlot(self.directory)
        self._threads = torch.get_num_threads()
        self._environment = {name: os.environ.get(name) for name in _VARIABLES}
        self._noticed = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._code = ExitCode()
        self._warn_once = WarnOnce(self.directory)
        self._hydra_errors: HydraErrors | None = None
        self._kept: list[object] = []  # of the parent's, in a child

    # ------------------------------------------------------------------ fork

    _forks = 0

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
        ForkedRanks._forks += 1
        ranks._publish_environment()
        torch.set_num_threads(1)
        forget_cached_meshes()
        gc.collect()  # what is dead dies here, where its threads are ...
        if ForkedRanks._forks > 1 or dist.is_initialized():
            ranks._kept = process_groups_alive()
        frozen_by_user = gc.get_freeze_count() > 0
        gc.freeze()  # ... and what children inherit is never collected in them (nor are its pages copied)
        python_random = random.getstate()  # Python reseeds `random` in a forked child; torch and numpy do not
        for stream in (sys.stdout, sys.stderr):
            flush(stream)
        parent = os.getpid()
        from_main = threading.current_thread() is threading.main_thread()
        rank = ranks._fork_each()
        if rank:
            random.setstate(python_random)
            ranks._become(rank, parent, from_main)
            _current = ranks
            return ranks
        if not frozen_by_user:
            gc.unfreeze()
        ranks._kept = []
        _current = ranks
        if not scoped:
            ranks._code.watch()
            ranks._warn_once.install()
            atexit.register(ranks._finish)
        threading.Thread(target=ranks._watch, name="megapar-ranks", daemon=True).start()
        return ranks

    def _fork_each(self) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python >= 3.12: "multi-threaded, use of fork()"
            for rank in range(1, self.size):
                try:
                    child = os.fork()
                except OSError:  # out of processes or memory
                    self.close()
                    raise
                if child == 0:
                    return rank
                self.children[rank] = child
        return 0

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

    def _become(self, rank: int, parent: int, from_main: bool) -> None:
        if from_main:  # the kernel's notion of a parent is the thread that forked
            die_with_parent(parent)
        self.rank = rank
        self.children = {}
        torch.set_num_threads(1)
        os.environ["LOCAL_RANK"] = str(rank)
        forget_parents_children()
        close_stdin()
        quiet_hydra()
        self._closed, self._noticed, self._lock = threading.Event(), threading.Event(), threading.Lock()
        if not self.scoped:
            self._code.watch()
            self._warn_once.install()
            sys.excepthook = self._child_excepthook
            if "hydra" in sys.modules:
                self._hydra_errors = HydraErrors(sys.stderr)
                sys.stderr = cast(TextIO, self._hydra_errors)
            atexit.register(self._leave_at_exit)
        threading.Thread(target=self._follow_parent, args=(parent,), name="megapar-parent", daemon=True).start()

    def _follow_parent(self, parent: int) -> None:
        # Where the kernel does not do it for us, and for a parent that launched from a thread.
        while not self._closed.wait(1.0):
            if os.getppid() != parent:
                os._exit(1)

    # ------------------------------------------------------------- a child's end

    def leave(self, code: int) -> NoReturn:
        """End this child now: its files flushed, its own DataLoader workers ended, nothing of the parent's run."""
        for stream in (sys.stdout, sys.stderr):
            flush(stream)
        flush_files()
        try:
            import multiprocessing

            for process in multiprocessing.active_children():
                process.terminate()
        finally:
            os._exit(code)

    def leave_silently(self, code: int = 1) -> NoReturn:
        """As :meth:`leave`, with standard error closed first: C++ threads write to it while the process dies."""
        flush(sys.stdout)
        silence_stderr()
        self.leave(code)

    def note_exit(self, code: int) -> None:
        """Remember the code of a SystemExit that passes through a launch."""
        self._code.value = code

    def begin_launch(self) -> None:
        """Another launch on the same ranks."""
        if self._hydra_errors is not None:
            self._hydra_errors.release()

    def _leave_at_exit(self) -> None:
        if self._code.value not in (0, PREEMPTED) and self._hydra_errors is not None and self._hydra_errors.kept:
            text = self._hydra_errors.kept
            self.slot.claim(Report(self.rank, f"rank {self.rank}", "the script", "", "", text, time.time()))
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
        self._warn_once.restore()
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
        flush(sys.stdout)
        shutil.rmtree(self.directory, ignore_errors=True)
        os._exit(1)

    def _say_failure(self) -> None:
        report = self.slot.first()
        text = report.text() if report is not None and not report.lost else self.describe_failed()
        flush(sys.stdout)
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


def _private_directory() -> Path:
    prefix = "megapar-ranks-"
    for old in Path(tempfile.gettempdir()).glob(f"{prefix}*"):  # of runs that were killed
        pid = old.name.removeprefix(prefix).split("-")[0]
        if pid.isdigit() and not _runs(int(pid)):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))  # mode 0700


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def how_it_ended(code: int) -> str:
    """``was killed by SIGKILL`` or ``left with exit code 3``."""
    if code >= 0:
        return f"left with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _leave_late() -> None:
    # Registered at import, so it runs after the handlers of everything that started later (trackers, loggers).
    if _late_exit_code:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            flush(stream)
        os._exit(_late_exit_code)


atexit.register(_leave_late)
