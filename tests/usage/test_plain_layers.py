"""Everyday training of torch's own layers, which tensor parallelism cuts by a plan that it finds; much at once."""

from __future__ import annotations

from typing import Any

import everyday
import pytest
import torch
from everyday import BOTH, PlainNet
from pool import RankPool
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torchmetrics.classification import MulticlassAccuracy
from usage.test_adapters import around_linear


class Busy(PlainNet):
    """Groups by name, a scheduler with a monitor, own backward and clipping, a metric object, sums of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(5, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.accuracy(out, batch[1])
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", nn.functional.cross_entropy(out, batch[1]) + max(0, self.trainer.global_step - 2))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 2).backward(*args, **kwargs)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        algorithm = "value" if self.trainer.global_step == 1 else "norm"
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=algorithm)

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [
            {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.2},
            {"params": [p for n, p in named if n.endswith("bias")], "lr": 0.02},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        follower = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": follower, "monitor": "val_loss"}}


class Adapted(PlainNet):
    """Adapters around every linear layer of the blocks; all else is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.mlp[0], block.mlp[2] = around_linear(block.mlp[0]), around_linear(block.mlp[2])


def run(layout: str) -> dict[str, Any]:
    windows: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.03}
    busy = everyday.fit(layout, Busy, validate=True, loggers=2, log_every_n_steps=1, **windows)
    adapted = everyday.fit(layout, Adapted, max_epochs=1, gradient_clip_val=0.05)
    return {"busy": busy, "adapted": adapted}


@pytest.mark.parametrize("layout", BOTH)
def test_layers_without_a_thought_of_parallelism(pool: RankPool, layout: str) -> None:
    expected = run(everyday.PLAIN)
    ranks = pool.run(run, 2, layout, mode="trainer")
    for name in ("busy", "adapted"):
        everyday.agree([rank[name] for rank in ranks], expected[name])
    busy, adapted = expected["busy"], expected["adapted"]
    assert busy["batches"][-1]["samples"] == 32.0 and len({tuple(r) for r in busy["rates"]}) >= 2
    assert {name.split(".")[-2] for name in adapted["of_rank_0"]["gradients"][0]} == {"a", "b"}
