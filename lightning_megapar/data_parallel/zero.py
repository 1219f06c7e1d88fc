"""ZeRO stages 1 to 3 on FSDP2 (arXiv 1910.02054): who holds what of parameters, gradients and optimizer state.

FSDP2 gives each unit a shard of its parameters; optimizer state follows the shards. What differs by stage:

=====  ==========================================  ======================================
stage  parameters                                  gradients
=====  ==========================================  ======================================
1      gathered once in an accumulation window     reduced once, at its end
2      gathered once in an accumulation window     reduced after each microbatch
3      gathered for each forward and backward      reduced after each microbatch
=====  ==========================================  ======================================

:mod:`lightning_megapar.data_parallel.formulas` has what that costs in collectives and bytes.

Units are the local blocks and the modules beside the stack, each on its own, because a pipelined step leaves by an
exception and a wrapped root would never see the end of its forward. They share one communication context, as the parts
of one FSDP2 root do: what is sent waits in one buffer and not in one for each unit. Modules beside the stack that share
parameters are one unit, which stands outside of the user's module, gathers when one of them is called, and stays
gathered to the end of the step at every stage. The gradient's divide factor is 1: the loss owns the scale.

**When gradients are reduced** is for the schedule to say, see :mod:`lightning_megapar.data_parallel.reduction`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightning_megapar.config import ConfigError
from lightning_megapar.data_parallel.gathers import (
    GatherEach,
    GatherOnce,
    Gathers,
    drop_pending,
    groups_of,
    is_gathered,
)
from lightning_megapar.data_parallel.sums import UnitSums, Whole, are_alike, end_backward, missing
from lightning_megapar.data_parallel.unit_hooks import (
    Together,
    accumulate_in,
    gather_for,
    keep_changes,
    keep_containers,
    untraced,
)
from lightning_megapar.data_parallel.units import units_of


class ZeroUnits:
    """The FSDP2 units of a stage.

    Args:
        module: this rank's share of the user's module, on its device.
        blocks: the stack's blocks (those of other stages own no parameters and are left out).
        mesh: the data ranks; two-dimensional (replicas, shards) for hybrid sharding.
        group: all of them.
        chunks: for each chunk of the rank the modules that live on it alone; none for a rank of one chunk.
        stage: of ZeRO, 1 to 3.
        offload: keep shards, their gradients and with them the optimizer's state in host memory.
        mixed_precision: dtypes of gathered parameters and of reductions; by default those of the parameters.

    Raises:
        ConfigError: see :func:`~lightning_megapar.data_parallel.units.units_of`; also for a torch whose FSDP2 cannot be
            told when to reduce.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
        chunks: Sequence[Collection[nn.Module]] = (),
        *,
        stage: int = 1,
        offload: bool = False,
        mixed_precision: MixedPrecisionPolicy | None = None,
    ) -> None:
        self.stage = stage
        self.units: list[FSDPModule] = []
        self.users: list[frozenset[int]] = []
        """For each unit the chunks whose backward can give it gradients."""
        self.called: set[FSDPModule] = set()
        """Units that have been called."""
        self.regathered: set[FSDPModule] = set()
        """Units that stage 3 gathers again for each backward."""
        self.calls_were_alike = True
        """Whether all data ranks called units in one order in the last step, where they must."""
        self._is_connected = False
        self._stays_gathered = False
        """Whether a step began with parameters that were gathered before it."""
        self._group = group
        self._device = torch.device(mesh.device_type)
        on_gpu = mesh.device_type == "cuda"
        policy = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()
        for owners in units_of(module, blocks, stage):
            alone = len(owners) == 1
            again = stage == 3 and alone
            unit = owners[0] if alone else Together(owners)
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=again,
                mp_policy=mixed_precision or MixedPrecisionPolicy(),
                offload_policy=policy,
            )
            assert isinstance(unit, FSDPModule)
            _refuse_unknown(unit, stage)
            unit.register_forward_pre_hook(self._before_forward, prepend=True)
            if alone:
                keep_containers(unit)
            else:
                gather_for(owners, unit)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
            # Itself, that is nothing: left alone FSDP2 would gather what ran before, even for another microbatch.
            unit.set_modules_to_backward_prefetch([unit])
            if not on_gpu and hasattr(unit, "_set_unshard_async_op"):
                unit._set_unshard_async_op(True)  # without streams only then a gather runs behind a computation
            if mixed_precision is not None:
                unit.register_forward_pre_hook(partial(accumulate_in, mixed_precision.reduce_dtype))
            self.units.append(unit)
            if again:
                self.regathered.add(unit)
            self.users.append(_users(owners, chunks))
        self._sums = UnitSums(self._in_order(module)[::-1], group, self._device)
        made: type[GatherOnce] | type[GatherEach] = GatherEach if stage == 3 else GatherOnce
        self._gathers: Gathers = made(self._sums.order[::-1])

    def _in_order(self, module: nn.Module) -> list[FSDPModule]:
        """The units in the order in which a module registers them, which mostly is that of its forward."""
        places = {id(part): place for place, part in enumerate(module.modules())}

        def place(unit: FSDPModule) -> int:
            return places[id(unit.owners[0] if isinstance(unit, Together) else unit)]

        return sorted(self.units, key=place)

    @untraced
    def _before_forward(self, unit: Any, _: Any) -> None:
        self._connect()
        self.called.add(unit)
        if torch._C._current_graph_task_id() < 0:  # not recomputed in a backward
            self._gathers.before_call(unit)

    def _connect(self) -> None:
        if not self._is_connected:
            self._is_connected = True
            _share_communication(self.units)

    def parameter_ids(self) -> set[int]:
        """``id`` of every parameter that FSDP2 manages."""
        return {id(p) for unit in self.units for p in unit.parameters()}  # type: ignore[attr-defined]

    def used_by(self, chunk: int) -> Iterator[FSDPModule]:
        """Units that can get gradients from a chunk's backward."""
        for unit, users in zip(self.units, self.users):
            if chunk in users and self.takes_part(unit):
                yield unit

    def takes_part(self, unit: FSDPModule) -> bool:
        """Whether a unit is reduced: at stage 3 only if it has been called, which is the same on all data ranks."""
        return self.stage < 3 or unit in self.called

    def begin_step(self, ahead: bool = True) -> None:
        """Before a step of any kind, and again behind a rehearsal; ``ahead`` unless its calls are somebody's own."""
        self._stays_gathered = any(map(is_gathered, self.units))
        self._gathers.begin_step(ahead)
        self._sums.begin_step(self.regathered)

    def observe(self, observer: Callable[[list[Whole]], None] | None) -> None:
        """Show each unit's gradients on this rank alone, just before they are summed, or no longer."""
        self._sums.observe = observer

    def begin_forward(self) -> None:
        """A microbatch is about to run through a chunk."""
        self._gathers.begin_forward()

    def open(self, units: Collection[FSDPModule]) -> None:
        """The coming backward completes gradients of ``units``, which are reduced within it where that can be.

        Every gather of the step comes before, on all data ranks: both are collectives of one group.
        """
        self.complete()
        # What other chunks use as well may get nothing from this one, and must not keep the others waiting.
        shared = {unit for unit, users in zip(self.units, self.users) if len(users) > 1}
        self._sums.open([unit for unit in units if unit not in shared], [unit for unit in units if unit in shared])

    def close(self) -> None:
        """That backward is over: reduce those that have not been."""
        self._sums.close()

    def complete(self) -> None:
        """Every unit has been called that this rank calls in the step: gather what others have called."""
        self._connect()
        self._gathers.complete()

    def finish(self, reshards: bool) -> None:
        """A step's sums have been started: settle what has a gradient, wait, and let go of parameters if ``reshards``.

        Collective over the data ranks.
        """
        self._gathers.end_step()
        digest = self._gathers.digest ^ self._sums.digest if self.stage == 3 else 0
        self.calls_were_alike = self._sums.agree(digest)
        if reshards and self._stays_gathered:
            self._keep_changes()
        end_backward([unit for unit in self.units if self.takes_part(unit)])
        if reshards:
            self.reshard()

    def whole_backward(self, backward: Callable[[], None]) -> None:
        """Run a backward of somebody's own, outside of a schedule, and reduce what it gives."""
        self._sums.begin_step(self.regathered)
        self.open([unit for unit in self.units if self.takes_part(unit)])
        backward()
        self.close()
        self._keep_changes()
        self.finish(reshards=True)

    def finish_forward(self) -> None:
        """A step that reduces nothing is over; collective over the data ranks."""
        self.complete()
        self._gathers.end_step()
        if self.stage == 3:
            self.calls_were_alike = are_alike(self._gathers.digest, self._group, self._device)

    def forget(self) -> None:
        """Drop the gradients of a window that was left before its end."""
        self._sums.forget()
        self.reshard()

    def let_go(self) -> None:
        """Between steps: as :meth:`reshard`, and what was changed in gathered parameters is changed in the shards."""
        self._keep_changes()
        self.reshard()

    def reshard(self) -> None:
        """Let go of parameters (the module then shows its shards); what was gathered may be out of date."""
        drop_pending(self.units)
        for unit in self.units:
            unit.reshard()
        self._stays_gathered = False
        self._gathers.restart(self._sums.order[::-1])

    def _keep_changes(self) -> None:
        """Carry over into the shards what somebody has written into gathered parameters between two steps.

        A hook that clamps or averages weights within an accumulation window, or behind a validation, meets them whole.
        """
        for unit in filter(is_gathered, self.units):
            for group in groups_of(unit):
                for parameter in group.fsdp_params:
                    keep_changes(parameter)


