"""Freezing, manual optimization, callbacks and optimizers with ideas of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from hostile import Net
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from pool import RankError, RankPool
from torch import Tensor, nn


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.inp, pl_module.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.inp, pl_module.blocks], optimizer, lr=0.05)


class HeadFirst(Net):
    """What BaseFinetuning asks for: the optimizer starts with what is trainable."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Switching(Net):
    """Freezes and unfreezes a module every epoch."""

    def on_train_epoch_start(self) -> None:
        self.inp.requires_grad_(self.current_epoch % 2 == 1)


class Gathers(Net):
    """Gathers a value over the data ranks behind the stack."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        everybody = self.all_gather(self.loss(batch))
        self.log("val_loss", everybody.mean())
        self.log("gathered", float(everybody.numel()))


class TwoOptimizers(Net):
    """One loss, two optimizers, Lightning's clipping between backward and step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = self.optimizers()  # type: ignore[misc]
        one.zero_grad()
        two.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(one.optimizer, 0.1, "norm")
        one.step()
        two.step()
        self.log("train_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        body = [*self.inp.parameters(), *self.blocks.parameters()]
        return [torch.optim.SGD(body, lr=0.5), torch.optim.SGD(self.head.parameters(), lr=0.3)]


class OwnClipping(TwoOptimizers):
    """Accumulates two batches by hand and clips with torch's function."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2 == 1:
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Closure(OwnClipping):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class Adversarial(TwoOptimizers):
    """Toggles between a generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(5, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()  # type: ignore[misc]
        for optimizer, sign in ((generator, 1.0), (critic, -1.0)):
            self.toggle_optimizer(optimizer)
            loss = sign * torch.tanh(self.critic(self(batch[0]))).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        body = [*self.inp.parameters(), *self.blocks.parameters(), *self.head.parameters()]
        return [torch.optim.SGD(body, lr=0.1), torch.optim.SGD(self.critic.parameters(), lr=0.1)]


class TiedByHand(OwnClipping):
    """Both ends share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head.weight = self.inp.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.inp(torch.cat([x, x], 1))))[:, :5]


class PlainBackward(OwnClipping):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()
        self.optimizers().step()  # type: ignore[union-attr]


class Newton(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Factored(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class Orthogonal(Net):
    """An optimizer of somebody's own under a known name."""

    def configure_optimizers(self) -> Any:
        class Muon(torch.optim.SGD):
            pass

        return Muon(self.parameters(), lr=0.1)


class Nothing(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.head.parameters() if p.ndim > 2], lr=0.1)


def callbacks(name: str, root: str) -> list[Callback]:
    made: dict[str, Any] = {
        "none": lambda: None,
        "unfreeze": Unfreeze,
        "accumulate": lambda: GradientAccumulationScheduler({0: 1, 1: 3}),
        "swa": lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
        "ema": lambda: EMAWeightAveraging(decay=0.5),
        "on_exception": lambda: OnExceptionCheckpoint(root),
        "save_on_exception": lambda: ModelCheckpoint(root, save_on_exception=True),
        "lr_finder": lambda: LearningRateFinder(num_training_steps=8, min_lr=1e-4, max_lr=1.0, update_attr=False),
    }
    callback = made[name]()
    return [] if callback is None else [callback]


def fit(layout: str, module: type[Net], callback: str = "none", root: str = "", **kwargs: Any) -> dict[str, Any]:
    saves = callback.endswith("on_exception")
    kwargs |= {"default_root_dir": root or None, "enable_checkpointing": saves, "max_epochs": 3}
    return hostile.fit(layout, module, callbacks=callbacks(callback, root), **kwargs)


@pytest.mark.parametrize(
    ("layout", "module", "callback"),
    [
        ("dp2", HeadFirst, "unfreeze"),
        ("dp2", Switching, "none"),
        ("pp2", Switching, "none"),
        ("pp2", Net, "accumulate"),
        ("dp2", Net, "swa"),
        ("dp2", Net, "ema"),
        ("pp2", Net, "lr_finder"),
        ("single", Net, "lr_finder"),
        ("dp2", TwoOptimizers, "none"),
        ("dp2_zero1", TwoOptimizers, "none"),
        ("tp2", TwoOptimizers, "none"),
        ("dp2", OwnClipping, "none"),
        ("dp2_zero1", OwnClipping, "none"),
        ("dp2_zero1", TiedByHand, "none"),
        ("dp2", Closure, "none"),
        ("dp2", Adversarial, "none"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_like_plain_lightning(pool: RankPool, tmp_path: Path, layout: str, module: type[Net], callback: str) -> None:
    expected = fit(hostile.PLAIN, module, callback, str(tmp_path / "plain"))
    world = hostile.LAYOUTS[layout][0]
    root = str(tmp_path / layout)
    hostile.agree(pool.run(fit, world, layout, module, callback, root, mode="trainer"), expected)


@pytest.mark.parametrize(
    ("layout", "module", "callback", "message"),
    [
        ("dp2_zero1", Switching, "none", "requires_grad of .'inp.weight', 'inp.bias'. was changed after set-up"),
        ("dp2_zero1", HeadFirst, "unfreeze", "Unfreeze compares parameters .* sharded under zero_stage=1"),
        ("tp2", HeadFirst, "unfreeze", "Unfreeze compares parameters .* sharded under tensor_parallel_size=2"),
        ("pp2", Nothing, "none", "gave optimizer 0 an empty parameter list: no pipeline stage has a parameter"),
        ("dp2", PlainBackward, "none", r"call self.manual_backward\(loss\)"),
        ("pp2", Newton, "none", "LBFGS needs inner products over all parameters"),
        ("dp2_zero1", Factored, "none", "Adafactor takes means over rows and columns.*zero_stage=1"),
        ("tp2", Orthogonal, "none", "Muon orthogonalises matrices, of which a rank holds only pieces under tensor_par"),
        (
            "dp2_zero1",
            Net,
            "swa",
            "StochasticWeightAveraging averages copies .* under zero_stage=1.*EMAWeightAveraging, which work on parts",
        ),
        ("dp2", Net, "on_exception", "OnExceptionCheckpoint saves when a rank fails"),
        ("dp2", Net, "save_on_exception", "ModelCheckpoint saves when a rank fails"),
    ],
)
def test_refused(pool: RankPool, tmp_path: Path, layout: str, module: type[Net], callback: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        world = hostile.LAYOUTS[layout][0]
        pool.run(fit, world, layout, module, callback, str(tmp_path), mode="trainer", timeout=60)


def validate_then_fit(layout: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Net().double()
    watch = hostile.Watch()
    trainer = hostile.trainer_for(layout, [watch])
    first = trainer.validate(module, hostile.loader(layout, 12), verbose=False)
    trainer.fit(module, hostile.loader(layout), hostile.loader(layout, 12))
    return {"first": first, "epochs": watch.epochs, "weights": watch.weights}


@pytest.mark.parametrize("layout", ["dp2_zero1", "pp2"])
def test_validate_before_fit(pool: RankPool, layout: str) -> None:
    results = pool.run(validate_then_fit, 2, layout, mode="trainer")
    hostile.agree(results, validate_then_fit(hostile.PLAIN))


@pytest.mark.parametrize("layout", ["pp2", "tp2_pp2", "dp2_pp2"])
def test_all_gather_in_a_step_is_over_the_data_ranks(pool: RankPool, layout: str) -> None:
    expected = hostile.fit(hostile.PLAIN, Gathers, validate=True, max_epochs=1)
    world, options = hostile.LAYOUTS[layout]
    results = pool.run(hostile.fit, world, layout, Gathers, validate=True, max_epochs=1, mode="trainer")
    count = float(options.get("data_parallel_size", 1))
    for epoch in expected["epochs"]:
        epoch["gathered"] = count
    hostile.agree(results, expected)
