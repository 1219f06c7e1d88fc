"""Hugging Face directories in and out, on every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import hugging_face_cases as cases
from pool import RankPool

pytest.importorskip("transformers")

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "dp2": (2, {"data_parallel_size": 2}),
    "dp2_zero1": (2, {"data_parallel_size": 2, "zero_stage": 1}),
    "dp2_pp2": (4, {"data_parallel_size": 2, "pipeline_parallel_size": 2}),
}
SOME = [
    ("llama", "pp2"),
    ("llama_tied", "pp2"),
    ("gpt2", "pp2"),
    ("mixtral", "pp2"),
    ("llama", "dp2"),
    ("mixtral", "dp2_zero1"),
    ("llama_tied", "single"),
    pytest.param("gpt2", "dp2", marks=pytest.mark.slow),
    pytest.param("llama_tied", "dp2_pp2", marks=pytest.mark.slow),
    pytest.param("mixtral", "dp2_pp2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "layout"), SOME)
def test_in_three_steps_and_out(pool: RankPool, tmp_path: Path, name: str, layout: str) -> None:
    import transformers

    world, options = LAYOUTS[layout]
    config, source, out = cases.config_of(name), tmp_path / "in", tmp_path / "out"
    # Indexed files on the way in and on the way out.
    model = cases.written(source, config, max_shard_size="20KB")
    assert len(list(source.glob("model-*.safetensors"))) > 2
    before = {f"model.{k}": v.clone() for k, v in model.state_dict().items()}
    expected = cases.reference(model)
    options = {**options, "load_from": str(source)}
    result = pool.run(
        cases.train_and_write, world, config, world, options, str(out), max_file_bytes=30_000, mode="trainer"
    )[0]

    assert set(result["initial"]) == set(before)
    for key, value in before.items():
        assert torch.equal(result["initial"][key], value), key
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    largest = max(float(g.abs().max()) for g in expected["gradients"].values())
    for key, gradient in expected["gradients"].items():
        scale = max(float(gradient.abs().max()), largest * 1e-3)
        assert float((result["gradients"][key] - gradient).abs().max()) <= 1e-5 * scale, key

    # transformers opens it, with the logits of what was gathered, and of what one process has trained.
    assert len(list(out.glob("model-*.safetensors"))) > 2
    opened, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = cases.model_of(config, seed=5)
    ours.load_state_dict({k.removeprefix("model."): v for k, v in result["weights"].items()})
    rows = cases.tokens(4, seed=9)
    with torch.no_grad():
        logits = opened.eval()(rows).logits
        torch.testing.assert_close(logits, ours(rows).logits, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(logits, model.eval()(rows).logits, rtol=1e-4, atol=1e-5)
    for kind in ("config.json", "generation_config.json"):
        mine, theirs = (json.loads((place / kind).read_text()) for place in (out, source))
        assert mine == theirs, kind
    # The same tensors under the same names as in the directory that it came from (experts apart, tied ones once).
    maps = [json.loads((place / "model.safetensors.index.json").read_text())["weight_map"] for place in (out, source)]
    assert set(maps[0]) == set(maps[1])
