"""Keeps a run in balance: measures every step, and between two steps moves layers or microbatches off slow ranks.

Every rank measures its own actions and blocks; one gather per measured step shows them to all. The first rank decides,
on medians (:mod:`lightning_megapar.pipeline.balance`), and says so in its row of the next gather, so that all ranks
take part in a move at the same step boundary although no two machines need round alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_megapar.config import ConfigError
from lightning_megapar.mesh import ParallelMesh, all_gather_single
from lightning_megapar.pipeline.balance.decide import Proposal, Situation, propose, step_seconds
from lightning_megapar.pipeline.balance.estimate import Estimate, estimate
from lightning_megapar.pipeline.balance.measured import History, Place, RankTimes, SlowRanks, StepTimes, slowest
from lightning_megapar.pipeline.balance.options import Rebalance
from lightning_megapar.pipeline.balance.sizes import SizeTrial
from lightning_megapar.pipeline.engine.stopwatch import Stopwatch
from lightning_megapar.pipeline.schedules import Schedule
from lightning_megapar.step.stepper import Stepper
from lightning_megapar.strategy.averaging import averaging_callbacks
from lightning_megapar.strategy.balance.appraisal import appraise, seconds_per_byte
from lightning_megapar.strategy.balance.moving import move_layers
from lightning_megapar.strategy.balance.spares import count_hooks
from lightning_megapar.strategy.prepare import PreparedModule

Order = Proposal | int
"""What the first rank wants done: a proposal, or a number of microbatches."""


def refuse_rebalance(module: Any, options: Rebalance, callbacks: Iterable[Any], prepared: PreparedModule) -> None:
    """Refuse what cannot be measured, and what cannot follow a block to another stage.

    Raises:
        ConfigError: naming the callback, or what the module does.
    """
    if not module.automatic_optimization:
        raise ConfigError(
            f"rebalance needs automatic optimization: {type(module).__name__} sets automatic_optimization=False and "
            "steps by itself, so that its batches are not cut into microbatches; valid: rebalance=null"
        )
    if not options.layers:
        return
    averaging = averaging_callbacks(callbacks)
    if averaging:
        raise ConfigError(
            f"rebalance: layers cannot be moved beside {type(averaging[0]).__name__}, which keeps a copy of each "
            "stage's weights; valid: rebalance=replicas, rebalance=null, or a run without it"
        )
    if prepared.plan is not None and prepared.spares is None:
        raise ConfigError(
            "rebalance: the module was already cut by a strategy that does not move layers; build the module anew and "
            "load its checkpoint, or use rebalance=replicas"
        )


@dataclass(frozen=True)
class BalanceEvent:
    """Something that was found or done.

    Args:
        step: batches trained so far.
        kind: ``"slow"`` (a rank), ``"layers"``, ``"replicas"``, ``"microbatches"``, ``"measured"`` (what a move has
            brought), or ``"declined"`` (a move that would not pay, fit, or be complete).
        text: for people.
        gain: predicted share of the step's time that is saved.
        seconds: that the move took.
        slowness: of a slow rank, how many times as long it takes for the same work.
    """

    step: int
    kind: str
    text: str
    gain: float = 0.0
    seconds: float = 0.0
    slowness: float = 1.0


class Rebalancer:
    """One run's balance.

    Args:
        options: the levers that this layout has.
        module: this rank's share.
        mesh: the ranks.
        device: where this rank computes.
        schedule: its name, or the schedule of a whole batch.
        stepper: runs the steps.
        prepared: what is known of the share.
        optimizers: those of the run.
        convert: the precision plugin's ``convert_module``.
        adopt: takes what is known of the share after a move.
        holders: objects that may keep blocks or their parameters (callbacks).
    """

    def __init__(
        self,
        options: Rebalance,
        module: nn.Module,
        mesh: ParallelMesh,
        device: torch.device,
        schedule: str | Schedule,
        stepper: Stepper,
        prepared: PreparedModule,
        optimizers: Callable[[], Sequence[Optimizer]],
        convert: Callable[[nn.Module], nn.Module],
        adopt: Callable[[PreparedModule], None],
        holders: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self.options = options
        self.events: list[BalanceEvent] = []
        """What was found and done so far, on every rank."""
        self._module, self._mesh, self._device = module, mesh, device
        self._schedule, self._stepper, self._prepared = schedule, stepper, prepared
        self._optimizers, self._convert, self._adopt, self._holders = optimizers, convert, adopt, holders
        self._history = History(options.window)
        self._slow = SlowRanks(options.slow_factor)
        self._levers = {"layers": options.layers, "replicas": options.replicas}
        self._sizes = SizeTrial(options.min_gain) if options.microbatches else None
        self._agreed = 0
        self._least_gain = options.min_gain
        self._expected: float | None = None
        self._order: Order | None = None
        self._agenda: Order | None = None
        self._per_byte: float | None = None
        self._fixed_seconds = 0.0
        self._batches = self._samples = 0
        self._moved = self._order_is_out = False
        self._is_open = True
        self._hooks: dict[str, int] = {}
        self._watch = Stopwatch(device, lambda: stepper.is_running)
        stepper.runtime.stopwatch = self._watch
        self._look_at(prepared)

    def close(self) -> None:
        """Stop measuring, and say so when there was nothing to do."""
        if self._is_open and self._batches and not any(event.kind != "slow" for event in self.events):
            enough = self._batches >= self.options.every * (self.options.window // 2 + self.options.patience)
            what = "nothing had to move" if enough else "too few to decide on anything"
            rank_zero_info(f"balance: {-(-self._batches // self.options.every)} batches were measured, {what}")
        self._is_open = False
        self._watch.watch({})
        self._stepper.runtime.stopwatch = None

    @property
    def shares(self) -> tuple[int, ...]:
        """Microbatches of a whole batch that each data rank works on."""
        return self._stepper.sharing.shares

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Blocks of each virtual stage."""
        return ((0, 0),) if self._prepared.plan is None else self._prepared.plan.ranges

    # -- measuring ---------------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """A training batch begins."""
        if self._batches % self.options.every == 0:
            self._watch.start()

    def after_step(self, samples: int) -> None:
        """A training batch has ended; collective over all ranks when it was measured.

        Args:
            samples: of this rank's batch.
        """
        measured = self._batches % self.options.every == 0
        self._batches += 1
        if not measured:
            return
        self._watch.stop()
        self._samples = max(self._samples, samples)
        times = self._gathered()
        if self._order_is_out:
            box: list[Any] = [self._order]
            dist.broadcast_object_list(box, src=0)
            self._agenda, self._order = box[0], None
            return
        if times is not None and self._agenda is None:
            decided = self._decided(times)
            if self._mesh.rank == 0:
                self._order = decided

    def _gathered(self) -> StepTimes | None:
        """What every place took; ``None`` when the batch had not all its microbatches."""
        plan = self._prepared.plan
        blocks = 0 if plan is None else len(plan.blocks)
        chunks = len(self._mesh.placement[0])
        taken = self._watch.actions(chunks)
        own = RankTimes(
            self._stepper.num_microbatches,
            taken["forward"],
            taken["backward_input"],
            taken["backward_weight"],
            self._watch.blocks(),
        )
        is_whole = self._watch.forwards == self.shares[self._mesh.coordinate("data")]
        row = [float(self._order is not None), float(is_whole), *own.packed(blocks)]
        mine = torch.tensor(row, dtype=torch.float64, device=self._device)
        table = torch.empty(self._mesh.layout.world_size * len(row), dtype=torch.float64, device=self._device)
        all_gather_single(table, mine)
        rows = table.view(-1, len(row)).cpu().tolist()
        self._order_is_out = rows[0][0] > 0
        if not all(one[1] for one in rows):
            return None
        found: dict[Place, list[RankTimes]] = {}
        for rank, numbers in enumerate(rows):
            place = self._mesh.layout.coordinates(rank)
            found.setdefault((place["pipeline"], place["data"]), []).append(RankTimes.unpacked(numbers[2:], chunks))
        return {place: slowest(times) for place, times in found.items()}

    # -- deciding: every rank sees what is slow, the first one's order counts -----------------------------------------

    def _decided(self, times: StepTimes) -> Order | None:
        self._history.add(times)
        if len(self._history) < self.options.window // 2 + 1:
            return None
        now = Situation(self.ranges, self.shares, self._schedule, self._mesh.placement)
        medians = self._history.medians()
        found = estimate(medians, now.ranges, now.placement, self._kinds)
        self._tell_slow(found)
        if not self._history.is_full and self._moved:
            return None  # what is kept of the time after a move says too little for the next one
        self._learn(now, found)
        if self._sizes is not None and not self._sizes.is_settled and self._stepper.sharing.is_even:
            return self._sizes.next(now, self._samples, medians) if self._history.is_full else None
        if self._mesh.rank != 0:
            return None
        proposal = propose(now, found, self._levers, self._least_gain)
        self._agreed = self._agreed + 1 if proposal is not None else 0
        if self._agreed < self.options.patience:
            return None
        self._agreed = 0
        return proposal

    @property
    def _kinds(self) -> tuple[str, ...]:
        """Without spares no block moves, and which of them cost the same is not asked."""
        if self._prepared.spares is not None:
            return self._prepared.spares.kinds
        plan = self._prepared.plan
        return () if plan is None else tuple(f"block {index}" for index in range(len(plan.blocks)))

    def _tell_slow(self, found: Estimate) -> None:
        for (stage, data), ratio in self._slow.update(found.slowness).items():
            names = [f"stage {stage}"] if self._mesh.size("pipeline") > 1 else []
            names += [f"replica {data}"] if self._mesh.size("data") > 1 else []
            text = f"{' of '.join(names)} takes {ratio:.2f} times as long as the others for the same work"
            self._note("slow", text, slowness=ratio)

    def _learn(self, now: Situation, found: Estimate) -> None:
        """Whether the last move brought what it promised; if not, the next one has to promise more."""
        if self._expected is None:
            return
        promised, self._expected = self._expected, None
        taken = step_seconds(now, found, now.ranges, now.shares)
        self._note("measured", f"a step takes {taken:.3g} s by its parts now; {promised:.3g} s were expected")
        if taken > promised * (1 + self.options.min_gain):
            self._least_gain = min(0.5, 2 * self._least_gain)

    # -- doing, on all ranks -----------------------------------------------------------------------------------------

    def between_steps(self) -> None:
        """Do what was ordered, if anything was; collective over all ranks."""
        order, self._agenda = self._agenda, None
        if order is None:
            return
        start = time.perf_counter()
        if isinstance(order, int):
            self._stepper.cut_batches(order)
            self._note("microbatches", f"batches are cut into {order} microbatches")
        elif order.lever == "replicas":
            self._stepper.sharing.shares = order.shares
            text = f"replicas work on {', '.join(map(str, order.shares))} microbatches"
            self._note("replicas", f"{text} ({_said(order)})", order.gain, time.perf_counter() - start)
        elif not self._move(order, start):
            return
        self._history.clear()
        self._moved = True
        self._expected = None if isinstance(order, int) else order.seconds_then

    def _move(self, order: Proposal, start: float) -> bool:
        optimizers = self._optimizers()
        appraisal = appraise(
            self._module,
            self._prepared,
            order.ranges,
            self._mesh,
            optimizers,
            self._device,
            self._hooks,
            self._holders(),
        )
        if self._per_byte is None:
            self._per_byte = seconds_per_byte(self._mesh, self._device)
        # After the first one, what a move took beside its messages is known.
        price = appraisal.largest * self._per_byte + self._fixed_seconds
        reason = ""
        if appraisal.pinned:
            reason = "; ".join(appraisal.pinned[:3])
        elif appraisal.short:
            reason = f"{appraisal.short:,} bytes are missing on the stage that would get more layers"
        elif not order.pays(price, self.options.pays_within):
            reason = f"it takes {price:.3g} s and saves less in {self.options.pays_within} steps"
        if reason:
            self._note("declined", f"layers stay where they are ({_said(order)}): {reason}", order.gain)
            self._least_gain = max(self._least_gain, order.gain * 1.2)
            return False
        partial = {p.name for p in self._stepper.all_parameters if p.partial_over_tensor}
        prepared = move_layers(
            self._module,
            self._prepared,
            order.ranges,
            self._mesh,
            optimizers,
            device=self._device,
            convert=self._convert,
            partial=partial,
        )
        self._prepared = prepared
        self._adopt(prepared)
        self._look_at(prepared)
        taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=self._device)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        self._fixed_seconds = max(0.0, float(taken) - appraisal.largest * self._per_byte)
        sizes = ", ".join(str(stop - begin) for begin, stop in order.ranges)
        self._note("layers", f"stages hold {sizes} blocks ({_said(order)})", order.gain, float(taken))
        return True

    def _look_at(self, prepared: PreparedModule) -> None:
        self._watch.watch({} if prepared.cut is None else prepared.cut.local_blocks())
        if prepared.spares is not None:
            self._hooks = count_hooks({name: self._module.get_submodule(name) for name in prepared.spares.modules})

    def _note(self, kind: str, text: str, gain: float = 0.0, seconds: float = 0.0, slowness: float = 1.0) -> None:
        self.events.append(BalanceEvent(self._batches, kind, text, gain, seconds, slowness))
        rank_zero_info(f"balance after batch {self._batches}: {text}")


def _said(order: Proposal) -> str:
    now, then = order.seconds_now, order.seconds_then
    return f"a step should take {then:.3g} s instead of {now:.3g} s"
