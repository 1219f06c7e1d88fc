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
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightning_megapar.config import ConfigError
from lightning_megapar.data_parallel.units import units_of

_CALLBACK = "_root_post_backward_final_callback"


def _untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that ``module.compile()`` does not trace.

    That compiles a module's call with its hooks, and what a traced hook notes would be lost.
    """

    @wraps(hook)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            hook_alone = torch._dynamo.disable(hook, recursive=True, reason="a hook of sharded units")
            return hook_alone(*args, **kwargs)
        return hook(*args, **kwargs)

    return called


class ZeroUnits:
    """The FSDP2 units of a stage.

    Args:
        module: this rank's share of the user's module, on its device.
        blocks: the stack's blocks (those of other stages own no parameters and are left out).
        mesh: the data ranks; two-dimensional (replicas, shards) for hybrid sharding.
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
        """Units that have been called; FSDP2 sets others up by halves only."""
        self.regathered: set[FSDPModule] = set()
        """Units that stage 3 gathers again for each backward."""
        self._shards: dict[FSDPModule, nn.Parameter] = {}
        self._is_connected = False
        self._order = _Order()
        on_gpu = mesh.device_type == "cuda"
        policy = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()
        for owners in units_of(module, blocks, stage):
            alone = len(owners) == 1
            again = stage == 3 and alone
            unit = owners[0] if alone else _Together(owners)
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
                _keep_containers(unit)
            else:
                _gather_for(owners, unit)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
            # Itself, that is nothing: left alone FSDP2 would gather what ran before, even for another microbatch.
            unit.set_modules_to_backward_prefetch([unit])
            if not on_gpu and hasattr(unit, "_set_unshard_async_op"):
                unit._set_unshard_async_op(True)  # without streams only then a gather runs behind a computation
            if mixed_precision is not None:
                unit.register_forward_pre_hook(partial(_accumulate_in, mixed_precision.reduce_dtype))
            self._shards[unit] = next(unit.parameters())
            self.units.append(unit)
            if again:
                self.regathered.add(unit)
            self.users.append(_users(owners, chunks))

    @_untraced
    def _before_forward(self, unit: Any, _: Any) -> None:
        if not self._is_connected:
            self._is_connected = True
            _share_communication(self.units)
        self.called.add(unit)
        if torch._C._current_graph_task_id() < 0:  # not recomputed in a backward
            self._order.note(unit)

    def parameter_ids(self) -> set[int]:
        """``id`` of every parameter that FSDP2 manages."""
        return {id(p) for unit in self.units for p in unit.parameters()}  # type: ignore[attr-defined]

    def is_sharded(self, unit: FSDPModule) -> bool:
        """Whether a unit is known to have let go of gathered parameters."""
        return next(unit.parameters()) is self._shards[unit]  # type: ignore[attr-defined]

    def used_by(self, chunk: int) -> Iterator[tuple[FSDPModule, frozenset[int]]]:
        """Units that have been called and can get gradients from a chunk's backward, in one order on all ranks.

        With each all the chunks from which it can.
        """
        for unit, users in zip(self.units, self.users):
            if unit in self.called and chunk in users:
                yield unit, users

    def begin_forward(self) -> None:
        """A microbatch is about to run through a chunk: what it calls first is not prefetched by what ran before."""
        self._order.previous = None

    def hold(self, reduces: bool) -> None:
        """Before a step: what the ends of its backwards do until a reduction says otherwise.

        Args:
            reduces: whether FSDP2's hooks reduce gradients; without, they stay where they are.
        """
        self._order.apply()
        for unit in self.units:
            switch(unit, reduces, unit in self.regathered)

    def end_backward(self) -> None:
        """After a backward of somebody's own, outside of a schedule: reduce what FSDP2's hooks have not."""
        for unit in self.units:
            if unit in self.called:
                switch(unit, True, True)
                unit.set_is_last_backward(True)
                end_backward(unit)

    def forget(self) -> None:
        """Drop the gradients of a window that was left before its end; collective over the data ranks."""
        for unit in self.units:
            if unit in self.called:
                unit.unshard()
                for parameter in unit.parameters():  # type: ignore[attr-defined]
                    parameter.grad = None
                unit.reshard()

    def settle(self) -> None:
        """Before a step of any kind: drop what was gathered ahead and never called for.

        A forward that leaves out a module which mostly follows (one of validation, or of somebody's hook) has started
        its gather; weights may be others by the time of the next call.
        """
        for unit in self.units:
            if any(group._all_gather_result is not None for group in _groups_of(unit._get_fsdp_state())):
                unit.unshard()  # waits for the gather that runs, and starts none
                unit.reshard()

    def reshard(self) -> None:
        """Let go of parameters that a forward without a backward left gathered (the module then shows its shards)."""
        self.settle()
        for unit in self.units:
            unit.reshard()


