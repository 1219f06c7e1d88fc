"""Weight decay that keeps its own time, whatever the learning rate and the batch do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import SGD, AdamW, Optimizer

from lightning_megapar.config import ConfigError, nearest_name
from lightning_megapar.data.module import data_size
from lightning_megapar.optim.around_step import StepSetting
from lightning_megapar.optim.window import batch_per_rank, summed

UNITS = ("samples", "epochs", "steps")
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Multipliers of the decay by the run's progress, from 0 to 1."""


class DynamicWeightDecay(StepSetting):
    """Sets every group's ``weight_decay``, for the step alone, so that weights forget at a pace of its own.

    AdamW multiplies weights by ``1 - lr * wd`` in a step: they are an exponential mean of updates over
    ``1 / (lr * wd)`` steps (Wang and Aitchison, arXiv 2405.13698, who find the best value of this timescale, in epochs,
    to be nearly constant over sizes of models and data). A scheduler changes it with the rate, and a batch size ramp
    with the samples of a step. Here the product is

        ``lr * wd = (samples of the step) / timescale * schedule(progress)``

    so that the timescale in samples (or epochs) is constant under any rate and batch. With ``unit="steps"`` the batch
    does not count: that is the decoupled decay of Loshchilov and Hutter (arXiv 1711.05101), which follows its own
    schedule and not the rate. Groups without decay stay without. The user's values are there again after the step. At a
    rate of exactly 0 nothing decays (torch multiplies the two).

    Logs ``weight_decay`` of the first group that decays.

    Args:
        timescale: in ``unit``; ``None`` takes each group's own: that of its first rate (``initial_lr`` of a scheduler)
            and decay, at the batch of the run's first step.
        unit: of the timescale, one of :data:`UNITS`.
        schedule: one of :data:`SCHEDULES`, or a function of the run's progress (0 to 1).
        floor: least value of the schedule.

    Raises:
        ConfigError: a value out of its range; at set-up an optimizer whose decay is not decoupled (it enters Adam's
            moments), or an unknown length of the run under a schedule that needs it.
    """

    def __init__(
        self,
        timescale: float | None = None,
        unit: str = "samples",
        schedule: str | Callable[[float], float] = "constant",
        floor: float = 0.0,
    ) -> None:
        if timescale is not None and not timescale > 0:
            raise ConfigError(f"DynamicWeightDecay timescale={timescale!r}: expected a positive number of {unit}")
        if unit not in UNITS:
            raise ConfigError(f"DynamicWeightDecay unit={unit!r}: expected {', '.join(UNITS)}{_hint(unit, UNITS)}")
        if isinstance(schedule, str) and schedule not in SCHEDULES:
            raise ConfigError(
                f"DynamicWeightDecay schedule={schedule!r}: expected {', '.join(SCHEDULES)}, or a function"
                + _hint(schedule, SCHEDULES)
            )
        if not 0.0 <= floor <= 1.0:
            raise ConfigError(f"DynamicWeightDecay floor={floor!r}: expected 0 to 1")
        self.timescale = timescale
        self.unit = unit
        self.schedule = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
        self.floor = floor
        self._is_constant = schedule == "constant"
        self._trainer: Trainer | None = None
        self._samples = 1.0
        self._epoch_samples = 1
        self._reference: dict[str, Any] = {}
        self._latest: float | None = None

    @property
    def step_figures(self) -> dict[str, float | None]:
        """What is logged of the latest step, for callbacks that report steps."""
        return {"weight_decay": self._latest}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            refuse_coupled(optimizer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_constant and _progress(trainer) is None:
            raise ConfigError(
                "DynamicWeightDecay: a schedule needs the length of the run; give the Trainer max_steps, or "
                "schedule='constant'"
            )
        self._trainer = trainer
        if self.unit == "epochs":
            self._epoch_samples = _epoch_samples(trainer)
        # After on_fit_start, where NoiseScaleLR makes its hooks: the rate that it sets is the one that counts.
        self.change(trainer, "weight_decay", self._decay)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._latest = None
        per_rank = batch_per_rank(trainer, batch)
        self._samples = per_rank * data_size(trainer) * int(trainer.accumulate_grad_batches)
        if not self._reference:
            groups = [[_first_values(group) for group in one.param_groups] for one in trainer.optimizers]
            self._reference = {"samples": self._samples, "groups": groups}

    def _decay(self, index: int, number: int, group: dict[str, Any]) -> float | None:
        rate, first = float(group["lr"]), self._reference["groups"][index]
        if not group["weight_decay"] or rate == 0.0 or number >= len(first):
            return None
        assert self._trainer is not None
        product = self._samples / self._reference["samples"] * first[number][0] * first[number][1]
        if self.unit == "steps":
            product = first[number][0] * first[number][1]
        if self.timescale is not None:
            taken = {"steps": 1.0, "samples": self._samples, "epochs": self._samples / self._epoch_samples}
            product = taken[self.unit] / self.timescale
        if not self._is_constant:
            product *= max(self.floor, self.schedule(_progress(self._trainer) or 0.0))
        value = product / rate
        self._latest = value if self._latest is None else self._latest
        return value

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._latest is not None:
            pl_module.log("weight_decay", self._latest)

    def leave(self) -> None:
        super().leave()
        self._trainer = None

    def state_dict(self) -> dict[str, Any]:
        return {"reference": self._reference}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._reference = state_dict["reference"]


def _hint(given: object, valid: Iterable[str]) -> str:
    near = nearest_name(str(given), valid)
    return f"; did you mean {near!r}?" if near else ""


def refuse_coupled(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose weight decay does not multiply weights by ``1 - lr * wd``.

    Raises:
        ConfigError: naming it and what to use.
    """
    for group in optimizer.param_groups:
        kinds = (AdamW, torch.optim.Muon)
        decoupled = isinstance(optimizer, kinds) or bool(group.get("decoupled_weight_decay"))
        if isinstance(optimizer, SGD):
            decoupled = not group.get("momentum")
        if group.get("weight_decay") and not decoupled:
            raise ConfigError(
                f"DynamicWeightDecay: {type(optimizer).__name__} adds weight_decay={group['weight_decay']} to the "
                "gradient, which its momentum or its moments then scale: there is no timescale 1/(lr x wd). Use AdamW, "
                "lightning_megapar.optim.Muon, SGD without momentum, or decoupled_weight_decay=True"
            )


def _first_values(group: dict[str, Any]) -> tuple[float, float]:
    return float(group.get("initial_lr", group["lr"])), float(group["weight_decay"])


def _progress(trainer: Trainer) -> float | None:
    """How much of the run is done, 0 to 1, by whichever of its limits is nearer; ``None`` where it has none.

    Epochs count in loader batches, which a batch size ramp leaves as they are, and not in optimizer steps.
    """
    found = []
    if trainer.max_steps > 0:
        found.append(trainer.global_step / trainer.max_steps)
    batches = float(trainer.num_training_batches)
    if trainer.max_epochs is not None and trainer.max_epochs > 0 and math.isfinite(batches):
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        done = max(0, ready - int(trainer.accumulate_grad_batches))  # at the window's beginning
        found.append((trainer.current_epoch + done / batches) / trainer.max_epochs)
    return min(1.0, max(found)) if found else None


def _epoch_samples(trainer: Trainer) -> int:
    """Samples of an epoch, over all data ranks.

    Raises:
        ConfigError: where nobody knows.
    """
    loader: Any = trainer.train_dataloader
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        pass
    batches = trainer.num_training_batches
    if math.isinf(batches):
        raise ConfigError("DynamicWeightDecay unit='epochs': the loader has no length; use unit='samples'")
    return summed(trainer, int(batches) * int(getattr(loader, "batch_size", None) or 1))
