"""The recipe as a user types it: failures, kills and resuming on other layouts, sweeps."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from launch.cases import ROOT, CaseServer, Result

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

RECIPE = f"""
import runpy
sys.argv[0] = {str(ROOT / "recipes" / "pretrain.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SMALL = (
    "model=gpt_tiny",
    "model.num_layers=2",
    "data.max_bytes=40000",
    "data.validation_limit=16",
    "data.sequence_length=32",
    "optimizer.warmup_steps=2",
    "optimizer.max_steps=20",
    "~callbacks.sample_text",
    "trainer.val_check_interval=4",
    "seed=1",
)
COMPARED = ("train_loss", "val_loss", "grad_norm", "consumed_samples", "lr")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def typed(product: CaseServer, home: Path, *overrides: str, **environment: str) -> Result:
    """``python recipes/pretrain.py ...``"""
    return product.run(RECIPE, *overrides, env={"HOME": str(home), **environment}, seconds=120)


def fault(what: str, hook: str, rank: int, step: int = -1) -> list[str]:
    target = "+callbacks.fault._target_=recipe_callbacks.Fault"
    values = {"what": what, "hook": hook, "rank": rank, "step": step}
    return [target, *(f"+callbacks.fault.{name}={value}" for name, value in values.items())]


def rows(run: Path) -> dict[int, dict[str, str]]:
    with open(run / "metrics.csv", newline="") as file:
        return {int(row["step"]): row for row in csv.DictReader(file)}


@pytest.mark.parametrize(
    ("hook", "rank", "said"),
    [
        ("set_up", 2, "in set-up (setup)"),
        pytest.param("on_train_batch_start", 0, "in training step 0 (on_train_batch_start)", marks=pytest.mark.slow),
        pytest.param("on_validation_epoch_end", 3, "in on_validation_epoch_end", marks=pytest.mark.slow),
        ("on_save_checkpoint", 1, "in checkpoint save"),
    ],
)
def test_a_failing_callback_is_told_once(product: CaseServer, home: Path, hook: str, rank: int, said: str) -> None:
    arguments = ["trainer.max_steps=4", "trainer.num_sanity_val_steps=0", *fault("raise", hook, rank)]
    result = typed(product, home, *SMALL, *arguments, f"run_dir={home}/{hook}")
    assert result.code == 1, result.text
    assert result.text.count(f"planted-{hook}-{rank}") == 1, result.text
    place = f"rank {rank} (data 0, pipeline {rank // 2}, tensor {rank % 2})"
    assert f"{place} {said}" in result.err.replace(" failed in", " in"), result.err
    result.assert_in_time()
    result.assert_nobody_left()


@pytest.fixture(scope="module")
def uninterrupted(product: CaseServer, home: Path) -> dict[int, dict[str, str]]:
    result = typed(product, home, *SMALL, "parallel=single", "trainer.max_steps=13", f"run_dir={home}/whole")
    assert result.code == 0, result.text
    return rows(home / "whole")


def same(found: dict[int, dict[str, str]], expected: dict[int, dict[str, str]], steps: Sequence[int]) -> None:
    for step in steps:
        for name in (name for name in COMPARED if name in expected[step]):
            mine, other = found[step][name], expected[step][name]
            assert (mine == "") == (other == ""), f"{name} at step {step}: {mine!r}, {other!r}"
            if other:
                assert float(mine) == pytest.approx(float(other), rel=1e-5), f"{name} at step {step}"


@pytest.mark.parametrize(
    ("first", "rank", "second"), [("tp2_pp2", -1, "dp2_pp2"), ("dp2", 1, "tp2"), ("single", 0, "dp2_tp2")]
)
def test_killed_and_resumed_on_another_layout(
    product: CaseServer, home: Path, uninterrupted: dict[int, dict[str, str]], first: str, rank: int, second: str
) -> None:
    """Killed after step 10; the last checkpoint is of step 8, in the middle of an epoch."""
    run = home / f"killed-{first}"
    kill = fault("kill", "on_train_batch_end", rank, 10)
    result = typed(product, home, *SMALL, f"parallel={first}", "trainer.max_steps=20", f"run_dir={run}", *kill)
    if rank == 1:
        assert result.code == 1 and result.err.count("rank 1 was killed by SIGKILL") == 1, result.text
    else:
        assert result.code == -9, result.text
    result.assert_nobody_left()
    again = (f"resume={run}", f"parallel={second}", "trainer.max_steps=13")
    result = typed(product, home, *again, FAULT_OVER="yes")
    assert result.code == 0, result.text
    assert "at step 8, in the same directory" in result.out
    found = rows(run)
    assert list(found) == list(range(1, 14))
    same(found, uninterrupted, range(1, 14))
    result.assert_nobody_left()


def test_a_sweep_over_layouts(product: CaseServer, home: Path) -> None:
    """One, four and eight processes after each other in one command."""
    arguments = ["trainer.max_steps=3", "trainer.limit_val_batches=1", f"hydra.sweep.dir={home}/sweep"]
    result = typed(product, home, "-m", "parallel=single,tp2_pp2,dp2_tp2_pp2", *SMALL, *arguments)
    assert result.code == 0, result.text
    jobs = [rows(home / "sweep" / job) for job in "012"]
    assert [list(job) for job in jobs] == [[1, 2, 3]] * 3
    for job in jobs[1:]:
        same(job, jobs[0], [1, 2, 3])
    assert {path.name for path in (home / "sweep").iterdir()} == {"0", "1", "2", "multirun.yaml"}
