"""Parameter groups by name, schedulers of every kind, manual optimization."""

from __future__ import annotations

from typing import Any

import everyday
import pytest
import torch
from everyday import BOTH, Net
from pool import RankPool
from torch import nn
from torch.optim import lr_scheduler


class Groups(Net):
    """Groups by name, in the two forms that torch takes; some are empty on some stage."""

    kind = "adamw"

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        decay = [p for n, p in named if p.ndim > 1 and n.startswith("blocks")]
        plain = [p for n, p in named if p.ndim <= 1 and n.startswith("blocks")]
        groups: Any = [
            {"params": decay, "weight_decay": 0.2, "name": "decay"},
            {"params": plain, "weight_decay": 0.0, "name": "plain"},
            {"params": [p for n, p in named if n.startswith("inp")], "lr": 0.05, "name": "first stage only"},
            {"params": [p for n, p in named if n.startswith("head")], "lr": 0.01, "name": "last stage only"},
        ]
        if self.kind == "sgd":
            return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        optimizer = torch.optim.AdamW(groups, lr=3e-3)
        warm = lr_scheduler.LambdaLR(optimizer, [lambda i, k=k: min(1.0, (i + 1) / (k + 2)) for k in range(4)])
        return [optimizer], [{"scheduler": warm, "interval": "step", "name": "warm"}]


class SgdGroups(Groups):
    kind = "sgd"


class NamedParameters(Net):
    """``torch.optim`` given names (since torch 2.6)."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.named_parameters(), lr=3e-3)


class Early(Net):
    """Builds its optimizer with its layers, before anything is sharded, as LightningCLI does."""

    def __init__(self) -> None:
        super().__init__()
        body = [(n, p) for n, p in self.named_parameters() if not n.startswith("head")]
        head = [(n, p) for n, p in self.named_parameters() if n.startswith("head")]
        groups = [{"params": body}, {"params": head, "lr": 1e-2}]
        self.early = torch.optim.AdamW(groups, lr=3e-3)  # type: ignore[arg-type]
        self.schedule = lr_scheduler.StepLR(self.early, 3, 0.5)

    def configure_optimizers(self) -> Any:
        return [self.early], [{"scheduler": self.schedule, "interval": "step"}]


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("module", [Groups, SgdGroups, NamedParameters, Early], ids=lambda m: m.__name__)
def test_groups_by_name(pool: RankPool, layout: str, module: type[Net]) -> None:
    expected = everyday.compare(pool, everyday.fit, layout, module, gradient_clip_val=0.3)
    if module is Groups:
        assert len(expected["rates"][0]) == 4 and len({tuple(r) for r in expected["rates"]}) > 3


def monitored_rates(layout: str, root: str, interrupted: bool) -> dict[str, Any]:
    """Groups that a stage lacks, saved and loaded: LearningRateMonitor names them, the checkpoint keeps them."""
    from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint

    memory = everyday.Memory()
    common: dict[str, Any] = {"logger": memory, "log_every_n_steps": 1, "default_root_dir": root}
    torch.manual_seed(0)
    module = Groups().double()
    path = f"{root}/middle.ckpt"
    if interrupted:
        saver = ModelCheckpoint(root, "middle", every_n_train_steps=3, save_top_k=1)
        callbacks = [LearningRateMonitor("step"), saver]
        first = everyday.make_trainer(layout, callbacks, max_steps=4, enable_checkpointing=True, **common)
        first.fit(module, everyday.loader(layout))
        torch.manual_seed(7)
        module = Groups().double()
    watch = everyday.Watch()
    trainer = everyday.make_trainer(layout, [watch, LearningRateMonitor("step")], max_epochs=2, **common)
    trainer.fit(module, everyday.loader(layout), ckpt_path=path if interrupted else None)
    logged = [(step, row) for step, row in memory.rows if any(k.startswith("warm") for k in row)][-5:]
    return {"of_rank_0": {"weights": watch.weights, "logged": logged, "last": watch.gradients[-1]}}


@pytest.mark.parametrize("layout", BOTH)
def test_groups_that_a_stage_lacks_are_named_saved_and_resumed(pool: RankPool, tmp_path: Any, layout: str) -> None:
    expected = monitored_rates(everyday.PLAIN, str(tmp_path / "plain"), interrupted=False)
    assert set(expected["of_rank_0"]["logged"][0][1]) == {
        f"warm/{n}" for n in ("decay", "plain", "first stage only", "last stage only")
    }
    root = str(tmp_path / layout)
    results = pool.run(monitored_rates, everyday.world(layout), layout, root, True, mode="trainer")
    everyday.agree(results, expected)


class Plateau(Net):
    """Follows a metric of the validation; the loss is made to stop falling."""

    interval = "epoch"

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss + max(0, self.trainer.global_step - 6))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        follower = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": follower, "monitor": self.monitor, "interval": self.interval},
        }

    monitor = "val_loss"


class PlateauOfSteps(Plateau):
    """Follows the training loss after every second step."""

    interval, monitor = "step", "train_loss"

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made["lr_scheduler"]["frequency"] = 2
        return made


class Warm(Net):
    """Two schedulers in sequence, per step; an own lr_scheduler_step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        steps = int(self.trainer.estimated_stepping_batches)
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps - 3)
        both = lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[3])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": both, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


@pytest.mark.parametrize("layout", [*BOTH, "dp2_pp2"])
@pytest.mark.parametrize("module", [Plateau, PlateauOfSteps, Warm], ids=lambda m: m.__name__)
def test_schedulers(pool: RankPool, layout: str, module: type[Net]) -> None:
    if layout == "dp2_pp2" and module is Warm:
        pytest.skip("no metric involved")
    expected = everyday.compare(pool, everyday.fit, layout, module, validate=True, max_epochs=4)
    assert len({tuple(r) for r in expected["rates"]}) >= 2


class Manual(Net):
    """Two optimizers, accumulation, clipping, a scheduler and toggling, all by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        body, head = self.optimizers()  # type: ignore[misc]
        loss = self.loss(batch)
        self.manual_backward(loss / 2)
        if batch_idx % 2 == 1:
            self.clip_gradients(body, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            self.clip_gradients(head, gradient_clip_val=0.01, gradient_clip_algorithm="value")
            body.step()
            head.step()
            body.zero_grad()
            head.zero_grad()
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
                scheduler.step()
        self.log("train_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        body = torch.optim.SGD([*self.inp.parameters(), *self.blocks.parameters()], lr=0.5, momentum=0.9)
        head = torch.optim.AdamW(self.head.parameters(), lr=0.01)
        return [body, head], [lr_scheduler.StepLR(o, 1, 0.5) for o in (body, head)]


class ManualNorm(Manual):
    """Clips with torch's own function over all parameters, sharded and replicated ones."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def manual(layout: str, module: type[Net]) -> dict[str, Any]:
    result = everyday.fit(layout, module)
    return {**result, "losses": []}  # outputs of a manual step are None


class WatchlessManual(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        return {"loss": torch.zeros(())}


@pytest.mark.parametrize("layout", ["tp2", "dp2_tp2"])
def test_manual_optimization(pool: RankPool, layout: str) -> None:
    expected = everyday.compare(pool, everyday.fit, layout, WatchlessManual)
    assert len(expected["of_rank_0"]["gradients"]) == 8  # two optimizers, two steps an epoch, two epochs
