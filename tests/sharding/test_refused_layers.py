"""What a plan cannot cut, and layers that cannot work on several ranks: refused by name before any rank exists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_megapar import MegaParStrategy
from lightning_megapar.config import ConfigError, Layout
from lightning_megapar.sharding.choice import check_written_plan
from lightning_megapar.sharding.chooser.trial import try_assignments
from lightning_megapar.sharding.plan import ShardingPlan, resolve
from lightning_megapar.strategy.limits import refuse_modules


class Bare(nn.Module):
    """Parameters of its own, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 6
        self.w, self.s = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w * self.s


class Layers(LightningModule):
    def __init__(self, **table: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, **table)
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6)
        self.bare = Bare()
        self.normed = parametrizations.weight_norm(nn.Linear(6, 6))
        self.pair = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])


@pytest.mark.parametrize(
    ("plan", "size", "says"),
    [
        (
            {"up": "colwise"},
            4,
            r"up \(colwise.*5 outputs over tensor_parallel_size=4 leave tensor rank 3.*valid.*: 3, 5",
        ),
        ({"down": "rowwise"}, 8, r"down.*5 inputs over tensor_parallel_size=8.*nearest valid.*: 3, 5"),
        ({"table": "embedding_colwise"}, 4, r"6 features \(embedding_dim\).*nearest valid tensor_parallel_size: 2, 3"),
        ({"table": "embedding_rowwise"}, 12, r"11 rows \(num_embeddings\).*nearest valid tensor_parallel_size: 6, 11"),
        ({"bare.w": "split:dim=0"}, 4, r"6 indices of dimension 0 of \(6, 6\).*nearest valid"),
        ({"up": "colwise:unit=2"}, 2, r"unit=2 does not divide 5 outputs; nearest valid units: 1, 5"),
        ({"pair.0": "colwise:unit=2"}, 2, r"3 heads \(unit=2\).*nearest valid tensor_parallel_size: 1, 3"),
        (
            {"bare": "colwise"},
            2,
            r"'bare'.*is a Bare; colwise needs an nn.Linear.*bare.w, bare.s.*'bare.w': 'split:dim=0'",
        ),
        ({"bare": "moe_tp_experts:once=v"}, 2, r"once='v' is no own parameter of Bare \(own: w, s\)"),
        ({"bare": "local_attributes:head"}, 2, r"Bare has no 'head'; did you mean 'heads'"),
        ({"bare": "local_attributes:heads"}, 4, r"attribute heads=6 is not divisible.*tensor_parallel_size: 2, 3"),
        ({"bare": "local_arguments:heads=6"}, 4, r"heads=6 is not divisible.*nearest valid tensor_parallel_size: 2, 3"),
        ({"bare": "ep_dispatch_experts"}, 2, r"expert parameters of Bare.*own parameters: w, s"),
        ({"bare.s": "grouped_gemm"}, 2, r"one number cannot be cut; valid styles: replicate"),
        ({"bare.w": "split:dim=2"}, 2, r"dim=2 is no dimension of a parameter of shape \(6, 6\); valid: 0, 1"),
        ({"bare.w": "grouped_gemm"}, 4, r"experts=6 is not divisible by tensor_parallel_size=4"),
        ({"up": "mla_kv_a_proj:features=5"}, 2, r"features=5 of 5 outputs.*valid: 1 to 4"),
        ({"normed": "colwise"}, 2, r"normed.*computed by torch.nn.utils.parametrize \(WeightNorm\).*leave it out"),
    ],
)
def test_plans_that_cannot_be_applied(plan: dict[str, str], size: int, says: str) -> None:
    module = Layers()
    with pytest.raises(ConfigError, match=says):
        check_written_plan(module, plan, size)
    assert not any(p.is_meta for p in module.parameters()) and type(module.up) is nn.Linear, "left alone"


@pytest.mark.parametrize(
    ("option", "style"),
    [
        ({"max_norm": 1.0}, "embedding_rowwise"),
        ({"max_norm": 1.0}, "embedding_colwise"),
        ({"scale_grad_by_freq": True}, "embedding_rowwise"),
        ({"sparse": True}, "embedding_rowwise"),
        ({"sparse": True}, "embedding_colwise"),
    ],
)
def test_options_of_tables_that_need_all_of_them(option: dict[str, Any], style: str) -> None:
    name, value = next(iter(option.items()))
    with pytest.raises(ConfigError, match=rf"table \({style}.*Embedding with {name}={value}.*valid: {name}="):
        check_written_plan(Layers(**option), {"table": style}, 2)


def test_frequencies_count_alike_where_every_rank_sees_all_ids() -> None:
    table = nn.Sequential(nn.Embedding(11, 6, scale_grad_by_freq=True)).double()
    ids = torch.tensor([[1, 6, 6, 10]])
    plan = resolve(ShardingPlan.from_mapping({"0": "embedding_colwise"}), table, strict=True)
    assert try_assignments(table, plan, 2, lambda m: m(ids).square().sum()).exact(1e-12)


def test_of_equally_long_patterns_the_literal_one_counts_and_a_tie_is_refused() -> None:
    module = nn.ModuleDict({"layers": nn.ModuleList([Bare(), Bare()])})
    found = resolve(ShardingPlan.from_mapping({"layers.*.w": "rowwise", "layers.1.w": "colwise"}), module, strict=True)
    assert [str(a.style) for a in found] == ["rowwise", "colwise"]
    tied = ShardingPlan.from_mapping(
        {"*.1.w": "rowwise", "layers.0.w": "replicate", "1.*": "colwise", "*.w": "rowwise"}
    )
    with pytest.raises(ConfigError, match=r"'1\.\*': 'colwise' and '\*\.w': 'rowwise' both match|both match"):
        resolve(ShardingPlan(tied.rules[2:]), module, strict=True)
    assert resolve(ShardingPlan(tied.rules[2:]), module, strict=False), "a published plan: the first one"


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(data=2), Layout(pipeline=2)])
def test_layers_that_cannot_work_on_several_ranks(layout: Layout) -> None:
    lazy, sparse = nn.Sequential(nn.LazyLinear(4)), nn.ModuleDict({"bag": nn.EmbeddingBag(4, 2, sparse=True)})
    with pytest.raises(
        ConfigError, match=r"0 is a LazyLinear whose weight and bias have no shape.*on one batch before"
    ):
        refuse_modules(lazy, layout)
    with pytest.raises(ConfigError, match=r"bag is an nn.EmbeddingBag\(sparse=True\).*valid value: sparse=False"):
        refuse_modules(sparse, layout)
    for module in (lazy, sparse):
        refuse_modules(module, Layout())
    lazy(torch.ones(1, 3))
    refuse_modules(lazy, layout)


def test_rows_that_replicas_would_shrink_apart() -> None:
    module = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))
    with pytest.raises(ConfigError, match=r"max_norm=1.0.*data_parallel_size=2.*drift apart; valid: max_norm=None"):
        refuse_modules(module, Layout(data=2))
    refuse_modules(module, Layout(tensor=2))


def test_a_strategy_refuses_them_before_it_makes_a_process_group() -> None:
    for module, says in [
        (Layers(sparse=True), "sparse=True"),
        (Layers(), r"5 outputs over tensor_parallel_size=4"),
    ]:
        strategy = MegaParStrategy(tensor_parallel_size=4, sharding_plan={"up": "colwise"})
        strategy._layout = Layout(tensor=4)
        strategy._lightning_module = module
        with pytest.raises(ConfigError, match=says):
            strategy.setup_environment()
        assert not torch.distributed.is_initialized()
