"""One failure, said once: which rank speaks, which ranks leave in silence, and how fast.

The launcher calls :meth:`FailureReporter.report` for every exception that leaves the function it launched, before
Lightning's own handling (callbacks' ``on_exception``, teardown) sees it; a strategy may call it again from
``on_exception``, which is then a no-op. What happens depends on the kind of rank:

``"speaker"`` (rank 0 of a set that we forked, see :mod:`~lightning_megapar.launch.ranks`)
    The only rank that ever raises. Its own exception propagates with a note that names rank and stage; an exception
    that merely says that a peer is gone is replaced by :class:`RankFailedError`, which carries the first failing
    rank's place, stage and traceback, or tells which rank was killed by which signal. The other ranks are ended first.
    So ``try: trainer.fit(...)`` and ``pytest.raises`` around it work, and whatever prints the traceback (Python,
    Hydra) prints it once. Should rank 0 be blocked, a watch thread prints the report and ends the process after
    :data:`~lightning_megapar.launch.ranks.NOTICE_WITHIN` seconds.
``"child"`` (the other forked ranks)
    Leaves its report in the slot and is gone: silent, exit code 1.
``"peer"`` (a rank that torchrun, srun or submitit started)
    The first to claim the slot raises its own exception, with the note. The others stay silent and exit with 1. A rank
    that only lost a peer gives the rank that broke :data:`SETTLE` seconds to report before it speaks. A watch thread
    polls the slot and ends a rank that is stuck in a collective :data:`LINGER` seconds after the report was made (not
    sooner: the launcher kills every rank when one is gone, and the speaker still has to print).
``"guest"`` (a rank that runs functions for a host program: multiprocessing worker, pytest, notebook)
    Never ended from here; exceptions go to the host unchanged but for the note.

``SystemExit`` (143 after a preemption signal), ``KeyboardInterrupt`` and Lightning's tuner exit are no failures.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch.distributed as dist

from lightning_megapar.launch.hygiene import discard_process_group, silence_stderr
from lightning_megapar.launch.ranks import ForkedRanks, how_it_ended
from lightning_megapar.launch.slot import Report, Slot, report_of

Role = Literal["speaker", "child", "peer", "guest"]

SETTLE = 1.5
"""Seconds that a rank which lost a peer waits for the peer's own report."""
LINGER = 3.5
"""Seconds after a report at which silent ranks leave at the latest."""
AFTER_SPOKEN = 0.7
"""Seconds after the speaker's last words at which silent ranks leave."""
_POLL = 0.5

# What gloo, NCCL and their stores say in a plain RuntimeError; a user's own "socket timeout" must not match.
_LOST = re.compile(
    r"gloo[/\\:]|connection (was )?(reset|closed|refused|aborted)( by)? (peer|remote)|^\[.*broken pipe"
    r"|nccl (error|comm)|timed out waiting \d+ ?ms|wait timeout after \d+ ?ms|timeout waiting for key"
    r"|application timeout|monitoredbarrier|no route to host",
    re.IGNORECASE,
)


class RankFailedError(RuntimeError):
    """Another rank failed first; the text names it, its stage, and shows its traceback.

    Attributes:
        report: the failing rank's report, or ``None`` when the rank died without one (killed by a signal).
    """

    def __init__(self, text: str, report: Report | None = None) -> None:
        super().__init__(text)
        self.report = report


def lost_peer(exception: BaseException) -> bool:
    """Whether an exception only says that a connection to another rank broke or timed out."""
    seen: BaseException | None = exception
    while seen is not None:
        if isinstance(seen, ConnectionError | dist.DistNetworkError | dist.DistStoreError | dist.DistBackendError):
            return True
        if isinstance(seen, RuntimeError) and _LOST.search(str(seen)):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def is_guest() -> bool:
    """Whether this process runs functions on behalf of a host program that must survive and see exceptions."""
    return multiprocessing.parent_process() is not None or under_pytest() or interactive()


def under_pytest() -> bool:
    """Whether a pytest test is running in this process."""
    return "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ


