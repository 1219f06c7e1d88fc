"""``Trainer(strategy=MegaParStrategy(...))`` on real ranks: loss and every gathered gradient against one process.

``RESULTS.md`` is the table of the whole zoo. The slow tests here write theirs into pytest's temporary directory.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pool import RankPool

pytest.importorskip("transformers")
from zoo.architectures import KINDS, architectures
from zoo.on_ranks import LAYOUTS, Outcome, outcomes
from zoo.ranks_table import HIDDEN, markdown, read, run, versions

REFUSED = {"tp2": set(), "pp2": {"dory", "hrm_text", "reformer"}, "tp2_pp2": {"dory", "hrm_text", "reformer"}}
"""Looped stacks, two stacks of equal size in a loop, reversible layers: no pipeline."""
PATIENCE = 60.0
ON_RANKS = {
    "tp2_pp2": ("mixtral", "deepseek_v3", "qwen3", "phi3", "gpt2", "bloom", "openai-gpt", "cpmant"),
    "tp2": (
        *("llama", "gpt_neox", "falcon", "gpt_bigcode", "gemma3_text", "opt", "mpt"),
        *("gpt_oss", "mamba", "jamba", "bert", "cohere", "olmo2"),
    ),
    "pp2": ("rwkv", "xlm", "ctrl", "gemma3n_text", "zamba2", "qwen3_next"),
}
"""Every kind once: what is hard for both on four ranks, others on two; no tensor ranks where choosing takes long."""


@pytest.mark.parametrize("layout", ON_RANKS)
def test_kinds(pool: RankPool, layout: str) -> None:
    names = ON_RANKS[layout]
    # Several sets of ranks: gloo's threads outlive their groups, so that old ranks grow slow.
    found: dict[str, Outcome] = {}
    for start in range(0, len(names), 7):
        found |= outcomes(pool, names[start : start + 7], 32, layout, PATIENCE)
    assert {name: one.kind for name, one in found.items()} == dict.fromkeys(names, "exact"), found
    assert max(one.held for one in found.values()) < 0.95, found  # something is cut


def test_every_kind_is_tried_on_ranks() -> None:
    assert sorted(name for names in ON_RANKS.values() for name in names) == sorted(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_class(pool: RankPool, layout: str, hidden: int, tmp_path: Path) -> None:
    record = tmp_path / "outcomes.jsonl"
    for _ in run(pool, record, [layout], [hidden], list(architectures())):
        pass
    found = {name: one for (_, _, name), one in read(record).items()}
    (tmp_path / "ranks.md").write_text(markdown(read(record), versions()))
    assert set(found) == set(architectures())
    assert not {name: one for name, one in found.items() if one.kind in ("wrong", "crash")}
    assert {name for name, one in found.items() if one.kind == "refused"} == REFUSED[layout]
    assert sum(one.kind == "exact" for one in found.values()) >= 185


def test_what_is_recorded_is_not_run_again(tmp_path: Path) -> None:
    record = tmp_path / "outcomes.jsonl"

    class NoRanks(RankPool):
        ran = 0

        def run(self, *args: object, **kwargs: object) -> list[dict[str, Outcome]]:  # type: ignore[override]
            self.ran += 1
            return [{args[2][0]: Outcome("exact", error=2e-7, held=share)} for share in (0.5, 0.6)]  # type: ignore[index]

    pool = NoRanks()
    first = list(run(pool, record, ["tp2"], [32], ["llama"]))
    assert first == [(("tp2", 32, "llama"), Outcome("exact", error=2e-7, held=0.6))]
    both = list(run(pool, record, ["tp2"], [32], ["llama", "gpt2"]))
    assert [key for key, _ in both] == [("tp2", 32, "gpt2")] and pool.ran == 2
    assert len(list(run(pool, record, ["tp2"], [32], ["llama", "gpt2"], again=["exact"]))) == 2
    table = markdown(read(record), "versions")
    assert "| LlamaForCausalLM | llama | exact (2e-07), 60% |" in table
    assert "| tp2 | 32 | 2 | 0 | 0 | 0 | 0 | 2e-07 |" in table


def test_the_table_holds_every_class() -> None:
    import transformers

    text = (Path(__file__).parent / "RESULTS.md").read_text()
    if f"transformers {transformers.__version__}," not in text:
        pytest.skip("the table is of another release of transformers")
    rows = {row[1]: row[0] for row in re.findall(r"^\| (\w+) \| ([\w.-]+) \| (?=exact|refused|one|not)", text, re.M)}
    assert rows == {name: one.class_name for name, one in architectures().items()}
    assert not re.search(r"\| (wrong|crash)\b", text.split("## Every class")[1])
