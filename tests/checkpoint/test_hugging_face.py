"""Hugging Face directories in and out, on every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import hugging_face_cases as cases
from pool import RankPool

from lightning_megapar.checkpoint import CheckpointError
from lightning_megapar.config import ConfigError

pytest.importorskip("transformers")

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "tp2_pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "dp2": (2, {"data_parallel_size": 2}),
    "dp2_zero1": (2, {"data_parallel_size": 2, "zero_stage": 1}),
    "dp2_pp2": (4, {"data_parallel_size": 2, "pipeline_parallel_size": 2}),
}
SOME = [
    ("llama", "pp2"),
    ("llama_tied", "pp2"),
    ("gpt2", "pp2"),
    ("mixtral", "pp2"),
    ("llama", "tp2"),
    ("llama", "tp2_pp2"),
    pytest.param("llama_tied", "tp2_pp2", marks=pytest.mark.slow),
    ("mixtral", "tp2_pp2"),
    ("gpt2", "tp2"),
    pytest.param("llama", "dp2", marks=pytest.mark.slow),
    ("mixtral", "dp2_zero1"),
    ("llama_tied", "single"),
    pytest.param("gpt2", "dp2", marks=pytest.mark.slow),
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
        torch.testing.assert_close(logits, model.eval()(rows).logits, rtol=1e-5, atol=1e-5)
    for kind in ("config.json", "generation_config.json"):
        mine, theirs = (json.loads((place / kind).read_text()) for place in (out, source))
        assert mine == theirs, kind
    # The same tensors under the same names as in the directory that it came from (experts apart, tied ones once).
    maps = [json.loads((place / "model.safetensors.index.json").read_text())["weight_map"] for place in (out, source)]
    assert set(maps[0]) == set(maps[1])


@pytest.mark.parametrize("build", ["at once", "init_module"])
def test_modules_built_in_other_ways_take_the_files_values(pool: RankPool, tmp_path: Path, build: str) -> None:
    """On the CPU, differently on each rank; or empty, outside of configure_model."""
    config = cases.config_of("gpt2")
    model = cases.written(tmp_path / "in", config)
    options = {"pipeline_parallel_size": 2, "load_from": {"model": str(tmp_path / "in")}}
    result = pool.run(cases.train_and_write, 2, config, 2, options, build=build, mode="trainer")[0]
    for key, value in model.state_dict().items():
        assert torch.equal(result["initial"][f"model.{key}"], value), key


def test_built_empty_without_files_every_layout_starts_from_one_model(pool: RankPool) -> None:
    """With transformers' own rules: the same scale of every tensor as in a model that transformers fills itself."""
    for name in ("gpt2", "mixtral"):
        config = cases.config_of(name)
        results = {
            layout: pool.run(cases.train_and_write, LAYOUTS[layout][0], config, *LAYOUTS[layout], mode="trainer")[0]
            for layout in ("single", "pp2")
        }
        torch.manual_seed(0)
        alike = cases.empty(config).model.__class__(config)
        for key, value in alike.state_dict().items():
            mine = results["single"]["initial"][f"model.{key}"]
            assert torch.equal(mine, results["pp2"]["initial"][f"model.{key}"]), key
            assert mine.std().item() == pytest.approx(value.std().item(), rel=0.3, abs=1e-8), key
        assert results["single"]["losses"] == pytest.approx(results["pp2"]["losses"], rel=1e-5)


def test_buffers_that_no_file_holds_are_computed() -> None:
    for name in ("llama", "mixtral", "gpt2"):
        config = cases.config_of(name)
        whole = dict(cases.model_of(config).named_buffers())
        module = cases.filled(cases.empty(config), None)
        for key, value in module.model.named_buffers():
            assert torch.equal(value, whole[key]), key


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "mixtral"])
def test_single_file_and_directory_are_the_same(tmp_path: Path, name: str) -> None:
    config = cases.config_of(name)
    model = cases.written(tmp_path / "in", config)
    for path in (tmp_path / "in", tmp_path / "in" / "model.safetensors"):
        module = cases.filled(cases.empty(config), path)
        for key, value in model.state_dict().items():
            assert torch.equal(module.model.state_dict()[key], value), key
        assert (module.model.get_output_embeddings().weight is module.model.get_input_embeddings().weight) == (
            name in ("llama_tied", "gpt2")
        )


