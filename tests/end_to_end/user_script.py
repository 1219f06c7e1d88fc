"""What a user's script holds: a model that fails or waits where it is told to, data, a Trainer on four processes.

Imported by the scripts of these tests (``from user_script import *``), each of which runs as a process of its own.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_megapar import MegaParStrategy
from lightning_megapar.models.gpt import GPTConfig
from lightning_megapar.models.language_model import LanguageModel

__all__ = [
    "OUT", "Callback", "DataLoader", "L", "LanguageModel", "Losses", "MegaParStrategy", "Model", "ModelCheckpoint",
    "Tokens", "make_model", "make_trainer", "note", "os", "pathlib", "rank_of_this", "signal", "strategy", "sys",
    "time", "torch",
]  # fmt: skip

OUT = pathlib.Path(os.environ.get("OUT", "."))
SIZES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}
SEQUENCE = 16


def note(name: str, text: object = "") -> None:
    """Leave a file for the test to read (complete or absent), whichever ranks write it at once."""
    part = OUT / f"{name}-{os.getpid()}.part"
    part.write_text(str(text))
    part.rename(OUT / name)


def rank_of_this() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


class Tokens(Dataset):
    """Sequences of random tokens, the same in every process."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.rows = torch.randint(64, (count, SEQUENCE + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.rows[index, :-1], "labels": self.rows[index, 1:]}


class Model(LanguageModel):
    """Fails in one hook on one rank, with a message that stands nowhere in a source line; waits where told to."""

    stage, rank = "", -1
    pauses: dict[str, float] = {}  # noqa: RUF012

    def at(self, hook: str, step: int | None = None) -> None:
        """Called in ``hook``."""
        if hook in self.pauses:
            note(f"at-{hook}-{self.global_rank}", self.trainer.global_step)
            time.sleep(self.pauses[hook])
        if hook == self.stage and self.global_rank == self.rank and step in (None, 2):
            note("raised", time.time())
            raise ValueError("-".join(["planted", hook, str(self.rank)]))

    def configure_model(self) -> None:
        note(f"pid-{self.global_rank}", os.getpid())
        self.at("configure_model")
        super().configure_model()

    def setup(self, stage: str) -> None:
        self.at("setup")

    def train_dataloader(self) -> DataLoader:
        # Forty samples, eight to a step: an epoch ends after every fifth step.
        per_rank = 8 // self.trainer.strategy.data_parallel_size // self.trainer.accumulate_grad_batches
        return DataLoader(Tokens(40), batch_size=per_rank, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Tokens(16), batch_size=8 // self.trainer.strategy.data_parallel_size)

    test_dataloader = predict_dataloader = val_dataloader

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.at("on_train_batch_start", self.trainer.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.at("training_step", self.trainer.global_step)
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.at("on_before_optimizer_step", self.trainer.global_step)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.at("validation_step")
        return super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.at("on_validation_epoch_end")

    def on_train_epoch_end(self) -> None:
        self.at("on_train_epoch_end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.at("on_save_checkpoint")

    def teardown(self, stage: str) -> None:
        self.at("teardown")


class Losses(Callback):
    """Rank 0 writes each step's loss to ``losses`` as soon as it is known."""

    def __init__(self, name: str = "losses") -> None:
        self.path = OUT / name

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            with open(self.path, "a") as file:
                file.write(f"{trainer.global_step} {trainer.callback_metrics['train_loss'].item()!r}\n")


def strategy(layout: str) -> MegaParStrategy:
    """``tp2_pp2`` and the like; ``single`` is one process."""
    parts = [] if layout == "single" else layout.split("_")
    return MegaParStrategy(seed=11, **{SIZES[part[:2]]: int(part[2:]) for part in parts})


def make_model(kind: type[Model] = Model, **config: Any) -> Any:
    sizes = {"vocab_size": 64, "num_layers": 4, "num_heads": 2, "hidden_size": 32, "max_sequence_length": SEQUENCE}
    return kind(GPTConfig.gpt2(**{**sizes, **config}), {"lr": 1e-2, "schedule": "constant", "warmup_steps": 3})


def make_trainer(layout: str = "tp2_pp2", **settings: Any) -> L.Trainer:
    plan = strategy(layout)
    devices = 1
    for part in [] if layout == "single" else layout.split("_"):
        devices *= int(part[2:])
    defaults: dict[str, Any] = {
        "max_steps": 4,
        "max_epochs": -1,
        "num_sanity_val_steps": 0,
        "val_check_interval": 4,
        "check_val_every_n_epoch": None,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": OUT,
    }
    return L.Trainer(strategy=plan, devices=devices, accelerator="cpu", **{**defaults, **settings})
