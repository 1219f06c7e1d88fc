"""What hooks and steps do with weights between forward, backward and optimizer step, while units may be gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hostile
import pytest
import torch
from hostile import Net
from lightning.pytorch import Callback, Trainer
from pool import RankError, RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megapar.optim import GradientNoiseScale


class Acts(Net):
    """Does something in one of its hooks."""

    hook = ""
    act: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name != type(self).hook or name == "":
            return value

        def called(*args: Any, **kwargs: Any) -> Any:
            type(self).act(self)
            return value(*args, **kwargs)

        return called


def look(module: Any) -> None:
    """Calls itself without gradients."""
    if not module.trainer.sanity_checking:
        with torch.no_grad():
            module.seen.append(float(module(torch.full((2, 8), 0.3, dtype=torch.float64)).sum()))


def edit(module: Any) -> None:
    """Changes all weights in place."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.97)


def clamp(module: Any) -> None:
    """As one does for a critic: behind autograd's back."""
    for parameter in module.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def acting(stage: int, hook: str, act: Callable[[Any], None], accumulate: int) -> dict[str, Any]:
    made: list[Any] = []

    class Module(Acts):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    Module.hook, Module.act = hook, staticmethod(act)
    settings: dict[str, Any] = {"accumulate_grad_batches": accumulate, "val_check_interval": 2, "max_epochs": 2}
    found = hostile.fit("dp2", Module, validate=True, options={"zero_stage": stage}, **settings)
    return {"weights": found["weights"], "epochs": found["epochs"], "seen": made[0].seen}


CASES = [
    ("on_before_optimizer_step", look, 1),
    ("on_after_backward", look, 1),
    ("on_before_zero_grad", look, 1),
    ("on_train_batch_start", edit, 1),
    ("on_train_batch_start", clamp, 3),
    ("on_train_batch_end", edit, 3),
    ("on_validation_epoch_end", edit, 1),
    ("on_train_epoch_start", clamp, 1),
]


@pytest.mark.parametrize("stage", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_hooks_that_look_and_that_change(pool: RankPool, stage: int) -> None:
    for hook, act, accumulate in CASES:
        mine = pool.run(acting, 2, stage, hook, act, accumulate, mode="trainer")
        expected = pool.run(acting, 2, 0, hook, act, accumulate, mode="trainer")
        assert hostile.differences(mine, expected) == [], (hook, act.__name__, accumulate)


class Adversaries(Net):
    """Its generator's forward stands between the critic's backward and the critic's step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def configure_optimizers(self) -> Any:
        others = [p for name, p in self.named_parameters() if not name.startswith("critic")]
        return [torch.optim.SGD(others, lr=0.1), torch.optim.SGD(self.critic.parameters(), lr=0.1)]

    def body(self, x: Tensor) -> Tensor:
        return self.blocks(self.inp(x))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()  # type: ignore[misc]
        with torch.no_grad():
            fake = self.body(batch[0])
        loss = self.critic(fake).mean() - self.critic(torch.full_like(fake, 0.5)).mean()
        critic.zero_grad()
        self.manual_backward(loss)
        fake = self.body(batch[0])
        critic.step()
        loss = nn.functional.cross_entropy(self.head(fake), batch[1]) - self.critic(fake).mean()
        generator.zero_grad()
        self.manual_backward(loss)
        self.log("before", self.loss(batch).detach())
        generator.step()
        self.log("behind", self.loss(batch).detach())


class Clamps(Adversaries):
    """Changes weights in place, within the step, where it has looked at itself before."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.log("before", self.loss(batch))
        clamp(self)
        super().training_step(batch, batch_idx)


def adversarial(stage: int, module: type[Net] = Adversaries) -> dict[str, Any]:
    return hostile.fit("dp2", module, options={"zero_stage": stage})


@pytest.mark.parametrize("module", [Adversaries, Clamps])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_forwards_between_backward_and_step(pool: RankPool, stage: int, module: type[Net]) -> None:
    mine = pool.run(adversarial, 2, stage, module, mode="trainer")
    assert hostile.differences(mine, pool.run(adversarial, 2, 0, module, mode="trainer")) == []


class Gated(Net):
    """All ranks call all blocks in one order; which of them a backward comes to is the batch's choice."""

    def __init__(self) -> None:
        super().__init__()
        del self.inp
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.Tanh()) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        found = [block(x) for block in self.blocks]  # type: ignore[union-attr]
        return self.head(found[3] + found[2 * int(float(x.detach().sum()) > 0)])


