"""The benchmark of allocation runs, with sizes that mean little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recipe_module import load_recipe

from lightning_megapar.memory import Trace
from lightning_megapar.memory.replay import RULES

bench = load_recipe("benchmarks/allocator.py")


@pytest.mark.slow
def test_runs_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, traces = tmp_path / "figures.json", tmp_path / "traces"
    sizes = ["--layers=2", "--width=32", "--sequence=32"]
    assert bench.main([*sizes, f"--out={out}", f"--traces={traces}"]) == 0
    figures = json.loads(out.read_text())
    assert len(figures["cases"]) == 20 == len(list(traces.iterdir()))
    for name, row in figures["cases"].items():
        assert 1 <= row["planned offline"] <= row["best fit"] + 0.05, name
        assert row["best fit"] <= row["without coalescing"], name
        trace = Trace.load(traces / f"{name.replace(', ', '-').replace(' ', '_')}.json")
        assert trace.aligned(512).max_live_bytes == row["max_live_bytes"]
    said = capsys.readouterr().out
    assert "(aim: at most 1.03)" in said and all(rule.split()[0] in said for rule in RULES)


def test_sizes_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("--layers=0", "--width=24"):
        with pytest.raises(SystemExit):
            bench.parse([wrong])
    assert "--width=24: expected a multiple of 16, such as 16" in capsys.readouterr().err
