"""Plans: the vocabulary, where a plan comes from, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megapar.config import ConfigError
from lightning_megapar.sharding.by_plan import apply_assignments
from lightning_megapar.sharding.choice import PlanChoice, choose_plan, given_plan
from lightning_megapar.sharding.chooser.trial import TrialRanks, _Meeting, try_assignments
from lightning_megapar.sharding.names import starred
from lightning_megapar.sharding.plan import ShardingPlan, Style, resolve
from lightning_megapar.sharding.table import plan_rows, print_plan, stage_part
from lightning_megapar.sharding.transformers_plan import transformers_plan
from lightning_megapar.shards import own_shards

ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}


class Attention(nn.Module):
    def __init__(self, heads: int = 4, kv_heads: int = 4, head_dim: int = 2) -> None:
        super().__init__()
        self.head_dim, width = head_dim, heads * head_dim
        self.q_proj = nn.Linear(width, width)
        self.k_proj, self.v_proj = nn.Linear(width, kv_heads * head_dim), nn.Linear(width, kv_heads * head_dim)
        self.o_proj = nn.Linear(width, width)
        self.num_key_value_groups = heads // kv_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in (k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


def ranks(size: int = 2) -> TrialRanks:
    return TrialRanks(_Meeting(size), 0)


def apply(module: nn.Module, plan: dict[str, str], size: int = 2) -> nn.Module:
    apply_assignments(module, resolve(ShardingPlan.from_mapping(plan), module, strict=True), ranks(size))
    return module


def test_a_plan_survives_yaml(tmp_path: Path) -> None:
    plan = {**ATTENTION, "layers.*.mlp": "local_attributes:heads,width + all_reduce", "x": "packed_colwise:parts=4+2"}
    ShardingPlan.from_mapping(plan).write(tmp_path / "plan.yaml")
    assert ShardingPlan.read(tmp_path / "plan.yaml").to_mapping() == plan
    assert given_plan(str(tmp_path / "plan.yaml")).to_mapping() == plan
    assert given_plan("auto") is None and given_plan("off") == ShardingPlan()


def test_the_longest_pattern_counts_and_stars_are_one_part() -> None:
    module = nn.ModuleDict({"layers": nn.ModuleList([Attention(), Attention()])})
    plan = ShardingPlan.from_mapping({"q_proj": "colwise", "layers.1.q_proj": "colwise_gather_output"})
    found = {a.path: str(a.style) for a in resolve(plan, module, strict=True)}
    assert found == {"layers.0.q_proj": "colwise", "layers.1.q_proj": "colwise_gather_output"}
    assert len(resolve(ShardingPlan.from_mapping({"layers.*.o_proj": "rowwise"}), module, strict=True)) == 2


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"q_proy": "colwise"}, r"'q_proy' matches no module.*did you mean 'q_proj'"),
        ({"q_proj": "columnwise"}, r"sharding_plan\['q_proj'\].*'columnwise' is unknown.*did you mean 'colwise'"),
        ({"q_proj": "embedding_rowwise"}, r"q_proj is a Linear; embedding_rowwise needs an nn.Embedding"),
        ({"q_proj.weight": "all_reduce"}, r"q_proj.weight is a parameter; parameters take"),
        ({"q_proj": "packed_colwise:parts=3"}, r"q_proj.*3 equal parts do not fit a width of 8"),
        ({"q_proj": "packed_colwise:parts=4+3"}, r"parts 4\+3 do not add up to 8"),
        ({"q_proj": "packed_colwise:part=3"}, r"unknown option 'part'; did you mean 'parts'"),
        (
            {"q_proj": "packed_colwise:parts=0"},
            r"'parts' takes a positive integer or positive widths.*as in packed_colwise:parts=3",
        ),
        ({"q_proj": "packed_colwise:parts=2,parts=2"}, r"given twice"),
        ({"q_proj": "colwise:foo=1"}, r"unknown option 'foo' \(options: unit, inner\)"),
        ({"q_proj": "rowwise:unit"}, r"'unit' takes a positive integer, as in rowwise:unit=64"),
        ({"q_proj": "colwise:inner=1"}, r"'inner' takes no value"),
        ({"q_proj": "rowwise:unit=0"}, r"unit='0', but 'unit' takes a positive integer"),
        ({"q_proj": "packed_colwise:parts=4+3"}, r"they make 7\); nearest valid: parts=4\+4, or equal parts"),
        ({"q_proj": "packed_colwise:parts=3"}, r"nearest valid numbers of equal parts: 2, 4"),
        ({"q_proj.weight": "split"}, r"split lacks its option 'dim', a dimension.*: split:dim=1"),
        ({"q_proj.weight": "split:dim=-1"}, r"dim='-1', but 'dim' takes a dimension, 0 or a positive"),
        ({"q_proj": "local_arguments"}, r"lacks its option 'heads', a positive integer"),
        ({"q_proj": "local_attributes"}, r"names no attribute.*local_attributes:num_heads"),
        ({"q_proj": "local_attributes:heads=4"}, r"heads='4', but attributes are named without a value"),
        ({"q_proj": 3}, r"'q_proj'.*3 is a int"),
    ],
)
def test_refused_by_name(plan: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        apply(Attention(), plan)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"norm": "colwise"}, r"sharding_plan\['norm'\] = 'colwise': norm is a LayerNorm; colwise needs an nn.Linear"),
        ({"table": "rowwise"}, r"table is a Embedding; rowwise needs an nn.Linear"),
        ({"norm": "mla_kv_a_proj:features=2"}, r"norm is a LayerNorm; mla_kv_a_proj needs an nn.Linear"),
        ({"table": "split:dim=0"}, r"table is a Embedding; split needs a parameter's name"),
        ({"blocks": "all_reduce"}, r"blocks is a ModuleList; all_reduce needs a module that is called"),
        (
            {"blocks": "local_arguments:heads=4"},
            r"blocks is a ModuleList; local_arguments needs a module that is called",
        ),
    ],
)
def test_styles_of_other_modules_are_refused(plan: dict[str, str], says: str) -> None:
    module = nn.ModuleDict({"norm": nn.LayerNorm(8), "table": nn.Embedding(8, 8), "blocks": nn.ModuleList()})
    with pytest.raises(ConfigError, match=says):
        resolve(ShardingPlan.from_mapping(plan), module, strict=True)


def test_refused_as_a_setting(tmp_path: Path) -> None:
    from lightning_megapar import MegaParStrategy

    for setting, says in [
        (3, "sharding_plan=3"),
        ("of", "did you mean 'off'"),
        ("no/such/plan.yaml", "cannot be read"),
        ({"a": "b"}, "'b' is unknown"),
    ]:
        with pytest.raises(ConfigError, match=says):
            MegaParStrategy(tensor_parallel_size=2, sharding_plan=setting)
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(ConfigError, match="expected a mapping"):
        MegaParStrategy(sharding_plan=tmp_path / "list.yaml")


def test_tied_weights_that_a_plan_would_untie_are_refused() -> None:
    for plan in ({"head": "colwise_gather_output"}, {"table": "embedding_columnwise"}):
        with pytest.raises(ConfigError):
            apply(Tied(), plan)
    with pytest.raises(ConfigError, match="would untie one parameter"):
        apply(Tied(), {"table": "embedding_rowwise"})
    module = apply(Tied(), {"table": "embedding_rowwise", "head": "colwise_gather_output"})
    assert module.head.weight is module.table.weight and tuple(module.head.weight.shape) == (5, 4)


def test_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"q_proj has 4 heads.*tensor_parallel_size=3.*nearest valid.*2, 4"):
        apply(Attention(), ATTENTION, size=3)
    with pytest.raises(ConfigError, match=r"k_proj has 3 heads"):
        apply(Attention(heads=6, kv_heads=3), ATTENTION, size=2)


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 2), (2, 4), (1, 4), (2, 2), (1, 2)])
def test_key_value_heads_are_cut_or_shared(kv_heads: int, size: int) -> None:
    module = Attention(heads=8, kv_heads=kv_heads).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assignments = resolve(ShardingPlan.from_mapping(ATTENTION), module, strict=True)
    verdict = try_assignments(module, assignments, size, lambda m: m(x).square().sum())
    assert verdict.exact(1e-12), verdict


def test_a_wrong_order_of_a_fused_weight_runs_and_is_seen() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.view(*x.shape[:2], -1, 2).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            return self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    right, wrong = (
        try_assignments(module, resolve(ShardingPlan.from_mapping(plan), module, strict=True), 2, lambda m: m(x).sum())
        for module in [Fused().double()]
        for plan in (
            {"qkv": "packed_colwise:parts=3", "out": "rowwise"},
            {"qkv": "colwise", "out": "rowwise"},
        )
    )
    assert right.exact(1e-12)
    assert not wrong.exact(1e-2)


def test_a_rank_that_fails_in_a_trial_ends_all_of_them() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(x)
            if y.shape[-1] == 3 and fails.pop():
                raise KeyError("only one rank")
            return self.down(y)

    fails = [False, True]  # the rank that comes first
    module = Failing()
    plan = resolve(ShardingPlan.from_mapping({"up": "colwise", "down": "rowwise"}), module, strict=True)
    with pytest.raises(KeyError, match="only one rank"):
        try_assignments(module, plan, 2, lambda m: m(torch.ones(2, 4)).sum())


def test_first_hit_wins() -> None:
    def chosen(module: nn.Module, setting: Any) -> list[str]:
        never = lambda *_: pytest.fail("the chooser was asked")  # noqa: E731
        choice = choose_plan(
            module, setting, 2, runs=lambda m: "no samples", alone=never, share=lambda x: x, is_first=True
        )
        return [a.why for a in choice.assignments]

    class Own(Attention):
        def sharding_plan(self) -> dict[str, str]:
            return ATTENTION

    assert set(chosen(Own(), "auto")) == {"Own.sharding_plan()"}
    holder = Own()
    holder.__dict__["sharding_plan"] = holder.sharding_plan()  # a mapping serves as well
    assert set(chosen(holder, "auto")) == {"Own.sharding_plan"}
    holder.__dict__["sharding_plan"] = 3
    with pytest.raises(ConfigError, match="sharding_plan=3: expected a mapping"):
        chosen(holder, "auto")
    assert set(chosen(Own(), ATTENTION)) == {"sharding_plan"}
    assert chosen(Own(), "off") == []
    with pytest.raises(ConfigError, match=r"matches no module"):
        chosen(Own(), {"nothing": "colwise"})


def test_transformers_plans_are_read_off_the_module() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    module = nn.ModuleDict({"net": LlamaForCausalLM(LlamaConfig(**settings, vocab_size=32))})
    plan = transformers_plan(module)
    assert plan.to_mapping()["net.model.layers.*.self_attn.o_proj"] == "rowwise"
    assignments = resolve(plan, module, strict=False)
    apply_assignments(module, assignments, ranks())
    alike = {one.name: starred(one.name) for one in assignments}
    rows = {
        row.module: row for row in plan_rows(PlanChoice(assignments, alike=alike), [stage_part(module, assignments)])
    }
    assert rows["net.model.layers.*.mlp.up_proj"].count == 2
    assert rows["(whole on every rank)"].share < 0.1
    assert abs(sum(row.share for row in rows.values()) - 1) < 1e-9
    assert own_shards(module["net"].lm_head)["weight"].dim == 0


def test_the_table_speaks_of_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """A tied head on the last stage counts once; alike blocks of several stages share a row."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.blocks = nn.Embedding(8, 8), nn.ModuleList([Attention(), Attention(), Attention()])
            self.head = nn.Linear(8, 8, bias=False)
            self.head.weight = self.table.weight

    tied = {"table": "embedding_rowwise", "head": "colwise_gather_output"}
    plan = {**tied, "q_proj": "colwise", "blocks.*.o_proj": "rowwise"}
    never = lambda *_: pytest.fail("the chooser was asked")  # noqa: E731
    choice = choose_plan(Whole(), plan, 2, runs=lambda m: "no samples", alone=never, share=lambda x: x, is_first=True)
    parts = []
    for gone in (["blocks.2", "head"], ["table", "blocks.0", "blocks.1"]):
        stage: Any = Whole()
        for path in gone:
            owner, _, name = path.rpartition(".")
            setattr(stage.get_submodule(owner), name, nn.Identity())
        apply_assignments(stage, choice.assignments, ranks())
        parts.append(stage_part(stage, choice.assignments, {"head.weight": "table.weight"}))
    rows = {row.module: row for row in plan_rows(choice, parts)}
    assert {name: (row.count, row.stages) for name, row in rows.items() if row.count} == {
        "table": (1, (0,)), "head": (1, (1,)), "blocks.*.q_proj": (3, (0, 1)), "blocks.*.o_proj": (3, (0, 1)),
    }  # fmt: skip
    total = sum(p.numel() for p in Whole().parameters())
    assert rows["blocks.*.q_proj"].share == 3 * 72 / total and rows["table"].share == 64 / total
    assert rows["head"].share == 0 and abs(sum(row.share for row in rows.values()) - 1) < 1e-9
    print_plan(choice, parts)
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert ["blocks.*.q_proj", "3", "colwise", "sharding_plan", "0-1"] in [
        [cell.strip() for cell in line[1:6]] for line in lines
    ]


def test_options_are_numbers_where_they_must_be() -> None:
    with pytest.raises(ConfigError, match="unit='two', but 'unit' takes a positive integer"):
        Style.parse("colwise:unit=two")
    assert str(Style.parse(" packed_colwise: parts=3 , inner ")) == "packed_colwise:parts=3,inner"


def test_a_wrong_style_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("layers.*.up: colwize\n")
    with pytest.raises(ConfigError, match=r"in .*plan\.yaml: sharding_plan\['layers\.\*\.up'\]: .*'colwise'"):
        ShardingPlan.read(path)