def _share_communication(units: Sequence[FSDPModule]) -> None:
    """Give all units the streams and buffers of the first.

    FSDP2 keeps what a reduction sends until the next reduction of the same root: with a root for each unit, copies of
    all gradients would stay.
    """
    states: list[Any] = [unit._get_fsdp_state() for unit in units]
    for unit, state in zip(units, states):
        state._lazy_init()
        context = state._comm_ctx = states[0]._comm_ctx
        for group in groups_of(unit):
            group.comm_ctx = context


def _refuse_unknown(unit: FSDPModule, stage: int) -> None:
    unknown = missing(unit)
    if unknown:
        raise ConfigError(
            f"zero_stage={stage}: FSDP2 of torch {torch.__version__} has no {', '.join(unknown)}, by which it is told "
            "that gradients are complete. Valid values: zero_stage=0, or a torch from 2.11 to 2.13"
        )


def _users(owners: Sequence[nn.Module], chunks: Sequence[Collection[nn.Module]]) -> frozenset[int]:
    """The chunks that call a unit: those on which its parts live, all of them for a part that lives nowhere alone."""
    everywhere = frozenset(range(max(1, len(chunks))))
    homes: dict[int, set[int]] = {}
    for chunk, modules in enumerate(chunks):
        for module in modules:
            for part in module.modules():
                homes.setdefault(id(part), set()).add(chunk)
    parts = (part for owner in owners for part in owner.modules() if part._parameters)
    return frozenset().union(*(homes.get(id(part), everywhere) for part in parts))
