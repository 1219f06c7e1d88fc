"""The numbers of one optimizer step, measured once and shown by every callback that asks.

:class:`MeteredCallback` is the base of the callbacks that report: all of them in one Trainer share one
:class:`Meter`, so that the terminal line and ``metrics.csv`` cannot disagree.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from torch import Tensor

_FETCH = "train_dataloader_next"
_SAVE = "save_checkpoint"


SCALING = ("loss_scale", "skipped_steps")
"""What the strategy logs in each optimizer step under ``precision="16-mixed"``."""


@dataclass(frozen=True)
class StepRecord:
    """What is known of one optimizer step. ``None`` where there is nothing to know.

    Attributes:
        step: optimizer steps done, this one included.
        epoch: index of the epoch.
        train_loss: mean over the batches that were accumulated into the step.
        grad_norm: the logged ``grad_norm``.
        lr: of the first parameter group, as used in the step.
        tokens_per_second: tokens of all data ranks over training time (validation and checkpoints excluded), of the
            last ``Meter.window`` steps.
        data_wait_seconds: time in this step that this rank waited for its loader.
        data_wait_share: the same as a share of training time, of the last ``Meter.window`` steps, in [0, 1].
        peak_memory_bytes: of this rank so far: allocated on its GPU, or resident on the CPU.
        samples: of all data ranks since training began or resumed in this process.
        seconds: the same for wall time, validation and checkpoints included.
        eta_seconds: until the Trainer's last step at the mean pace of this process.
        total_steps: the Trainer's last step.
        loss_scale, skipped_steps: as logged under ``precision="16-mixed"``: the scale of the step, and the steps that
            were skipped up to it.
        figures: what other callbacks tell of the step, by the names under which they log it (``noise_scale``,
            ``batch_size``, ...); see :func:`figures_of`.
    """

    step: int
    epoch: int
    train_loss: float | None
    grad_norm: float | None
    lr: float | None
    tokens_per_second: float | None
    data_wait_seconds: float
    data_wait_share: float
    peak_memory_bytes: int
    samples: int
    seconds: float
    eta_seconds: float | None
    total_steps: int | None
    loss_scale: float | None = None
    skipped_steps: float | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)


class _TimedProfiler(Profiler):
    """The Trainer's profiler with a stop watch on two of its actions; everything else passes through."""

    def __init__(self, inner: Profiler) -> None:
        super().__init__()
        self.inner = inner
        self.waited = 0.0
        self.saving = 0.0
        self._fetch_began = 0.0

    def start(self, action_name: str) -> None:
        if action_name.endswith(_FETCH):
            self._fetch_began = time.perf_counter()
        self.inner.start(action_name)

    def stop(self, action_name: str) -> None:
        self.inner.stop(action_name)
        if action_name.endswith(_FETCH):
            self.waited += time.perf_counter() - self._fetch_began

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self._profile_save(action_name) if action_name == _SAVE else self.inner.profile(action_name)

    @contextmanager
    def _profile_save(self, action_name: str) -> Generator[Any, None, None]:
        began = time.perf_counter()
        try:
            with self.inner.profile(action_name) as value:
                yield value
        finally:
            self.saving += time.perf_counter() - began

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.inner.setup(*args, **kwargs)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self.inner.teardown(*args, **kwargs)

    def summary(self) -> str:
        return self.inner.summary()

    def describe(self) -> None:
        self.inner.describe()


