"""The measured timeline of chosen steps of a pipeline, as one Chrome/Perfetto file and as a picture."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_megapar.callbacks.file_names import checked_name
from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline.engine.clocks import SAME, ClockOffset, clock_offsets
from lightning_megapar.pipeline.picture import beside_simulated, draw
from lightning_megapar.pipeline.picture.drawing import FORMATS
from lightning_megapar.pipeline.planning.trace import TraceEvent, write_trace

DEFAULT_STEPS = (2, 3)


class PipelineTrace(Callback):
    """Records when each stage did what in a few steps, and writes one file that ``chrome://tracing``,
    https://ui.perfetto.dev, :func:`~lightning_megapar.pipeline.planning.trace.read_trace` and
    ``recipes/show_schedule.py`` open.

    A step's events are every action of the schedule on every stage (with accumulation the microbatches of its batches
    are numbered on), and per stage, where it has them, kind ``"reduce"``: the sums of gradients over ranks with the
    wait for those ranks, and ``"optimizer"``: from ``on_before_optimizer_step`` of this callback to the end of the
    optimizer's step, clipping included. With shards over data ranks FSDP2 reduces inside a chunk's backwards, which
    then contain it, and with schedules that split the backward behind a chunk's last action.
    Spans are those of the ranks
    with data and tensor coordinate 0; a span contains the sending of its result, which the next stage can have a moment
    before the span ends. On a GPU each action ends with a wait for its work in the chosen steps, so that a span is not
    the time of a launch.

    Times count from the first event. Those of other stages are brought to the first stage's clock after each chosen
    step, see :mod:`~lightning_megapar.pipeline.engine.clocks`; the error per stage stands in the file, in seconds,
    under ``otherData.clock_error_seconds``. Other steps are not measured.

    Rank 0 writes after the last chosen step, or when training ends or fails before it the steps that are complete. An
    older file of that name is replaced. Without a pipeline the callback says so once and does nothing.

    Args:
        steps: values of ``trainer.global_step`` during the steps (the first step is 0), or one of them. The first step
            is slower than those that follow: it rehearses, and allocates memory.
        path: name of the JSON file; a relative one is put into ``trainer.log_dir``, which is ``default_root_dir``
            without a logger.
        picture: name of an ``.svg`` or ``.png`` with the last recorded step beside its simulation, or ``None``.

    Raises:
        ConfigError: on steps that are no integers from 0, none at all, or a name with another ending; in ``setup`` when
            the trainer has two of them.
    """

    def __init__(
        self,
        steps: int | Iterable[int] = DEFAULT_STEPS,
        path: str | os.PathLike[str] = "pipeline_trace.json",
        picture: str | os.PathLike[str] | None = None,
    ) -> None:
        self.steps = _checked_steps(steps)
        self.path = checked_name("PipelineTrace path", path, (".json",), "trace")
        self.picture = None if picture is None else checked_name("PipelineTrace picture", picture, FORMATS, "trace")
        if (
            self.picture is not None
            and self.picture.suffix.lower() == ".png"
            and not importlib.util.find_spec("matplotlib")
        ):
            raise ConfigError(
                f"PipelineTrace picture={str(picture)!r}: PNG needs matplotlib (lightning_megapar[plot]); "
                f"{str(self.picture.with_suffix('.svg'))!r} needs nothing"
            )
        self._chosen = frozenset(self.steps)
        self._said = False
        self._recorder: _Recorder | None = None
        self._strategy: Any = None
        self._folder = Path()
        self._first_step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._recorder = self._strategy = None
        if stage != "fit":
            return
        if next(one for one in trainer.callbacks if isinstance(one, PipelineTrace)) is not self:  # type: ignore[attr-defined]
            raise ConfigError("a trainer takes one PipelineTrace; give it all steps, such as steps=[2, 3, 100]")
        strategy: Any = trainer.strategy
        is_ours = hasattr(type(strategy), "stepper")
        if is_ours and strategy.layout.pipeline > 1:
            self._strategy = strategy
            self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # broadcast by rank 0
        elif not self._said:
            self._said = True
            what = "pipeline_parallel_size=1" if is_ours else type(strategy).__name__
            rank_zero_warn(
                f"PipelineTrace: {what} runs no pipeline, so that there is nothing to trace and no {self.path.name} "
                "will be written; use MegaParStrategy(pipeline_parallel_size=2) or more"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step
        strategy = self._strategy
        if strategy is not None and all(at == 0 for axis, at in strategy.mesh.place.items() if axis != "pipeline"):
            self._recorder = _Recorder(strategy.stepper)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._recorder is not None:
            if trainer.global_step in self._chosen:
                self._recorder.begin_batch(trainer.global_step)
            else:
                self._recorder.stop()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._recorder is not None:
            self._recorder.begin_update(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        recorder = self._recorder
        if recorder is None or not recorder.is_recording:
            return
        recorder.end_batch()
        if trainer.global_step > recorder.step:
            recorder.gather()
            if recorder.step == self.steps[-1]:
                self._write()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recorder is None:
            return
        self._recorder.stop()
        if not self._recorder.steps:
            ran = f"{self._first_step} to {trainer.global_step - 1}"
            rank_zero_warn(
                f"PipelineTrace steps={self.steps}: none of them ran, so that no {self.path.name} was written; "
                + (f"steps {ran} did" if trainer.global_step > self._first_step else "training ran no step")
            )
        self._write()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """No collectives: other ranks may be gone. What is complete has been gathered."""
        if self._recorder is None:
            return
        self._recorder.stop()
        try:
            self._write()
        except OSError as error:  # what failed first is what has to be told
            rank_zero_warn(f"PipelineTrace: {self.path.name} could not be written: {error}")

    def _write(self) -> None:
        """Write what has been gathered, once; on rank 0."""
        recorder, strategy = self._recorder, self._strategy
        if recorder is None or strategy is None or not recorder.events:
            return
        origin = min(event.start for event in recorder.events)
        events = [_shifted(event, origin) for event in recorder.events]
        recorder.events = []
        schedule = strategy.schedule
        errors = [offset.error for offset in recorder.offsets]
        notes = {"schedule": schedule, "layout": strategy.layout.describe(), "clock_error_seconds": errors}
        path = self._folder / self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        write_trace(temporary, events, schedule, notes)
        os.replace(temporary, path)
        named = ", ".join(map(str, recorder.steps))
        rank_zero_info(
            f"pipeline trace of step{'s' if len(recorder.steps) > 1 else ''} {named} ({schedule}): {path}; clocks of "
            f"the stages within {max(errors) * 1e3:.2g} ms"
        )
        if self.picture is not None:
            self._draw(events, self._folder / self.picture)

    def _draw(self, events: list[TraceEvent], path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            panels, schedule, _ = beside_simulated(events)
            length = max(len(actions) for actions in schedule.ranks)
            draw(panels, min(max(900.0, 18.0 * length), 6000.0), seconds=True).save(path)
        except ConfigError as error:  # no reason to end a training run
            rank_zero_warn(f"PipelineTrace: {path} could not be drawn: {error}")


class _Recorder:
    """What one stage did in the chosen steps; on the first stage, in the end, what all of them did.

    Args:
        stepper: the rank's.
    """

    def __init__(self, stepper: Any) -> None:
        self.stepper = stepper
        self.rank = stepper.mesh.coordinate("pipeline")
        self.step = -1
        """The step of :attr:`own`."""
        self.own: list[TraceEvent] = []
        self.events: list[TraceEvent] = []
        self.steps: list[int] = []
        """What has been gathered; ``events`` on the first stage only, in seconds of its clock."""
        self.offsets: list[ClockOffset] = [SAME] * stepper.mesh.size("pipeline")
        """Per stage the offset with the largest error."""
        self._microbatches = 0
        self._update: list[float] = []
        self._hook: Any = None

    @property
    def is_recording(self) -> bool:
        return self.stepper.runtime.spans is not None

    def begin_batch(self, step: int) -> None:
        if step != self.step:
            self.step, self.own, self._microbatches = step, [], 0
        self._update = []
        self.stepper.runtime.spans, self.stepper.runtime.reductions = [], []

    def begin_update(self, optimizer: Optimizer) -> None:
        """The optimizer's step begins; its end is seen by a hook of its own."""
        if self.is_recording and hasattr(optimizer, "register_step_post_hook"):
            self._update = [self.stepper.runtime.now()]
            self._hook = optimizer.register_step_post_hook(lambda *_: self._end_update())

    def _end_update(self) -> None:
        self._update[1:] = [self.stepper.runtime.now()]

    def end_batch(self) -> None:
        """Keep a batch's spans; its microbatches follow those of the step's earlier batches."""
        spans, reductions = self.stepper.runtime.spans or [], self.stepper.runtime.reductions or []
        before = self._microbatches
        for span in spans:
            action = span.action
            number = before + action.microbatch
            self._microbatches = max(self._microbatches, number + 1)
            self._keep(action.kind, span.start, span.end, number, action.chunk)
        for start, end in reductions:
            self._keep("reduce", start, end)
        if len(self._update) == 2:
            self._keep("optimizer", self._update[0], self._update[1])
        self.stop()

    def _keep(self, kind: str, start: float, end: float, microbatch: int = -1, chunk: int = -1) -> None:
        self.own.append(TraceEvent(kind, self.rank, start, end, microbatch, chunk, self.step))

    def stop(self) -> None:
        """Measure nothing any more."""
        self.stepper.runtime.spans = self.stepper.runtime.reductions = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def gather(self) -> None:
        """Bring a complete step's events to the first stage; collective over the stages."""
        mesh = self.stepper.mesh
        offsets = clock_offsets(mesh, self.stepper.device)
        everyone: list[Any] | None = [None] * len(offsets) if offsets else None
        dist.gather_object(self.own, everyone, dst=mesh.stage_rank(0), group=mesh.group("pipeline"))
        for offset, events in zip(offsets, everyone or ()):
            self.events += [_shifted(event, offset.seconds) for event in events]
        self.offsets = [max(pair, key=lambda one: one.error) for pair in zip(self.offsets, offsets)]
        self.steps.append(self.step)
        self.own = []


def _shifted(event: TraceEvent, by: float) -> TraceEvent:
    return TraceEvent(**{**event.to_json(), "start": event.start - by, "end": event.end - by})


def _checked_steps(steps: Any) -> tuple[int, ...]:
    given: list[Any] = [steps] if isinstance(steps, int | str) or not isinstance(steps, Iterable) else list(steps)
    advice = f"expected a step or a list of steps, integers from 0, such as {list(DEFAULT_STEPS)}"
    if not given:
        raise ConfigError(f"PipelineTrace steps={steps!r} names no step: {advice}")
    wrong = [step for step in given if not isinstance(step, int) or isinstance(step, bool) or step < 0]
    if wrong:
        near = [max(0, round(step)) for step in given if isinstance(step, int | float) and abs(step) < 1e18]
        hint = f"; nearest valid: steps={sorted(set(near))}" if len(near) == len(given) else ""
        raise ConfigError(f"PipelineTrace steps={steps!r} has {wrong[0]!r}: {advice}{hint}")
    return tuple(sorted(set(given)))
