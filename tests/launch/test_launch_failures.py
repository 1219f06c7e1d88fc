"""An exception on any rank, in any stage, ends all ranks soon and is said once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cases import PREAMBLE, CaseServer, Result, clean_environment, patience

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

STAGES = ("setup", "step", "validation", "save")
SAID = {"setup": "set-up", "step": "training step 2", "validation": "validation", "save": "checkpoint save"}

FAILING = """
stage, rank = sys.argv[1], int(sys.argv[2])
model = Model()
model.stage, model.rank = stage, rank
fit = trainer(4, limit_val_batches=1, num_sanity_val_steps=0, val_check_interval=4, enable_checkpointing=True)
fit.fit(model)
"""

CAUGHT = """
import traceback
for stage in sys.argv[1].split(","):
    for rank in range(4):
        model = Model()
        model.stage, model.rank = stage, rank
        fit = trainer(4, limit_val_batches=1, num_sanity_val_steps=0, val_check_interval=4, enable_checkpointing=True)
        try:
            fit.fit(model)
        except Exception as exception:
            seconds = time.time() - float((OUT / "raised").read_text())
            text = "".join(traceback.format_exception(exception))
            note(f"caught-{stage}-{rank}", f"{type(exception).__name__}|{seconds}|{text}")
        (OUT / "raised").unlink()
model = Model()
fit = trainer(4)
fit.fit(model)  # and the process is still good for a run
note(f"finished-{fit.global_rank}", fit.global_step)
"""


def check(result: Result, stage: str, rank: int) -> None:
    """Uncaught: exit code 1, the message once on the terminal with rank and stage, in time, nobody left."""
    assert result.code == 1, result.text
    assert result.text.count(f"planted-{stage}-{rank}") == 1, result.text
    assert f"rank {rank} (data {rank}, pipeline 0, tensor 0)" in result.err, result.err
    assert SAID[stage] in result.err, result.err
    result.assert_in_time()
    result.assert_nobody_left()


def test_every_rank_in_every_stage_can_be_caught_on_rank_zero(cases: CaseServer) -> None:
    """``try: trainer.fit(...)``: 16 times an exception on rank 0 that names the culprit, and the script goes on."""
    result = cases.run(CAUGHT, ",".join(STAGES), seconds=240)
    assert result.code == 0, result.text
    assert [result.read(f"finished-{rank}") for rank in range(4)] == ["4"] * 4
    for stage in STAGES:
        for rank in range(4):
            kind, seconds, text = result.read(f"caught-{stage}-{rank}").split("|", 2)
            assert kind == ("ValueError" if rank == 0 else "RankFailedError")
            assert text.count(f"planted-{stage}-{rank}") == 1
            assert f"rank {rank} (data {rank}, pipeline 0, tensor 0)" in text and SAID[stage] in text
            assert float(seconds) < patience(5)
    assert "planted" not in result.text, "nobody but the caught exception says it"
    result.assert_nobody_left()


@pytest.mark.parametrize(("stage", "rank"), [("setup", 3), ("step", 0), ("validation", 2), ("save", 1)])
def test_uncaught_under_our_launcher(cases: CaseServer, stage: str, rank: int) -> None:
    check(cases.run(FAILING, stage, rank), stage, rank)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("stage", STAGES)
def test_uncaught_under_an_agent(cases: CaseServer, stage: str, rank: int) -> None:
    check(cases.run(FAILING, stage, rank, peers=4), stage, rank)


EVERYWHERE = """
class Everywhere(Model):
    def configure_optimizers(self):
        raise ValueError("-".join(["on", "every", "rank"]))
trainer(4).fit(Everywhere())
"""


@pytest.mark.parametrize("peers", [0, 4])
def test_the_same_exception_on_every_rank_is_said_once(cases: CaseServer, peers: int) -> None:
    result = cases.run(EVERYWHERE, peers=peers)
    assert result.code == 1, result.text
    assert result.text.count("on-every-rank") == 1, result.err
    assert result.err.count("Traceback") == 1, result.err
    result.assert_nobody_left()


STUCK = """
class Stuck(Model):
    def training_step(self, batch, index):
        if index == 2 and self.global_rank == int(sys.argv[1]):
            note("raised", time.time())
            if sys.argv[2] == "raise":
                raise ValueError("-".join(["while", "rank", "is", "stuck"]))
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 2 and self.global_rank == 0:
            time.sleep(60)  # and so notices nothing
        return super().training_step(batch, index)
trainer(3).fit(Stuck())
"""


def test_a_blocked_rank_zero_does_not_keep_the_run(cases: CaseServer) -> None:
    result = cases.run(STUCK, 2, "raise")
    assert result.code == 1, result.text
    assert result.err.count("while-rank-is-stuck") == 1, result.err
    assert "rank 2 (data 2, pipeline 0, tensor 0) failed in training step 2" in result.err
    result.assert_in_time()
    result.assert_nobody_left()


def test_a_blocked_peer_does_not_keep_the_run(cases: CaseServer) -> None:
    result = cases.run(STUCK, 2, "raise", peers=3)
    assert result.code == 1, result.text
    assert result.err.count("while-rank-is-stuck") == 1, result.err
    result.assert_in_time()
    result.assert_nobody_left()


KILLED = """
model = Model()
model.pause = 0.05
trainer(3, max_steps=10_000).fit(model)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named(cases: CaseServer, signum: signal.Signals) -> None:
    running = cases.start(KILLED)
    running.until("step-0", "step-1", "step-2")
    os.kill(running.pid_of(1), signum)
    began = time.time()
    result = running.wait()
    assert result.code == 1, result.text
    assert result.err.count(f"rank 1 was killed by {signum.name}") == 1, result.err
    assert result.ended - began < patience(5)
    result.assert_nobody_left()


