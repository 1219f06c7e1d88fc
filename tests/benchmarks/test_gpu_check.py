"""The check of a GPU runs on a CPU, with sizes that mean little."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_module import load_recipe
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_megapar.models.gpt import GPT

check = load_recipe("benchmarks/gpu_check.py")
cases = load_recipe("benchmarks/gpu_cases.py")
CPU = torch.device("cpu")


def test_runs_and_prints_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    assert check.main(["--device=cpu", "--quick", f"--out={out}"]) == 0
    figures = json.loads(out.read_text())
    rows = {row["name"]: row for row in figures["rows"]}
    names = [case.name for case in check.training_cases()]
    assert {*names, *check.CHECKS} <= set(rows)
    assert list(rows)[:7] == names[:7] and list(rows)[-1] == list(check.CHECKS)[-1] == "arena of gradients"
    for name in names:
        row = rows[name]
        if row["status"] == "skipped":
            assert find_spec("torchao") is None and "fp8" in name
            continue
        assert row["status"] == "done", row
        assert row["step_seconds"] > 0 and row["peak_bytes"] > 0 and row["tokens_per_second"] > 0
        assert row["model_utilisation"] is None and len(row["losses"]) == 4 + 2 + 1
        if row["precision_and_fp8"] == ["bf16-mixed", None] and name != names[0]:
            assert row["compared_with"] == names[0] and row["losses_part"] == 0, row
    for share in ("15%", "40%", "70%"):
        assert "budget" in rows[f"recompute auto, budget {share}"]["note"]
    assert rows["recompute full"]["peak_bytes"] < rows["recompute none"]["peak_bytes"]
    assert all(rows[name]["status"] == "done" and rows[name]["is_ok"] for name in check.CHECKS), rows
    assert figures["left_out"] == []
    said = capsys.readouterr().out
    assert said.count("┏") == 1, "one table"
    assert "budget_bytes" not in said and "FAILED" not in said


def runner(minutes: float, now: Any, **settings: Any) -> Any:
    args = argparse.Namespace(quick=True, minutes=minutes, out=None, **settings)
    return check.Runner(args, CPU, now)


def test_what_fails_is_a_row_and_the_next_one_runs() -> None:
    rows = runner(8, lambda: 0.0)

    def fail() -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 TiB.")

    rows.row("large", fail)
    rows.row("small", lambda: {"note": "fine", "is_ok": True})
    rows.row("wrong", lambda: {"note": "gradients DIFFER", "is_ok": False})
    assert [row["status"] for row in rows.rows] == ["failed", "done", "done"]
    assert check._note(rows.rows[0]) == "FAILED: OutOfMemoryError: CUDA out of memory."
    assert check._note(rows.rows[1]) == "ok: fine" and check._note(rows.rows[2]) == "NOT OK: gradients DIFFER"


def test_nothing_is_begun_that_may_not_end_in_time() -> None:
    clock = [0.0]
    rows = runner(1, lambda: clock[0])

    def take(seconds: float) -> dict[str, Any]:
        clock[0] += seconds
        return {"note": ""}

    rows.row("first", lambda: take(25))
    rows.row("second", lambda: take(20))  # 25 s were there for it
    rows.row("third", lambda: take(1))  # 15 s are left, and the longest took 25
    assert [row["status"] for row in rows.rows] == ["done", "done", "left out"]
    result = rows.result()
    assert result["left_out"] == ["third"]
    assert "No time was left for: third (--minutes=1)" in str(check.show(result, CPU).caption)


def test_without_torchao_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    rows = runner(8, lambda: 0.0)
    for case in check.training_cases():
        if case.fp8:
            rows.row(case.name, dict, rows._why_not(case))
    assert rows.rows and all(check._note(row) == "skipped: torchao is not installed" for row in rows.rows)


def test_operations_of_a_model_are_those_that_torch_counts() -> None:
    """But for attention, of which torch counts what the mask leaves out as well."""
    size = cases.Size(layers=3, width=32, heads=2, vocabulary=128, sequence=16, batch=2, steps=1)
    tokens = torch.zeros((2, 16), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        GPT(size.config)(tokens, tokens).backward()
    attention = 6 * size.layers * size.width * size.sequence * size.tokens
    assert counter.get_total_flops() == size.flops + attention


def test_utilisation_by_the_name_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for name, expected in (("NVIDIA H200", 0.5), ("NVIDIA A100-SXM4-80GB", 494.5 / 312), ("Some GPU", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert cases.model_utilisation(494.5e12, gpu) == (None if expected is None else pytest.approx(expected))
    assert cases.model_utilisation(1e12, CPU) is None


def test_settings_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check.parse(["--minutes=0"])
    assert "--minutes=0: expected a number above 0, such as 8" in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            check.parse(["--device=cuda"])
        assert "torch sees no GPU here" in capsys.readouterr().err
        assert check.parse([]).device == "cpu"
