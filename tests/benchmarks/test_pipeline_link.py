from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from recipe_module import load_recipe

bench = load_recipe("benchmarks/pipeline_link.py")


@pytest.mark.slow
def test_over_a_shaped_link(tmp_path: Path) -> None:
    """What a slow machine cannot change: messages take their share, nothing is faster than it can be."""
    out = tmp_path / "link.json"
    done = subprocess.run(
        [sys.executable, str(bench.__file__), "--steps=1", "--microbatches=5", f"--out={out}"],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    if "skipped" in figures:
        pytest.skip(figures["skipped"])
    links, (beside, waiting) = figures["links"], figures["versions"].values()
    # The middle boundary goes over the link, which has a rate; the other two stay inside a namespace.
    assert figures["link_over_forward"] == links[1] / 0.1 >= 0.44
    assert max(links[0], links[2]) < links[1]
    assert figures["without_messages"] == pytest.approx(8 * 0.2)
    assert figures["without_messages"] < beside["simulated"] < waiting["simulated"]
    assert beside["seconds"] >= 8 * 0.2 + 2 * 0.044  # the first microbatch's way there, the last one's way back
    assert waiting["seconds"] >= 8 * 0.2 + 2 * 0.044


def test_the_ratios_of_a_run() -> None:
    arguments = bench.argparse.Namespace(forward=0.1, backward=0.1, microbatches=8)
    links = [0.0, 0.05, 0.0]
    found = {"links": links, "runs": {"overlapped": [2.6, 9.0, 2.5], "synchronous": [2.9]}}
    figures = bench.summary(found, arguments)
    beside, waiting = figures["versions"]["overlapped"], figures["versions"]["synchronous"]
    assert figures["without_messages"] == pytest.approx(11 * 0.2) and figures["link_over_forward"] == 0.5
    assert beside["seconds"] == 2.6 and beside["ratio"] == pytest.approx(2.6 / beside["simulated"])
    # Each way once for the first and the last microbatch; between them three are in flight, for two messages.
    assert 11 * 0.2 + 2 * 0.05 <= beside["simulated"] < waiting["simulated"]


def test_where_there_is_no_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(bench.os, "geteuid", lambda: 1000)
    out = tmp_path / "link.json"
    bench.main([f"--out={out}"])
    assert "skipped: network namespaces need root" in capsys.readouterr().out
    assert json.loads(out.read_text()) == {"skipped": "network namespaces need root"}
