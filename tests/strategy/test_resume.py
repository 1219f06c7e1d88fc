"""A run interrupted on one layout goes on, on any other, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from pool import RankPool
from torch.utils.data import DataLoader

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "dp2_zero1": (2, {"data_parallel_size": 2, "zero_stage": 1}),
    "dp2_pp2_zbv_zero1": (
        4,
        {"data_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_schedule": "zbv", "zero_stage": 1},
    ),
    "tp2_sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "tp2_pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
}
SAMPLES = 40  # five global batches of eight: an epoch ends between steps 5 and 6
BATCH = 8


def train(
    options: dict[str, Any],
    world: int,
    root: str,
    *,
    stop: int,
    ckpt: str | None = None,
    save: str | None = None,
    dropout: float = 0.0,
) -> dict[str, Any]:
    from lightning_megapar import MegaParStrategy

    strategy = MegaParStrategy(seed=11, **options)
    data = strategy.config.resolve(world)[0].data
    loader = DataLoader(parity.Tokens(SAMPLES, 16, 61), batch_size=BATCH // data, shuffle=True, drop_last=True)
    record = parity.Record()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world,
        max_steps=stop,
        max_epochs=-1,
        precision="64-true",
        callbacks=[record],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    trainer.fit(parity.Model(parity.style("gpt2", dropout=dropout), "adamw"), loader, ckpt_path=ckpt)
    if save is not None:
        trainer.save_checkpoint(save)
    return {"losses": record.losses, "weights": record.weights, "norms": record.norms}


@pytest.fixture(scope="module")
def uninterrupted(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = str(tmp_path_factory.mktemp("whole"))
    return pool.run(train, 1, {}, 1, root, stop=13, mode="trainer")[0]


@pytest.mark.parametrize(
    ("first", "second", "step"),
    [
        ("single", "tp2_pp2", 3),
        ("tp2_pp2", "dp2_zero1", 7),
        ("dp2_zero1", "pp2", 8),
        ("pp2", "tp2_sp", 5),
        ("tp2_pp2", "tp2_pp2", 4),
        ("tp2_sp", "single", 8),
        ("dp2_pp2_zbv_zero1", "tp2_pp2", 4),
        ("pp2", "dp2_pp2_zbv_zero1", 7),
    ],
)
def test_resume_on_another_layout(
    pool: RankPool, tmp_path: Path, uninterrupted: dict[str, Any], first: str, second: str, step: int
) -> None:
    path = str(tmp_path / "run.ckpt")
    world, options = LAYOUTS[first]
    before = pool.run(train, world, options, world, str(tmp_path), stop=step, save=path, mode="trainer")[0]
    assert before["losses"] == pytest.approx(uninterrupted["losses"][:step], rel=1e-11)
    world, options = LAYOUTS[second]
    after = pool.run(train, world, options, world, str(tmp_path), stop=step + 5, ckpt=path, mode="trainer")[0]
    assert len(after["losses"]) == 5
    assert after["losses"] == pytest.approx(uninterrupted["losses"][step : step + 5], rel=1e-9)


def test_checkpoint_loads_with_weights_only(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    world, options = LAYOUTS["tp2_pp2"]
    pool.run(train, world, options, world, str(tmp_path), stop=2, save=str(path), mode="trainer")
    rest = [p for p in path.iterdir() if p.suffix == ".pt"]
    assert rest
    loaded = torch.load(rest[0], weights_only=True)
    assert loaded


def every_kind_of_checkpoint(root: str) -> dict[str, tuple[list[float], list[float]]]:
    """One process: resume from each step's mid-epoch, end-of-epoch and after-fit checkpoint."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_megapar import MegaParStrategy

    def run(
        stop: int, ckpt: str | None = None, callback: ModelCheckpoint | None = None, save: str | None = None
    ) -> Any:
        record = parity.Record()
        trainer = Trainer(
            strategy=MegaParStrategy(seed=11),
            accelerator="cpu",
            devices=1,
            max_steps=stop,
            max_epochs=-1,
            precision="64-true",
            callbacks=[record, *([callback] if callback else [])],
            logger=False,
            enable_checkpointing=callback is not None,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=root,
        )
        loader = DataLoader(parity.Tokens(24, 16, 61), batch_size=BATCH, shuffle=True, drop_last=True)
        trainer.fit(parity.Model(parity.style("gpt2", num_layers=1), "adamw"), loader, ckpt_path=ckpt)
        if save:
            trainer.save_checkpoint(save)
        return record.losses

    whole = run(11)
    where = Path(root)
    run(7, callback=ModelCheckpoint(where, filename="batch_{step}", every_n_train_steps=1, save_top_k=-1))
    run(7, callback=ModelCheckpoint(where, filename="epoch_{step}", every_n_epochs=1, save_top_k=-1))
    for step in (2, 3, 6):
        run(step, save=f"{root}/fit_step={step}.ckpt")
    results = {}
    for path in sorted(where.glob("*.ckpt")):
        step = int(path.stem.split("=")[-1])
        results[path.stem] = (run(step + 4, ckpt=str(path)), whole[step : step + 4])
    return results


def test_every_kind_of_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(every_kind_of_checkpoint, 1, str(tmp_path), mode="trainer")[0]
    assert len(results) == 7 + 3 + 3
    for name, (resumed, expected) in results.items():
        assert resumed == pytest.approx(expected, rel=1e-12), name


