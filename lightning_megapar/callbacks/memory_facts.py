"""What a report on memory has to know of a run: tensors, blocks and the layout, under any strategy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megapar.data_parallel.gathers import groups_of
from lightning_megapar.memory import prediction
from lightning_megapar.memory.block_costs import BlockCostsWatch
from lightning_megapar.memory.prediction import Activations, ParameterFacts, States, ZeroLayout
from lightning_megapar.memory.recomputation import InFlight
from lightning_megapar.memory.report import RankMemory, device_bytes
from lightning_megapar.memory.timeline import (
    ACTIVATIONS,
    GRADIENTS,
    MESSAGES,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARY,
    Timeline,
)
from lightning_megapar.pipeline.cutting.stages import largest_stacks
from lightning_megapar.pipeline.cutting.stand_ins import StandIn

_WIDTH_IN_STEP = 2
"""Bytes of an element of the weights that steps of ``bf16-true`` work with."""


class RankFacts:
    """A rank of a run, as it is now.

    Args:
        trainer: in ``fit``.
        module: this rank's share.
    """

    def __init__(self, trainer: Any, module: nn.Module) -> None:
        self.trainer, self.module = trainer, module
        self.strategy: Any = trainer.strategy
        self.device: torch.device = self.strategy.root_device
        self.is_ours = hasattr(type(self.strategy), "in_flight")
        self.prepared: Any = self.strategy.prepared if self.is_ours else None

    @property
    def deferral(self) -> Any:
        """Where weight gradients wait, ``None`` where they do not."""
        return None if self.prepared is None else self.prepared.deferral

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 gathers parameters."""
        return self.prepared is not None and self.prepared.zero is not None

    @property
    def planned_measures(self) -> dict[str, Any]:
        """What blocks were measured to cost when their recomputation was planned."""
        found = None if self.prepared is None else self.prepared.recomputation
        return {} if found is None else found.measures

    def is_settled(self) -> bool:
        """Whether what blocks recompute stays what it is; collective over all ranks where it is planned."""
        found = None if self.prepared is None else self.prepared.recomputation
        if found is None or not found.config.is_planned:
            return True
        own = found.chosen is not None or not found.choices()
        return bool(self.strategy.reduce_boolean_decision(own, all=True))

    def blocks(self) -> dict[str, nn.Module]:
        """Name -> block: those that may be recomputed, else those of the pipeline, else of the largest stack."""
        names: Iterable[str] = ()
        if self.prepared is not None and self.prepared.recomputation is not None:
            names = self.prepared.recomputation.choices()
        elif self.prepared is not None and self.prepared.plan is not None:
            names = self.prepared.plan.blocks
        else:
            names = [
                f"{path}.{name}" if path else name
                for path in largest_stacks(self.module)
                for name, _ in self.module.get_submodule(path).named_children()
            ]
        found = {name: self.module.get_submodule(name) for name in dict.fromkeys(names)}
        return {
            name: block
            for name, block in found.items()
            if not isinstance(block, StandIn) and next(block.parameters(), None) is not None
        }

    def tensors(self) -> dict[str, list[Tensor]]:
        """What is there between two steps, by category."""
        state = [value for one in self.trainer.optimizers for value in _tensors_in(one.state)]
        return {
            PARAMETERS: [*self.module.parameters(), *self.module.buffers()],
            OPTIMIZER: state,
            GRADIENTS: [one.grad for one in self.module.parameters() if one.grad is not None],
        }

    def leaves(self) -> list[Tensor]:
        """Tensors that gradients arrive at: parameters, and FSDP2's whole ones."""
        found: list[Tensor] = list(self.module.parameters())
        for unit in self.prepared.zero.units if self.is_sharded else ():
            for group in groups_of(unit):
                found += [one._unsharded_param for one in group.fsdp_params if hasattr(one, "_unsharded_param")]
        return [one for one in found if one.requires_grad and one.is_leaf]

    def _coordinates(self) -> dict[str, int]:
        return self.strategy.layout.coordinates(self.strategy.global_rank) if self.is_ours else {}

    @property
    def place(self) -> str:
        """Coordinates of this rank on axes that are split."""
        axes = self._coordinates().items()
        return ", ".join(f"{axis} {at}" for axis, at in axes if getattr(self.strategy.layout, axis) > 1)

    # -- what is predicted --------------------------------------------------------------------------------------------

    def states(self) -> States:
        """Of parameters, gradients and the optimizer."""
        if self.prepared is None:
            parameters = [ParameterFacts.of(one) for one in self.module.parameters()]
            zero = ZeroLayout()
        else:
            records = self.strategy.stepper.all_parameters
            parameters = [ParameterFacts.of(one.parameter, one.data_sharded) for one in records]
            zero = self.zero()
        width = _WIDTH_IN_STEP if self.is_ours and self.precision == "bf16-true" else 0
        tensors = prediction.state_tensors(self.trainer.optimizers)
        # In plain Lightning gradients of all batches of a window come together.
        accumulate = self.trainer.accumulate_grad_batches if self.is_ours else 1
        return prediction.states(parameters, zero, tensors, width, self._units(), self.microbatches, accumulate)

    def _units(self) -> list[int]:
        if not self.is_sharded:
            return []
        places = {id(part): place for place, part in enumerate(self.module.modules())}
        units = sorted(self.prepared.zero.units, key=lambda unit: places.get(id(unit), 0))
        facts = [[ParameterFacts.of(one) for one in unit.parameters()] for unit in units]
        return [sum(one.elements * one.width for one in unit if one.is_trained) for unit in facts]

    def zero(self) -> ZeroLayout:
        """How data ranks share out what they hold; under our strategy."""
        mesh, config = self.strategy.mesh, self.strategy.settled
        stage = config.zero_stage if self.prepared.zero is not None else 0
        offloaded = config.offload_optimizer and self.device.type == "cuda"
        return ZeroLayout(stage, mesh.size("data"), mesh.shards, offloaded)

    def in_flight(self) -> InFlight:
        """Microbatches that are alive at once."""
        return self.strategy.in_flight if self.is_ours else InFlight((((1,), (0,)),), (False,))

    def activations(self, costs: BlockCostsWatch, option: str = "") -> Activations | None:
        """Of the blocks, if all of them could be measured.

        Args:
            costs: of the blocks.
            option: that all of them have, instead of their own.
        """
        held = self.in_flight()
        if self.prepared is not None and self.prepared.cut is not None:
            chunks = [[n for n in costs.measures if n in chunk.local_modules] for chunk in self.prepared.cut.chunks]
        else:
            chunks = [list(costs.measures)]
        if len(costs.measures) < len(self.blocks()) or len(chunks) != len(held.microbatches):
            return None
        choices = self.strategy.recompute_choices if self.is_ours else {}
        choices = dict.fromkeys(costs.measures, option) if option else choices
        batches = self.microbatches * self.trainer.accumulate_grad_batches
        calls = {name: max(1, number // batches) for name, number in costs.calls.items()}
        return prediction.activations(chunks, costs.measures, choices, held, costs.outside_bytes, calls)

    @property
    def microbatches(self) -> int:
        """Pieces of a batch."""
        return int(self.strategy.stepper.num_microbatches) if self.is_ours else 1

    @property
    def is_plain(self) -> bool:
        """Whether the user's step is the whole step: then gradients of the step before are there in its forward."""
        if not self.is_ours:
            return True
        alone = self.strategy.layout.world_size == 1 and self.microbatches == 1
        return alone and self.precision != "bf16-true" and self.strategy.loss_scale is None

    @property
    def precision(self) -> str:
        """Lightning's word."""
        return str(getattr(self.strategy.precision_plugin, "precision", "32-true"))

    def _gradients_beside(self, gradients: int, held: InFlight) -> int:
        """Bytes of gradients that are there when most activations are."""
        goes_back = sum(held.microbatches) < self.microbatches * len(held.microbatches)
        if self.trainer.accumulate_grad_batches == 1:
            return gradients if self.is_plain or goes_back else 0
        return gradients if goes_back or not self.is_ours else gradients // 2

    def _messages(self, costs: BlockCostsWatch) -> int:
        """Of the pipeline: a copy of a boundary that is sent, and what is being received from either side."""
        if self.prepared is None or self.prepared.cut is None:
            return 0
        size = max((measure.output_bytes for measure in costs.measures.values()), default=0)
        stages, place = self.strategy.layout.pipeline, self.strategy.mesh.coordinate("pipeline")
        ends = 2 * (place < stages - 1) + (place > 0)
        return size * ends * len(self.prepared.cut.chunks)

    # -- all of it ---------------------------------------------------------------------------------------------------

    def memory(self, step: int, timeline: Timeline, costs: BlockCostsWatch) -> RankMemory:
        """This rank's report on a step that has just ended."""
        states, kept, held = self.states(), self.activations(costs), self.in_flight()
        messages = self._messages(costs)
        predicted = {PARAMETERS: states.parameters, GRADIENTS: states.gradients}
        if states.optimizer is not None:
            predicted[OPTIMIZER] = states.optimizer
        predicted[MESSAGES] = max(messages + states.gathered, states.buffers)
        if kept is not None:
            predicted |= {ACTIVATIONS: kept.kept, TEMPORARY: kept.transient}
        arena = self.strategy.stepper.runtime.arena if self.is_ours else None
        return RankMemory(
            rank=int(self.trainer.global_rank),
            place=self.place,
            stage=self._coordinates().get("pipeline", 0),
            step=step,
            measured=timeline.most,
            measured_peak=timeline.peak_bytes,
            predicted=predicted,
            predicted_peak=prediction.peak(states, kept, messages, self._gradients_beside(states.gradients, held)),
            layers=timeline.layers,
            predicted_layers={} if kept is None else kept.layers,
            microbatches=held.microbatches,
            device=device_bytes(self.device),
            arena=None if arena is None else arena.stats(),
            timeline=timeline,
        )


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in _tensors_in(one)]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in _tensors_in(one)]
    return []
