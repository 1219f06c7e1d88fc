"""A rank's blocks and what each of them recomputes; a plan of it is made from the first training step.

Under ``mode="auto"`` blocks recompute everything in the first step, in which each kind of block is measured at its
first call. Between two steps the plan is made and the blocks change what they keep: nothing else depends on it. A step
in which a block gets larger inputs than it was measured with is followed by another such step, and another plan.
Without a budget that is given, planning waits for an optimizer step: what the device has left then is the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_megapar.config import ConfigError
from lightning_megapar.memory.arena import Arena
from lightning_megapar.memory.blocks import ALL, INPUTS, OFFLOAD, BlockForward, choose_for, elements_of
from lightning_megapar.memory.chain import ChainCosts
from lightning_megapar.memory.kinds import KindMeasures, StateKept
from lightning_megapar.memory.measure import BlockMeasure, Postponed
from lightning_megapar.memory.moments import Moment, peak_of, plan_for_all
from lightning_megapar.memory.offload import OffloadSaved
from lightning_megapar.memory.options import MODES, RecomputeConfig
from lightning_megapar.memory.recompute import RecomputePlan

Agree = Callable[[list[float]], list[float]]
"""The largest of each number over the ranks that have to recompute alike; collective over them."""


@dataclass(frozen=True)
class InFlight:
    """What a schedule keeps alive on a rank.

    Args:
        moments: for each moment that may need most, for each chunk the microbatches that are between their forward and
            their backward (of the inputs), and those that are between that and the backward of their weights.
        keeps_outputs: for each chunk whether its last block's result is kept until its gradient comes.
    """

    moments: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    keeps_outputs: tuple[bool, ...]

    @property
    def microbatches(self) -> tuple[int, ...]:
        """For each chunk the most between forward and backward, at whatever moment."""
        return tuple(max(counts) for counts in zip(*(alive for alive, _ in self.moments), strict=True))


@dataclass(frozen=True)
class ChosenPlan:
    """What a rank's blocks keep.

    Args:
        names: of the blocks, in the order of their calls.
        plan: an option for each.
        budget_bytes: that it was made for.
    """

    names: tuple[str, ...]
    plan: RecomputePlan
    budget_bytes: int


class Recomputation:
    """What the blocks of a rank recompute.

    Args:
        config: what the user wants.
        chunks: name -> block, of each chunk of this rank.
        device: where they compute.
        state_kept: leaves a module as it was around runs that do not count.
        postponed: where weight gradients wait under schedules that split the backward.
        arena: where kept inputs come from.
    """

    def __init__(
        self,
        config: RecomputeConfig,
        chunks: Sequence[Mapping[str, nn.Module]],
        device: torch.device,
        state_kept: StateKept,
        postponed: Postponed | None = None,
        arena: Arena | None = None,
    ) -> None:
        self.config = config
        self.chosen: ChosenPlan | None = None
        """The plan, when there is one."""
        self.is_paused = False
        """Whether calls of blocks are of no step, such as those of a rehearsal."""
        self._chunks = [list(chunk) for chunk in chunks]
        self._kinds = KindMeasures(device, state_kept, postponed, (ALL, INPUTS, *config.options))
        self._measures: dict[str, BlockMeasure] = {}
        self._calls: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._is_due = False
        option = INPUTS if config.is_planned else MODES[config.mode]
        blocks = {name: block for chunk in chunks for name, block in chunk.items()}
        self._forwards = dict(zip(blocks, choose_for(blocks.items(), option)))
        offload = OffloadSaved() if OFFLOAD in config.options else None
        for place, forward in enumerate(self._forwards.values()):
            forward.offload, forward.place, forward.arena = offload, place, arena

    def choices(self) -> dict[str, str]:
        """The option of each block now."""
        return {name: forward.option for name, forward in self._forwards.items()}

    @property
    def measures(self) -> dict[str, BlockMeasure]:
        """What was measured of each block, in the order of their first calls; empty before."""
        return dict(self._measures)

    # -- around training steps -----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Before a training step: measure in it, if need be."""
        if self.config.is_planned and not self._measures:
            for name, forward in self._forwards.items():
                forward.option = INPUTS
                forward.calls = 0
                forward.measure = partial(self._note, name)
        for forward in self._forwards.values():
            forward.most_elements = 0

    def end_step(self) -> None:
        """Behind a training step."""
        for name in self._measures.keys() - self._calls.keys():
            self._calls[name] = self._forwards[name].calls  # of the step that was measured in, not of all since
        for name, forward in self._forwards.items():
            forward.measure = None
            if self._sizes and forward.most_elements > self._sizes.get(name, 0):
                self._is_due = True
        if self._is_due and self.chosen is not None:
            self._measures.clear()
            self._calls.clear()
            self._sizes.clear()
            self._is_due, self.chosen = False, None

    @property
    def can_be_planned(self) -> bool:
        """Whether a plan can be made, and has not been."""
        return self.config.is_planned and self.chosen is None and bool(self._measures)

    def plan(self, budget_bytes: int, held: InFlight, agree: Agree, microbatches: int) -> ChosenPlan:
        """Make the plan and follow it; between two steps, collective over the ranks that recompute alike.

        Args:
            budget_bytes: of this rank.
            held: by the schedule.
            agree: see :data:`Agree`.
            microbatches: of the step that was measured in.

        Raises:
            ConfigError: no plan is within the budget.
        """
        names = [name for chunk in self._order() for name in chunk]
        lines, moments = self._lines(self._agreed(names, agree, microbatches), held)
        allowed = [[costs.only(self.config.options) for costs in line] for line in lines]
        try:
            plan = plan_for_all(allowed, budget_bytes, moments)
        except ConfigError as error:
            most = max(max(one.microbatches) for one in moments)
            waits = max(one.other_bytes for one in moments)
            also = f", {waits} bytes of it for weight gradients that wait" if waits else ""
            raise ConfigError(
                f"recompute: {error} (for the {len(names)} blocks of this rank, of which up to {most} microbatches are "
                f"in flight{also})"
            ) from None
        for name, option in zip(names, plan.choices):
            self._forwards[name].option = option
        self.chosen = ChosenPlan(tuple(names), plan, budget_bytes)
        return self.chosen

    def least_bytes(self, held: InFlight, agree: Agree, microbatches: int) -> int:
        """What blocks take that recompute everything; arguments as for :meth:`plan`."""
        names = [name for chunk in self._order() for name in chunk]
        lines, moments = self._lines(self._agreed(names, agree, microbatches), held)
        return peak_of(lines, [INPUTS] * len(names), moments)

    def _order(self) -> list[list[str]]:
        """Names of the measured blocks of each chunk, in the order of their first calls."""
        return [[name for name in self._measures if name in set(chunk)] for chunk in self._chunks]

    def _lines(self, found: Mapping[str, BlockMeasure], held: InFlight) -> tuple[list[list[ChainCosts]], list[Moment]]:
        """Costs of the blocks of each chunk, and the moments that may need most."""
        lines, waits = [], []
        for chunk, keeps in zip(self._order(), held.keeps_outputs):
            line = [found[name].costs for name in chunk]
            if keeps and line:
                line[-1] = line[-1].with_kept(found[chunk[-1]].output_bytes)
            lines.append(line)
            waits.append(sum(found[name].waiting_bytes for name in chunk))
        moments = [
            Moment(alive, sum(number * size for number, size in zip(waiting, waits))) for alive, waiting in held.moments
        ]
        return lines, moments

    def _agreed(self, names: list[str], agree: Agree, microbatches: int) -> dict[str, BlockMeasure]:
        """What was measured, the largest of all ranks that recompute alike."""
        flat: list[float] = []
        for name in names:
            flat += self._measures[name].numbers(max(1, -(-self._calls[name] // microbatches)))
        numbers = iter(agree(flat))
        return {name: self._measures[name].with_numbers(numbers) for name in names}

    def _note(self, name: str, forward: BlockForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A block's first call in a step that is measured in."""
        if self.is_paused:
            forward.measure = partial(self._note, name)
            return
        self._measures[name] = self._kinds.of(forward, args, kwargs)
        forward.calls = 1
        self._sizes[name] = elements_of(args, kwargs)
