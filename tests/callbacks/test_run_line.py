from __future__ import annotations

import csv
import os
import pty
import re
import sys
import threading
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import TQDMProgressBar
from toy import Toy, loader, trainer

from lightning_megapar.callbacks import GradNorm, MetricsCSV, RunLine
from lightning_megapar.callbacks.meter import StepRecord
from lightning_megapar.callbacks.run_line import line
from lightning_megapar.config import ConfigError


def numbers(text: str) -> dict[str, float]:
    found = {"step": float(re.match(r"step (\d+)", text).group(1))}  # type: ignore[union-attr]
    for name, pattern in (
        ("train_loss", r"\| loss ([\d.]+)"),
        ("val_loss", r"val_loss ([\d.]+)"),
        ("grad_norm", r"grad_norm ([\d.e+-]+)"),
        ("tokens_per_second", r"([\d,]+) tokens/s"),
        ("data_wait_share", r"data wait ([\d.]+) %"),
    ):
        match = re.search(pattern, text)
        if match:
            found[name] = float(match.group(1).replace(",", ""))
    return found


def test_pipe_gets_one_plain_line_per_interval_with_the_numbers_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = [GradNorm(), MetricsCSV(), RunLine(every_n_steps=4)]
    fit = trainer(tmp_path, callbacks, val_check_interval=4, check_val_every_n_epoch=None)
    fit.fit(Toy(), loader(80), loader(8))
    captured = capsys.readouterr()
    assert "\r" not in captured.out + captured.err and "\x1b" not in captured.out + captured.err
    lines = [text for text in captured.out.splitlines() if text.startswith("step ")]
    with open(tmp_path / "metrics.csv", newline="") as file:
        table = {int(row["step"]): row for row in csv.DictReader(file)}
    assert [int(numbers(text)["step"]) for text in lines] == [4, 8, 10]
    val_loss = None
    for text in lines:
        shown = numbers(text)
        row = table[int(shown["step"])]
        val_loss = row["val_loss"] or val_loss
        assert shown["train_loss"] == round(float(row["train_loss"]), 4)
        assert shown["val_loss"] == round(float(val_loss), 4)  # type: ignore[arg-type]
        assert shown["grad_norm"] == float(f"{float(row['grad_norm']):.4g}")
        assert shown["tokens_per_second"] == round(float(row["tokens_per_second"]))
        assert shown["data_wait_share"] == float(f"{100 * float(row['data_wait_share']):.1f}")
        assert f"peak {int(row['peak_memory_bytes']) / 2**20:,.0f} MiB" in text
        assert "ETA 0:00:" in text
    assert lines[-1].startswith("step 10/10 | ")


def test_interval_defaults_to_the_trainers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, [RunLine()], log_every_n_steps=3, max_steps=7).fit(Toy(), loader(80))
    lines = [text for text in capsys.readouterr().out.splitlines() if text.startswith("step ")]
    assert [text.split()[1] for text in lines] == ["3/7", "6/7", "7/7"]


def test_last_line_before_an_exception_is_not_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = iter(range(100))

    def fail() -> None:
        if next(calls) == 2:
            raise RuntimeError("validation failed")

    fit = trainer(tmp_path, [RunLine(5)], val_check_interval=5, check_val_every_n_epoch=None)
    with pytest.raises(RuntimeError, match="validation failed"):
        fit.fit(Toy(on_val=fail), loader(80), loader(40))
    assert "step 5/10" in capsys.readouterr().out


def test_terminal_gets_one_line_redrawn_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr("lightning_megapar.callbacks.run_line._REFRESH_SECONDS", 0.0)
    master, slave = pty.openpty()
    screen = bytearray()

    def read() -> None:
        try:
            while piece := os.read(master, 4096):
                screen.extend(piece)
        except OSError:
            pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        fit = trainer(tmp_path, [GradNorm(), RunLine()], val_check_interval=4, check_val_every_n_epoch=None)
        fit.fit(Toy(), loader(80), loader(8))
        monkeypatch.undo()
    reader.join(5)
    os.close(master)
    text = screen.decode()
    assert text.count("\r") > 10  # redrawn in place ...
    assert text.count("\n") <= 3  # ... not scrolled
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    for step in range(1, 11):
        assert f"step {step}/10 | loss " in plain
    assert "validating 1/2" in plain and "val_loss" in plain and "tokens/s" in plain
    assert "\u2501" in plain  # the bar
    assert "\x1b[?25h" in text  # the cursor is back


def test_takes_the_place_of_the_progress_bar(tmp_path: Path) -> None:
    run_line = RunLine()
    fit = trainer(tmp_path, [run_line])
    assert fit.progress_bar_callback is run_line
    with pytest.raises(MisconfigurationException, match="multiple progress bar"):
        trainer(tmp_path, [RunLine(), TQDMProgressBar()])


def test_silent_when_disabled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_line = RunLine(1)
    fit = trainer(tmp_path, [run_line], max_steps=2)
    run_line.disable()  # as Lightning does on ranks other than 0
    fit.fit(Toy(), loader())
    run_line.print("nothing")
    assert capsys.readouterr().out == ""


def test_works_for_validate_and_test_alone(tmp_path: Path) -> None:
    fit = trainer(tmp_path, [RunLine()])
    (result,) = fit.validate(Toy(), loader(8), verbose=False)
    assert result["val_loss"] > 0


def test_unknown_values_are_left_out() -> None:
    record = StepRecord(3, 0, None, None, None, None, 0.0, 0.0, 0, 0, 1.0, None, None)
    assert line(record) == "step 3 | data wait 0.0 %"


def test_narrow_line_keeps_what_matters() -> None:
    record = StepRecord(30, 0, 2.5, 0.75, 1e-3, 12345.6, 0.1, 0.01, 2**30, 480, 60.0, 90.0, 100)
    whole = line(record, 2.25)
    assert whole == (
        "step 30/100 | loss 2.5000 | val_loss 2.2500 | grad_norm 0.75 | 12,346 tokens/s | peak 1,024 MiB | "
        "data wait 1.0 % | ETA 0:01:30"
    )
    assert line(record, 2.25, width=len(whole)) == whole
    at_80 = line(record, 2.25, width=80)
    assert at_80 == "step 30/100 | loss 2.5000 | val_loss 2.2500 | 12,346 tokens/s | ETA 0:01:30"
    assert (
        line(record, 2.25, "validating 3/8", width=60) == "step 30/100 | loss 2.5000 | val_loss 2.2500 | validating 3/8"
    )


def test_noise_and_batch_size_are_told_where_they_are_known() -> None:
    figures = {"noise_scale": 41.25, "noise_scale/trace": 9.0, "batch_size": 32.0, "weight_decay": 0.1}
    record = StepRecord(30, 0, 2.5, None, None, None, 0.0, 0.0, 0, 0, 1.0, None, None, figures=figures)
    assert line(record) == "step 30 | loss 2.5000 | noise_scale 41.25 | batch_size 32 | data wait 0.0 %"
    record = StepRecord(1, 0, 2.5, None, None, None, 0.0, 0.0, 0, 0, 1.0, None, None, figures={"noise_scale": None})
    assert line(record) == "step 1 | loss 2.5000 | data wait 0.0 %"


def test_interval_is_checked() -> None:
    with pytest.raises(ConfigError, match="every_n_steps=0"):
        RunLine(every_n_steps=0)
