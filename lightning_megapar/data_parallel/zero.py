"""ZeRO stage 1 on FSDP2: parameters stay gathered through a step, gradients are reduce-scattered once per step.

FSDP2 gives each unit a shard of its parameters; optimizer state follows the shards. Units are the local blocks and the
modules beside the stack, each on its own, because a pipelined step leaves by an exception and a wrapped root would
never see the end of its forward. Modules beside the stack that share parameters are one unit, which stands outside of
the user's module and gathers when one of them is called. The gradient's divide factor is 1: the loss owns the scale.

**When gradients are reduced** is for the schedule to say. FSDP2 reduces a unit behind a backward that it sees, which
with several chunks on a rank is not the last one, and weight gradients that wait are computed without autograd. So
FSDP2 reduces nothing by itself through a step (:meth:`ZeroUnits.hold`); in the last batch of an accumulation window a
:class:`Reduction` reduces a unit when the last action has run of all chunks that use it:

* where that action is a whole backward, FSDP2's hooks are switched on for it, so that the sums run while it computes;
* whatever then still has gradients (weight gradients that waited, parts that the last microbatch left out, modules
  that are no unit of their own) is reduced after it, in the order of the units.

A step's sums are waited for at its end. Data ranks may have different numbers of microbatches (a ragged last batch)
and so finish their chunks in different orders; the order of the sums is that of a whole batch on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_megapar.config import ConfigError

_CALLBACK = "_root_post_backward_final_callback"


class ZeroUnits:
    """The FSDP2 units of a stage.

    Args:
        module: this rank's share of the user's module, on its device.
        blocks: the stack's blocks (those of other stages own no parameters and are left out).
        mesh: one-dimensional data mesh.
        chunks: for each chunk of the rank the modules that live on it alone; none for a rank of one chunk.

    Raises:
        ConfigError: see :func:`units_of`; also for a torch whose FSDP2 cannot be told when to reduce.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        mesh: DeviceMesh,
        chunks: Sequence[Collection[nn.Module]] = (),
    ) -> None:
        self.units: list[FSDPModule] = []
        self.users: list[frozenset[int]] = []
        """For each unit the chunks whose backward can give it gradients."""
        self.called: set[FSDPModule] = set()
        """Units that have been called; FSDP2 sets others up by halves only."""
        self._shards: dict[FSDPModule, nn.Parameter] = {}
        for owners in units_of(module, blocks):
            unit = owners[0] if len(owners) == 1 else _Together(owners)
            fully_shard(unit, mesh=mesh, reshard_after_forward=False)
            assert isinstance(unit, FSDPModule)
            if unit is owners[0]:
                _keep_containers(unit)
            else:
                _gather_for(owners, unit)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
            _refuse_unknown(unit)
            unit.register_forward_pre_hook(lambda module, _: self.called.add(module))
            self._shards[unit] = next(unit.parameters())
            self.units.append(unit)
            self.users.append(_users(owners, chunks))

    def parameter_ids(self) -> set[int]:
        """``id`` of every parameter that FSDP2 manages."""
        return {id(p) for unit in self.units for p in unit.parameters()}  # type: ignore[attr-defined]

    def is_sharded(self, unit: FSDPModule) -> bool:
        """Whether a unit is known to have let go of gathered parameters."""
        return next(unit.parameters()) is self._shards[unit]  # type: ignore[attr-defined]

    def hold(self) -> None:
        """Before a step: keep parameters gathered and gradients local until a :class:`Reduction` says otherwise."""
        for unit in self.units:
            _switch(unit, False)

    def end_backward(self) -> None:
        """After a backward of somebody's own, outside of a schedule: reduce what FSDP2's hooks have not."""
        for unit in self.units:
            if unit in self.called:
                _switch(unit, True)
                unit.set_is_last_backward(True)
                _end_backward(unit)

    def forget(self) -> None:
        """Drop the gradients of a window that was left before its end; collective over the data ranks."""
        for unit in self.units:
            if unit in self.called:
                unit.unshard()
                for parameter in unit.parameters():  # type: ignore[attr-defined]
                    parameter.grad = None
                unit.reshard()

    def reshard(self) -> None:
        """Let go of parameters that a forward without a backward left gathered (the module then shows its shards)."""
        for unit in self.units:
            unit.reshard()


