"""Every style of the vocabulary by itself, all ranks in one process: every gradient against the whole module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import architectures as zoo

from lightning_megapar.sharding.chooser.trial import Verdict, perturb, try_assignments
from lightning_megapar.sharding.plan import STYLES, ShardingPlan, resolve


def verdict(module: nn.Module, plan: dict[str, str], x: Tensor, size: int = 2, **options: Any) -> Verdict:
    module = module.double()
    perturb(module)
    x = x.double() if x.is_floating_point() else x
    assignments = resolve(ShardingPlan.from_mapping(plan), module, strict=True)
    return try_assignments(module, assignments, size, lambda m: m(x).square().sum(), **options)


def features(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class MLP(nn.Module):
    def __init__(self, inner: int = 7, act: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, inner), nn.Linear(inner, 6)
        self.scale = nn.Parameter(torch.ones(inner)) if act else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        return self.down(y if self.scale is None else y * self.scale)


class Gated(nn.Module):
    """Fused gate and up; ``packed`` inputs of the way out when the halves stay side by side."""

    def __init__(self, halves_go_on: bool = False) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(6, 16), nn.Linear(16 if halves_go_on else 8, 6)
        self.halves_go_on = halves_go_on

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        if self.halves_go_on:
            return self.down(torch.cat([torch.tanh(gate), up.square()], -1))
        return self.down(F.silu(gate) * up)


class Lookup(nn.Module):
    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(11, 6, padding_idx=padding), nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids))


class Subclass(nn.Linear):
    """Somebody's linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("module", "plan"),
    [
        (MLP(act=False), {"up": "colwise", "down": "rowwise"}),
        (MLP(), {"up": "colwise", "down": "rowwise", "scale": "colwise"}),
        (MLP(act=False), {"up": "colwise_gather_output", "down": "rowwise_split_input"}),
        (MLP(act=False), {"up": "colwise_gather_output"}),
        (MLP(), {"scale": "replicate", "down": "replicate"}),
        (Gated(), {"both": "packed_colwise", "down": "rowwise"}),
        (Gated(), {"both": "packed_colwise:parts=8+8", "down": "rowwise"}),
        (Gated(halves_go_on=True), {"both": "packed_colwise", "down": "packed_rowwise"}),
        (nn.Sequential(nn.Linear(6, 6), Subclass(6, 6)), {"0": "colwise", "1": "rowwise"}),
    ],
)
def test_linear_styles_of_even_and_uneven_widths(module: nn.Module, plan: dict[str, str], size: int) -> None:
    assert verdict(module, plan, features(3, 4, 6), size).exact(1e-12)


def test_a_forgotten_parameter_has_partial_gradients_and_an_exact_loss() -> None:
    plan = {"up": "colwise:unit=1", "down": "rowwise"}

    class Scaled(MLP):
        def __init__(self) -> None:
            super().__init__(inner=8, act=False)
            self.alpha = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.tanh(self.alpha * self.up(x)))

    forgotten = verdict(Scaled(), plan, features(3, 6), sum_partial=False)
    assert forgotten.loss_error < 1e-12 and forgotten.partial == ("alpha",) and forgotten.worst > 1e-2
    named = verdict(Scaled(), {**plan, "alpha": "replicated_with_grad_allreduce"}, features(3, 6))
    assert named.exact(1e-12) and not named.partial


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("style", ["embedding_rowwise", "embedding_colwise"])
@pytest.mark.parametrize("padding", [None, 0, 10])
def test_embeddings(style: str, padding: int | None, size: int) -> None:
    ids = torch.arange(11).view(1, 11).repeat(2, 1)
    assert verdict(Lookup(padding), {"table": style}, ids, size).exact(1e-12)


def test_regions_sum_their_output_and_count_a_last_bias_once() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(3, 6, 8)), nn.Parameter(torch.randn(3, 8, 6))
            self.down_bias = nn.Parameter(torch.randn(3, 6))

        def forward(self, x: Tensor) -> Tensor:
            return (torch.tanh(x @ self.up) @ self.down + self.down_bias[:, None]).sum(0)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.experts = nn.Linear(6, 6), Experts()

        def forward(self, x: Tensor) -> Tensor:
            return self.experts(self.first(x))

    plan = {"experts.up": "split:dim=2", "experts.down": "split:dim=1", "experts": "moe_tp_experts:once=down_bias"}
    assert verdict(Around(), plan, features(4, 6)).exact(1e-12)
    assert not verdict(Around(), {**plan, "experts": "all_reduce"}, features(4, 6)).exact(1e-3)


def test_per_head_arguments_and_divided_attributes() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.qkv, self.out = 4, nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            q, k, v = (t.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            y = ((q @ k.transpose(-1, -2) + bias).softmax(-1) @ v).transpose(1, 2)
            return self.out(y.flatten(2))

    class WithBias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes, self.attention = nn.Parameter(torch.randn(4, 5, 5)), Heads()

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, self.slopes)

    plan = {"qkv": "packed_colwise:parts=3,unit=2", "out": "rowwise:unit=2"}
    own = {"attention": "local_attributes:heads + local_arguments:heads=4"}
    found = verdict(WithBias(), {**plan, **own}, features(2, 5, 8))
    assert found.exact(1e-12) and found.partial == ("slopes",)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_whole_experts_are_dealt_out(name: str, size: int) -> None:
    model = zoo.build(zoo.architectures()[name])
    experts = [n for n, p in model.named_parameters() if ".experts." in n]
    plan = {n.replace(".0.", ".*.", 1): "grouped_gemm" for n in experts if ".layers.0." in n}
    plan["mlp.experts"] = "ep_dispatch_experts"
    assignments = resolve(ShardingPlan.from_mapping(plan), model, strict=True)
    ids = zoo.tokens()
    assert try_assignments(model, assignments, size, lambda m: zoo.loss_of(m, ids)).exact(1e-5)


def test_latent_attention_enters_by_its_rotary_tail() -> None:
    model = zoo.build(zoo.architectures()["deepseek_v2"])
    from lightning_megapar.sharding.transformers_plan import transformers_plan

    plan = transformers_plan(model)
    assert "mla_kv_a_proj" in {rule.style.name for rule in plan.rules}
    ids = zoo.tokens()
    run = lambda m: zoo.loss_of(m, ids)  # noqa: E731
    assert try_assignments(model, resolve(plan, model, strict=False), 2, run).exact(1e-5)
    without = ShardingPlan(tuple(rule for rule in plan.rules if rule.style.name != "mla_kv_a_proj"))
    assert not try_assignments(model, resolve(without, model, strict=False), 2, run).exact(1e-3)


def test_what_the_vocabulary_says_is_what_transformers_says() -> None:
    words = {
        *("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "packed_colwise", "packed_rowwise"),
        *("embedding_rowwise", "embedding_colwise", "replicated_with_grad_allreduce", "replicate", "local_params"),
        *(
            "mla_kv_a_proj",
            "moe_tp_experts",
            "moe_identity_expert",
            "all_reduce",
            "grouped_gemm",
            "ep_dispatch_experts",
        ),
    }
    assert words <= set(STYLES)
