"""Measures the gradient noise scale while a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lightning_megapar.config import ConfigError, nearest_name
from lightning_megapar.optim.noise import RunningMoments, moments
from lightning_megapar.optim.observer import SOURCES, NoiseObserver
from lightning_megapar.trees import in_any_tree


class GradientNoiseScale(Callback):
    """Logs ``noise_scale`` (``B_noise``, in samples), ``noise_scale/grad_sq`` and ``noise_scale/trace``.

    Norms of the gradients over small batches are compared with that of the whole window (see
    :mod:`~lightning_megapar.optim.noise`); all of them are global under tensor and pipeline parallelism, from before
    clipping, and in the gradient's true scale. ``noise_scale`` is logged once both means are positive. The means are
    kept in checkpoints, for any layout. Batches of several tokens a sample count in samples, each by its valid tokens.

    Args:
        every_n_steps: measure one optimizer step of so many; a step that is not measured costs nothing.
        decay: of the exponential means over measured steps; 0.99 remembers about 100 of them.
        source: what the small batches are. ``"data"``: what each data rank saw of the window (one norm more per
            step). ``"accumulation"``: each accumulated batch of each data rank. ``"microbatches"``: each microbatch of
            each (a norm per parameter and microbatch). ``"auto"``: the first of these that the run has in every window.

    Raises:
        ConfigError: a value out of its range; before a process exists, a run that has nothing to compare, or a source
            that it does not have.
    """

    def __init__(self, every_n_steps: int = 1, decay: float = 0.99, source: str = "auto") -> None:
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ConfigError(f"GradientNoiseScale every_n_steps={every_n_steps!r}: expected an integer >= 1")
        if source not in ("auto", *SOURCES):
            near = nearest_name(str(source), ("auto", *SOURCES))
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"GradientNoiseScale source={source!r}: expected auto, {', '.join(SOURCES)}{hint}")
        self.every_n_steps = every_n_steps
        self.source = source
        self.running = RunningMoments(decay, "GradientNoiseScale decay")
        self._observer: NoiseObserver | None = None
        self._windows = 0

    @property
    def compares_batches(self) -> bool:
        """Whether windows of one batch tell nothing."""
        return self._observer is not None and self._observer.source == "accumulation"

    @property
    def noise_scale(self) -> float | None:
        """``B_noise`` in samples, the same on every rank; ``None`` until it is known."""
        return self.running.noise_scale

    @property
    def step_figures(self) -> dict[str, float | None]:
        """What is logged of the latest step, for callbacks that report steps."""
        return {
            "noise_scale": self.noise_scale,
            "noise_scale/grad_sq": self.running.grad_sq,
            "noise_scale/trace": self.running.trace,
        }

    def before_launch(self, trainer: Trainer, args: Sequence[Any] = ()) -> None:
        """Refuse what cannot be measured, while there is one process."""
        self._source(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        source = self._source(trainer)
        if not pl_module.automatic_optimization:
            raise ConfigError(
                f"GradientNoiseScale follows automatic optimization; {type(pl_module).__name__} sets "
                "automatic_optimization=False, whose windows it does not know"
            )
        strategy: Any = trainer.strategy
        self._observer = NoiseObserver(strategy.mesh, strategy.root_device, source, self.every_n_steps)
        self._observer.windows = self._windows
        strategy.observe_gradients(self._observer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        seen = self._observer.take() if self._observer is not None else None
        if seen is not None:
            self.running.update(moments(seen.small_sq, seen.small, seen.big_sq, seen.big))
        pl_module.log_dict({name: value for name, value in self.step_figures.items() if value is not None})

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave(trainer)

    def _leave(self, trainer: Trainer) -> None:
        if self._observer is not None:
            self._windows, self._observer = self._observer.windows, None
            trainer.strategy.observe_gradients(None)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        windows = self._windows if self._observer is None else self._observer.windows
        return {"running": self.running.state_dict(), "windows": windows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.running.load_state_dict(state_dict["running"])
        self._windows = int(state_dict["windows"])
        if self._observer is not None:
            self._observer.windows = self._windows

    def _source(self, trainer: Trainer) -> str:
        """Which small batches there are.

        Raises:
            ConfigError: none, or not those that were asked for.
        """
        strategy: Any = trainer.strategy
        if not hasattr(strategy, "observe_gradients"):
            raise ConfigError(
                f"GradientNoiseScale needs strategy='megapar', which shows gradients before they are summed; the "
                f"Trainer has {type(strategy).__name__}"
            )
        config, data = strategy.settled, strategy.layout.data
        stage = config.zero_stage if data > 1 else 0
        why_not: dict[str, str] = {}
        if data == 1:
            why_not["data"] = "data_parallel_size=1"
        elif stage > 1:
            why_not["data"] = f"zero_stage={stage} sums each microbatch's gradient over the data ranks"
        if not accumulates(trainer):
            why_not["accumulation"] = "accumulate_grad_batches=1"
        if stage > 0:
            why_not["accumulation"] = f"zero_stage={stage} keeps no batch's gradient by itself"
        if stage == 1:
            why_not["microbatches"] = "zero_stage=1 keeps a window's gradient in one place, to which each adds"
        elif stage == 0 and strategy.num_microbatches == 1:
            why_not["microbatches"] = "num_microbatches=1"
        elif strategy.layout.pipeline > 1 and config.splits_backward:
            why_not["microbatches"] = f"{config.schedule_name} computes weight gradients outside of backwards"
        elif strategy.layout.pipeline > 1 and config.chunks != 1:
            why_not["microbatches"] = f"{config.schedule_name} has several chunks on a rank"
        if self.source in why_not:
            rest = [one for one in SOURCES if one not in why_not]
            raise ConfigError(
                f"GradientNoiseScale source={self.source!r}: {why_not[self.source]}; valid values here: "
                f"{', '.join(rest) or 'none'}"
            )
        # Windows that grow from one batch on have nothing to compare at first, if batches are what is compared.
        order = SOURCES if trainer.accumulate_grad_batches > 1 else ("data", "microbatches", "accumulation")
        found = next((one for one in order if one not in why_not), None)
        if found is None:
            reasons = "; ".join(f"{name}: {why}" for name, why in why_not.items())
            raise ConfigError(
                "GradientNoiseScale compares gradients over batches of two sizes, and this run has one "
                f"({reasons}). Use two data ranks, accumulate_grad_batches >= 2, or num_microbatches >= 2"
            )
        return self.source if self.source != "auto" else found


def accumulates(trainer: Trainer) -> bool:
    """Whether windows have, or will have, more than one batch."""
    kinds = in_any_tree("callbacks", "GradientAccumulationScheduler")
    changing = (getattr(one, "changes_accumulation", isinstance(one, kinds)) for one in _callbacks(trainer))
    return trainer.accumulate_grad_batches > 1 or any(changing)


def _callbacks(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]


def noise_of(trainer: Trainer, owner: str) -> GradientNoiseScale:
    """The callback that measures the noise for another one.

    Raises:
        ConfigError: when there is none.
    """
    for callback in _callbacks(trainer):
        if isinstance(callback, GradientNoiseScale):
            return callback
    raise ConfigError(f"{owner} follows the measured noise scale: put GradientNoiseScale() among the callbacks")