class Reduction:
    """Reduces the gradients of one step, the last of an accumulation window, and lets go of gathered parameters.

    Args:
        zero: the units; :meth:`ZeroUnits.hold` was called before the step.
        order: this rank's chunks in the order in which a whole batch completes them, the same on all data ranks.
        early: let FSDP2's hooks reduce within a chunk's last backward. Only for schedules of whole backwards: with
            others the kind of the last action may differ between data ranks, and with it the order of the sums.
        observe: called with a unit before it is reduced; only without ``early``.
    """

    def __init__(
        self,
        zero: ZeroUnits,
        order: Sequence[int],
        early: bool,
        observe: Callable[[FSDPModule], None] | None = None,
    ) -> None:
        self._zero = zero
        self._observe = observe
        self._left = list(order)
        self._early = early
        self._complete: set[int] = set()
        self._reduced: set[int] = set()
        """Chunks after which units have been reduced: a beginning of ``order``."""
        self._hooked: set[FSDPModule] = set()
        """Units whose hooks may reduce them within a backward."""

    def before_last(self, chunk: int) -> None:
        """A chunk's last action comes next, and is a whole backward."""
        if self._early and self._left[:1] == [chunk]:
            for unit in self._due({*self._reduced, chunk}):
                _switch(unit, True)
                if not self._zero.is_sharded(unit):
                    self._hooked.add(unit)

    def after_last(self, chunk: int) -> bool:
        """A chunk's last action has run.

        Returns:
            whether gradients were reduced just now, and not within that action.
        """
        self._complete.add(chunk)
        was = len(self._left)
        while self._left and self._left[0] in self._complete:
            reduced = {*self._reduced, self._left.pop(0)}
            for unit in self._due(reduced):
                if unit in self._hooked and self._zero.is_sharded(unit):
                    continue  # a hook has done it: FSDP2 would now wait for the sum, instead of at the end
                if self._observe is not None:
                    self._observe(unit)
                _switch(unit, True)
                _end_backward(unit)
            self._reduced = reduced
        return len(self._left) < was and not self._early

    def finish(self) -> None:
        """Every action has run: wait for the sums."""
        for unit in self._zero.called:
            unit.set_requires_gradient_sync(False)  # nothing is left to be reduced
            unit.set_is_last_backward(True)
            _end_backward(unit)

    def _due(self, complete: Collection[int]) -> Iterator[FSDPModule]:
        """Units that have all gradients once these chunks are complete, and had not before."""
        for unit, users in zip(self._zero.units, self._zero.users):
            if unit in self._zero.called and users.issubset(complete) and not users.issubset(self._reduced):
                yield unit


def _switch(unit: FSDPModule, reduces: bool) -> None:
    """Whether the end of a backward reduces a unit's gradients and lets go of its parameters."""
    unit.set_requires_gradient_sync(reduces)
    unit.set_reshard_after_backward(reduces)
    unit.set_is_last_backward(not reduces)  # sums that are started are waited for in the end


def _end_backward(unit: FSDPModule) -> None:
    """What FSDP2 does with a unit at the end of a backward, whether or not it has seen one.

    Each unit is a root of its own. The callback, which torch's own pipelining calls as well
    (``torch.distributed.pipelining.stage``), runs the unit's post-backward if no hook has; a second call finds no
    gradients and reduces nothing.
    """
    getattr(unit._get_fsdp_state(), _CALLBACK)()


