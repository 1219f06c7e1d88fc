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
        torch.testing.assert_close(logits, model.eval()(rows).logits, rtol=1e-4, atol=1e-5)
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


def test_nothing_is_written_over_a_directory(pool: RankPool, tmp_path: Path) -> None:
    config, out = cases.config_of("gpt2"), tmp_path / "out"
    out.mkdir()
    said = pool.run(cases.expect_refusal, 2, config, 2, {"pipeline_parallel_size": 2}, str(out), mode="trainer")
    assert said[0] == said[1] and f"CheckpointError: writing {out}: {out} exists" in said[0]
    assert not any(out.iterdir()) and cases.names_in(tmp_path) == {"out"}


def test_a_disk_that_fails_is_every_rank_s_error_and_leaves_nothing(pool: RankPool, tmp_path: Path) -> None:
    config, out = cases.config_of("gpt2"), tmp_path / "out"
    said = pool.run(cases.write_on_a_full_disk, 2, config, 2, {"pipeline_parallel_size": 2}, str(out), mode="trainer")
    assert said[0] == said[1]
    assert f"CheckpointError: writing {out} failed on rank 0: [ENOSPC] No space left on device" in said[0]
    assert cases.names_in(tmp_path) == set()


@pytest.mark.parametrize("name", ["llama_tied", "mixtral"])
def test_a_state_that_is_whole_is_written_alike(tmp_path: Path, name: str) -> None:
    from lightning_megapar.checkpoint.hugging_face_saving import save_hugging_face_state

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