class Meter:
    """Times steps, counts tokens, keeps the losses of an accumulation window.

    Args:
        window: optimizer steps over which rates are taken.
        loss_name: the logged metric taken for the training loss; what ``training_step`` returned when it is not logged.
    """

    def __init__(self, window: int = 20, loss_name: str = "train_loss") -> None:
        self.window = window
        self.loss_name = loss_name
        self._profiler: _TimedProfiler | None = None
        self._history: deque[tuple[float, float, int]] = deque(maxlen=window)
        self._losses: list[Tensor | float] = []
        self._seen: tuple[int, int] | None = None
        self._record: StepRecord | None = None
        self._pending: dict[str, Any] | None = None
        self._stepped = False
        self._lr: float | None = None
        self._validating_since: float | None = None
        self._begin(0)

    def _begin(self, step: int) -> None:
        now = time.perf_counter()
        self._started = self._last = now
        self._first_step = self._step = step
        self._excluded = self._waited = self._step_waited = self._step_seconds = 0.0
        self._tokens = self._samples = 0

    # Driven by every MeteredCallback; only the first call for an event counts.

    def attach(self, trainer: Trainer) -> None:
        inner = getattr(trainer, "profiler", None)
        if self._profiler is None and isinstance(inner, Profiler):
            self._profiler = _TimedProfiler(inner)
            trainer.profiler = self._profiler  # type: ignore[attr-defined]

    def detach(self, trainer: Trainer) -> None:
        if self._profiler is not None and getattr(trainer, "profiler", None) is self._profiler:
            trainer.profiler = self._profiler.inner  # type: ignore[attr-defined, union-attr]
        self._profiler = None

    def train_start(self, trainer: Trainer) -> None:
        self._history.clear()
        self._losses = []
        self._seen, self._record, self._pending, self._stepped = None, None, None, False
        self._begin(trainer.global_step)
        if self._profiler is not None:
            self._waited, self._excluded = self._profiler.waited, self._profiler.saving

    def batch_start(self, trainer: Trainer) -> None:
        # Read here, because the scheduler has moved on by the end of the batch.
        optimizers = trainer.optimizers
        self._lr = float(optimizers[0].param_groups[0]["lr"]) if optimizers else None

    def validation_start(self) -> None:
        if self._validating_since is None:
            self._validating_since = time.perf_counter()

    def validation_end(self) -> None:
        if self._validating_since is not None:
            self._last += time.perf_counter() - self._validating_since
            self._validating_since = None

    def batch_end(self, trainer: Trainer, outputs: Any, batch: Any, batch_idx: int) -> bool:
        """Account for a batch; true when it ended an optimizer step (for every caller of the same batch)."""
        event = (trainer.current_epoch, batch_idx)
        if event == self._seen:
            return self._stepped
        self._seen = event
        now = time.perf_counter()
        saving = self._profiler.saving if self._profiler else 0.0
        waited = self._profiler.waited if self._profiler else 0.0
        self._step_seconds += now - self._last - (saving - self._excluded)
        self._step_waited += waited - self._waited
        self._last, self._excluded, self._waited = now, saving, waited
        self._tokens += token_count(batch)
        self._samples += sample_count(batch)
        self._losses.append(self._loss(trainer, outputs))
        self._stepped = trainer.global_step != self._step
        if not self._stepped:
            return False
        self._step = trainer.global_step
        self._history.append((self._step_seconds, self._step_waited, self._tokens * data_ranks(trainer)))
        norm = trainer.callback_metrics.get("grad_norm")
        self._record = None
        self._pending = {
            "losses": self._losses,
            "grad_norm": norm.detach().clone() if isinstance(norm, Tensor) else norm,
            "waited": self._step_waited,
            "samples": self._samples * data_ranks(trainer),
            "lr": self._lr,
            "now": now,
            "scaling": {name: trainer.callback_metrics.get(name) for name in SCALING},
            "figures": figures_of(trainer),
        }
        self._losses, self._tokens, self._step_seconds, self._step_waited = [], 0, 0.0, 0.0
        return True

    @property
    def has_record(self) -> bool:
        """Whether an optimizer step has ended since training began."""
        return self._pending is not None

    def record(self, trainer: Trainer) -> StepRecord:
        """The last optimizer step that ended. Reading it moves its loss to the CPU, hence only where it is shown.

        Raises:
            RuntimeError: when there is none yet.
        """
        if self._record is None:
            if self._pending is None:
                raise RuntimeError("no optimizer step has ended")
            self._record = self._make(trainer, **self._pending)
        return self._record

    def _make(
        self,
        trainer: Trainer,
        losses: list[Tensor | float],
        grad_norm: Any,
        waited: float,
        samples: int,
        lr: float | None,
        now: float,
        scaling: dict[str, Any],
        figures: dict[str, float | None],
    ) -> StepRecord:
        seconds = sum(entry[0] for entry in self._history)
        tokens = sum(entry[2] for entry in self._history)
        values = [value for value in map(as_float, losses) if value is not None]
        total = total_steps(trainer)
        elapsed, done = now - self._started, self._step - self._first_step
        return StepRecord(
            step=self._step,
            epoch=trainer.current_epoch,
            train_loss=math.fsum(values) / len(values) if values else None,
            grad_norm=as_float(grad_norm),
            lr=lr,
            tokens_per_second=tokens / seconds if tokens and seconds > 0 else None,
            data_wait_seconds=waited,
            data_wait_share=min(1.0, sum(entry[1] for entry in self._history) / seconds) if seconds > 0 else 0.0,
            peak_memory_bytes=peak_memory(trainer.strategy.root_device),
            samples=samples,
            seconds=elapsed,
            eta_seconds=None if total is None or done < 1 else max(0, total - self._step) * elapsed / done,
            total_steps=total,
            figures=figures,
            **{name: as_float(value) for name, value in scaling.items()},
        )

    def _loss(self, trainer: Trainer, outputs: Any) -> Tensor | float:
        metrics = trainer.callback_metrics
        logged = metrics.get(f"{self.loss_name}_step", metrics.get(self.loss_name))
        if logged is not None:
            return logged.detach().clone()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        # Lightning hands the callbacks the loss divided by the number of accumulated batches.
        return loss.detach() * trainer.accumulate_grad_batches if isinstance(loss, Tensor) else math.nan


