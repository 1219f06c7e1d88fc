"""The chooser on modules that people write: what they do with weights, heads and widths is found by running them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_megapar.config import ConfigError
from lightning_megapar.sharding.by_plan import apply_assignments
from lightning_megapar.sharding.choice import choose_plan
from lightning_megapar.sharding.chooser.alone import runs_of_step, stand_alone
from lightning_megapar.sharding.chooser.choose import Choice, choose
from lightning_megapar.sharding.chooser.trial import TrialRanks, _Meeting
from lightning_megapar.sharding.plan import ShardingPlan, resolve

WIDTH, HEADS, VOCABULARY = 16, 4, 32


class Block(nn.Module):
    """Attention and MLP; ``style`` is how the heads are found."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.n_head = style, HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def attention(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        if self.style == "in turn":  # one head after the other, each with its q, k and v
            q, k, v = self.qkv(x).view(rows, length, self.n_head, 3, -1).permute(3, 0, 2, 1, 4)
        elif self.style == "by width":  # nanoGPT: everything follows from the width of the input
            parts = self.qkv(x).split(width, dim=2)
            q, k, v = (t.view(rows, length, HEADS, width // HEADS).transpose(1, 2) for t in parts)
        else:
            parts = self.qkv(x).chunk(3, -1)
            q, k, v = (t.view(rows, length, self.n_head, -1).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.proj(y.reshape(rows, length, width if self.style == "by width" else -1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(LightningModule):
    def __init__(self, style: str = "plain", tie: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tie = tie
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(style) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tie == "parameter":
            self.head.weight = self.table.weight

    def training_step(self, batch: Tensor, index_of_batch: int) -> Any:
        x = self.table(batch)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(x, self.table.weight) if self.tie == "function" else self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.roll(-1, 1).flatten())
        self.log("loss", loss)
        return {"loss": loss}


def tokens(rows: int = 4, length: int = 12) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(rows))


def chosen(module: LightningModule, size: int = 2) -> tuple[Choice, dict[str, str]]:
    twin = stand_alone(module, "blocks")
    choice = choose(twin, size, runs_of_step("training_step", tokens()))
    return choice, choice.plan.to_mapping()


def held(module: nn.Module, choice: Choice, size: int = 2) -> float:
    twin = copy.deepcopy(module)
    apply_assignments(twin, resolve(choice.plan, twin, strict=True), TrialRanks(_Meeting(size), 0))
    return sum(p.numel() for p in twin.parameters()) / sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("plain", {"qkv": "packed_colwise:parts=3,unit=4", "proj": "rowwise:unit=4"}),
        ("in turn", {"qkv": "colwise:unit=12", "proj": "rowwise:unit=4"}),
        ("by width", {"qkv": "colwise_gather_output", "proj": "rowwise_split_input"}),
    ],
)
def test_the_order_of_a_fused_weight_is_found_by_running(style: str, expected: dict[str, str]) -> None:
    module = Net(style)
    choice, plan = chosen(module)
    assert choice.verdict.exact(1e-9)
    assert {name: plan[f"blocks.*.{name}"] for name in expected} == expected
    assert plan["blocks.*.up"] == "colwise:unit=10" and plan["blocks.*.down"] == "rowwise:unit=10"
    assert held(module, choice) < 0.6


def test_ranks_that_do_not_divide_the_heads_cut_the_rest() -> None:
    choice, plan = chosen(Net(), size=3)
    assert choice.verdict.exact(1e-9)
    assert plan["blocks.*.up"] == "colwise" and plan["blocks.*.down"] == "rowwise"
    assert plan["blocks.*.qkv"] == "colwise_gather_output"


@pytest.mark.parametrize("tie", ["parameter", "function"])
def test_tied_heads_are_cut_together_or_not_at_all(tie: str) -> None:
    choice, plan = chosen(Net(tie=tie))
    assert choice.verdict.exact(1e-9)
    if tie == "parameter":
        assert plan["table"] == "embedding_rowwise" and plan["head"] == "colwise_gather_output"
    else:
        assert "table" not in plan


def test_a_copy_has_one_block_of_each_kind_and_the_module_is_left_alone() -> None:
    module = Net()
    module.blocks.append(Block("in turn"))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    twin = stand_alone(module, "blocks")
    assert len(twin.blocks) == 2 and len(module.blocks) == 4
    chosen(module)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_random_numbers_of_the_step_do_not_disturb_the_trial() -> None:
    class Noisy(Net):
        def training_step(self, batch: Tensor) -> Any:
            x = self.table(batch)
            x = x + 0.1 * torch.randn_like(x)
            for block in self.blocks:
                x = F.dropout(block(x), 0.1, self.training) + 0.1 * torch.randn_like(x)
            return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    choice, plan = chosen(Noisy())
    assert choice.verdict.exact(1e-9) and len(plan) >= 6


def asked(module: nn.Module, batch: Any) -> Any:
    return choose_plan(
        module,
        "auto",
        2,
        runs=lambda m: "no samples" if batch is None else runs_of_step("training_step", batch),
        alone=lambda m, shorten, planned: stand_alone(m, "blocks" if shorten else None),
        share=lambda value: value,
        is_first=True,
    )


def test_what_cannot_be_tried_stays_whole_with_the_reason() -> None:
    class Broken(Net):
        def training_step(self, batch: Tensor, index: int) -> Any:
            raise KeyError("no such thing")

    class Talking(Net):
        def training_step(self, batch: Tensor, index: int) -> Any:
            torch.distributed.barrier()

    assert asked(Net(), tokens()).assignments
    for module, batch, says in [
        (Net(), None, "no samples"),
        (Broken(), tokens(), "no such thing"),
        (Talking(), tokens(), "collective of its own"),
    ]:
        choice = asked(module, batch)
        assert not choice.assignments and says in choice.notes[0], choice.notes


def test_a_loss_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss of nan"):
        choose(nn.Linear(4, 4), 2, [lambda m: m(torch.ones(2, 4)).sum() * float("nan")])


def test_a_stack_whose_layers_all_differ_in_place_is_tried_whole() -> None:
    """A Sequential that narrows and widens: two layers of one shape are not two blocks of one kind."""

    class Autoencoder(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            widths = (16, 64, 16, 64, 2)
            layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
            self.blocks = nn.Sequential(*layers)

        def training_step(self, batch: Tensor, index: int) -> Any:
            return self.blocks(F.one_hot(batch % 16, 16).to(self.blocks[0][0].weight.dtype)).square().mean()

    choice = asked(Autoencoder(), tokens())
    assert {str(a.style) for a in choice.assignments} >= {"colwise", "rowwise"}, choice.notes


def test_blocks_that_differ_by_any_plain_value_function_or_hook_are_kinds_of_their_own() -> None:
    class Acting(Block):
        def __init__(self, act: Any = torch.tanh, window: int | None = None) -> None:
            super().__init__("plain")
            self.act, self.window = act, window

    module = Net()
    hooked = Acting()
    hooked.up.register_forward_hook(lambda *_: None)
    module.blocks = nn.ModuleList([Acting(), Acting(), Acting(torch.relu), Acting(window=7), hooked])
    twin = stand_alone(module, "blocks")
    assert list(twin.blocks._modules) == ["0", "2", "3", "4"], "kept under the names that the plan will speak of"


def test_a_step_that_differs_from_run_to_run_is_not_judged() -> None:
    class Counting(Net):
        runs = 0

        def training_step(self, batch: Tensor, index: int) -> Any:
            Counting.runs += 1
            return Counting.runs * super().training_step(batch, index)["loss"]

    choice = asked(Counting(), tokens())
    assert not choice.assignments and "differ from run to run" in choice.notes[0]


def test_training_mode_is_tried_and_dropout_is_not() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.3)

        def training_step(self, batch: Tensor, index: int) -> Any:
            assert self.training
            loss = super().training_step(batch, index)["loss"]
            return loss + self.drop(self.head.weight).square().mean()

    assert asked(Normed(), tokens()).assignments


def test_hooks_on_gradients_that_a_cut_would_lose_are_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].weight.register_hook(lambda gradient: 2 * gradient)
    plan = ShardingPlan.from_mapping({"0": "colwise", "1": "rowwise"})
    with pytest.raises(ConfigError, match="hooks on its gradient"):
        apply_assignments(module, resolve(plan, module, strict=True), TrialRanks(_Meeting(2), 0))


def test_layers_of_different_blocks_are_no_pair() -> None:
    """In a copy with one block its only layer stands between the way in and the head; in the module it does not."""

    class Chain(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))

        def training_step(self, batch: Tensor, index: int) -> Any:
            x = F.one_hot(batch % 16, 16).to(self.inp.weight.dtype)
            return self.head(self.blocks(self.inp(x))).square().mean()

    choice = asked(Chain(), tokens())
    assert {str(a.style) for a in choice.assignments} == {"colwise_gather_output"}


