"""Hugging Face directories that cannot be read or written: one message, alike on every rank, nothing left behind."""

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


def test_models_that_are_not_there_are_named() -> None:
    import transformers
    from torch import nn

    from lightning_megapar.checkpoint.hugging_face.saving import find_blueprint
    from lightning_megapar.sharding.blueprint import record_blueprints

    def find(module: nn.Module, name: str | None) -> str:
        with pytest.raises(ConfigError) as refused:
            find_blueprint(record_blueprints(module), name)
        return str(refused.value)

    plain = nn.ModuleDict({"net": nn.Linear(2, 2)})
    assert find(plain, None).startswith("nothing in the module is a transformers model (a PreTrainedModel)")
    assert find(plain, "net").startswith("module='net': nothing in the module is a transformers model")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8)
    with torch.device("meta"):
        two = nn.ModuleDict({name: transformers.GPT2LMHeadModel(config) for name in ("student", "teacher")})
    assert "the module holds 2 transformers models: name one of them by module=: 'student', 'teacher'" in find(
        two, None
    )
    assert "there are 2: ['student', 'teacher']; did you mean 'student'?" in find(two, "studant")