def test_a_base_model_goes_into_the_model_with_a_head_and_back(tmp_path: Path) -> None:
    import transformers

    config = cases.config_of("llama_tied")
    model = cases.written(tmp_path / "whole", config)
    model.model.save_pretrained(tmp_path / "base")
    module = cases.filled(cases.empty(config), tmp_path / "base")
    assert all(torch.equal(module.model.state_dict()[k], v) for k, v in model.state_dict().items())

    class Base(cases.User):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = transformers.AutoModel.from_config(config)

    module = cases.filled(cases.empty(config, Base), tmp_path / "whole")
    assert all(torch.equal(module.model.state_dict()[k], v) for k, v in model.model.state_dict().items())


def test_a_part_of_a_model_goes_in_and_out(tmp_path: Path) -> None:
    """By its dotted name; its own conversions are found (the experts are put together)."""
    config = cases.config_of("mixtral")
    model = cases.written(tmp_path / "whole", config)
    model.model.save_pretrained(tmp_path / "base")
    module = cases.empty(config)
    with pytest.raises(ConfigError, match=r"missing in the files: 'lm_head\.weight'"):
        cases.filled(module, {"model": tmp_path / "base"})
    module = cases.filled(cases.empty(config), {"model.model": tmp_path / "base"})
    assert all(torch.equal(module.model.model.state_dict()[k], v) for k, v in model.model.state_dict().items())
    cases.save_whole(module, tmp_path / "out", "model.model")
    mine, theirs = cases.tensors_in(tmp_path / "out"), cases.tensors_in(tmp_path / "base")
    assert set(mine) == set(theirs) and all(torch.equal(mine[key], theirs[key]) for key in mine)
    with pytest.raises(ConfigError, match=r"module='model\.layers' is no transformers model; there are 1"):
        cases.save_whole(module, tmp_path / "no", "model.layers")


def test_what_may_differ_is_named(tmp_path: Path) -> None:
    """A new head on a pretrained body: the head is initialised, the old one left out."""
    import transformers

    config = cases.config_of("llama")
    model = cases.written(tmp_path / "in", config)

    class Classifier(cases.User):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = transformers.AutoModelForSequenceClassification.from_config(config)

    with pytest.raises(ConfigError) as refused:
        cases.filled(cases.empty(config, Classifier), tmp_path / "in")
    said = str(refused.value)
    assert "does not fit LlamaForSequenceClassification (module 'model'), 2 names:" in said
    assert "missing in the files: 'score.weight'" in said and "unknown to the model: 'lm_head.weight'" in said
    module = cases.filled(cases.empty(config, Classifier), tmp_path / "in", ("score.*", "lm_head.*"))
    for key, value in model.model.state_dict().items():
        assert torch.equal(module.model.model.state_dict()[key], value), key
    assert 0 < module.model.score.weight.std() < 0.1


def test_other_float_types_are_converted(tmp_path: Path) -> None:
    model = cases.model_of(cases.config_of("mixtral")).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in")
    module = cases.filled(cases.empty(cases.config_of("mixtral")), tmp_path / "in")
    for key, value in model.state_dict().items():
        mine = module.model.state_dict()[key]
        assert mine.dtype == torch.float32 and torch.equal(mine, value.float()), key


def test_conversions_that_compute_are_done_on_whole_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture whose files hold gate and up projections interleaved row by row, under another name."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Chunk, Interleave, WeightConverter, WeightRenaming

    rules = [
        WeightRenaming("self_attn.out", "self_attn.o_proj"),
        WeightConverter(
            "mlp.gate_up.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Interleave(dim=0), Chunk(dim=0)]
        ),
    ]
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # builds the table
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "llama", rules)
    config = cases.config_of("llama")
    model = cases.written(tmp_path / "in", config)
    stored = cases.tensors_in(tmp_path / "in")
    assert "model.layers.0.mlp.gate_up.weight" in stored and "model.layers.0.self_attn.out.weight" in stored
    gate = model.model.layers[0].mlp.gate_proj.weight
    assert not torch.equal(stored["model.layers.0.mlp.gate_up.weight"][: len(gate)], gate)
    module = cases.filled(cases.empty(config), tmp_path / "in")
    for key, value in model.state_dict().items():
        assert torch.equal(module.model.state_dict()[key], value), key

    cases.save_whole(module, tmp_path / "out")
    again = cases.tensors_in(tmp_path / "out")
    assert set(again) == set(stored) and all(torch.equal(again[key], stored[key]) for key in stored)


