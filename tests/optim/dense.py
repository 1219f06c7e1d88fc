"""Noise of gradients by hand: one process, every small batch's gradient on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import parity
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megapar.config import ConfigError  # noqa: F401  (a rank that refuses says so by this class)


class Logged(Callback):
    """What was logged under some names at each optimizer step."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.rows: list[list[float]] = []
        self._steps = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            self.rows.append([float(trainer.callback_metrics.get(name, float("nan"))) for name in self.names])


def gradient(model: Any, tokens: Tensor, labels: Tensor) -> tuple[list[Tensor], float]:
    """Of the mean over valid tokens, and their number."""
    model.zero_grad()
    model(tokens, labels).backward()
    return [p.grad.clone() for p in model.parameters()], float((labels != parity.IGNORED).sum())


def expected_moments(config: Any, windows: Sequence[Sequence[list[int]]], by_tokens: bool = True) -> list[Any]:
    """``(grad_sq, trace)`` of each window; a window is a list of small batches, each a list of rows. Weights stay."""
    from lightning_megapar.models.gpt import GPT
    from lightning_megapar.optim.noise import moments

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    model = GPT(config).double()
    count = max(row for window in windows for batch in window for row in batch) + 1
    data = parity.Tokens(count, config.max_sequence_length, config.vocab_size)
    found = []
    for window in windows:
        pieces = [gradient(model, data.tokens[rows], data.labels[rows]) for rows in window]
        weights = [tokens if by_tokens else len(rows) for (_, tokens), rows in zip(pieces, window)]
        total = sum(weights)
        squares = [sum(float(g.square().sum()) for g in gradients) for gradients, _ in pieces]
        small_sq = sum(w / total * square for w, square in zip(weights, squares))
        whole = [sum(w / total * g for w, g in zip(weights, each)) for each in zip(*(p for p, _ in pieces))]
        samples = sum(map(len, window))
        big_sq = sum(float(g.square().sum()) for g in whole)
        found.append(moments(small_sq, samples / len(window), big_sq, samples))
    torch.set_default_dtype(default)
    return [(one.grad_sq, one.trace) for one in found]


class Still(parity.Model):
    """Does not move, so that all windows see the same weights."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def measure(
    config: Any,
    world: int,
    options: dict[str, Any],
    source: str,
    per_rank: int,
    samples: int,
    accumulate: int = 1,
    count_tokens: bool = True,
    **more: Any,
) -> list[list[float]]:
    """Logged moments of each optimizer step, on this rank."""
    from lightning_megapar import MegaParStrategy
    from lightning_megapar.optim import GradientNoiseScale

    logged = Logged("noise_scale/grad_sq", "noise_scale/trace")
    trainer = Trainer(
        strategy=MegaParStrategy(**options),
        accelerator="cpu",
        devices=world,
        max_epochs=1,
        precision="64-true",
        accumulate_grad_batches=accumulate,
        callbacks=[GradientNoiseScale(decay=0.0, source=source), logged],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    data = parity.Tokens(samples, config.max_sequence_length, config.vocab_size)
    module = Still(config, "sgd", count_tokens=count_tokens)
    trainer.fit(module, DataLoader(data, batch_size=per_rank))
    return logged.rows
