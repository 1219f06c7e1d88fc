"""The files of ``conf/``: a comment on each key, nothing that the help or the README forgets."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
FILES = sorted(CONF.rglob("*.yaml"))
GROUPS = {
    folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name not in ("hydra", "strategy", "__pycache__")
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_every_key_has_a_comment(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert path.parent.name == "help" or lines[0].startswith("# "), "the first line says what the option is"
    node = yaml.compose("\n".join(lines))
    bare = [line for line in _scalar_lines(node) if " # " not in lines[line]]
    assert not bare, [lines[line] for line in bare]


def _scalar_lines(node: yaml.Node) -> list[int]:
    """Line numbers of keys with a scalar or a flow list as value: a block below a key is explained by its own keys."""
    if not isinstance(node, yaml.MappingNode):
        return []
    found = []
    for key, value in node.value:
        if key.value == "defaults":
            continue
        if isinstance(value, yaml.MappingNode):
            found += _scalar_lines(value)
        else:
            found.append(key.start_mark.line)
    return found


def test_help_and_readme_list_every_group_and_option() -> None:
    template = yaml.safe_load((CONF / "hydra" / "help" / "pretrain.yaml").read_text())["template"]
    listed = {words[0]: set(words[1:]) for words in (line.split() for line in template.splitlines()) if words}
    readme = (ROOT / "README.md").read_text()
    for group, options in GROUPS.items():
        assert set(options) <= listed[group], group
        assert f"`{group}`" in readme
        assert all(option in readme for option in options), group


@pytest.mark.parametrize("name", [name for name in GROUPS["parallel"] if name != "auto"])
def test_devices_are_the_product_of_the_sizes_and_of_the_name(name: str) -> None:
    option = yaml.safe_load((CONF / "parallel" / f"{name}.yaml").read_text())
    sizes = {
        axis: option[f"{word}_parallel_size"] for axis, word in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data"))
    }
    assert option["devices"] == math.prod(sizes.values())
    assert name == ("_".join(f"{axis}2" for axis in ("dp", "tp", "pp") if sizes[axis] == 2) or "single")


def test_the_issue_s_groups_and_options_exist() -> None:
    assert GROUPS["model"] == ["gpt_125m", "gpt_small", "gpt_tiny", "llama_tiny"]
    assert set(GROUPS["parallel"]) == {
        "auto", "single", "dp2", "tp2", "pp2", "dp2_tp2", "dp2_pp2", "tp2_pp2", "dp2_tp2_pp2"
    }  # fmt: skip
    assert GROUPS["data"] == ["stdlib", "text"] and GROUPS["precision"] == ["bf16", "bf16_true", "fp16", "fp32", "fp8"]
    assert GROUPS["schedule"] == [
        "1f1b",
        "auto",
        "dualpipe_v",
        "gpipe",
        "interleaved_1f1b",
        "zb_h1",
        "zb_h2",
        "zbv",
    ] and GROUPS["optimizer"] == ["adamw", "sgd"]


def test_the_sizes_that_the_models_are_named_after() -> None:
    from lightning_megapar.models.gpt import GPTConfig

    def parameters(name: str) -> int:
        option = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
        known = {key: value for key, value in option.items() if not key.startswith("_") and "${" not in str(value)}
        config = GPTConfig(max_sequence_length=128, **known)
        width, heads = config.hidden_size, config.num_heads
        attention = (2 * width + 2 * width * config.kv_heads // heads) * width
        return config.num_layers * (attention + (3 if config.mlp == "swiglu" else 2) * width * config.ffn_size)

    assert 80e6 < parameters("gpt_125m") < 90e6  # GPT-2 small without its 39 million vocabulary parameters
    assert parameters("gpt_tiny") < parameters("gpt_small") < 2e6
