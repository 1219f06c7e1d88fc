"""A batch size that grows while a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_megapar.batches import batch_size_of
from lightning_megapar.config import ConfigError, refuse_no_number
from lightning_megapar.data.batch import WindowLength
from lightning_megapar.data.module import data_size
from lightning_megapar.optim.batch_schedule import BatchSchedule, refuse_indivisible
from lightning_megapar.optim.noise_scale import GradientNoiseScale, noise_of
from lightning_megapar.optim.window import batches_left, summed
from lightning_megapar.trees import in_any_tree


class BatchSizeRamp(Callback):
    """Grows the samples of an optimizer step, by a schedule or by the measured gradient noise; logs ``batch_size``.

    It does so by accumulation: the loader's batch and its microbatches stay what they are, and a step takes more of
    them, so that microbatches of a step grow in number and not in size. The loader's order is untouched; every sample
    is used exactly once an epoch, and a run that is resumed at any window, on any layout, goes on at the next sample.
    Every window's gradient is the mean over its samples, also of the last window of an epoch, which is shorter where
    the rest of the epoch is. Lightning counts optimizer steps (``max_steps``, schedulers) and loader batches
    (``val_check_interval``) as always; ``trainer.estimated_stepping_batches`` counts steps of the loader's batch.

    Exactly one of the first three is given; sizes are samples over all data ranks, and multiples of the loader's batch
    times the data ranks.

    Args:
        schedule: pairs ``(consumed samples, batch size)``, from 0 on and rising.
        rampup: Megatron-LM's ``[start, increment, samples]``, up to ``max_batch_size``.
        noise_ratio: the batch follows ``noise_ratio * B_noise`` of a ``GradientNoiseScale`` among the callbacks, from
            ``start`` to ``max_batch_size``, and never falls.
        start: with ``noise_ratio``: the first batch size; ``None`` is one batch of every data rank.
        max_batch_size: the last batch size.
        growth: with ``noise_ratio``: the largest factor of one change.
        hold: with ``noise_ratio``: optimizer steps before the first change, and between two.

    Raises:
        ConfigError: values that do not fit together; before a process exists where the loader's batch is known then,
            sizes that it does not divide, with the nearest valid ones.
    """

    changes_accumulation = True
    """What :func:`~lightning_megapar.optim.noise_scale.accumulates` asks."""

    def __init__(
        self,
        schedule: Sequence[Sequence[int]] | None = None,
        rampup: Sequence[int] | None = None,
        noise_ratio: float | None = None,
        start: int | None = None,
        max_batch_size: int | None = None,
        growth: float = 2.0,
        hold: int = 20,
    ) -> None:
        given = [
            n for n, v in (("schedule", schedule), ("rampup", rampup), ("noise_ratio", noise_ratio)) if v is not None
        ]
        if len(given) != 1:
            raise ConfigError(
                f"BatchSizeRamp: give one of schedule, rampup and noise_ratio (given: {', '.join(given) or 'none'})"
            )
        if max_batch_size is None and schedule is None:
            raise ConfigError(f"BatchSizeRamp {given[0]} needs max_batch_size")
        if schedule is not None and (start is not None or max_batch_size is not None):
            raise ConfigError(
                "BatchSizeRamp schedule: its pairs say where it starts and ends; start and max_batch_size "
                "are of rampup and noise_ratio"
            )
        for name, value in (("start", start), ("max_batch_size", max_batch_size), ("hold", hold)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"BatchSizeRamp {name}={value!r}: expected a whole number, at least 1")
        if noise_ratio is not None:
            refuse_no_number("BatchSizeRamp noise_ratio", noise_ratio, above=0)
        refuse_no_number("BatchSizeRamp growth", growth, above=1)
        if start is not None and max_batch_size is not None and not 1 <= start <= max_batch_size:
            raise ConfigError(f"BatchSizeRamp start={start}: expected 1 to max_batch_size={max_batch_size}")
        self.plan: BatchSchedule | None = None
        if schedule is not None:
            if not all(isinstance(pair, Sequence) for pair in schedule):
                raise ConfigError(
                    f"BatchSizeRamp schedule={list(schedule)}: expected pairs of consumed samples and a batch size"
                )
            self.plan = BatchSchedule(tuple(tuple(pair) for pair in schedule))  # type: ignore[misc]
        elif rampup is not None:
            if len(rampup) != 3:
                raise ConfigError(f"BatchSizeRamp rampup={list(rampup)}: expected [start, increment, samples]")
            assert max_batch_size is not None
            first, increment, samples = rampup
            self.plan = BatchSchedule.linear(first, increment, samples, max_batch_size)
        self.noise_ratio, self.start, self.max_batch_size = noise_ratio, start, max_batch_size
        self.growth, self.hold = growth, hold
        self.consumed = 0
        """Samples that optimizer steps have used so far, over all data ranks and epochs."""
        self.batch_size = 0
        """Of the window at hand; at the end of an epoch the rest may be less."""
        self._noise: GradientNoiseScale | None = None
        self._held = 0  # optimizer steps with this batch size
        self._left = 0  # batches of the window that are not done
        self._window = 0  # samples of this rank in the window

    @property
    def step_figures(self) -> dict[str, float | None]:
        """What is logged of the latest step, for callbacks that report steps."""
        return {"batch_size": float(self.batch_size)}

    # -- refusals ----------------------------------------------------------------------------------------------------

    def before_launch(self, trainer: Trainer, args: Sequence[Any] = ()) -> None:
        """Refuse what does not fit, while there is one process.

        Args:
            trainer: with a strategy that knows its ranks.
            args: of ``Trainer.fit``: module, loader or data module, ...
        """
        self._refuse_company(trainer)
        loader_batch = _loader_batch(args, data_size(trainer))
        if loader_batch is not None:
            refuse_indivisible(self._sizes(), loader_batch, data_size(trainer))
        if self.noise_ratio is not None:
            noise_of(trainer, "BatchSizeRamp noise_ratio")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._refuse_company(trainer)
        if not pl_module.automatic_optimization:
            raise ConfigError(
                f"BatchSizeRamp changes Lightning's accumulation; {type(pl_module).__name__} optimizes by itself "
                "(automatic_optimization=False)"
            )
        self._noise = noise_of(trainer, "BatchSizeRamp noise_ratio") if self.noise_ratio is not None else None

    def _refuse_company(self, trainer: Trainer) -> None:
        accumulate = trainer.accumulate_grad_batches
        if accumulate != 1:
            raise ConfigError(
                f"BatchSizeRamp sets accumulate_grad_batches for each window, but the Trainer has {accumulate}; valid "
                "value: 1, with the loader's batch as the smallest step"
            )
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        kinds = in_any_tree("callbacks", "GradientAccumulationScheduler")
        others = [one for one in callbacks if isinstance(one, (*kinds, BatchSizeRamp)) and one is not self]
        if others:
            raise ConfigError(f"BatchSizeRamp and {type(others[0]).__name__} both set the accumulation; keep one")

    def _sizes(self) -> list[int]:
        if self.plan is not None:
            return [size for _, size in self.plan.points]
        return [size for size in (self.start, self.max_batch_size) if size is not None]

    # -- windows -----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._left = self._window = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._left = self._window = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._left:
            return
        ranks = data_size(trainer)
        nominal = getattr(trainer.train_dataloader, "batch_size", None)
        per_rank = nominal if isinstance(nominal, int) else summed(trainer, batch_size_of(batch) or 1) // ranks
        refuse_indivisible(self._sizes(), per_rank, ranks)
        unit = per_rank * ranks
        self._choose(unit)
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1  # Lightning has counted this batch
        # At the end of an epoch Lightning steps after the last batch in any case: the loss is divided by what there is.
        length = min(self.batch_size // unit, batches_left(trainer, done))
        self._left = int(length)
        trainer.accumulate_grad_batches = WindowLength(int(length), done)

    def _choose(self, unit: int) -> None:
        if self.plan is not None:
            self.batch_size = self.plan.at(self.consumed)
            return
        assert self.max_batch_size is not None and self.noise_ratio is not None and self._noise is not None
        first = self.start or unit
        if first == unit and self._noise.compares_batches:
            raise ConfigError(
                f"BatchSizeRamp start={first}: a window of one batch tells no noise on one data rank, so that it "
                f"would never grow; valid: start={2 * unit}, or num_microbatches >= 2"
            )
        # A run that goes on with other loader batches keeps its size as nearly as they allow.
        size = max(first, round(self.batch_size / unit) * unit)
        noise = self._noise.noise_scale
        if noise is not None and self._held >= self.hold:
            wanted = min(self.noise_ratio * noise, self.growth * size, self.max_batch_size)
            size = max(size, int(wanted) // unit * unit)
        size = min(size, self.max_batch_size)
        if size != self.batch_size:
            self.batch_size, self._held = size, 0

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        pl_module.log("batch_size", float(self.batch_size))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._window += _samples(trainer, batch)
        self._left -= 1
        if self._left == 0:
            self.consumed += summed(trainer, self._window)
            self._held += 1
            self._window = 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.accumulate_grad_batches = 1

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        trainer.accumulate_grad_batches = 1

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.consumed, "batch_size": self.batch_size, "held": self._held}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.consumed = int(state_dict["consumed"])
        self.batch_size = int(state_dict["batch_size"])
        self._held = int(state_dict["held"])


def _samples(trainer: Trainer, batch: Any) -> int:
    """Samples of this rank's batch: what the strategy's sampler gave, else what the batch shows."""
    tell = getattr(trainer.strategy, "samples_of_batch", None)
    own = tell() if callable(tell) else None
    return own if own is not None else batch_size_of(batch) or 1


def _loader_batch(args: Sequence[Any], ranks: int) -> int | None:
    """Samples of one data rank's batch, where the arguments of ``fit`` say it before loaders are made."""
    for one in args[1:]:
        if isinstance(one, DataLoader):
            return one.batch_size  # the first is the training loader
        if isinstance(one, LightningDataModule):
            total = getattr(one, "global_batch_size", None)
            return total // ranks if isinstance(total, int) and total % ranks == 0 else None
    return None
