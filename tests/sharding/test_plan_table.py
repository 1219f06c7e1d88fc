"""The table says why: layers that are gathered, and layers that stay whole, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from test_chooser import Net, asked, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from lightning_megapar.sharding.by_plan import apply_assignments
from lightning_megapar.sharding.choice import PlanChoice
from lightning_megapar.sharding.chooser.alone import runs_of_step, stand_alone
from lightning_megapar.sharding.chooser.choose import choose
from lightning_megapar.sharding.chooser.trial import TrialRanks
from lightning_megapar.sharding.table import PlanRow, plan_rows, stage_part


def rows_of(module: nn.Module, choice: PlanChoice) -> dict[str, PlanRow]:
    apply_assignments(module, choice.assignments, TrialRanks.alone(2))
    rows = plan_rows(choice, [stage_part(module, choice.assignments, None, tuple(choice.whole))])
    assert abs(sum(row.share for row in rows) - 1) < 1e-9
    return {row.module: row for row in rows}


@pytest.mark.parametrize(
    ("style", "size", "says"),
    [
        ("by width", 2, "chooser: gathered (cut inside: does not run in pieces (RuntimeError: "),
        ("plain", 3, "chooser: gathered (the 4 heads of Block are not divisible by 3 tensor ranks)"),
    ],
)
def test_why_layers_are_gathered(style: str, size: int, says: str) -> None:
    choice = choose(stand_alone(Net(style), "blocks"), size, runs_of_step("training_step", tokens()))
    why = {rule.pattern: rule.why for rule in choice.plan.rules}
    assert says.replace("\\", "") in why["blocks.*.qkv"] and why["blocks.*.qkv"] == why["blocks.*.proj"]
    assert why["head"] == "chooser: gathered (no layer follows that takes pieces)"


def test_heads_that_no_attribute_counts() -> None:
    """nanoGPT with its heads from the width of the input, and no number in the module."""

    class Widths(Net):
        def __init__(self) -> None:
            super().__init__("by width")
            for block in self.blocks:
                del block.n_head

    choice = choose(stand_alone(Widths(), "blocks"), 2, runs_of_step("training_step", tokens()))
    why = {rule.pattern: rule.why for rule in choice.plan.rules}["blocks.*.qkv"]
    says = "Block has no attribute that counts heads: its forward takes them from the width of its input"
    assert why == f"chooser: gathered ({says})"


class Einsum(Net):
    """The weights of one layer are read without a call of it."""

    def training_step(self, batch: Tensor, index: int) -> Any:
        x = self.table(batch)
        for block in self.blocks:
            x = x + torch.einsum("bti,oi->bto", x, block.up.weight).tanh() @ block.down.weight.T
        return self.head(x).square().mean()


def test_why_layers_stay_whole() -> None:
    module = Net()
    for block in module.blocks:
        parametrizations.weight_norm(block.up)
    choice = asked(module, tokens())
    rows = rows_of(module, choice)
    assert rows["blocks.*.up"].style == "whole" and rows["blocks.*.up"].count == 3
    assert rows["blocks.*.up"].why == "its weight is computed by torch.nn.utils.parametrize (WeightNorm)"
    assert rows["blocks.*.up"].share > 0.1 and rows["blocks.*.qkv"].style.startswith("packed_colwise")

    module = Einsum()
    rows = rows_of(module, asked(module, tokens()))
    for name in ("up", "down", "qkv"):
        assert "read without a call of the module (such as einsum)" in rows[f"blocks.*.{name}"].why
    assert rows["head"].style == "colwise_gather_output"


def test_a_weight_that_an_earlier_forward_computed_does_not_stop_the_trial() -> None:
    module = Net()
    with pytest.warns(FutureWarning, match="weight_norm"):
        weight_norm(module.blocks[0].up)
    choice = asked(module, tokens())
    assert choice.whole["blocks.*.up"] == "its weight is computed by torch.nn.utils.weight_norm"
    assert "blocks.0.qkv" in {a.path for a in choice.assignments}


def test_what_torch_compile_has_wrapped_is_named() -> None:
    class Compiled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(torch.compile(block, backend=never) for block in self.blocks)

    def never(*_: Any) -> Any:
        pytest.fail("a trial compiles")

    module = Compiled()
    choice = asked(module, tokens())
    assert choice.whole["blocks.*._orig_mod.qkv"].startswith("inside torch.compile(module)")
    assert {a.path for a in choice.assignments} == {"table", "head"}


def test_a_convolution_has_no_layout() -> None:
    class Image(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.up, self.down = nn.Conv1d(12, 16, 1), nn.Linear(1, 32), nn.Linear(32, 16)

        def training_step(self, batch: Tensor, index: int) -> Any:
            x = self.stem(batch.to(self.stem.weight.dtype).unsqueeze(-1) / 32)
            return self.down(torch.tanh(self.up(x))).square().mean()

    module = Image()
    rows = rows_of(module, asked(module, tokens()))
    assert rows["stem"].why == "no layout is known for a Conv1d" and rows["up"].style == "colwise"


def test_a_module_without_a_dotted_name_has_one_in_the_table() -> None:
    module = nn.Linear(4, 4)
    choice = PlanChoice(whole={"": "it is small"})
    rows = plan_rows(choice, [stage_part(module, [], None, ("",))])
    assert [row.module for row in rows] == ["(the module itself)", "(whole on every rank)"]
