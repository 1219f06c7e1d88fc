from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from recipe_module import load_recipe

bench = load_recipe("benchmarks/strategy_overhead.py")


def test_turns_alternate_and_time_each_alone() -> None:
    clock, order = [0.0], []
    turns = bench.Turns(["a", "b", "c"], 3, lambda: clock[0])
    pace = {"a": 1.0, "b": 2.0, "c": 5.0}

    def contend(name: str) -> None:
        turns.enter(name)
        for _ in range(9):
            clock[0] += pace[name]
            order.append(name)
            turns.step_done(name)
        turns.leave(name)

    threads = [threading.Thread(target=contend, args=(name,)) for name in pace]
    for thread in threads:
        thread.start()
    turns.gates["a"].release()
    for thread in threads:
        thread.join(10)
    assert "".join(order) == "aaabbbccc" * 3
    for name, seconds in pace.items():
        assert turns.seconds[name] == [seconds] * 9
        assert turns.medians(turns.seconds[name]) == [seconds] * 2  # the first turn is left out


def test_runs_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    sizes = ["--layers=1", "--width=16", "--heads=2", "--sequence=16", "--batch=2", "--steps=3", "--rounds=3"]
    bench.main([*sizes, "--clip=0.5", f"--out={out}"])
    figures = json.loads(out.read_text())
    assert set(figures["median_step_seconds"]) == {bench.LOOP, bench.PLAIN, bench.MEGAPAR}
    assert all(len(turns) == 3 and min(turns) > 0 for turns in figures["turns"].values())
    assert figures["ratios"]["megapar_to_lightning"]["median"] > 0
    losses = list(figures["last_losses"].values())
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-3)
    assert "MegaParStrategy against plain Lightning" in capsys.readouterr().out


def test_failing_contender_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise ValueError("no loop today")

    monkeypatch.setattr(bench.Bench, "loop", fail)
    with pytest.raises(ValueError, match="no loop today"):
        bench.main(["--layers=1", "--width=16", "--heads=2", "--sequence=8", "--batch=1", "--steps=2", "--rounds=1"])