def test_children_die_with_rank_zero(cases: CaseServer) -> None:
    running = cases.start(KILLED)
    running.until("step-0", "step-1", "step-2")
    os.kill(running.pid, signal.SIGKILL)
    result = running.wait()
    assert result.code == -signal.SIGKILL
    result.assert_nobody_left()


def torchrun(tmp_path: Path, code: str, *argv: str, options: tuple[str, ...] = ()) -> Result:
    """A case under the real torchrun."""
    path = tmp_path / "case.py"
    path.write_text(PREAMBLE + code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, str(path), *argv]
    done = subprocess.run(
        command, env=clean_environment(OUT=str(tmp_path)), capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    return Result(done.returncode, time.time(), done.stdout, done.stderr, tmp_path)


@pytest.mark.slow
def test_uncaught_under_torchrun(tmp_path: Path) -> None:
    result = torchrun(tmp_path, FAILING, "step", "2", options=("--nproc-per-node=4",))
    # The agent's own summary and shutdown take a second or two beyond the ranks' end.
    assert result.text.count("planted-step-2") == 1, result.text
    assert "rank 2 (data 2, pipeline 0, tensor 0) in training step 2" in result.err
    assert result.code == 1
    result.assert_in_time(7.0)
    result.assert_nobody_left()


@pytest.mark.slow
def test_torchrun_restarts_recover(tmp_path: Path) -> None:
    """Rank 1 of the first attempt is killed; the second one does not meet the dead ranks' addresses."""
    code = """
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
class Dies(Model):
    def training_step(self, batch, index):
        if attempt == "0" and index == 1 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, index)
fit = trainer(2)
fit.fit(Dies())
note(f"done-{attempt}-{fit.global_rank}", fit.global_step)
"""
    result = torchrun(tmp_path, code, options=("--nproc-per-node=2", "--max-restarts=1"))
    assert result.code == 0, result.text
    assert [result.read(f"done-1-{rank}") for rank in range(2)] == ["4", "4"]
    assert not list(tmp_path.glob("done-0-*"))
    result.assert_nobody_left()


def tasks(kind: str, rank: int, job: int) -> dict[str, str]:
    """What two tasks of one job find in their environment."""
    if kind == "submitit":
        return {
            "SUBMITIT_LOCAL_JOB_ID": str(job),
            "SUBMITIT_LOCAL_NTASKS": "2",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_GLOBALID": str(rank),
            "SUBMITIT_LOCAL_LOCALID": str(rank),
        }
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


@pytest.mark.parametrize("kind", ["submitit", "slurm"])
@pytest.mark.parametrize("rank", [0, 1])
def test_tasks_of_a_scheduler_fail_once(cases: CaseServer, kind: str, rank: int) -> None:
    """Two processes started by hand with a scheduler's variables: they meet, train, and one speaks of the failure."""
    job = os.getpid() * 10 + rank + 5 * (kind == "slurm")
    code = FAILING.replace("trainer(4", "trainer(2")
    running = [cases.start(code, "step", rank, env=tasks(kind, r, job)) for r in range(2)]
    results = [one.wait() for one in running]
    assert [result.code for result in results] == [1, 1], "\n".join(result.text for result in results)
    said = [result.text.count(f"planted-step-{rank}") for result in results]
    assert said == [1 - rank, rank], "\n".join(result.text for result in results)
    assert f"rank {rank} (data {rank}, pipeline 0, tensor 0) in training step 2" in results[rank].err
    assert "Traceback" not in results[1 - rank].err, results[1 - rank].err
    for result in results:
        assert result.ended - float(results[rank].read("raised")) < patience(5)
        result.assert_nobody_left()


@pytest.mark.slow
def test_where_forking_is_unsafe_the_script_is_started_again(tmp_path: Path) -> None:
    code = """
from lightning_megapar.launch import launcher
launcher.why_not_fork = lambda nodes=1: "a test " + "says so"
model = Model()
model.stage, model.rank = "step", 1
trainer(2).fit(model)
"""
    path = tmp_path / "case.py"
    path.write_text(PREAMBLE + code)
    environment = clean_environment(OUT=str(tmp_path))
    done = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=120)
    result = Result(done.returncode, time.time(), done.stdout, done.stderr, tmp_path)
    assert result.code == 1, result.text
    assert result.err.count("started by running the script again: a test says so") == 1
    assert result.err.count("planted-step-1") == 1, result.err
    assert "raised on rank 1 (data 1, pipeline 0, tensor 0) in training step 2" in result.err
    result.assert_nobody_left()
