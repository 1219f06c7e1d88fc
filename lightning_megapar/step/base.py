"""What a step of any kind needs on a rank and what it leaves; :mod:`lightning_megapar.step.stepper` runs the steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megapar.batches import (
    copied,
    fingerprint,
    refuse_unlike_batches,
)
from lightning_megapar.config import ConfigError
from lightning_megapar.data_parallel.gradients import GradientReducer
from lightning_megapar.data_parallel.parameters import LogicalParameter, trainable
from lightning_megapar.data_parallel.zero import ZeroUnits
from lightning_megapar.generators import generators_kept
from lightning_megapar.layers.deferral import Deferral
from lightning_megapar.memory.arena import Arena
from lightning_megapar.memory.recomputation import Recomputation
from lightning_megapar.memory.stash import GradientStash
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.pipeline.cutting import explain
from lightning_megapar.pipeline.cutting.away import StageError
from lightning_megapar.pipeline.cutting.chunks import RankCut
from lightning_megapar.pipeline.cutting.rehearsal import Rehearsal
from lightning_megapar.pipeline.engine.runtime import PipelineRuntime
from lightning_megapar.pipeline.schedules import Schedule, build_schedule, forward_schedule
from lightning_megapar.step.likeness import REMEDY, tell_unlike
from lightning_megapar.step.log import LogExchange, LogRecorder, StepReport
from lightning_megapar.step.outcome import StepContractError, refusal_of
from lightning_megapar.step.random_streams import RandomStreams
from lightning_megapar.step.sharing import Origin, ReplicaSharing
from lightning_megapar.step.tokens import TokenCounter
from lightning_megapar.step.watching import GradientObserver, Watch, observed_units


@dataclass(frozen=True)
class StepResult:
    """What a step leaves for the strategy.

    Args:
        output: what Lightning gets.
        report: reduced logs, loss and flags; the same on every rank.
        samples: samples of this rank's batch.
    """

    output: Any
    report: StepReport
    samples: int


@dataclass
class Window:
    """An accumulation window: from a zero_grad to an optimizer step.

    Args:
        is_open: whether a batch of it has begun.
        trained: names of parameters that were trainable before or after any of its batches (steps may switch them).
        by_tokens, unit, weight: what its losses count for.
    """

    is_open: bool = False
    trained: set[str] = field(default_factory=set)
    by_tokens: bool = False
    unit: float = 0.0
    weight: float = 0.0


class StepperBase:
    """What training and evaluation steps of one rank share: its pieces, its switches, one call of the user's step.

    Args:
        mesh: the ranks.
        device: this rank's device.
        parameters: this rank's logical parameters.
        owner: what the parameters belong to; see :meth:`fits`.
        cut: this rank's share of the module, ``None`` without a pipeline.
        zero: FSDP2 units, ``None`` for zero_stage 0.
        deferral: where weight gradients wait under a schedule that splits the backward.
        schedule: name of the schedule, or the schedule of a whole batch; a ragged last batch, which has fewer
            microbatches, is then run in the same order without those that it lacks.
        num_microbatches: microbatches per batch (fewer for a ragged last batch).
        streams: seeds torch's generators for each microbatch; ``None`` leaves them alone.
        forward_context: makes the precision plugin's context around one forward.
        buffers: this rank's buffers by name, without those of layers that are cut.
        parts: what the step does with pieces of sharded layers, ``None`` where nothing is sharded.
        is_cut: whether tensor ranks hold pieces of anything.
        state_kept: leaves the module's buffers and attributes as they were, around a run that does not count.
        count_tokens: how many valid tokens a microbatch has, where its step does not tell.
        working_dtype: what steps compute in, where parameters are wider.
        arena: where messages and gradients come from, ``None`` for torch's allocator.
        recomputation: what blocks recompute, to be told of rehearsals.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        device: torch.device,
        parameters: Sequence[LogicalParameter],
        *,
        owner: object = None,
        cut: RankCut | None = None,
        zero: ZeroUnits | None = None,
        deferral: Deferral | None = None,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int = 1,
        streams: RandomStreams | None = None,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        buffers: Callable[[], Mapping[str, Tensor]] = dict,
        parts: Watch | None = None,
        is_cut: bool = False,
        state_kept: Callable[[], AbstractContextManager[Any]] = nullcontext,
        count_tokens: TokenCounter | None = None,
        working_dtype: torch.dtype | None = None,
        arena: Arena | None = None,
        recomputation: Recomputation | None = None,
    ) -> None:
        self.working_dtype = working_dtype
        self.mesh = mesh
        self.device = device
        self.owner = owner
        self.cut = cut
        self.zero = zero
        self.deferral = deferral
        self.schedule = schedule
        self.num_microbatches = num_microbatches
        self.streams = streams
        self.forward_context = forward_context
        self.buffers = buffers
        self.parts = parts
        self.is_cut = is_cut
        self.state_kept = state_kept
        self.count_tokens = count_tokens
        self._parameters = list(parameters)
        self._frozen = self._fixed_switches()
        self._running = False
        self._compared: set[str] = set()
        # The same on every stage, whether or not it sees the loss.
        double = any(record.parameter.dtype == torch.float64 for record in parameters)
        self.loss_dtype = torch.float64 if double else torch.float32
        self.runtime = PipelineRuntime(mesh, device, arena)
        self.recomputation = recomputation
        self._stash = None if arena is None else GradientStash(arena)
        self.reducer = GradientReducer(parameters, mesh)
        self.exchange = LogExchange(mesh, device, compare=is_cut)
        self.sharing = ReplicaSharing(mesh, device, num_microbatches)
        self._origins: list[Origin] = []
        self.steps = 0
        self._token_unit: float | None = None
        self._window = Window()
        self._schedules: dict[tuple[str, int], Schedule] = {}
        self._windows = 0
        self._rehearsed: set[str] = set()
        self._repeated: str | None = None
        """Name of the step whose next call repeats its rehearsal."""
        self._told: set[str] = set()
        self.observer: GradientObserver | None = None
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    @property
    def check_is_due(self) -> bool:
        """Whether tensor ranks compare what they hold alike in this window: the first, second, fourth, eighth, ...

        Once is not enough: behind a weight that starts at zero, a gradient differs from the second step on.
        """
        number = self._windows + 1
        return self.mesh.size("tensor") > 1 and number & (number - 1) == 0

    @property
    def window_is_open(self) -> bool:
        """Whether an accumulation window has begun and the optimizer has not stepped."""
        return self._window.is_open

    @property
    def is_running(self) -> bool:
        """Whether the user's step is being called right now."""
        return self._running

    @property
    def parameters(self) -> list[LogicalParameter]:
        """What is trainable now; callbacks may freeze and unfreeze between steps."""
        return trainable(self._parameters)

    @property
    def all_parameters(self) -> list[LogicalParameter]:
        """Those that are not trainable now as well."""
        return list(self._parameters)

    def _fixed_switches(self) -> dict[str, bool]:
        """``requires_grad`` of the parameters that must keep it: FSDP2's, and those that several stages share."""
        fixed = (p for p in self._parameters if p.data_sharded or len(p.stages) > 1)
        return {p.name: p.parameter.requires_grad for p in fixed}

    def fits(self, mesh: ParallelMesh, owner: object) -> bool:
        """Whether this stepper can go on for a later run, with its groups, connections and schedules."""
        return self.mesh is mesh and self.owner is owner

    def adopt(
        self, parameters: Sequence[LogicalParameter], cut: RankCut | None, parts: Watch | None, owner: object
    ) -> None:
        """Go on with other blocks on this stage; collective over all ranks, between two steps.

        What each stage needs of the others is found out anew by the next step of each kind.

        Args: as for the class.
        """
        self.owner, self.cut, self.parts = owner, cut, parts
        self._parameters = list(parameters)
        self._frozen = self._fixed_switches()
        self.reducer = GradientReducer(self._parameters, self.mesh)
        self._rehearsed.clear()

    def cut_batches(self, num_microbatches: int) -> None:
        """Cut batches into another number of microbatches from now on."""
        self.num_microbatches = num_microbatches
        self.sharing = ReplicaSharing(self.mesh, self.device, num_microbatches)

    def observe(self, observer: GradientObserver | None) -> None:
        """Show gradients before they are summed over the data ranks, or no longer."""
        self.observer = observer
        if self.zero is not None:
            self.zero.observe(None if observer is None else observed_units(observer, self._parameters))

    def begin_run(self) -> None:
        """Forget an accumulation window that an earlier run left open, with this stepper or another one."""
        if self.zero is not None:
            self.zero.forget()
        self._window = Window()

    def _refuse_switched(self) -> None:
        now = self._fixed_switches()
        switched = [name for name, required in self._frozen.items() if now[name] != required]
        if switched:
            stage = 0 if self.zero is None else self.zero.stage
            where = f"with zero_stage={stage}" if stage else "for parameters that several pipeline stages share"
            valid = "zero_stage=0" if stage else "pipeline_parallel_size=1"
            raise ConfigError(
                f"requires_grad of {switched[:3]} was changed after set-up (by unfreezing or toggle_optimizer), which "
                f"does not work {where}. Valid values: {valid}; or leave toggling out (gradients that an optimizer "
                "does not use cost time alone), or freeze in configure_model"
            )

    @property
    def schedule_of_batch(self) -> Schedule:
        """The schedule of a whole batch."""
        return self._schedule(self.schedule, self.num_microbatches)

    # -- pieces shared by training and evaluation --------------------------------------------------------------------

    def _schedule(self, schedule: str | Schedule, microbatches: int) -> Schedule:
        key = (schedule if isinstance(schedule, str) else "own", microbatches)
        if key not in self._schedules:
            placement = self.mesh.placement
            if isinstance(schedule, Schedule):
                whole = microbatches == schedule.num_microbatches
                self._schedules[key] = schedule if whole else schedule.restricted(microbatches)
            elif schedule == "forward":
                self._schedules[key] = forward_schedule(placement, microbatches)
            else:
                self._schedules[key] = build_schedule(schedule, len(placement), microbatches, len(placement[0]))
        return self._schedules[key]

    def _origin(self, microbatch: int) -> tuple[int, int | None]:
        """Number in its batch of a microbatch that runs here, and whose batch it is (``None``: this rank's)."""
        if not self._origins:
            return microbatch, None
        data_rank, number = self._origins[microbatch]
        return number, data_rank

    def _call(self, step: Callable[[], Any], microbatch: int, received: Any, chunk: int = 0) -> tuple[bool, Any]:
        if self.zero is not None:
            self.zero.begin_forward()
        if self.streams is not None:
            number, data_rank = self._origin(microbatch)
            self.streams.begin_microbatch(self.steps, number, data_rank)
        self._running = True
        repeated, self._repeated = self._repeated, None
        try:
            with self.explained(), self.forward_context():
                finished, value = (True, step()) if self.cut is None else self.cut.call(step, received, chunk)
        except StageError as error:
            if repeated is None:
                raise
            raise StageError(explain.differs(repeated, error)) from error
        finally:
            self._running = False
        return finished, value

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Around the user's code and its backward: torch's messages about sharded parameters, in other words."""
        try:
            yield
        except RuntimeError as error:
            says = "" if self.zero is None else refusal_of(str(error))
            if not says:
                raise
            raise StepContractError(says) from error

    def _gradients_in_arena(self) -> AbstractContextManager[None]:
        """Around the backwards of a step: gradients come to lie in the arena, if there is one. FSDP2 moves its own."""
        if self._stash is None:
            return nullcontext()
        return self._stash.step(record.parameter for record in self.parameters if not record.data_sharded)

    def _keep_generators(self) -> AbstractContextManager[None]:
        return nullcontext() if self.streams is None else generators_kept()

    def _fingerprint(self, batch: Any, pieces: int, kind: str) -> Tensor | None:
        """What peers compare in the step's packet; the first time at once, before a difference can make them hang."""
        if self.mesh.size("tensor") * self.mesh.size("pipeline") == 1:
            return None
        mark = fingerprint(batch, self.device)
        if kind not in self._compared:
            self._compared.add(kind)
            marks: list[Any] = [None] * self.mesh.layout.world_size
            dist.all_gather_object(marks, [*mark.tolist(), pieces])
            refuse_unlike_batches(marks, [self.mesh.layout.coordinates(r)["data"] for r in range(len(marks))])
        return mark

    def _rehearse(self, kind: str, step: Callable[[Any], Any], pieces: Sequence[tuple[Any, int]], results: Any) -> None:
        """Before the first step of a kind: find out what each stage needs, refuse what cannot be cut."""
        if self.cut is None or kind in self._rehearsed:
            return
        self._rehearsed.add(kind)
        piece, count = pieces[0]
        rehearsal = Rehearsal(self.cut, self.mesh.size("tensor") > 1 or self.zero is not None)

        def once() -> None:
            def run(chunk: int, received: Any) -> tuple[bool, Any]:
                recorder = LogRecorder()
                recorder.begin_microbatch(0, count)
                with recorder.attached(results):
                    finished, value = self._call(lambda: step(copied(piece)), 0, received, chunk)
                if finished:
                    recorder.complete()
                return finished, value

            def forward(chunk: int, _: int, received: Any) -> tuple[bool, Any]:
                return rehearsal.forward(partial(run, chunk), received, chunk)

            with self._keep_generators():
                schedule = self._schedule("forward", 1)
                self.runtime.run(schedule, forward)

        spans, self.runtime.spans = self.runtime.spans, None  # what is rehearsed is not of the step
        if self.recomputation is not None:
            self.recomputation.is_paused = True
        try:
            rehearsal.run(once)
        finally:
            if self.recomputation is not None:
                self.recomputation.is_paused = False
        self.runtime.spans = spans
        self._repeated = f"{'training' if kind == 'train' else kind}_step"

    def _reduce(self, factor: float, names: set[str]) -> None:
        """Sum the gradients over the ranks, see :meth:`~lightning_megapar.data_parallel.gradients.GradientReducer`."""
        start = self.runtime.now()
        observer = self.observer
        before = None if observer is None else lambda: observer.before_sum(self._parameters, names)
        self.reducer.reduce(factor, names, before)
        if self.runtime.reductions is not None and self.reducer.has_sums:
            self.runtime.reductions.append((start, self.runtime.now()))

    def _recorder_of(self, chunk: int, recorder: LogRecorder) -> LogRecorder:
        """What a chunk's run of the step logs to: only the one that gets to the loss counts."""
        return recorder if self.cut is None or self.cut.chunks[chunk].is_last else LogRecorder()

    def _tell_unlike(self, report: StepReport, kind: str) -> None:
        """Of what tensor ranks logged or returned differently. Predictions are what their step is for: refused.

        Raises:
            StepContractError: the same on every rank.
        """
        step = f"{'training' if kind == 'train' else kind}_step"
        if kind == "predict" and report.outputs_unlike:
            raise StepContractError(
                f"predict_step returned other values on each of the tensor ranks, which share their samples: {REMEDY}"
            )
        if self.mesh.rank == 0:
            tell_unlike(report.unlike, self._told, step if report.outputs_unlike else None)

    def _fill_absent_logs(self, recorder: LogRecorder) -> None:
        if self.cut is None or not self.cut.is_last:
            return
        names = recorder.fill_absent()
        if names:
            warnings.warn(
                f"self.log got not-a-number for {names}: these values are computed on an earlier pipeline stage, and "
                "the first step did not log them, so that they do not travel. Log them in every step, or values from "
                "after the stack",
                stacklevel=2,
            )

    def _weight(self, samples: int, tokens: Any) -> Tensor:
        """What a microbatch's loss counts for: 0-dim float64 on the device (reading it there would stall a GPU)."""
        count = samples if tokens is None else tokens
        return torch.as_tensor(count, dtype=torch.float64, device=self.device).detach()
