"""SIGTERM to any subset of the ranks: everybody leaves at the same step boundary, with exit code 143."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import zipfile

import pytest
from cases import CaseServer, clean_environment, patience

from lightning_megapar.launch.preemption import PreemptionFlag

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

ENDLESS = """
import io, zipfile
class Journal:  # holds itself, so that only a garbage collector would close its file
    def __init__(self, path):
        self.itself, self.file = self, open(path, "w")
model = Model()
model.pause = 0.05
fit = trainer(3, max_steps=10_000)
model.on_fit_start = lambda: setattr(model, "journal", Journal(OUT / f"journal-{fit.global_rank}"))
class Bad(io.TextIOWrapper):  # a file of somebody's that disturbs nobody
    def flush(self):
        raise RuntimeError("no flush")
def write():
    model.journal.bad = Bad(open(OUT / f"bad-{fit.global_rank}", "wb"))
    model.journal.file.write("trained")
    model.journal.archive = zipfile.ZipFile(OUT / f"archive-{fit.global_rank}.zip", "w")
    model.journal.archive.writestr("name", "trained")
model.on_train_start = write
try:
    fit.fit(model)
finally:
    note(f"left-{fit.global_rank}", fit.global_step)
"""


@pytest.mark.parametrize(
    ("target", "peers"), [("rank 0", 0), ("rank 1", 0), ("group", 0), ("rank 1", 3), ("group", 3), ("agent", 3)]
)
def test_sigterm_saves_and_leaves_together(cases: CaseServer, target: str, peers: int) -> None:
    running = cases.start(ENDLESS, peers=peers)
    running.until("step-0", "step-1", "step-2")
    if target == "group":
        os.killpg(running.pid, signal.SIGTERM)
    else:
        os.kill(running.pid if target == "agent" else running.pid_of(int(target[-1])), signal.SIGTERM)
    began = time.time()
    result = running.wait()
    if peers:
        # The agent sends SIGTERM to the others once the first has gone; one may meet it in its very last moments, when
        # Python has given up its handlers.
        codes = [line.split()[1] for line in result.read("codes").splitlines()]
        assert codes[0] == "143" and set(codes) <= {"143", "-15"}, (codes, result.text)
    else:
        assert result.code == 143, result.text
    steps = {result.read(f"left-{rank}") for rank in range(3)}
    assert len(steps) == 1, "all ranks left at the same step"
    assert "Traceback" not in result.err, result.err
    assert len(list(result.directory.rglob("preempted-*.ckpt"))) == 1
    assert [result.read(f"journal-{rank}") for rank in range(3)] == ["trained"] * 3
    archives = [zipfile.ZipFile(result.directory / f"archive-{rank}.zip") for rank in range(3)]
    assert [archive.read("name") for archive in archives] == [b"trained"] * 3
    assert result.ended - began < patience(5)
    result.assert_nobody_left()


def test_ctrl_c_ends_everybody(cases: CaseServer) -> None:
    # A shell lets its background jobs, and with them tests that run in one, ignore the signal; Python keeps that.
    heard = "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    running = cases.start(heard + "model = Model()\nmodel.pause = 0.05\ntrainer(3, max_steps=10_000).fit(model)")
    running.until("step-0", "step-1", "step-2")
    os.killpg(running.pid, signal.SIGINT)
    result = running.wait(30)
    assert result.code == 1
    result.assert_nobody_left()


@pytest.fixture
def handlers() -> object:
    kept = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for signum, handler in kept.items():
        signal.signal(signum, handler)


@pytest.mark.usefixtures("handlers")
class TestFlag:
    def test_only_sets_a_flag(self) -> None:
        seen: list[int] = []
        signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
        flag = PreemptionFlag()
        flag.install()
        assert not flag.is_set and flag.signal_name == ""
        os.kill(os.getpid(), signal.SIGUSR1)
        assert flag.is_set and flag.signal_name == "SIGUSR1" and seen == []
        flag.restore()  # leaving: not before somebody has dealt with it
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == []
        flag.clear()
        flag.restore()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [1]

    def test_replaces_a_handler_wrapped_around_it(self) -> None:
        """What Lightning does between two installs of one run must neither survive nor become the previous handler."""
        mine: list[str] = []
        signal.signal(signal.SIGTERM, lambda *_: mine.append("user"))
        flag = PreemptionFlag()
        flag.install()
        inner = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *a: (mine.append("lightning"), inner(*a)))
        flag.install()
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.is_set and mine == []
        flag.clear()
        flag.restore()
        signal.signal(signal.SIGTERM, inner)  # Lightning's teardown puts back what it found: ours
        os.kill(os.getpid(), signal.SIGTERM)
        assert mine == ["user"]

    def test_twice_at_once_is_one_request(self) -> None:
        flag = PreemptionFlag()
        flag.install()
        flag.install()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert flag.is_set
        flag.clear()
        assert not flag.is_set

    def test_outside_the_main_thread_nothing_happens(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        flag = PreemptionFlag()
        thread = threading.Thread(target=lambda: (flag.install(), flag.restore()))
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_later_second_sigterm_ends_at_once(cases: CaseServer) -> None:
    code = """
from lightning_megapar.launch import preemption
preemption.REPEAT_AFTER = 0.2
flag = preemption.PreemptionFlag()
flag.install()
note("ready")
while not flag.is_set:
    time.sleep(0.01)
note("set")
time.sleep(30)
"""
    running = cases.start(code)
    running.until("ready")
    os.kill(running.pid, signal.SIGTERM)
    running.until("set")
    time.sleep(0.4)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(10).code == -signal.SIGTERM


WORKER = """
import multiprocessing, os, sys, time
from lightning_megapar.launch.preemption import shield_worker

def work(queue):
    shield_worker(0)
    queue.put(os.getpid())
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=work, args=(queue,)) for _ in range(2)]
    [worker.start() for worker in workers]
    pids = sorted(queue.get() for _ in workers)
    print(*pids, flush=True)
    sys.stdin.readline()
    print(*[worker.is_alive() for worker in workers], flush=True)
    workers[0].terminate()  # the owner may
    workers[0].join(10)
    print(workers[0].exitcode, flush=True)
    os._exit(0)  # without ending the second one
"""


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="needs sigwaitinfo")
def test_loader_workers_heed_their_rank_only(tmp_path: object) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    assert process.stdin is not None and process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    for pid in pids:
        os.kill(pid, signal.SIGTERM)  # from a stranger
    time.sleep(0.5)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline().split() == ["True", "True"]
    assert process.stdout.readline().strip() == "0"
    assert process.wait(20) == 0
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.05)
    if sys.platform.startswith("linux"):
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids), "a worker outlived its rank"
