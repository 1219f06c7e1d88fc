"""A run that left after a signal goes on as if it had not: steps of validation and of loggers, not only numbers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_megapar import MegaParStrategy


class Steps(Callback):
    """Of validations that came to their end; asks to leave after a step."""

    def __init__(self, leave_after: int | None = None) -> None:
        self.leave_after = leave_after
        self.validated: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.leave_after:
            strategy: Any = trainer.strategy
            strategy._preemption.set()
            strategy._leave_requested = True  # what the next step would find out

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)


def fit(root: Path, leave_after: int | None = None, resumed: Path | None = None) -> tuple[list[int], list[int]]:
    """Steps at which the run validated and logged its loss."""
    steps = Steps(leave_after)
    torch.manual_seed(0)
    logger = CSVLogger(root, version="steps")
    trainer = Trainer(
        strategy=MegaParStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=12,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        callbacks=[steps],
        default_root_dir=root,
        **{**hostile.QUIET, "logger": logger},
    )
    loader = hostile.loader("single", 40)
    try:
        trainer.fit(
            hostile.Net(), loader, hostile.loader("single", 8), ckpt_path=None if resumed is None else str(resumed)
        )
    except SystemExit as left:
        assert left.code == 143 and leave_after is not None
    logger.save()
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        logged = [int(row["step"]) for row in csv.DictReader(file) if row["train_loss"]]
    return steps.validated, logged


@pytest.mark.parametrize("leave_after", range(1, 12))
def test_validations_and_logs_keep_their_steps(tmp_path: Path, leave_after: int) -> None:
    """Also where it leaves within a validation, at the end of an epoch (after five steps) or before its last batch."""
    validated, logged = fit(tmp_path / "whole")
    assert validated == [3, 6, 9, 12] and logged == list(range(12))
    before, begun = fit(tmp_path / "left", leave_after)
    [saved] = (tmp_path / "left").rglob("preempted-*.ckpt")
    after, rest = fit(tmp_path / "resumed", resumed=saved)
    assert before + after == validated
    assert begun + rest == logged