def _refuse_unknown(unit: FSDPModule) -> None:
    state = getattr(unit, "_get_fsdp_state", lambda: None)()
    if not callable(getattr(state, _CALLBACK, None)):
        raise ConfigError(
            f"zero_stage=1: FSDP2 of torch {torch.__version__} has no FSDPState.{_CALLBACK}, by which it is told that "
            "gradients are complete. Valid values: zero_stage=0, or a torch from 2.11 to 2.13"
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

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions = {index: value for index, value in enumerate(args) if isinstance(value, (list, dict))}
        given[:] = [(positions, {key: value for key, value in kwargs.items() if isinstance(value, (list, dict))})]

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions, named = given.pop()
        if not positions and not named:
            return None
        return tuple(positions.get(index, value) for index, value in enumerate(args)), {**kwargs, **named}

    unit.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    unit.register_forward_pre_hook(after, with_kwargs=True)


def units_of(module: nn.Module, blocks: Sequence[nn.Module]) -> list[tuple[nn.Module, ...]]:
    """Modules to shard, each with those that it has to be sharded with.

    Every block with parameters is a unit, and so is every module with parameters beside the path to the blocks.
    Modules beside it that share a parameter are one unit. Parameters that a module on the path owns itself stay
    replicated.

    Raises:
        ConfigError: a parameter that a block shares with another block or with a module beside the stack, or that a
            module beside it shares with one on the path.
    """
    _refuse_tied_blocks(module, blocks)
    inside = {id(m) for block in blocks for m in block.modules()}
    beside: dict[nn.Module, str] = {}
    on_path: dict[nn.Parameter, str] = {}

    def walk(path: str, parent: nn.Module) -> None:
        on_path.update((p, f"{path}{name}") for name, p in parent._parameters.items() if p is not None)
        for name, child in parent.named_children():
            if id(child) in inside or next(child.parameters(), None) is None:
                continue
            # Lists of modules have no forward.
            if isinstance(child, nn.ModuleList | nn.ModuleDict) or any(id(m) in inside for m in child.modules()):
                walk(f"{path}{name}.", child)
            else:
                beside.setdefault(child, f"{path}{name}")

    walk("", module)
    groups: list[list[nn.Module]] = []
    for child, path in beside.items():
        parameters = set(child.parameters())
        _refuse_tied_to_the_path(child, path, on_path)
        tied = [g for g in groups if any(p in parameters for member in g for p in member.parameters())]
        groups = [g for g in groups if g not in tied]
        groups.append([*(member for g in tied for member in g), child])
    return [
        *((block,) for block in blocks if next(block.parameters(), None) is not None),
        *(tuple(group) for group in groups),
    ]


def _refuse_tied_to_the_path(child: nn.Module, path: str, on_path: Mapping[nn.Parameter, str]) -> None:
    for name, parameter in child.named_parameters():
        if parameter in on_path:
            raise ConfigError(
                f"zero_stage=1: {on_path[parameter]!r} and '{path}.{name}' are one parameter (tied weights), of a "
                "module around the blocks and of one beside them; the latter is sharded over the data ranks by itself, "
                "so that they would come apart. Valid values: zero_stage=0, or give each its own parameter"
            )


def _refuse_tied_blocks(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """FSDP2 makes a parameter of its own of each unit's: one that two units hold would come apart."""
    numbers = {id(block): number for number, block in enumerate(blocks)}
    inside = {id(child): number for number, block in enumerate(blocks) for child in block.modules()}
    everywhere = dict(module.named_modules(remove_duplicate=False))
    places = {path: numbers[id(child)] for path, child in everywhere.items() if id(child) in numbers}

    def block_of(path: str, owner: nn.Module) -> int | None:
        parts = path.split(".")
        around = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        # A part of a block may be registered outside of it as well: that is another name, no tie.
        return next((places[name] for name in around if name in places), inside.get(id(owner)))

    owned = (
        (path, child, name, parameter)
        for path, child in everywhere.items()
        for name, parameter in child._parameters.items()
        if parameter is not None
    )
    seen: dict[int, tuple[str, int | None]] = {}
    for path, child, attribute, parameter in owned:
        name, block = ".".join(filter(None, (path, attribute))), block_of(path, child)
        other, other_block = seen.setdefault(id(parameter), (name, block))
        if block != other_block:
            shared = "two blocks share" if None not in (block, other_block) else "a block shares with a module outside"
            raise ConfigError(
                f"zero_stage=1: {other!r} and {name!r} are one parameter (tied weights), which {shared}; each block is "
                "sharded over the data ranks by itself, so that they would come apart. Valid values: zero_stage=0, or "
                "give each its own parameter"
            )