def truncate(source: Path) -> None:
    file = sorted(source.glob("model-*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])


def truncate_the_header(source: Path) -> None:
    file = sorted(source.glob("model-*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:40])


def lose_a_file(source: Path) -> None:
    sorted(source.glob("model-*.safetensors"))[1].unlink()


def lose_all(source: Path) -> None:
    for file in source.glob("model*"):
        file.unlink()


def pickle_it(source: Path) -> None:
    lose_all(source)
    (source / "pytorch_model.bin").write_bytes(b"PK")


def quantize(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))


def leave_the_directory(source: Path) -> None:
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def lie_in_the_index(source: Path) -> None:
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (truncate, "-of-00004.safetensors is truncated: it has"),
        (truncate_the_header, "cannot be read: it is truncated, or it is no safetensors file"),
        (lose_a_file, "lacks model-00002-of-00004.safetensors (1 of the index's 4 files)"),
        (
            lose_all,
            "holds neither model.safetensors nor model.safetensors.index.json (it holds config.json, generation",
        ),
        (pickle_it, "but pytorch_model.bin; pickled weights are not read. Convert them once:"),
        (quantize, "holds quantized weights (gptq); give a directory of float weights"),
        (leave_the_directory, "names files outside of the directory: ../elsewhere.safetensors"),
        (lie_in_the_index, "has no tensor 'lm_head.weight', which the index says it holds"),
    ],
)
def test_damaged_directories_are_refused_before_any_rank(tmp_path: Path, harm: Any, said: str) -> None:
    from lightning_megapar import MegaParStrategy

    cases.written(tmp_path / "in", cases.config_of("llama"), max_shard_size="45KB")
    assert len(list((tmp_path / "in").glob("model-*"))) == 4
    MegaParStrategy(load_from=tmp_path / "in")
    harm(tmp_path / "in")
    for load_from in (tmp_path / "in", {"model": str(tmp_path / "in")}):
        with pytest.raises(ConfigError) as refused:
            MegaParStrategy(load_from=load_from)
        assert said in str(refused.value) and str(refused.value).startswith("load_from: ")


def test_paths_that_are_none_are_refused(tmp_path: Path) -> None:
    from lightning_megapar import MegaParStrategy

    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.pt").write_bytes(b"PK")
    for load_from, said in (
        (tmp_path / "no", "no does not exist"),
        (tmp_path / "empty", "holds neither model.safetensors nor"),
        (tmp_path / "weights.pt", "weights.pt is not a .safetensors file; pickled weights are not read"),
        (3, "load_from=3: expected a path, or a mapping from module names to paths"),
        ({"model": 3}, "expected a path, or a mapping"),
        ({}, "expected a path, or a mapping"),
    ):
        with pytest.raises(ConfigError) as refused:
            MegaParStrategy(load_from=load_from)
        assert said in str(refused.value)


def test_names_that_do_not_fit_come_in_one_list(pool: RankPool, tmp_path: Path) -> None:
    config, source = cases.config_of("llama"), tmp_path / "in"
    cases.written(source, config)
    stored = cases.tensors_in(source)
    stored["model.layers.1.self_attn.q_prj.weight"] = stored.pop("model.layers.1.self_attn.q_proj.weight")
    stored["model.norm.weight"] = stored["model.norm.weight"][:7].clone()
    stored["lm_head.weight"] = stored["lm_head.weight"].to(torch.int8)
    cases.store(stored, source)
    options = {"pipeline_parallel_size": 2, "load_from": str(source)}
    said = pool.run(cases.expect_refusal, 2, config, 2, options, mode="trainer")
    assert said[0] == said[1]
    lines = said[0].splitlines()
    assert lines[0] == f"ConfigError: load_from: {source} does not fit LlamaForCausalLM (module 'model'), 4 names:"
    assert sorted(lines[1:5]) == [
        "  missing in the files: 'model.layers.1.self_attn.q_proj.weight' (nearest there: "
        "'model.layers.1.self_attn.q_prj.weight')",
        "  other kind of number: 'lm_head.weight' is torch.int8 in the files, torch.float32 in the model",
        "  other shape: 'model.norm.weight' is (7,) in the files, (32,) in the model",
        "  unknown to the model: 'model.layers.1.self_attn.q_prj.weight' (nearest there: "
        "'model.layers.1.self_attn.q_proj.weight')",
    ]


def test_tied_tensors_with_two_values_are_refused(tmp_path: Path) -> None:
    config = cases.config_of("llama_tied")
    model = cases.written(tmp_path / "in", config)
    stored = cases.tensors_in(tmp_path / "in")
    assert "lm_head.weight" not in stored
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    cases.store(stored, tmp_path / "in")
    module = cases.filled(cases.empty(config), tmp_path / "in")  # twice the same
    assert torch.equal(module.model.lm_head.weight, model.lm_head.weight)
    only_head = {key: value for key, value in stored.items() if key != "model.embed_tokens.weight"}
    cases.store(only_head, tmp_path / "in")
    module = cases.filled(cases.empty(config), tmp_path / "in")  # under the other name
    assert torch.equal(module.model.model.embed_tokens.weight, model.lm_head.weight)
    stored["lm_head.weight"][3, 3] += 1
    cases.store(stored, tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"holds different values for 'model\.model\.embed_tokens\.weight' and"):
        cases.filled(cases.empty(config), tmp_path / "in")


def test_which_module_is_meant(tmp_path: Path) -> None:
    config = cases.config_of("gpt2")
    cases.written(tmp_path / "in", config)

    class Two(cases.BuiltAtOnce):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.teacher = type(self.model)(config)
            self.net = torch.nn.Linear(2, 2)

    with pytest.raises(ConfigError, match="but there are 2: 'model', 'teacher'; give a mapping"):
        cases.filled(cases.empty(config, Two), tmp_path / "in")
    with pytest.raises(ConfigError, match=r"Two has no module 'teachr'; did you mean 'teacher'\?"):
        cases.filled(cases.empty(config, Two), {"teachr": tmp_path / "in"})
    cases.store({"weight": torch.eye(2), "bias": torch.ones(2)}, tmp_path / "net")
    module = cases.filled(
        cases.empty(config, Two), {"teacher": tmp_path / "in", "model": tmp_path / "in", "net": tmp_path / "net"}
    )
    assert torch.equal(module.net.weight, torch.eye(2))
    states = module.model.state_dict(), module.teacher.state_dict()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_file_that_ends_early_on_one_rank_is_every_rank_s_error(pool: RankPool, tmp_path: Path) -> None:
    config = cases.config_of("gpt2")
    cases.written(tmp_path / "in", config)
    said = pool.run(cases.fill_with_one_truncated_file, 2, config, str(tmp_path / "in"))
    assert said[0] == said[1]
    assert "failed on rank 1:" in said[0] and "model.safetensors is truncated: it ends within tensor" in said[0]


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
    if layout == "tp2_pp2":
        # transformers' own plan, written out: to choose one, rank 0 tries a shortened copy of the model.
        plan = {f"model.model.{name}": style for name, style in config.base_model_tp_plan.items()}
        plan |= {"model.model.embed_tokens": "embedding_rowwise", "model.lm_head": "colwise_gather_output"}
        options = {**options, "sharding_plan": plan}
    if from_files:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "in", max_shard_size="50MB")
        options = {**options, "load_from": str(tmp_path / "in")}
    measured = pool.run(cases.measure_start, world, config, world, options, str(tmp_path / "out"), file, mode="trainer")
    for rank, one in enumerate(measured):
        assert one["shard"] < share
        assert one["set-up"] <= 1.3 * one["shard"] + largest, (rank, one)
        assert one["writing"] <= (file if rank == 0 else 0) + 1.3 * largest, (rank, one)
