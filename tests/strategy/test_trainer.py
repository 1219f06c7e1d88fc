"""The Trainer's own features under tp2_pp2 behave as in plain Lightning on one device."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from pool import RankPool
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy


class Full(parity.Model):
    """Validation, test, predict, metrics, several reductions, a scheduler."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config, "adamw", **kwargs)
        self.accuracy = MulticlassAccuracy(config.vocab_size, average="micro")
        self.events: list[str] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.gpt(batch["tokens"], batch["labels"])
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest_label", batch["labels"].max().float(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("samples", float(len(batch["labels"])), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.gpt(batch["tokens"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.accuracy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_accuracy", self.accuracy)
        return loss

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.gpt(batch["tokens"], batch["labels"]))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.gpt(batch["tokens"]).argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = parity.make_optimizer(self.parameters(), "adamw", self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.events.append("zero")

    def on_before_backward(self, loss: Tensor) -> None:
        self.events.append("before_backward")

    def on_after_backward(self) -> None:
        self.events.append("after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.events.append("before_step")


class Seen(Callback):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.metrics.append({k: float(v) for k, v in sorted(trainer.callback_metrics.items())})


def fit_everything(strategy: Any, devices: int, root: str, logger: str) -> dict[str, Any]:
    config = parity.style("llama")
    # 22 samples: the last training batch and the last validation batch are ragged.
    train = DataLoader(parity.Tokens(22, 16, 61, ragged=False), batch_size=8, shuffle=False)
    val = DataLoader(parity.Tokens(11, 16, 61, ragged=False), batch_size=4)
    seen = Seen()
    best = ModelCheckpoint(dirpath=Path(root) / "ckpt", monitor="val_loss", save_top_k=2, save_last=True)
    loggers = {"csv": CSVLogger(root, name="csv"), "tensorboard": TensorBoardLogger(root, name="tb")}
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=3,
        precision="64-true",
        logger=loggers[logger],
        log_every_n_steps=1,
        callbacks=[seen, best, EarlyStopping("val_loss", patience=5), LearningRateMonitor("step")],
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=root,
        num_sanity_val_steps=1,
    )
    model = Full(config)
    trainer.fit(model, train, val)
    fit_metrics = {k: float(v) for k, v in sorted(trainer.callback_metrics.items())}
    validated = trainer.validate(model, val, verbose=False)
    tested = trainer.test(model, val, verbose=False)
    predicted = torch.cat(trainer.predict(model, val))
    return {
        "metrics": seen.metrics,
        "fit": fit_metrics,
        "validated": validated,
        "tested": tested,
        "predicted": predicted,
        "best": Path(best.best_model_path).name,
        "score": float(best.best_model_score),
        "events": model.events,
        "global_step": trainer.global_step,
        "files": sorted(p.name for p in (Path(root) / "ckpt").iterdir()),
    }


def under_megapar(options: dict[str, Any], devices: int, root: str, logger: str = "csv") -> dict[str, Any]:
    from lightning_megapar import MegaParStrategy

    return fit_everything(MegaParStrategy(**options), devices, root, logger)


def rows_of(directory: Path) -> list[dict[str, str]]:
    with next(directory.rglob("metrics.csv")).open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    root = tmp_path_factory.mktemp("plain")
    return fit_everything("auto", 1, str(root), "csv"), root


LAYOUTS = {
    "single": (1, {}),
    "tp2_pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "dp2_pp2": (4, {"data_parallel_size": 2, "pipeline_parallel_size": 2, "zero_stage": 1}),
}


@pytest.mark.parametrize("layout", ["single", "tp2_pp2"])
def test_like_plain_lightning(pool: RankPool, tmp_path: Path, plain: tuple[dict[str, Any], Path], layout: str) -> None:
    expected, expected_root = plain
    world, options = LAYOUTS[layout]
    results = pool.run(under_megapar, world, options, world, str(tmp_path), mode="trainer")
    mine = results[0]
    assert mine["events"] == expected["events"]
    assert mine["global_step"] == expected["global_step"]
    assert mine["files"] == expected["files"]
    assert mine["best"] == expected["best"]
    assert torch.equal(mine["predicted"], expected["predicted"])
    for name in ("fit",):
        assert mine[name] == pytest.approx(expected[name], rel=1e-9)
    assert len(mine["metrics"]) == len(expected["metrics"]) == 3
    for a, e in zip(mine["metrics"], expected["metrics"]):
        assert a == pytest.approx(e, rel=1e-9)
    for name in ("validated", "tested"):
        assert mine[name][0] == pytest.approx(expected[name][0], rel=1e-9)
    for other in results[1:]:
        # Every rank sees the same metrics, so callbacks decide alike.
        assert other["metrics"] == mine["metrics"]
        assert other["best"] == mine["best"] and other["score"] == mine["score"]
        assert torch.equal(other["predicted"], mine["predicted"])
    a, e = rows_of(tmp_path), rows_of(expected_root)
    assert [set(row) for row in a] == [set(row) for row in e]
    for mine_row, row in zip(a, e):
        for key, value in row.items():
            assert (mine_row[key] == "") == (value == ""), key
            if value:
                assert float(mine_row[key]) == pytest.approx(float(value), rel=1e-9), key


def test_data_ranks_and_tensorboard(pool: RankPool, tmp_path: Path) -> None:
    world, options = LAYOUTS["dp2_pp2"]
    results = pool.run(under_megapar, world, options, world, str(tmp_path), "tensorboard", mode="trainer")
    assert all(r["metrics"] == results[0]["metrics"] for r in results)
    files = list((tmp_path / "tb").rglob("events.out.tfevents*"))
    assert files  # one per entry point (fit, validate, test), all of them written by one rank
    assert len({file.name.split(".")[-2] for file in files}) == 1