def test_a_tokenizer_and_everything_else_of_the_source_is_kept(pool: RankPool, tmp_path: Path) -> None:
    config = cases.config_of("llama")
    source = tmp_path / "in"
    cases.written(source, config)
    kept = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "chat_template.jinja"]
    for name in (*kept, "training_args.bin", "notes.txt"):
        (source / name).write_text(name)
    options = {"pipeline_parallel_size": 2, "load_from": str(source)}
    out = tmp_path / "out"
    pool.run(cases.train_and_write, 2, config, 2, options, str(out), tokenizer_from=str(source), mode="trainer")
    assert cases.names_in(out) == {"config.json", "generation_config.json", "model.safetensors", *kept}
    assert all((out / name).read_text() == name for name in kept)
    assert cases.names_in(tmp_path) == {"in", "out"}, "no temporary directory is left"


@pytest.mark.parametrize("name", ["llama_tied", "mixtral"])
def test_a_state_that_is_whole_is_written_alike(tmp_path: Path, name: str) -> None:
    from lightning_megapar.checkpoint.hugging_face.saving import save_hugging_face_state

    config = cases.config_of(name)
    model = cases.written(tmp_path / "in", config)
    state = {f"net.{key}": value for key, value in model.state_dict().items()}
    for number, drop in enumerate(("", "net.lm_head.weight", "net.model.embed_tokens.weight")):
        if drop and name == "mixtral":
            continue
        out = tmp_path / f"out{number}"
        save_hugging_face_state(out, {k: v for k, v in state.items() if k != drop}, config, "net", max_file_bytes=30000)
        mine, theirs = cases.tensors_in(out), cases.tensors_in(tmp_path / "in")
        assert set(mine) == set(theirs) and all(torch.equal(mine[key], theirs[key]) for key in mine)
    with pytest.raises(CheckpointError, match="no rank holds 'model"):
        save_hugging_face_state(tmp_path / "lost", dict(list(state.items())[:3]), config, "net")
    with pytest.raises(CheckpointError, match="exists; nothing is written over it"):
        save_hugging_face_state(tmp_path / "in", state, config, "net")


def test_a_sharded_checkpoint_is_exported_in_one_process(
    pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import runpy

    import transformers

    export = runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "export.py"))["main"]
    config, path = cases.config_of("mixtral"), tmp_path / "last.ckpt"
    world, options = LAYOUTS["tp2_pp2"]
    state = pool.run(cases.train_and_checkpoint, world, config, world, options, str(path), mode="trainer")[0]
    assert export([str(path), str(tmp_path / "out"), "--hugging-face"]) == 0
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for key, value in opened.state_dict().items():
        assert torch.equal(state[f"model.{key}"], value), key
    said = capsys.readouterr()
    assert f"wrote {tmp_path / 'out'}" in said.out
    assert export([str(path), str(tmp_path / "out"), "--hugging-face", "--force"]) == 2
    assert "exists; a directory is never written over" in capsys.readouterr().err
    assert export([str(path), str(tmp_path / "new"), "--hugging-face", "--config", str(tmp_path / "none")]) == 2
    assert "no transformers configuration" in capsys.readouterr().err
    assert export([str(path), str(tmp_path / "new"), "--hugging-face", "--module", "net"]) == 2
    assert "there is no tensor 'net.model.embed_tokens.weight'" in capsys.readouterr().err
    assert cases.names_in(tmp_path) == {"last.ckpt", "out"}


def test_a_whole_module_is_cut_and_the_rest_is_freed(pool: RankPool) -> None:
    config = cases.config_of("llama")
    for whole, foreign, share in pool.run(
        cases.what_lives_after_set_up, 2, config, 2, {"pipeline_parallel_size": 2}, mode="trainer"
    ):
        assert foreign == 0 and share < 0.6 * whole


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures by /proc")
@pytest.mark.parametrize("layout", ["tp2_pp2", "dp2_pp2"])
@pytest.mark.parametrize("from_files", [True, False])
def test_memory_of_a_start_is_that_of_the_share(pool: RankPool, tmp_path: Path, layout: str, from_files: bool) -> None:
    """188 MB of parameters: at most 1.3 x the rank's share + the largest tensor, whatever it is filled from."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=8000, hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8
    )
    largest, file = 8000 * 512 * 4, 40_000_000
    world, options = LAYOUTS[layout]
    share = 50e6 if layout == "tp2_pp2" else 100e6
    if from_files:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "in", max_shard_size="50MB")
        options = {**options, "load_from": str(tmp_path / "in")}
    measured = pool.run(cases.measure_start, world, config, world, options, str(tmp_path / "out"), file, mode="trainer")
    for rank, one in enumerate(measured):
        assert one["shard"] < share
        assert one["set-up"] <= 1.3 * one["shard"] + largest, (rank, one)
        assert one["writing"] <= (file if rank == 0 else 0) + 1.3 * largest, (rank, one)
