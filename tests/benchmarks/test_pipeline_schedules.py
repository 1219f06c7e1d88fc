from __future__ import annotations

import json
from pathlib import Path

import pytest
from recipe_module import RECIPES, load_recipe


@pytest.mark.slow
def test_runs_and_writes_its_figures(tmp_path: Path) -> None:
    """As a program: ranks are started anew, and import it by its path."""
    import subprocess
    import sys

    out = tmp_path / "figures.json"
    options = ["--schedules", "1f1b", "zbv", "--microbatches=4", "--seconds=0.01", "--steps=1", f"--out={out}"]
    done = subprocess.run(
        [sys.executable, str(RECIPES / "benchmarks" / "pipeline.py"), *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())["schedules"]
    assert set(figures) == {"1f1b", "zbv"}
    for row in figures.values():
        assert row["over_simulated"] >= 0.99 and row["torch_seconds"] > 0 and 0 < row["idle"] < 1


def test_the_ratios_of_a_run() -> None:
    bench = load_recipe("benchmarks/pipeline.py")
    found = {
        "1f1b": {"runs": {"ours": [3.3, 3.3, 9.0], "torch": [6.6, 6.6, 6.6]}, "idle": 0.25},
        "zb_h1": {"runs": {"ours": [2.7]}, "idle": 0.1},
    }
    arguments = bench.argparse.Namespace(seconds=0.1, microbatches=8)
    rows = bench.summary(found, arguments)
    assert rows["1f1b"]["simulated"] == pytest.approx(11 * 0.3) and rows["1f1b"]["over_simulated"] == pytest.approx(1.0)
    assert rows["1f1b"]["over_torch"] == pytest.approx(0.5) and rows["zb_h1"]["over_torch"] is None
    assert rows["zb_h1"]["idle_over_1f1b"] == pytest.approx(0.4)