class _Order:
    """Which unit is called after which within a chunk: the next one is gathered while the one before computes."""

    def __init__(self) -> None:
        self.previous: FSDPModule | None = None
        self._next: dict[FSDPModule, FSDPModule | None] = {}
        self._changed = False

    def note(self, unit: FSDPModule) -> None:
        before, self.previous = self.previous, unit
        if before is None or isinstance(before, _Together) or isinstance(unit, _Together):
            return
        if self._next.get(before, before) in (unit, None):
            return
        # A unit with several successors, or one of several before the same, has none that could be counted on.
        taken = any(after is unit for after in self._next.values())
        self._next[before] = None if before in self._next or taken or unit is before else unit
        self._changed = True

    def apply(self) -> None:
        """Between steps: tell FSDP2."""
        if not self._changed:
            return
        self._changed = False
        for unit, after in self._next.items():
            unit.set_modules_to_forward_prefetch([] if after is None else [after])
            if after is not None:
                after.set_modules_to_backward_prefetch([unit])


def switch(unit: FSDPModule, reduces: bool, reshards: bool) -> None:
    """What the end of a backward does with a unit: whether it reduces gradients, and lets go of parameters."""
    unit.set_requires_gradient_sync(reduces)
    unit.set_reshard_after_backward(reshards)
    unit.set_is_last_backward(False)  # sums that are started are waited for in the end


def end_backward(unit: FSDPModule) -> None:
    """What FSDP2 does with a unit at the end of a backward, whether or not it has seen one.

    Each unit is a root of its own. The callback, which torch's own pipelining calls as well
    (``torch.distributed.pipelining.stage``), runs the unit's post-backward if no hook has; a second call finds no
    gradients and reduces nothing.
    """
    getattr(unit._get_fsdp_state(), _CALLBACK)()


def _share_communication(units: Sequence[FSDPModule]) -> None:
    """Give all units the streams and buffers of the first.

    FSDP2 keeps what a reduction sends until the next reduction of the same root: with a root for each unit, copies of
    all gradients would stay.
    """
    states: list[Any] = [unit._get_fsdp_state() for unit in units]
    for state in states:
        state._lazy_init()
        context = state._comm_ctx = states[0]._comm_ctx
        for group in _groups_of(state):
            group.comm_ctx = context


def _groups_of(state: Any) -> list[Any]:
    """FSDP2's groups of parameters of a unit; torch 2.11 knows one alone."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [state._fsdp_param_group] if groups is None else groups


@_untraced
def _accumulate_in(dtype: torch.dtype | None, unit: Any, _: Any) -> None:
    """Sum the gathered parameters' gradients in the reduction's dtype from the first microbatch on.

    FSDP2 would leave those that waited (see :mod:`lightning_megapar.layers.deferral`) in the parameters' own, and
    refuses to reduce gradients of two dtypes.
    """
    for parameter in unit.parameters():
        if parameter.requires_grad and parameter.grad_dtype != dtype:
            parameter.grad_dtype = dtype


def _refuse_unknown(unit: FSDPModule, stage: int) -> None:
    state = getattr(unit, "_get_fsdp_state", lambda: None)()
    if not callable(getattr(state, _CALLBACK, None)) or not hasattr(state, "_comm_ctx"):
        raise ConfigError(
            f"zero_stage={stage}: FSDP2 of torch {torch.__version__} has no FSDPState.{_CALLBACK}, by which it is told "
            "that gradients are complete. Valid values: zero_stage=0, or a torch from 2.11 to 2.13"
        )


class _Together(nn.Module):
    """Modules that share parameters, as one unit. It is no part of the user's module; calling it gathers them."""

    def __init__(self, owners: Sequence[nn.Module]) -> None:
        super().__init__()
        self.owners = nn.ModuleList(owners)

    def forward(self) -> None:
        """Nothing: FSDP2's hooks do it."""


def _gather_for(owners: Sequence[nn.Module], unit: nn.Module) -> None:
    """Gather ``unit`` before any part of ``owners`` that has parameters of its own is called."""

    @_untraced
    def gather(*_: Any) -> None:
        unit()

    for part in {id(part): part for owner in owners for part in owner.modules()}.values():
        if next(part.parameters(recurse=False), None) is not None:
            part.register_forward_pre_hook(gather, prepend=True)


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


def _keep_containers(unit: nn.Module) -> None:
    """Call a unit with the very lists and dicts that it was called with.

    FSDP2 copies the containers among the arguments, so that what a block puts into a dict that all blocks share would
    be lost without a word.
    """
    given: list[tuple[dict[int, Any], dict[str, Any]]] = []

    @_untraced
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions = {index: value for index, value in enumerate(args) if isinstance(value, (list, dict))}
        given[:] = [(positions, {key: value for key, value in kwargs.items() if isinstance(value, (list, dict))})]

    @_untraced
    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions, named = given.pop()
        if not positions and not named:
            return None
        return tuple(positions.get(index, value) for index, value in enumerate(args)), {**kwargs, **named}

    unit.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    unit.register_forward_pre_hook(after, with_kwargs=True)
