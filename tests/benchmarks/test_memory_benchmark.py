"""The benchmark of activation memory runs, with sizes that mean little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from recipe_module import load_recipe

bench = load_recipe("benchmarks/memory.py")
budgets, chains = load_recipe("benchmarks/budgets.py"), load_recipe("benchmarks/chains.py")
overhead = load_recipe("benchmarks/recompute_overhead.py")


def test_runs_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    bench.main(["--quick", f"--out={out}"])
    figures = json.loads(out.read_text())
    assert list(figures["chains"]) == [shape.name for shape in bench.SMALL]
    for found in figures["chains"].values():
        assert [point["share"] for point in found["points"]] == list(bench.SHARES)
        assert found["is_monotone"]
        for point in found["points"]:
            assert point["is_within"] and point["is_close"], point
            assert max(point["first_bytes"], point["measured_bytes"]) <= point["budget_bytes"]
            assert point["step"]["wall"] > 0 and len(point["choices"]) == 2
        for rival in found["rivals"]:
            assert rival["ours_planned_bytes"] <= rival["planned_bytes"]
            assert rival["ours"]["measured_bytes"] <= rival["planned_bytes"]
        assert {"products", "no_attention", "inputs"} <= {one for r in found["rivals"] for one in r["rival"]["choices"]}
    first = next(iter(figures["chains"].values()))
    assert [one["budget"] for one in first["torch"]] == [0.0, 1.0]
    assert all(one["measured_bytes"] > 0 and one["step"]["cpu"] > 0 for one in first["torch"])
    for ways in figures["ways"].values():
        assert list(ways) == list(bench.ALL_WAYS)
        assert ways["moved to the host"]["gradients_are_equal"] and ways["recomputed (inputs)"]["gradients_are_equal"]
        assert 0 < ways["int4"]["kept_bytes"] < ways["int8"]["kept_bytes"] < ways["kept as it is"]["kept_bytes"]
        assert ways["int8"]["cosine"] > 0.999 > 0.9 and ways["int4"]["cosine"] > 0.98
        assert ways["moved to the host"]["host_bytes"] > ways["moved to the host"]["kept_bytes"]
    assert set(figures["overhead"]["median_step_seconds"]) == set(overhead.NAMES)
    assert max(figures["overhead"]["largest_difference_of_losses"].values()) < 1e-3
    assert figures["targets"]["measured peak within the budget"] == [12, 12]
    said = " ".join(capsys.readouterr().out.split())
    assert "the measured peak rises with the budget" in said and "what was aimed at" in said
    assert "█" in said and "12 of 12" in said and "torch's 0" in said


def test_rules_that_plans_are_compared_with() -> None:
    rules = budgets.rivals(6)
    assert rules["first 2 of 6 recomputed"] == ["inputs"] * 2 + ["all"] * 4
    assert rules["first 6 of 6 recomputed"] == ["inputs"] * 6
    assert list(budgets.rivals(1).values()) == [["inputs"], ["products"], ["no_attention"]]
    assert budgets.is_monotone([1, 1, 3]) and not budgets.is_monotone([1, 3, 2])


def test_works_take_turns_and_each_begins_a_round() -> None:
    order: list[str] = []
    works = {name: lambda name=name: order.append(name) for name in "abc"}
    found = chains.by_turns(works, 3, torch.device("cpu"))
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert all(len(times.wall) == len(times.cpu) == 3 for times in found.values())
    twice = chains.Times((2.0, 8.0, 6.0), (1.0, 1.0, 1.0)).ratio_to(chains.Times((1.0, 2.0, 3.0), (2.0, 2.0, 2.0)))
    assert twice == {"wall": 2.0, "cpu": 0.5}


def test_blocks_that_checkpoint_their_own_call_have_the_same_gradients() -> None:
    shape = chains.ChainShape("any", "gpt2", 2, 32, 2, 16, 2, dropout=0.1)
    chain = chains.Chain(shape, torch.device("cpu"))
    torch.manual_seed(0)
    plain = chain.gradients()
    for block in chain.blocks:
        block.__class__ = overhead.CheckpointedBlock
    torch.manual_seed(0)
    assert all(map(torch.equal, chain.gradients(), plain))


def test_sizes_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("--rounds=0", "--steps=1", "--threads=0"):
        with pytest.raises(SystemExit):
            bench.parse([wrong])
    assert "--steps=1: expected at least 2" in capsys.readouterr().err
