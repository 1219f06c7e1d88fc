from __future__ import annotations

from typing import Any

import parity
import pytest
import torch
from pool import RankPool

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "dp2": (2, {"data_parallel_size": 2}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "tp2_sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "tp4": (4, {"tensor_parallel_size": 4}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "pp2_gpipe": (2, {"pipeline_parallel_size": 2, "pipeline_schedule": "gpipe"}),
    "pp2_zb_h1": (2, {"pipeline_parallel_size": 2, "pipeline_schedule": "zb_h1"}),
    "tp2_pp2_zb_h2": (
        4,
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_schedule": "zb_h2", "num_microbatches": 4},
    ),
    "pp2_interleaved": (2, {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved_1f1b"}),
    "pp2_zbv": (2, {"pipeline_parallel_size": 2, "pipeline_schedule": "zbv"}),
    "tp2_pp2_dualpipe_v": (
        4,
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_schedule": "dualpipe_v"},
    ),
    "pp4": (4, {"pipeline_parallel_size": 4}),
    "pp3_uneven": (3, {"pipeline_parallel_size": 3, "pipeline_split": (2, 1, 1), "num_microbatches": 4}),
    "dp2_tp2": (4, {"data_parallel_size": 2, "tensor_parallel_size": 2}),
    "dp2_pp2": (4, {"data_parallel_size": 2, "pipeline_parallel_size": 2}),
    "tp2_pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "tp2_sp_pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "sequence_parallel": True}),
    "dp2_zero1": (2, {"data_parallel_size": 2, "zero_stage": 1}),
    "dp2_tp2_zero1": (4, {"data_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 1}),
    "dp2_pp2_zero1": (4, {"data_parallel_size": 2, "pipeline_parallel_size": 2, "zero_stage": 1}),
    "dp2_tp2_pp2": (8, {"data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
}
_references: dict[tuple[Any, ...], dict[str, Any]] = {}


def reference(style: str, optimizer: str, **options: Any) -> dict[str, Any]:
    key = (style, optimizer, *sorted(options.items(), key=str))
    if key not in _references:
        changes = {"tied_head": options.pop("tied")} if "tied" in options else {}
        _references[key] = parity.run_reference(parity.style(style, **changes), optimizer, **options)
    return _references[key]


@pytest.mark.parametrize("style", ["gpt2", "llama"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_float64(pool: RankPool, layout: str, style: str) -> None:
    world, options = LAYOUTS[layout]
    results = pool.run(
        parity.run_strategy, world, parity.style(style), world, "sgd", {**options, "empty_init": True}, mode="trainer"
    )
    parity.compare(results[0], reference(style, "sgd"), 1e-12)
    for other in results[1:]:
        assert other["losses"] == results[0]["losses"]
        assert other["norms"] == results[0]["norms"]


@pytest.mark.parametrize("layout", ["dp2_tp2_pp2", "tp2_sp_pp2", "dp2_pp2_zero1"])
def test_adamw_float32(pool: RankPool, layout: str) -> None:
    world, options = LAYOUTS[layout]
    results = pool.run(
        parity.run_strategy,
        world,
        parity.style("gpt2"),
        world,
        "adamw",
        options,
        precision="32-true",
        mode="trainer",
    )
    expected = reference("gpt2", "adamw", dtype=torch.float32)
    parity.compare(results[0], expected, 1e-5)


@pytest.mark.parametrize("layout", ["single", "dp2", "dp2_zero1", "tp2_pp2", "dp2_tp2_pp2", "dp2_pp2_zero1"])
def test_accumulation_and_clipping(pool: RankPool, layout: str) -> None:
    world, options = LAYOUTS[layout]
    results = pool.run(
        parity.run_strategy,
        world,
        parity.style("llama"),
        world,
        "adamw",
        options,
        accumulate=2,
        clip=0.5,
        mode="trainer",
    )
    parity.compare(results[0], reference("llama", "adamw", clip=0.5), 1e-11, accumulate=2)


@pytest.mark.parametrize(("style", "tied"), [("gpt2", False), ("llama", True)])
def test_tied_and_untied(pool: RankPool, style: str, tied: bool) -> None:
    world, options = LAYOUTS["tp2_pp2"]
    config = parity.style(style, tied_head=tied)
    results = pool.run(parity.run_strategy, world, config, world, "adamw", options, mode="trainer")
    parity.compare(results[0], reference(style, "adamw", tied=tied), 1e-11)


def test_dropout_masks_do_not_depend_on_where_a_block_runs(pool: RankPool) -> None:
    config = parity.style("gpt2", dropout=0.3)
    layouts = {
        "tp2": (2, {"tensor_parallel_size": 2}),
        "tp2_sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
        "pp2": (2, {"pipeline_parallel_size": 2, "num_microbatches": 1}),
        "tp2_pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 1}),
    }
    results = {
        name: pool.run(parity.run_strategy, world, config, world, "sgd", options, mode="trainer")[0]
        for name, (world, options) in layouts.items()
    }
    for name in ("tp2_sp", "pp2", "tp2_pp2"):
        parity.compare(results[name], results["tp2"], 1e-12)
    plain = reference("gpt2", "sgd")
    assert abs(results["tp2"]["losses"][0] - plain["losses"][0]) > 1e-6  # something was dropped


@pytest.mark.parametrize("layout", ["dp2_pp2", "dp2_pp2_zero1", "tp2_pp2"])
def test_microbatches_and_batches_without_a_valid_token(pool: RankPool, layout: str) -> None:
    """Rows 4 to 11 of the first batch, and the whole second batch, have no label that counts."""
    world, options = LAYOUTS[layout]
    for empty in (range(4, 12), range(16, 32)):
        config = parity.style("gpt2")
        mine = pool.run(parity.run_strategy, world, config, world, "sgd", options, empty=empty, mode="trainer")[0]
        parity.compare(mine, parity.run_reference(config, "sgd", empty=empty), 1e-12)
