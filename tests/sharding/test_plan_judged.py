"""A plan that somebody wrote is judged before it is used: wrong ones are refused with the entry that is to blame."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_megapar.config import ConfigError
from lightning_megapar.sharding.choice import PlanChoice, choose_plan
from lightning_megapar.sharding.chooser.alone import runs_of_step, stand_alone
from lightning_megapar.sharding.chooser.arithmetic import Arithmetic

WIDTH, INNER = 8, 12
RIGHT = {"up": "colwise", "down": "rowwise"}


class Net(LightningModule):
    """One hidden layer; ``inside`` happens between the two layers."""

    def __init__(self, inside: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.inside = inside

    def training_step(self, batch: Tensor, index: int) -> Any:
        return self.down(self.inside(self.up(self.norm(batch)))).square().mean()


def judged(module: nn.Module, plan: Any, size: int = 2, *, batch: Any = None, **options: Any) -> PlanChoice:
    rows = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(1)) if batch is None else batch
    return choose_plan(
        module,
        plan,
        size,
        runs=lambda m: runs_of_step("training_step", rows) if isinstance(rows, Tensor) else rows,
        alone=lambda m, shorten, planned: stand_alone(
            m, "blocks" if shorten else None, {one.name: str(one.style) for one in planned}
        ),
        share=lambda value: value,
        is_first=True,
        **options,
    )


def test_a_right_plan_is_taken_as_it_is_and_nothing_is_left_behind() -> None:
    module = Net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(7)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    choice = judged(module, RIGHT)
    assert choice.plan.to_mapping() == RIGHT and not choice.notes
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert states[2] == numpy.random.get_state()[1].tolist()


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        # Exact losses, gradients twice too large.
        (
            {**RIGHT, "norm": "replicated_with_grad_allreduce"},
            r"Declared addends are identical on all ranks.*'norm\.\w+'.*2 times too large.*"
            r"Without the entry 'norm': 'replicated_with_grad_allreduce' the plan is exact",
        ),
        # The input is whole: shapes do not fit.
        ({"down": "rowwise"}, r"runs whole, but not on 2 tensor ranks.*mat1.*in 'down'.*Entries.*'down': 'rowwise'"),
        # The output of a column layer enters nothing.
        ({**RIGHT, "norm": "entered_output"}, r"does not compute what one process does.*'norm': 'entered_output'"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_entry_and_the_way_out(plan: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        judged(Net(), plan)
    assert "recipes/verify.py" in str(refused.value) and "sharding_plan is wrong for Net" in str(refused.value)


def test_a_layout_that_fits_by_its_shape_alone_is_refused() -> None:
    """A softmax over what the ranks hold apart; a fused pair that is cut as if it were one part."""
    with pytest.raises(ConfigError, match=r"the gradient of '\w+\.\w+' is off by .*'up': 'colwise'|'down': 'rowwise'"):
        judged(Net(lambda x: x.softmax(-1)), RIGHT)

    class Gated(Net):
        def __init__(self) -> None:
            super().__init__(lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1])
            self.down = nn.Linear(INNER // 2, WIDTH)

    with pytest.raises(ConfigError, match="does not compute"):
        judged(Gated(), RIGHT)
    assert judged(Gated(), {**RIGHT, "up": "packed_colwise"}).assignments


def test_the_module_s_own_plan_is_judged_under_its_name() -> None:
    class Own(Net):
        def sharding_plan(self) -> dict[str, str]:
            return {"up": "colwise"}

    with pytest.raises(ConfigError, match=r"^Own\.sharding_plan\(\) is wrong for Own"):
        judged(Own(), "auto")


def test_addends_that_a_plan_forgot_are_added_and_told() -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.inside = lambda x: torch.tanh(x)

        def training_step(self, batch: Tensor, index: int) -> Any:
            return self.down(torch.tanh(self.scale * self.up(batch))).square().mean()

    for plan in (RIGHT, {**RIGHT, "scale": "replicate"}):
        choice = judged(Scaled(), plan)
        assert choice.plan.to_mapping() == {**RIGHT, "scale": "replicated_with_grad_allreduce"}
        assert "gradients of scale differ between tensor ranks" in choice.notes[0]


class Halved(nn.Linear):
    """Linear, with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) / 2


