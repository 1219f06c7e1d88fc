"""What an optimizer step takes: ranks, samples, batches that an epoch still has."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_megapar.batches import batch_size_of
from lightning_megapar.data.module import data_size


def batch_per_rank(trainer: Trainer, batch: Any) -> float:
    """Samples in one batch of one data rank, the same on every rank: the loader's batch size, or a mean over ranks."""
    nominal = getattr(trainer.train_dataloader, "batch_size", None)
    if isinstance(nominal, int):
        return nominal
    return summed(trainer, batch_size_of(batch) or 1) / data_size(trainer)


def summed(trainer: Trainer, count: int) -> int:
    """A count summed over the ranks that see different samples."""
    if trainer.world_size == 1:
        return count
    here = torch.tensor(count, dtype=torch.int64, device=trainer.strategy.root_device)
    return int(trainer.strategy.reduce(here, reduce_op="sum"))


def batches_left(trainer: Trainer, done: int) -> float:
    """Batches that an epoch still has after ``done`` of them; infinite where nobody knows."""
    left = float(trainer.num_training_batches) - done
    tell = getattr(trainer.strategy, "batches_left", None)
    own = tell() if callable(tell) else None
    # A run that was resumed on other data ranks counts batches of two sizes: then the sampler knows.
    return left if own is None else min(left if left > 0 else math.inf, own)