class MeteredCallback(Callback):
    """Base of callbacks that report steps: all of one Trainer drive and read one :class:`Meter`."""

    meter: Meter | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if self.meter is None:
            shared = (c.meter for c in trainer.callbacks if isinstance(c, MeteredCallback) and c.meter is not None)  # type: ignore[attr-defined]
            self.meter = next(shared, None) or Meter()
        self.meter.attach(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.meter is not None:
            self.meter.detach(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.meter is not None:
            self.meter.train_start(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.meter is not None:
            self.meter.batch_start(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.meter is not None and self.meter.batch_end(trainer, outputs, batch, batch_idx):
            self.step_ended(trainer, pl_module, self.meter)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.meter is not None:
            self.meter.validation_start()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.meter is not None:
            self.meter.validation_end()

    def step_ended(self, trainer: Trainer, pl_module: LightningModule, meter: Meter) -> None:
        """Called after each optimizer step, on every rank; ``meter.record(trainer)`` tells about it."""


def as_float(value: Any) -> float | None:
    """A number or one-element tensor as a float; ``None`` for anything else."""
    if isinstance(value, Tensor):
        return float(value.detach().item()) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


def figures_of(trainer: Trainer) -> dict[str, float | None]:
    """What callbacks with ``step_figures`` (a mapping of names to numbers) tell of the latest step.

    Asked rather than read from the logged metrics: one may log at the end of the batch, behind those that report.
    """
    found: dict[str, float | None] = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        figures = getattr(callback, "step_figures", None)
        if isinstance(figures, Mapping):
            found.update({str(name): as_float(value) for name, value in figures.items()})
    return found


def token_count(batch: Any) -> int:
    """Tokens in a batch: the size of ``tokens`` or ``input_ids``, else of the first integer tensor; 0 without one."""
    if isinstance(batch, Mapping):
        for name in ("tokens", "input_ids"):
            if isinstance(batch.get(name), Tensor):
                return int(batch[name].numel())
    return next((int(t.numel()) for t in _tensors(batch) if t.dim() > 1 and not t.is_floating_point()), 0)


def sample_count(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor that has one."""
    return next((int(t.shape[0]) for t in _tensors(batch) if t.dim() > 0), 0)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)


def data_ranks(trainer: Trainer) -> int:
    """Ranks that see different samples."""
    layout = getattr(trainer.strategy, "layout", None)
    return trainer.world_size if layout is None else int(layout.data)


def total_steps(trainer: Trainer) -> int | None:
    """The optimizer step at which the Trainer will stop, or ``None`` when it has no end."""
    limits: list[float] = []
    if trainer.max_steps is not None and trainer.max_steps > 0:
        limits.append(trainer.max_steps)
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        batches = trainer.num_training_batches
        if math.isfinite(batches):
            limits.append(trainer.max_epochs * math.ceil(batches / trainer.accumulate_grad_batches))
    return int(min(limits)) if limits else None


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on a CUDA device, or the largest resident size of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
