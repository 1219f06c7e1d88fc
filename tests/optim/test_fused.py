"""Fused and foreach optimizers on what a rank holds: plain tensors, pieces, DTensors, all in one group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import RankPool
from usage import everyday
from usage.everyday import slow


class FusedAdamW(everyday.Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1, fused=True)


class ForeachAdamW(everyday.Net):
    """Two groups, each with parameters of every kind."""

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        decay = {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1}
        return torch.optim.AdamW([decay, {"params": [p for _, p in named if p.ndim < 2]}], lr=3e-3, foreach=True)


class FusedSGD(everyday.Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)


class ForeachSGD(everyday.Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)


class ForeachAdagrad(everyday.Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.01, foreach=True)


KINDS = [FusedAdamW, ForeachAdamW, FusedSGD, ForeachSGD, ForeachAdagrad]


@pytest.mark.parametrize("layout", ["tp2", "dp2 zero1", slow("pp2"), slow("dp2"), slow("dp2_tp2 zero1")])
@pytest.mark.parametrize("module", [FusedAdamW, ForeachAdamW, slow(FusedSGD), slow(ForeachSGD), slow(ForeachAdagrad)])
def test_as_plain_lightning(pool: RankPool, layout: str, module: type[everyday.Net]) -> None:
    ranks, *zero = layout.split()
    options = {"zero_stage": 1} if zero else {}
    everyday.compare(pool, everyday.fit, ranks, module, strategy_options=options, gradient_clip_val=0.3)


def resumed(layout: str, root: str, resume: str | None) -> dict[str, Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    torch.manual_seed(0)
    watch = everyday.Watch()
    saving = [] if resume else [ModelCheckpoint(root, "middle", every_n_train_steps=3, save_top_k=1)]
    options: dict[str, Any] = {"default_root_dir": root, "enable_checkpointing": not resume}
    trainer = everyday.make_trainer(layout, [watch, *saving], **options)
    trainer.fit(FusedSGD().double(), everyday.loader(layout), ckpt_path=resume)
    return {"weights": watch.weights, "first": f"{root}/middle.ckpt"}


def test_momentum_that_a_kernel_made_is_saved_with_its_layout(pool: RankPool, tmp_path: Any) -> None:
    whole = pool.run(resumed, 2, "tp2", str(tmp_path), None, mode="trainer")[0]
    found = pool.run(resumed, 2, "pp2", str(tmp_path), whole["first"], mode="trainer")[0]
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-9, atol=1e-12, msg=name)
