"""LightningCLI: the strategy by name, by class path in a YAML file, saved in the configuration and read again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from launch.cases import CaseServer, Result
from strategy.hostile import differences

pytest.importorskip("jsonargparse")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

SCRIPT = """
from lightning.pytorch.cli import LightningCLI

class Tuned(everyday.Net):
    def __init__(self, width: int = 16, blocks: int = 4):
        super().__init__()
        self.save_hyperparameters()
        self.inp = torch.nn.Linear(8, width)
        self.blocks = torch.nn.Sequential(*[everyday.Block() for _ in range(blocks)])
        self.head = torch.nn.Linear(width, 5)
        self.double()
    configure_optimizers = L.LightningModule.configure_optimizers

class Data(L.LightningDataModule):
    def __init__(self, batch: int = 8):
        super().__init__()
        self.batch = batch
    def train_dataloader(self):
        return everyday.loader("plain", 32, self.batch)
    def val_dataloader(self):
        return everyday.loader("plain", 16, self.batch)
    test_dataloader = val_dataloader

def main():
    cli = LightningCLI(Tuned, Data, seed_everything_default=7, trainer_defaults={
        "accelerator": "cpu", "max_epochs": 2, "precision": "64-true", "enable_progress_bar": False, "logger": False,
        "enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": str(OUT)})
    strategy = cli.trainer.strategy
    if cli.subcommand == "fit":
        weights = everyday.whole(cli.trainer, cli.model)
        if cli.trainer.is_global_zero:
            torch.save(weights, OUT / "weights.pt")
    if cli.trainer.is_global_zero:
        metrics = {k: float(v) for k, v in cli.trainer.callback_metrics.items()}
        torch.save(metrics, OUT / "metrics.pt")
        print("layout", strategy.layout.describe() if hasattr(strategy, "layout") else "none", flush=True)

if __name__ == "__main__":
    main()
"""
TUNED = ["--model.blocks=3", "--optimizer=torch.optim.AdamW", "--optimizer.lr=0.01"]
SCHEDULE = ["--lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau", "--lr_scheduler.monitor=val_loss"]


def run(scripts: CaseServer, *argv: str) -> tuple[Result, Any, Any]:
    result = scripts.run(SCRIPT, *argv)
    assert result.code == 0, result.text
    found = [torch.load(result.directory / f"{n}.pt") for n in ("weights", "metrics") if argv[0] == "fit"]
    return result, *(found or [None, torch.load(result.directory / "metrics.pt")])


@pytest.fixture(scope="module")
def plain(scripts: CaseServer) -> tuple[Any, Any]:
    _, weights, metrics = run(scripts, "fit", *TUNED, *SCHEDULE, "--trainer.devices=1")
    return weights, metrics


def test_by_name(scripts: CaseServer, plain: tuple[Any, Any]) -> None:
    """A bare name on two devices: every degree chosen, which is two data ranks."""
    given = ["--trainer.strategy=megapar", "--trainer.devices=2", "--data.batch=4"]
    result, weights, metrics = run(scripts, "fit", *TUNED, *SCHEDULE, *given)
    assert "layout data=2" in result.out
    assert differences(weights, plain[0]) == [] and differences(metrics, plain[1]) == []


@pytest.mark.parametrize("axis", ["pipeline", "tensor"])
def test_by_class_path_and_the_saved_configuration(
    scripts: CaseServer, plain: tuple[Any, Any], tmp_path: Path, axis: str
) -> None:
    strategy = {"class_path": "lightning_megapar.MegaParStrategy", "init_args": {f"{axis}_parallel_size": 2}}
    config = {"trainer": {"strategy": strategy, "devices": 2, "logger": "CSV", "enable_checkpointing": True}}
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path)}}
    config["trainer"]["logger"] = logger
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    result, weights, metrics = run(scripts, "fit", "--config", str(path), *TUNED, *SCHEDULE)
    assert f"layout {axis}=2" in result.out
    assert differences(weights, plain[0]) == [] and differences(metrics, plain[1]) == []

    # What the run saved about itself starts the same run again, and a test of its checkpoint.
    [saved] = tmp_path.rglob("config.yaml")
    written = yaml.safe_load(saved.read_text())["trainer"]["strategy"]
    assert written["class_path"].endswith("MegaParStrategy")
    assert written["init_args"][f"{axis}_parallel_size"] == 2
    _, again, _ = run(scripts, "fit", "--config", str(saved), "--trainer.logger=false")
    assert differences(again, weights) == []
    [checkpoint] = tmp_path.rglob("*.ckpt")
    config["trainer"] |= {"logger": False, "enable_checkpointing": False}
    path.write_text(yaml.safe_dump(config))
    test = [f"--ckpt_path={checkpoint}", "--model.blocks=3"]
    _, _, alone = run(scripts, "test", *test, "--trainer.strategy=megapar", "--trainer.devices=1")
    _, _, tested = run(scripts, "test", "--config", str(path), *test)
    assert differences(tested, alone) == [] and tested["test_loss"] == pytest.approx(metrics["val_loss"], rel=1e-9)


def test_a_wrong_option_is_said_at_once(scripts: CaseServer, tmp_path: Path) -> None:
    strategy = {"class_path": "lightning_megapar.MegaParStrategy", "init_args": {"tensor_parallel": 2}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy, "devices": 2}}))
    result = scripts.run(SCRIPT, "fit", "--config", str(tmp_path / "run.yaml"))
    assert result.code == 2 and "tensor_parallel" in result.err, result.text