def train_plain(root: str, stop: int, save: str) -> list[float]:
    """Plain Lightning on one device, saving its own single file."""
    losses: list[float] = []

    class Losses(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            losses.append(float(outputs["loss"]))

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=stop,
        precision="64-true",
        callbacks=[Losses()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    loader = DataLoader(parity.Tokens(SAMPLES, 16, 61, ragged=False), batch_size=BATCH)
    trainer.fit(parity.Model(parity.style("gpt2"), "adamw"), loader)
    trainer.save_checkpoint(save)
    return losses


def continue_plain(options: dict[str, Any], world: int, root: str, ckpt: str) -> list[float]:
    from lightning_megapar import MegaParStrategy

    strategy = MegaParStrategy(**options)
    record = parity.Record()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world,
        max_steps=5,
        precision="64-true",
        callbacks=[record],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    data = parity.Tokens(SAMPLES, 16, 61, ragged=False)
    # A plain file does not say where its data stood: turn the data so that the first batch is the one that comes next.
    rest = torch.utils.data.Subset(data, [(i + 2 * BATCH) % SAMPLES for i in range(SAMPLES)])
    per_rank = BATCH // strategy.config.resolve(world)[0].data
    trainer.fit(parity.Model(parity.style("gpt2"), "adamw"), DataLoader(rest, batch_size=per_rank), ckpt_path=ckpt)
    return record.losses


@pytest.mark.parametrize("layout", ["tp2_pp2", "dp2_zero1"])
def test_a_plain_lightning_file_goes_on_with_its_optimizer(pool: RankPool, tmp_path: Path, layout: str) -> None:
    path = str(tmp_path / "plain.ckpt")
    whole = train_plain(str(tmp_path), 5, str(tmp_path / "whole.ckpt"))
    train_plain(str(tmp_path), 2, path)
    world, options = LAYOUTS[layout]
    after = pool.run(continue_plain, world, options, world, str(tmp_path), path, mode="trainer")[0]
    assert after == pytest.approx(whole[2:], rel=1e-9)


@pytest.mark.parametrize("layout", ["dp2_zero1", "tp2_sp"])
def test_random_numbers_go_on(pool: RankPool, tmp_path: Path, layout: str) -> None:
    """Masks of dropout are those of the run that was not interrupted, and not the first ones again."""
    world, options = LAYOUTS[layout]
    path, root, more = str(tmp_path / "run.ckpt"), str(tmp_path), {"mode": "trainer", "dropout": 0.2}
    whole = pool.run(train, world, options, world, root, stop=7, **more)[0]
    pool.run(train, world, options, world, root, stop=4, save=path, **more)
    found = pool.run(train, world, options, world, root, stop=7, ckpt=path, **more)[0]
    assert found["norms"] == pytest.approx(whole["norms"][4:], rel=1e-9)


class SavesWithin(Callback):
    """Saves in the middle of an accumulation window: after a batch, and after a validation."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if args[-1] == 3:
            trainer.save_checkpoint(f"{self.path}/batch.ckpt")

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking and not (Path(self.path) / "validation.ckpt").exists():
            trainer.save_checkpoint(f"{self.path}/validation.ckpt")


class Validated(parity.Model):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.gpt(batch["tokens"], batch["labels"]))


def accumulated(options: dict[str, Any], world: int, root: str, ckpt: str | None = None, ramps: bool = False) -> Any:
    """Windows of three batches, of which a validation comes after the fifth; a ramp has windows of two."""
    from lightning_megapar import MegaParStrategy
    from lightning_megapar.optim import BatchSizeRamp

    strategy = MegaParStrategy(seed=11, **options)
    data = strategy.config.resolve(world)[0].data
    loader = DataLoader(parity.Tokens(48, 16, 61), batch_size=4 // data)
    record, saves = parity.Record(), SavesWithin(root)
    ramp = [BatchSizeRamp([(0, 4), (4, 12)])] if ramps else []
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world,
        max_epochs=2,
        precision="64-true",
        accumulate_grad_batches=1 if ramps else 3,
        val_check_interval=5,
        callbacks=[record, saves, *ramp],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    trainer.fit(Validated(parity.style("gpt2"), "adamw"), loader, loader, ckpt_path=ckpt)
    return {"norms": record.norms, "weights": record.weights, "step": trainer.global_step}


@pytest.mark.parametrize("ramps", [False, True])
def test_a_window_that_was_begun_comes_again(pool: RankPool, tmp_path: Path, ramps: bool) -> None:
    """Its gradients are in no checkpoint."""
    first, second = {"data_parallel_size": 2, "zero_stage": 2}, {"pipeline_parallel_size": 2}
    root = str(tmp_path)
    whole = pool.run(accumulated, 2, first, 2, root, mode="trainer", ramps=ramps)[0]
    for name in ("batch", "validation"):
        path = str(tmp_path / f"{name}.ckpt")
        found = pool.run(accumulated, 2, second, 2, root, path, mode="trainer", ramps=ramps)[0]
        assert found["step"] == whole["step"] and 0 < len(found["norms"]) < len(whole["norms"])
        assert found["norms"] == pytest.approx(whole["norms"][-len(found["norms"]) :], rel=1e-9)
        for key, weight in whole["weights"].items():
            torch.testing.assert_close(found["weights"][key], weight, rtol=1e-9, atol=1e-12)
