"""ZeRO stage 1 on FSDP2: parameters stay gathered through a step, gradients are reduce-scattered once per step.

FSDP2 gives each unit a shard of its parameters; optimizer state follows the shards. Units are the local blocks and the
modules beside the stack, each on its own, because a pipelined step leaves by an exception and a wrapped root would
never see the end of its forward. Tied parameters need one unit around all their owners: without a pipeline that is the
owners' innermost common ancestor, whose forward ends properly; with one, a stage holds one owner only. The gradient's
divide factor is 1: the loss owns the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from lightning_megapar.config import ConfigError

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class ZeroUnits:
    """The FSDP2 units of a stage.

    Args:
        module: this rank's share of the user's module, on its device.
        blocks: the stack's blocks (those of other stages own no parameters and are left out).
        mesh: one-dimensional data mesh.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh) -> None:
        self.units: list[FSDPModule] = []
        for unit in units_of(module, blocks):
            fully_shard(unit, mesh=mesh, reshard_after_forward=False)
            _keep_containers(unit)
            assert isinstance(unit, FSDPModule)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
            self.units.append(unit)
            if unit is module:
                # Lightning calls the module's steps, not its forward.
                for step in STEPS:
                    register_fsdp_forward_method(module, step)

    def parameter_ids(self) -> set[int]:
        """``id`` of every parameter that FSDP2 manages."""
        return {id(p) for unit in self.units for p in unit.parameters()}  # type: ignore[attr-defined]

    def hold(self) -> None:
        """Before a step: keep parameters gathered and gradients local until :meth:`release`."""
        self._set(last=False)

    def release(self) -> None:
        """Before the last backward of an accumulation window: reduce gradients and let go of gathered parameters."""
        self._set(last=True)

    def reshard(self) -> None:
        """Let go of parameters that a forward without a backward left gathered (the module then shows its shards)."""
        for unit in self.units:
            unit.reshard()

    def _set(self, last: bool) -> None:
        for unit in self.units:
            unit.set_requires_gradient_sync(last)
            unit.set_reshard_after_backward(last)


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


def units_of(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules to shard, children before parents.

    Every block with parameters is a unit, and so is every module with parameters beside the path to the blocks.
    Modules that share a parameter are left to a unit around their innermost common ancestor. Parameters that a module
    on the path owns itself stay replicated, unless such a unit covers them.

    Raises:
        ConfigError: a parameter that a block shares with another block or with a module beside the stack.
    """
    _refuse_tied_blocks(module, blocks)
    inside = {id(m) for block in blocks for m in block.modules()}
    beside: dict[str, nn.Module] = {}

    def walk(path: str, parent: nn.Module) -> None:
        for name, child in parent.named_children():
            full = f"{path}.{name}" if path else name
            if id(child) in inside or next(child.parameters(), None) is None:
                continue
            if any(id(m) in inside for m in child.modules()):
                walk(full, child)
            else:
                beside[full] = child

    walk("", module)
    owners: dict[int, set[str]] = {}
    for path, child in beside.items():
        for parameter in child.parameters():
            owners.setdefault(id(parameter), set()).add(path)
    tied = [sorted(paths) for paths in owners.values() if len(paths) > 1]
    left_out = {path for paths in tied for path in paths}
    around = {_common_ancestor(paths) for paths in tied}
    return [
        *(block for block in blocks if next(block.parameters(), None) is not None),
        *(child for path, child in beside.items() if path not in left_out),
        *(module.get_submodule(path) for path in sorted(around, key=len, reverse=True)),
    ]


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


def _common_ancestor(paths: Sequence[str]) -> str:
    shared: list[str] = []
    for parts in zip(*(path.split(".") for path in paths)):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
