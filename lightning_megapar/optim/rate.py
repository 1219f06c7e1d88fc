"""The learning rate that a batch size deserves, by the measured noise of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.optim import ASGD, SGD, Optimizer

from lightning_megapar.config import ConfigError, refuse_no_number
from lightning_megapar.data.module import data_size
from lightning_megapar.optim.around_step import StepSetting
from lightning_megapar.optim.noise import rate_factor
from lightning_megapar.optim.noise_scale import GradientNoiseScale, noise_of
from lightning_megapar.optim.window import batch_per_rank


class NoiseScaleLR(StepSetting):
    """Multiplies every group's rate, for the step alone, by ``(1 + B_noise / B) ** -exponent``; logs ``lr_factor``.

    ``B`` is the batch of the optimizer step, whatever a :class:`~lightning_megapar.optim.ramp.BatchSizeRamp` or the
    accumulation makes of it: the rate RISES with it (see :mod:`~lightning_megapar.optim.noise`, also for the rule of
    some articles by which it would fall). What the user's scheduler has set is what is multiplied, and is there again
    after the step; schedulers, checkpoints and ``LearningRateMonitor`` see it unchanged.

    Args:
        exponent: ``None`` is 1 for SGD. Adam and its kin need a number between 0.5 and 1 (see
            :func:`~lightning_megapar.optim.noise.rate_factor`).
        reference_batch_size: the batch (in samples) for which the user's rate is right: the factor is then 1 there.
            ``None``: the user's rate is ``eps_max``, that of a batch without noise.
        noise_scale: taken until a ``GradientNoiseScale`` among the callbacks knows better, or for good without one.

    Raises:
        ConfigError: a value out of its range; neither a reference nor a noise scale to begin with; at set-up Adam
            without an exponent, or nothing that tells the noise.
    """

    def __init__(
        self,
        exponent: float | None = None,
        reference_batch_size: float | None = None,
        noise_scale: float | None = None,
    ) -> None:
        if exponent is not None:
            refuse_no_number("NoiseScaleLR exponent", exponent, above=0)
        if exponent is not None and not 0.5 <= exponent <= 1.0:
            near = 0.5 if exponent < 0.5 else 1.0
            raise ConfigError(f"NoiseScaleLR exponent={exponent!r}: expected 0.5 to 1 (nearest valid: {near})")
        for name, value in (("reference_batch_size", reference_batch_size), ("noise_scale", noise_scale)):
            if value is not None:
                refuse_no_number(f"NoiseScaleLR {name}", value, above=0)
        if reference_batch_size is None and noise_scale is None:
            raise ConfigError(
                "NoiseScaleLR does not know the noise before it is measured, and a rate for a batch without noise "
                "would be far too large: give reference_batch_size (the batch for which your rate is right), or "
                "noise_scale (samples, to begin with)"
            )
        self.exponent = exponent
        self.reference_batch_size = reference_batch_size
        self.given = noise_scale
        self.factor = 1.0
        """Of the latest step."""
        self._noise: GradientNoiseScale | None = None
        self._trainer: Trainer | None = None
        self._per_rank = 1.0

    @property
    def step_figures(self) -> dict[str, float | None]:
        """What is logged of the latest step, for callbacks that report steps."""
        return {"lr_factor": self.factor}

    def before_launch(self, trainer: Trainer, args: Sequence[Any] = ()) -> None:
        """Refuse a run that nothing tells the noise, while there is one process."""
        if self.given is None:
            noise_of(trainer, "NoiseScaleLR without noise_scale")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before_launch(trainer)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._noise = next((one for one in callbacks if isinstance(one, GradientNoiseScale)), None)
        exponents = [self._exponent_of(one) for one in trainer.optimizers]
        self._trainer = trainer

        def rate(index: int, number: int, group: dict[str, Any]) -> Any:
            self.factor = self._factor(exponents[index])
            return group["lr"] * self.factor

        self.change(trainer, "lr", rate)

    def _exponent_of(self, optimizer: Optimizer) -> float:
        plain = isinstance(optimizer, SGD | ASGD)
        if plain and self.exponent not in (None, 1.0):
            raise ConfigError(
                f"NoiseScaleLR exponent={self.exponent}: {type(optimizer).__name__} has 1 (valid values: null, 1)"
            )
        if not plain and self.exponent is None:
            raise ConfigError(
                f"NoiseScaleLR: {type(optimizer).__name__} divides by the gradient's size, so that the exponent is no "
                "longer 1; state one: 0.5 (square root rule) to 1"
            )
        return 1.0 if self.exponent is None else self.exponent

    def _factor(self, exponent: float) -> float:
        assert self._trainer is not None
        measured = None if self._noise is None else self._noise.noise_scale
        noise = self.given if measured is None else measured
        if noise is None:
            return 1.0
        batch = self._per_rank * data_size(self._trainer) * int(self._trainer.accumulate_grad_batches)
        factor = rate_factor(batch, noise, exponent)
        if self.reference_batch_size is None:
            return factor
        return factor / rate_factor(self.reference_batch_size, noise, exponent)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._per_rank = batch_per_rank(trainer, batch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        pl_module.log("lr_factor", self.factor)

    def leave(self) -> None:
        super().leave()
        self._trainer = None