def interactive() -> bool:
    """Whether a notebook kernel or an interactive prompt runs this process."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return True
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def is_failure(exception: BaseException) -> bool:
    """Whether an exception that leaves a run is a failure at all."""
    return isinstance(exception, Exception) and type(exception).__name__ != "_TunerExitException"


class FailureReporter:
    """Decides for one rank what becomes of an exception; see the module's text. One per launcher.

    Args:
        describe: the place of a rank (``None``: of this one) for messages: ``rank 3 (data 0, pipeline 1, tensor 1)``.
            An exception that all ranks raise together tells by its attribute ``failing_rank`` whose fault it is.
        where: the stage that the run is in, such as ``set-up``, ``training step 12``, ``checkpoint save``.
        advice: what else may be the cause when ranks have lost one another; nothing for no advice.
    """

    def __init__(
        self,
        describe: Callable[[int | None], str] | None = None,
        where: Callable[[], str] | None = None,
        advice: Callable[[], str] = lambda: "",
    ) -> None:
        self.describe = describe or (lambda rank: f"rank {self.rank if rank is None else rank}")
        self.where = where or (lambda: "the run")
        self.advice = advice
        self.arm(None, 0, "guest")

    @classmethod
    def for_strategy(cls, strategy: Any) -> FailureReporter:
        """The reporter of the strategy's launcher (one that never reports when the launcher is not ours)."""
        failures = getattr(strategy.launcher, "failures", None)
        return failures if isinstance(failures, cls) else cls()

    def arm(
        self, slot: Slot | None, rank: int, role: Role, ranks: ForkedRanks | None = None, hosts_store: bool = False
    ) -> None:
        """Prepare for a launch.

        Args:
            slot: where reports are left; ``None`` for a run of one rank.
            rank: global rank of this process.
            role: see the module's text.
            ranks: the forked set, for roles ``"speaker"`` and ``"child"``.
            hosts_store: the slot lives in this process and goes with it: the others need time to read it.
        """
        self.slot = slot
        self.rank = rank
        self.role: Role = role
        self.ranks = ranks
        self.hosts_store = hosts_store
        self._handled: BaseException | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def failed(self) -> bool:
        """Whether this rank has dealt with a failure: peers are gone, no collective may follow."""
        return self._handled is not None

    def report(self, exception: BaseException, where: str | None = None) -> BaseException:
        """Deal with an exception that ends the run.

        Returns:
            the exception to raise: the same one, or a :class:`RankFailedError` to raise ``from None``. Ranks that must
            stay silent do not return.
        """
        if not is_failure(exception) or self._handled is not None or self.slot is None:
            return exception
        self.stop()
        lost = lost_peer(exception)
        if lost and (advice := _call(self.advice, "")):
            _add_note(exception, advice)
        place = _call(lambda: self.describe(getattr(exception, "failing_rank", None)), f"rank {self.rank}")
        report = report_of(exception, self.rank, place, where or self._stage(), lost)
        if self.role == "child":
            assert self.ranks is not None
            self.slot.claim(report)
            self.ranks.leave_silently(1)
        if self.role == "speaker":
            self._handled = self._speak(exception, report)
        elif self.role == "peer":
            self._handled = self._speak_or_leave(exception, report)
        else:
            self._handled = _noted(exception, report)
        return self._handled

    def _stage(self) -> str:
        return _call(self.where, "the run")

    def _speak(self, exception: BaseException, mine: Report) -> BaseException:
        assert self.ranks is not None and self.slot is not None
        ranks = self.ranks
        ranks.notice()
        told: BaseException = exception
        if mine.lost:
            first = self._await_report(SETTLE, until=lambda: any(code < 0 for code in ranks.failed.values()))
            killed = [(rank, code) for rank, code in sorted(ranks.failed.items()) if code < 0]
            left = [(rank, code) for rank, code in sorted(ranks.ended.items()) if code == 0]
            if first is not None and not first.lost:
                told = RankFailedError(first.text(), first)
            elif killed or left:
                rank, code = (killed or left)[0]
                told = RankFailedError(f"rank {rank} {how_it_ended(code)} during {mine.where}; no exception was raised")
            elif first is not None:  # everybody speaks of a lost connection: the first one may know why
                told = RankFailedError(first.text(), first)
            else:
                told = _noted(exception, mine)
        else:
            first = self.slot.first()
            told = _noted(exception, mine)
            if first is not None and not first.lost and (first.kind, first.message) != (mine.kind, mine.message):
                _add_note(told, f"{first.place} failed as well, in {first.where}: {first.kind}: {first.message}")
        ranks.kill()
        discard_process_group()
        return told

    def _speak_or_leave(self, exception: BaseException, mine: Report) -> BaseException:
        assert self.slot is not None
        if mine.lost:
            first = self._await_report(SETTLE)
            if first is not None and first.rank != self.rank:
                self._leave_silently(first)
        if not self.slot.claim(mine):
            first = self.slot.first()
            if first is None or first.rank != self.rank:
                self._leave_silently(first)
        atexit.register(self.slot.say_spoken)
        if self.hosts_store:
            time.sleep(2 * _POLL)
        return _noted(exception, mine)

    def _await_report(self, seconds: float, until: Callable[[], bool] = lambda: False) -> Report | None:
        assert self.slot is not None
        deadline = time.monotonic() + seconds
        while True:
            first = self.slot.first()
            if (first is not None and not first.lost) or until() or time.monotonic() > deadline:
                return first
            time.sleep(0.05)

    def _leave_silently(self, first: Report | None) -> NoReturn:
        silence_stderr()
        if first is not None:
            self._let_speak(first, threading.Event())
        os._exit(1)

    def _let_speak(self, first: Report, stop: threading.Event) -> None:
        assert self.slot is not None
        latest = first.time + LINGER
        while time.time() < latest and not self.slot.spoken():
            if stop.wait(min(0.1, max(0.0, latest - time.time()))):
                return
        stop.wait(min(AFTER_SPOKEN, max(0.0, latest - time.time())))

    # ------------------------------------------------------------------ watch

    def start_watch(self) -> None:
        """For role ``"peer"``: watch the slot, so that a rank that is stuck leaves soon after another has failed.

        To be called once the process group is up: before that the store may not exist.
        """
        if self.role != "peer" or self.slot is None or self._thread is not None:
            return
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="megapar-failures", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch (the run is over, or this rank deals with a failure itself)."""
        self._stop.set()
        self._thread = None

    def _watch(self) -> None:
        assert self.slot is not None
        stop = self._stop
        while not stop.wait(_POLL):
            first = self.slot.first()
            if first is None or first.rank == self.rank:
                continue
            self._let_speak(first, stop)
            if stop.is_set():
                return
            silence_stderr()
            os._exit(1)


def _call(function: Callable[[], str], otherwise: str) -> str:
    try:
        return function()
    except Exception:  # a half-built strategy must not hide the failure that left it half-built
        return otherwise


def _noted(exception: BaseException, report: Report) -> BaseException:
    _add_note(exception, f"raised on {report.place} in {report.where}")
    return exception


def _add_note(exception: BaseException, note: str) -> None:
    if hasattr(exception, "add_note"):
        exception.add_note(note)
    else:  # Python 3.10
        print(note, file=sys.stderr)
