"""The benchmark of data parallelism runs, with sizes that mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recipe_module import load_recipe

bench = load_recipe("benchmarks/data_parallel.py")


@pytest.mark.slow
def test_runs_and_writes_its_figures(tmp_path: Path) -> None:
    """By its command: its ranks are started anew, and find their functions by the name of the module."""
    import subprocess
    import sys

    out = tmp_path / "figures.json"
    sizes = ["--layers=1", "--width=16", "--heads=2", "--sequence=16", "--batch=2", "--steps=2", "--rounds=2"]
    command = [sys.executable, str(bench.__file__), *sizes, "--stages", "0", "3", f"--out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    figures = json.loads(out.read_text())
    names = [bench.DDP, bench.FSDP, "MegaParStrategy(zero_stage=0)", "MegaParStrategy(zero_stage=3)"]
    assert list(figures["median_step_seconds"]) == names == list(figures["peak_bytes"])
    assert min(figures["median_step_seconds"].values()) > 0 and min(figures["peak_bytes"].values()) > 0
    losses = list(figures["last_losses"].values())
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-3)
    assert "aim: at most 1.05" in done.stdout
    assert "2 ranks: data=2" not in done.stdout, "a note of the strategy's for each contender"


def test_sizes_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--steps=1"], ["--layers=0"], ["--heads=3", "--width=64"]):
        with pytest.raises(SystemExit):
            bench.parse(wrong)
    said = capsys.readouterr().err
    assert "--steps=1: expected at least 2" in said
    assert "num_heads=3 does not divide hidden_size=64; nearest valid num_heads: 2, 4 (--width is" in said
