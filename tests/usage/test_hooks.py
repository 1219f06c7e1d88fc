"""Every hook of modules, callbacks and data modules runs in plain Lightning's order, with the same arguments."""

from __future__ import annotations

import inspect
from typing import Any

import everyday
import pytest
import torch
from everyday import BOTH, Net
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from pool import RankPool
from torch import Tensor

STEPS = ("training_step", "validation_step", "test_step", "predict_step", "forward")
MODULE_HOOKS = sorted(
    {name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name in dir(kind) if not name.startswith("_")}
    - {name for name in dir(DataHooks) if name.endswith("dataloader")}
    - {"configure_sharded_model"}
    | {"backward", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"}
    | {"configure_optimizers", "configure_callbacks"}
)  # fmt: skip
CALLBACK_HOOKS = sorted(
    n for n, _ in inspect.getmembers(Callback, inspect.isfunction) if n.startswith(("on_", "set", "tear"))
)


def describe(value: Any) -> str:
    """An argument in words that do not depend on the layout: numbers and tensors by value."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {float(value.detach().double().sum()):.6f}"
    if isinstance(value, dict):
        return str(sorted((k, describe(v)) for k, v in value.items() if k not in ("state_dict", "optimizer_states")))
    if isinstance(value, (list, tuple)):
        return str([describe(v) for v in value])
    return str(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__


LOUD = ("on_train_batch_end", "on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end")
LOUD += ("on_before_backward", "on_train_batch_start", "on_before_batch_transfer", "on_after_batch_transfer")


def spying(base: type, names: list[str], owner: str, events: list[str]) -> type:
    """A subclass of ``base`` that notes each call of ``names`` (and the values of a few) and goes on to ``base``."""

    def make(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            said = f"{owner}.{name}"
            if name in LOUD:
                said += " " + str([describe(a) for a in (*args, *kwargs.values())])
            events.append(said)
            return getattr(super(made, self), name)(*args, **kwargs)

        return hook

    made: type = type(base.__name__, (base,), {name: make(name) for name in names if hasattr(base, name)})
    return made


class Body(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "rows": batch[1]}

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


class Data(LightningDataModule):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout

    def train_dataloader(self) -> Any:
        return everyday.loader(self.layout, 24)

    def val_dataloader(self) -> Any:
        return everyday.loader(self.layout, 8, 4)

    test_dataloader = predict_dataloader = val_dataloader


def hooks(layout: str, root: str) -> dict[str, Any]:
    events: list[str] = []
    module_type: Any = spying(Body, MODULE_HOOKS, "module", events)
    data_type: Any = spying(Data, [n for n in MODULE_HOOKS if hasattr(LightningDataModule, n)], "data", events)
    callback: Any = spying(Callback, CALLBACK_HOOKS, "callback", events)()
    trainer = everyday.make_trainer(
        layout,
        [callback],
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        num_sanity_val_steps=1,
        enable_checkpointing=True,
        default_root_dir=root,
    )
    torch.manual_seed(0)
    module: LightningModule = module_type().double()
    data = data_type(layout)
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data)
    return {"events": events}


@pytest.mark.parametrize("layout", [*BOTH, "dp2_pp2"])
def test_order_of_every_hook(pool: RankPool, tmp_path: Any, layout: str) -> None:
    plain = hooks(everyday.PLAIN, str(tmp_path / "plain"))["events"]
    named = {event.split(" ")[0].split(".")[1] for event in plain}
    missing = {n for n in (*MODULE_HOOKS, *CALLBACK_HOOKS) if n.startswith("on_")} - named
    assert missing <= {"on_exception", "on_load_checkpoint"} and len(plain) > 300, missing
    ranks = pool.run(hooks, everyday.world(layout), layout, str(tmp_path / layout), mode="trainer")
    for index, rank in enumerate(ranks):
        mine, expected = rank["events"], plain
        if index > 0:  # Lightning prepares data once on a host
            expected = [event for event in plain if "prepare_data" not in event]
        if "dp2" in layout:  # each data rank has its own samples
            mine, expected = ([e.split(" ")[0] for e in side] for side in (mine, expected))
        first = next((i for i, (a, e) in enumerate(zip(mine, expected)) if a != e), None)
        assert first is None, (
            f"event {first}: {mine[max(0, first - 3) :][:6]} against {expected[max(0, first - 3) :][:6]}"
        )
        assert len(mine) == len(expected)


class Overriding(Net):
    """Own backward (scales the loss), own clipping (by name), own gradient surgery, own zero_grad and step."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 3).backward(*args, **kwargs)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.events.append(f"clip {gradient_clip_val} {gradient_clip_algorithm}")
        if self.trainer.global_step != 1:  # once not at all
            self.clip_gradients(optimizer, gradient_clip_val=0.07, gradient_clip_algorithm="norm")

    def on_after_backward(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias") and parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.trainer.global_step < 3:  # warm-up by hand
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * (self.trainer.global_step + 1) / 3
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=batch_idx % 2 == 0)


@pytest.mark.parametrize("layout", [*BOTH, "dp2_pp2", "dp2_tp2"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_overridden_hooks(pool: RankPool, layout: str, accumulate: int) -> None:
    if accumulate == 1 and layout not in BOTH:
        pytest.skip("covered by accumulation")
    expected = everyday.compare(pool, everyday.fit, layout, Overriding, accumulate_grad_batches=accumulate)
    assert expected["events"][0] == "clip None None" and expected["rates"][0] == [pytest.approx(0.1 / 3)]
