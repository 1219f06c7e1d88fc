"""SIGTERM and SIGUSR1 as a flag that the training step reads, instead of work inside a signal handler.

A scheduler warns one rank, some ranks or all of them. The handler here does nothing but set a flag; the strategy
carries it to every rank in the packet that it exchanges each step anyway, so that all of them save at the same step
boundary and leave with exit code 143. Lightning's own SIGTERM handler runs a broadcast inside the handler, which
pairs with whatever collective the other ranks are in: it must not stay installed.

When to install: Lightning registers its handlers in ``Trainer._run`` after ``Strategy.setup`` and just before
``strategy.barrier("run-stage")``. :meth:`PreemptionFlag.install` is idempotent and cheap: call it early (a signal
during set-up is then remembered) and again at ``barrier("run-stage")`` or in ``Strategy.on_train_start``.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning_megapar.launch.hygiene import flush_files

EXIT_CODE = 143
"""What a run that was asked to leave exits with: 128 + SIGTERM, as shells write it."""

REPEAT_AFTER = 2.0
"""Seconds after the first SIGTERM from which another one means "now". A scheduler that signals the whole process
group and an agent that forwards the signal to each rank send the first warning twice within milliseconds."""
CLOSING = 30.0
"""Seconds for which a rank that has saved and is leaving heeds no SIGTERM: an agent that sees the first rank go sends
it to all others, which are still closing their files."""

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class PreemptionFlag:
    """A flag raised by SIGTERM or SIGUSR1.

    While installed, the first signal only sets the flag. A second SIGTERM, :data:`REPEAT_AFTER` seconds or more after
    the first one, ends the process at once. After :meth:`restore` the previous handlers are back; should somebody have
    kept a reference to ours, it passes signals on to the previous ones.
    """

    def __init__(self) -> None:
        self.is_set = False
        self.signum: int | None = None
        self._first = 0.0
        self._active = False
        self._previous: dict[int, _Handler] = {}
        self._handler = self._handle  # a bound method is a new object on each access; this one is recognisable

    @property
    def signal_name(self) -> str:
        """Name of the signal that set the flag (``"SIGTERM"``), or ``""``."""
        return signal.Signals(self.signum).name if self.signum is not None else ""

    def install(self) -> None:
        """Put the handlers in place of whatever is there. Outside the main thread Python forbids it: no-op."""
        if threading.current_thread() is not threading.main_thread():
            return
        for name in ("SIGTERM", "SIGUSR1"):
            signum = getattr(signal, name, None)  # Windows has no SIGUSR1
            if signum is None:
                continue
            current = signal.getsignal(signum)
            if current is self._handler:
                continue
            if not self._active:  # while active, what stands there is Lightning's handler around ours
                self._previous[signum] = current
            signal.signal(signum, self._handler)
        self._active = True

    def restore(self) -> None:
        """Give the signals back to the handlers that were there before the first :meth:`install`.

        Not when the flag is set: the process is leaving because of it, and a launcher that sees the first rank go sends
        SIGTERM to those that are still closing their files.
        """
        if self.is_set:
            return
        self._active = False
        if threading.current_thread() is not threading.main_thread():
            return
        for signum, handler in self._previous.items():
            # Lightning's teardown may have put older handlers back already: leave those alone.
            if signal.getsignal(signum) is self._handler and handler is not None:
                signal.signal(signum, handler)

    def clear(self) -> None:
        """Forget a signal that has been dealt with (by something other than leaving)."""
        self.is_set, self.signum = False, None

    def set(self, signum: int = signal.SIGTERM) -> None:
        """Raise the flag by hand, for example because another rank was asked to leave."""
        if not self.is_set:
            self.is_set, self.signum, self._first = True, int(signum), time.monotonic()

    def leave(self) -> None:
        """All has been saved and this process is leaving: let it, so that its exit code is the one it asked for."""
        self.set()
        self._first = time.monotonic() + CLOSING - REPEAT_AFTER
        atexit.register(_end_quickly)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self._active:
            previous = self._previous.get(signum, signal.SIG_DFL)
            if callable(previous):
                previous(signum, frame)
            elif previous in (signal.SIG_DFL, None):
                _die_of(signum)
            return
        if not self.is_set:
            self.set(signum)
        elif signum == signal.SIGTERM and time.monotonic() - self._first >= REPEAT_AFTER:
            _die_of(signum)


def _end_quickly() -> None:
    """What a leaving process does last.

    Python takes its own signal handlers away before it is quite gone, and it looks through every object that is alive
    (400,000 with torch and Lightning: 2 s for each rank of a host) for garbage that nobody needs back any more.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    flush_files()  # without that search nothing closes those that a cycle of objects holds
    gc.freeze()


def _die_of(signum: int) -> None:
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def shield_worker(worker_id: int = 0) -> None:
    """A ``worker_init_fn`` part for DataLoader workers: only the rank that owns the worker may end it.

    A SIGTERM from anybody but the parent is ignored (a scheduler signals the whole process group, and a worker that
    dies in the middle of a step takes the step's checkpoint with it), and the worker dies with its rank. Needs
    ``sigwaitinfo``; on platforms without it (macOS, Windows) nothing changes.
    """
    del worker_id
    parent = os.getppid()
    die_with_parent(parent)
    if not hasattr(signal, "sigwaitinfo") or threading.current_thread() is not threading.main_thread():
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # inherited by every thread started from here on

    def listen() -> None:
        while True:
            received = signal.sigwaitinfo({signal.SIGTERM})
            if received.si_pid == parent or os.getppid() != parent:
                os._exit(0)

    threading.Thread(target=listen, name="megapar-worker-sigterm", daemon=True).start()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread of ``parent`` that forked it ends (Linux; else a no-op)."""
    try:
        import ctypes

        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError, ImportError, TypeError):
        return
    prctl(1, signal.SIGKILL, 0, 0, 0)  # 1 = PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