class Rectified(nn.Linear):
    """Not linear at all."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).relu()


@pytest.mark.parametrize(("kind", "exact"), [(Halved, True), (Rectified, False)])
def test_subclasses_of_linear_layers_are_judged_by_what_they_compute(kind: type[nn.Linear], exact: bool) -> None:
    module = Net()
    module.down = kind(INNER, WIDTH)
    if exact:
        assert judged(module, RIGHT).assignments
    else:
        with pytest.raises(ConfigError, match=r"a forward of their own.*: 'down': 'rowwise'"):
            judged(module, RIGHT)


def test_a_plan_that_cannot_be_tried_is_used_and_the_reason_is_told() -> None:
    class Random(Net):
        """Its own luck decides, not the generators that a trial seeds."""

        calls = 0

        def training_step(self, batch: Tensor, index: int) -> Any:
            Random.calls += 1
            return super().training_step(batch, index) * Random.calls

    class Failing(Net):
        def training_step(self, batch: Tensor, index: int) -> Any:
            raise KeyError("needs a card")

    class Uncopied(Net):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("one of a kind")

    for module, options, says in [
        (Random(), {}, "differ from run to run"),
        (Failing(), {}, "needs a card"),
        (Uncopied(), {}, "one of a kind"),
        (Net(), {"batch": "no samples could be taken"}, "no samples could be taken"),
        (Net(), {"patience": 0.0}, "would take longer"),
    ]:
        choice = judged(module, RIGHT, **options)
        assert choice.plan.to_mapping() == RIGHT, type(module).__name__
        assert len(choice.notes) == 1 and says in choice.notes[0] and "not proven" in choice.notes[0]


def test_dropout_and_numbers_from_any_generator_do_not_disturb_the_trial() -> None:
    class Noisy(Net):
        def training_step(self, batch: Tensor, index: int) -> Any:
            x = batch * (1 + random.random()) + float(numpy.random.rand())
            return self.down(F.dropout(torch.tanh(self.up(x)), 0.5, self.training)).square().mean()

    assert not judged(Noisy(), RIGHT).notes


def test_small_systematic_differences_are_seen() -> None:
    """A penalty over the parameters sees the rank's part of them; float32 would take 1e-6 for rounding."""

    class Penalised(Net):
        def training_step(self, batch: Tensor, index: int) -> Any:
            loss = super().training_step(batch.float(), index).float()
            return loss + 1e-6 * sum(p.square().sum() for p in self.parameters())

    with pytest.raises(ConfigError, match="the loss is off by"):
        judged(Penalised(), RIGHT)


def test_modules_that_convert_to_float32_are_tried_in_float64() -> None:
    module = nn.Linear(4, 4).double()
    with Arithmetic.of(module) as arithmetic:
        x = module(torch.ones(2, 4)).float().to(torch.bfloat16) + torch.zeros(4)
        y = F.softmax(x, -1, dtype=torch.float32)
        z = F.scaled_dot_product_attention(y[None], y[None], y[None], None, 0.5)
        assert torch.equal(z, F.scaled_dot_product_attention(y[None], y[None], y[None], dropout_p=0.9))
    assert y.dtype is torch.float64 and arithmetic.tolerance == 1e-9
    short = torch.ones(4)  # a constant that nothing converts
    with Arithmetic.of(module) as mixed:
        assert (2 * short).dtype is torch.float32
    assert mixed.tolerance == 1e-5


def test_blocks_that_a_plan_treats_differently_are_all_tried() -> None:
    class Stack(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Net() for _ in range(3))

        def training_step(self, batch: Tensor, index: int) -> Any:
            for block in self.blocks:
                batch = batch + block.down(torch.tanh(block.up(batch)))
            return batch.square().mean()

    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "blocks.1.up": "colwise_gather_output"}
    module = Stack()
    twin = stand_alone(module, "blocks", {"blocks.1.up": "colwise_gather_output"})
    assert list(twin.blocks._modules) == ["0", "1"]
    with pytest.raises(ConfigError, match=r"'blocks\.\*\.down'|'blocks\.1\.up'"):
        judged(module, plan)


def test_a_layer_whose_weight_is_read_by_other_code_is_told() -> None:
    class Reading(Net):
        def training_step(self, batch: Tensor, index: int) -> Any:
            return self.down(torch.tanh(F.linear(batch, self.up.weight, self.up.bias))).square().mean()

    with pytest.raises(ConfigError, match="'up': 'colwise' did not run on the first batch"):
        judged(Reading(), {"up": "colwise"})