def gated(stage: int) -> dict[str, Tensor]:
    options = {"zero_stage": stage, "timeout_seconds": 8}
    rows = DataLoader(hostile.data(24), batch_size=2)
    return hostile.fit("dp2", Gated, train=rows, max_epochs=1, options=options)["weights"]  # type: ignore[no-any-return]


def test_backwards_that_come_to_other_blocks(pool: RankPool) -> None:
    expected = pool.run(gated, 2, 0, mode="trainer")
    assert hostile.differences(pool.run(gated, 2, 2, mode="trainer"), expected) == []
    with pytest.raises(RankError, match="zero_stage=3"):
        pool.run(gated, 2, 3, mode="trainer")


class Twice(Net):
    """Calls its last block twice."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(self.inp(x))
        return self.head(self.blocks[3](hidden))  # type: ignore[index]


class Logged(Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.rows.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("noise_scale/")})


def noise(stage: int, source: str) -> dict[str, Any]:
    logged = Logged()
    options = {"zero_stage": stage, "num_microbatches": 2}
    callbacks = [GradientNoiseScale(decay=0.0, source=source), logged]
    found = hostile.fit("dp2", Twice, callbacks=callbacks, max_epochs=1, options=options)
    return {"rows": logged.rows, "weights": found["weights"]}


@pytest.mark.parametrize(("stage", "source"), [(1, "data"), (2, "microbatches"), (3, "microbatches")])
def test_noise_of_a_block_that_is_called_twice(pool: RankPool, stage: int, source: str) -> None:
    mine = pool.run(noise, 2, stage, source, mode="trainer")
    assert hostile.differences(mine, pool.run(noise, 2, 0, source, mode="trainer")) == []
    assert mine[0]["rows"][0]


class Leaves(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if args[-1] == 3:
            raise KeyError("left")


def left(stage: int) -> dict[str, Tensor]:
    """A window is left open, and another Trainer goes on with the module."""
    torch.manual_seed(0)
    module = Net().double()
    settings: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 3, "options": {"zero_stage": stage}}
    with pytest.raises(KeyError, match="left"):
        hostile.trainer_for("dp2", [Leaves()], **settings).fit(module, hostile.loader("dp2"))
    watch = hostile.Watch()
    hostile.trainer_for("dp2", [watch], **settings).fit(module, hostile.loader("dp2"))
    return watch.weights


def test_a_window_that_another_trainer_left(pool: RankPool) -> None:
    mine = pool.run(left, 2, 1, mode="trainer")
    assert hostile.differences(mine, pool.run(left, 2, 0, mode="trainer")) == []


def averaged(stage: int) -> dict[str, Any]:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    settings: dict[str, Any] = {"accumulate_grad_batches": 3, "val_check_interval": 4, "validate": True}
    return hostile.fit("dp2", callbacks=[EMAWeightAveraging(decay=0.9)], options={"zero_stage": stage}, **settings)


def test_averages_are_swapped_in_within_a_window(pool: RankPool) -> None:
    mine = pool.run(averaged, 2, 1, mode="trainer")
    assert hostile.differences(mine, pool.run(averaged, 2, 0, mode="trainer")) == []


class Penalty(Net):
    """Of the gradient with respect to its input."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_()
        out = self(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return nn.functional.cross_entropy(out, batch[1]) + gradient.square().mean()


def penalized(stage: int) -> dict[str, Any]:
    return hostile.fit("dp2", Penalty, max_epochs=1, options={"zero_stage": stage})


def test_a_penalty_on_gradients(pool: RankPool) -> None:
    mine = pool.run(penalized, 2, 1, mode="trainer")
    assert hostile.differences(mine, pool.run(penalized, 2, 0, mode="trainer")) == []
    with pytest.raises(RankError, match="StepContractError: zero_stage=3 lets go of a block's parameters behind its"):
        pool.run(penalized, 2, 3, mode="trainer")
