"""One run, one directory: claims, locks, states."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from lightning_megapar.config import ConfigError
from lightning_megapar.hydra_app.run_directory import (
    CLAIM,
    RunDirectory,
    is_first_process,
    merged_overrides,
    overrides_of,
    state_of,
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SUBMITIT_LOCAL_GLOBALID"):
        monkeypatch.delenv(name, raising=False)


def _claim(path: Path, barrier: object, answers: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    with RunDirectory.claim(path, automatic=True) as run:
        answers.put(run.path.name)  # type: ignore[attr-defined]
        barrier.wait()  # type: ignore[attr-defined]


def test_eight_jobs_of_one_second_get_eight_directories(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(8), context.Queue()
    jobs = [context.Process(target=_claim, args=(tmp_path / "run", barrier, answers)) for _ in range(8)]
    for job in jobs:
        job.start()
    names = {answers.get(timeout=30) for _ in jobs}
    for job in jobs:
        job.join(30)
    assert names == {"run"} | {f"run_{n}" for n in range(1, 8)}
    assert [job.exitcode for job in jobs] == [0] * 8
    assert all(state_of(tmp_path / name) == "finished" for name in names)


def test_a_chosen_directory_that_is_taken_is_refused_with_its_state(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    with RunDirectory.claim(path, automatic=False) as run:
        run.write("config.yaml", "seed: 1\n")
        assert state_of(path) == "live"
        with pytest.raises(ConfigError, match="a run is still writing here"):
            RunDirectory.claim(path, automatic=False)
        with pytest.raises(ConfigError, match="cannot be resumed yet"):
            RunDirectory.reopen(path)
    with pytest.raises(ConfigError, match=r"finished run.*resume="):
        RunDirectory.claim(path, automatic=False)
    other = tmp_path / "notes"
    other.mkdir()
    (other / "diary.txt").write_text("x")
    with pytest.raises(ConfigError, match="holds other files"):
        RunDirectory.claim(other, automatic=False)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="file of this name"):
        RunDirectory.claim(tmp_path / "file", automatic=False)
    with pytest.raises(ConfigError, match="cannot be made"):
        RunDirectory.claim(tmp_path / "file" / "below", automatic=False)
    (tmp_path / "empty").mkdir()
    with RunDirectory.claim(tmp_path / "empty", automatic=False) as run:
        assert run.claimed


def test_how_a_run_ended_is_recorded(tmp_path: Path) -> None:
    for name, error, state in (
        ("failed", RuntimeError("x"), "failed"),
        ("stopped", KeyboardInterrupt(), "interrupted"),
        ("preempted", SystemExit(143), "interrupted"),
        ("done", SystemExit(0), "finished"),
    ):
        with pytest.raises(type(error)):
            with RunDirectory.claim(tmp_path / name, automatic=False):
                raise error
        assert state_of(tmp_path / name) == state
        recorded = json.loads((tmp_path / name / CLAIM).read_text())
        assert recorded["pid"] == os.getpid() and recorded["ended"]
    assert state_of(tmp_path / "nothing") is None


def test_a_run_that_was_killed_can_be_reopened(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        RunDirectory.claim(tmp_path / "run", automatic=False)
        os._exit(9)
    os.waitpid(child, 0)
    assert json.loads((tmp_path / "run" / CLAIM).read_text())["state"] == "running"
    assert state_of(tmp_path / "run") == "interrupted"
    with RunDirectory.reopen(tmp_path / "run") as run:
        run.write("config.yaml", "a: 1\n")
    with RunDirectory.reopen(tmp_path / "run") as run:
        run.keep_older("config.yaml")
        run.write("config.yaml", "a: 2\n")
    assert (tmp_path / "run" / "config_1.yaml").read_text() == "a: 1\n"
    with pytest.raises(ConfigError, match="holds no run"):
        RunDirectory.reopen(tmp_path / "other")


def test_ranks_forked_from_the_claiming_process_keep_the_run_alive_and_do_not_end_it(tmp_path: Path) -> None:
    ready, done = os.pipe(), os.pipe()
    with RunDirectory.claim(tmp_path / "run", automatic=False) as run:
        child = os.fork()
        if child == 0:
            run.__exit__(None, None, None)
            os.write(ready[1], b"x")
            os.read(done[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        assert json.loads((run.path / CLAIM).read_text())["state"] == "running"
    assert state_of(tmp_path / "run") == "live"  # a rank still runs
    os.write(done[1], b"x")
    os.waitpid(child, 0)
    assert state_of(tmp_path / "run") == "finished"


def test_a_refusal_leaves_no_directory_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        with RunDirectory.claim(tmp_path / "run", automatic=False) as run:
            run.write("config.yaml", "x: 1\n")
            raise ConfigError("wrong")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError):
        with RunDirectory.claim(tmp_path / "kept", automatic=False) as run:
            (run.path / "metrics.csv").write_text("step\n")
            raise ConfigError("wrong, but something was written already")
    assert state_of(tmp_path / "kept") == "failed"


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID", "SUBMITIT_LOCAL_GLOBALID"])
def test_only_the_first_process_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert not is_first_process()
    with RunDirectory.claim(tmp_path / "run", automatic=False) as run:
        run.write("config.yaml", "x")
        assert not run.claimed
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv(name, "0")
    assert is_first_process()


def test_the_settings_of_a_resumed_run(tmp_path: Path) -> None:
    (tmp_path / "overrides.yaml").write_text("- parallel=tp2\n- +trainer.fast=1\n- run_dir=x\n- seed=1\n")
    saved = overrides_of(tmp_path)
    given = ["parallel=dp2", "trainer.max_steps=9"]
    assert merged_overrides(saved, given, dropped=("run_dir",)) == ["+trainer.fast=1", "seed=1", *given]
    assert overrides_of(tmp_path / "nowhere") == []