def test_a_module_that_cannot_be_copied_or_traced_stays_whole() -> None:
    import threading

    class Locked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    class Mapped(Net):
        def training_step(self, batch: Tensor, index: int) -> Any:
            x = self.table(batch)
            return torch.func.vmap(self.blocks[0].up)(x).square().mean()

    assert "cannot pickle" in asked(Locked(), tokens()).notes[0]
    choice = asked(Mapped(), tokens())
    assert {a.path for a in choice.assignments} == {"table"}, "what runs outside of the map is cut all the same"
    assert choice.whole["blocks.*.up"] == "called inside torch.func.vmap"


def test_a_small_module_is_judged_with_all_its_blocks() -> None:
    """What tells the third block apart stands in the step alone: a copy without that block would not know."""

    class Counted(Net):
        def training_step(self, batch: Tensor, index: int) -> Any:
            x = self.table(batch)
            for number, block in enumerate(self.blocks):
                inner = block.up(x)
                x = x + block.down(inner.softmax(-1) if number == 2 else inner.tanh())
            return self.head(x).square().mean()

    plan = {a.path: str(a.style) for a in asked(Counted(), tokens()).assignments}
    assert plan["blocks.2.up"] == "colwise_gather_output"


def test_when_time_is_over_nothing_more_is_tried_and_what_another_batch_refutes_leaves_at_once() -> None:
    class OtherBatch(Net):
        def training_step(self, batch: Tensor, index_of_batch: int) -> Any:
            if len(batch) == 1:  # reads weights without calling their modules: no cut of them is right
                first = self.blocks[0]
                return {"loss": sum(layer.weight.square().mean() for layer in (first.qkv, first.proj, first.up))}
            return super().training_step(batch, index_of_batch)

    plans = [
        ShardingPlan.from_mapping({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, "first"),
        ShardingPlan.from_mapping({"blocks.*.qkv": "colwise_gather_output"}, "second"),
        ShardingPlan.from_mapping({"blocks.*.proj": "colwise_gather_output"}, "third"),
    ]
    twin = stand_alone(OtherBatch(), None)
    runs = [runs_of_step("training_step", tokens(rows))[0] for rows in (4, 1)]
    choice = choose(twin, 2, runs, planned=plans[0] + plans[1] + plans[2], patience=0.0)
    assert not choice.plan.rules and choice.verdict.exact(1e-9)
    assert [one.kind for one in choice.found if one.how == "dropped"] == ["first, second, third"]
    assert all("time was over" in one.reason for one in choice.found if one.how != "first")
    choice = choose(twin, 2, runs, planned=plans[0] + plans[1] + plans[2])
    assert [one.kind for one in choice.found if one.how == "dropped"][:3] != ["first, second, third"]
