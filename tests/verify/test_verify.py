"""``recipes/verify.py``: equal, not equal and refused, as a user meets them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from recipe_module import load_recipe

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "verify.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RECIPE), *arguments],
        cwd=Path(__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_layout_that_is_right_and_one_that_is_not() -> None:
    """Without a word on the number of tokens, data ranks with ragged masks average their means; with it they do not."""
    said = run(
        "ragged:Ragged",
        "--arguments",
        '{"says_how_many": true}',
        "--data",
        "ragged:Data",
        "--layout",
        "dp2",
        "--steps",
        "2",
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert "equal: largest difference" in said.stdout and "net.0.weight" in said.stdout
    silent = run("ragged:Ragged", "--data", "ragged:Data", "--set", "data_parallel_size=2")
    assert silent.returncode == 1, silent.stdout + silent.stderr
    assert "NOT equal" in silent.stdout and "loss" in silent.stdout


def test_tensor_parallelism_of_a_module_without_a_plan() -> None:
    found = run("ragged:Ragged", "--arguments", '{"says_how_many": true}', "--data", "ragged:Data", "--layout", "tp2")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "colwise" in found.stdout and "equal: largest difference" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ragged:Ragged", "--data", "ragged:Data", "--layout", "tp2_xx3"], "'xx3' is not one of tpN, ppN, dpN"),
        (["ragged:Ragged", "--data", "ragged:Data", "--layout", "dp3"], "a batch of 8 samples"),
        (["ragged:Ragged", "--data", "ragged:Dta", "--layout", "dp2"], "cannot be imported"),
        (["ragged", "--layout", "dp2"], "expected package.module:name"),
        (["ragged:not_a_module", "--layout", "dp2"], "gave a int"),
        (["ragged:Ragged", "--set", "tensor_size=2"], "unknown argument 'tensor_size'"),
        (["ragged:Ragged", "--arguments", '{"manual": true}', "--data", "ragged:Data"], "optimizes by itself"),
    ],
)
def test_refused(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe("verify.py")
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert recipe.main(arguments) == 2
    assert says in capsys.readouterr().err
