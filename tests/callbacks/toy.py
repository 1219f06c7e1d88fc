"""A small module and data for callback tests: deterministic, in plain Lightning, milliseconds per step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_megapar.callbacks import meter


class Items(Dataset):
    """Sequences of 8 tokens; item ``i`` is the same at every call."""

    def __init__(self, count: int = 20, on_fetch: Callable[[], None] = lambda: None) -> None:
        self.count, self.on_fetch = count, on_fetch

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.on_fetch()
        tokens = torch.randint(0, 16, (9,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


class Toy(LightningModule):
    def __init__(self, on_train: Callable[[], None] = lambda: None, on_val: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(16, 16)
        self.on_train, self.on_val = on_train, on_val
        self.seen: list[float] = []

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.table(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.on_train()
        loss = self.loss(batch)
        self.log("train_loss", loss)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.on_val()
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def loader(count: int = 20, on_fetch: Callable[[], None] = lambda: None) -> DataLoader:
    return DataLoader(Items(count, on_fetch), batch_size=4)


def trainer(root: Path, callbacks: list[Callback], **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": root,
        "max_steps": 10,
        **options,
    }
    if not any(type(c).__name__ == "RunLine" for c in callbacks):
        settings.setdefault("enable_progress_bar", False)
    return Trainer(callbacks=callbacks, **settings)


def fake_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Callable[[], None]]:
    """Replace the meter's clock; returns ``takes(seconds)``, a function that lets so much time pass when called."""
    now = [100.0]
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def takes(seconds: float) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + seconds)

    return takes
