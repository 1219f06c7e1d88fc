"""``recipes/memory.py``: its command line, and a small run of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from recipe_module import RECIPES, load_recipe

from lightning_megapar.callbacks.memory_report import read_report


def test_its_words_in_those_of_pretrain() -> None:
    translated = load_recipe("memory.py").translated
    assert translated([]) == ["callbacks=memory", "trainer.max_steps=8", "trainer.limit_val_batches=0"]
    assert translated(["at_step=12", "parallel=tp2"])[1:] == [
        "trainer.max_steps=13", "trainer.limit_val_batches=0", "callbacks.memory_report.at_step=12", "parallel=tp2"
    ]  # fmt: skip
    assert translated(["trainer.max_steps=4", "out=a.svg"]) == [
        "callbacks=memory",
        "trainer.limit_val_batches=0",
        "trainer.max_steps=4",
        f"callbacks.memory_report.picture={Path('a.svg').absolute()}",
    ]


def test_a_small_run(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for number in range(8):
        (tmp_path / "notes" / f"{number}.txt").write_text("some words that are read again and again\n" * 40)
    words = [
        "model=gpt_tiny",
        "parallel=pp2",
        "data=text",
        f"data.source={tmp_path / 'notes'}",
        "data.global_batch_size=8",
        "run_dir=run",
        "out=seen.svg",
    ]
    done = subprocess.run(
        [sys.executable, str(RECIPES / "memory.py"), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stderr
    assert "memory of training step 2" in done.stdout and "optimizer state" in done.stdout and "step 8/8" in done.stdout
    assert [one.stage for one in read_report(tmp_path / "run" / "memory.json")] == [0, 1]
    assert "predicted peak" in (tmp_path / "seen.svg").read_text()
    assert "USDT" not in done.stderr and "Memory block of unknown size" not in done.stderr
