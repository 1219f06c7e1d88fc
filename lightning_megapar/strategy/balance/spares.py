"""Blocks of all stages without their numbers, so that a stage can take one over; and why one cannot be moved."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline.cutting.stages import StagePlan
from lightning_megapar.sharding.blueprint import on_meta
from lightning_megapar.strategy.balance.attributes import attributes_of, held_in

OUTSIDE = -1
"""Stands for modules beside the blocks where blocks have their numbers."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Spares:
    """What a stage can be rebuilt from when its blocks change.

    Args:
        modules: dotted name -> the module on the meta device, whole, as it was before it was cut and sharded; for
            everything that lives on one stage.
        kinds: for each block, equal for blocks that cost the same.
    """

    modules: Mapping[str, nn.Module]
    kinds: tuple[str, ...]
    _shared: Mapping[int, Any] = field(default_factory=dict)

    @classmethod
    def record(cls, module: nn.Module, plan: StagePlan) -> Spares:
        """Copies of a whole module's parts, before any stage is cut.

        Raises:
            ConfigError: for blocks that cannot be moved: those that share a parameter with something else, that are
                there twice, that are compiled, that hold metrics, or that cannot be copied, and for lists in which
                somebody keeps blocks or their parameters.
        """
        groups = [(name, *beside) for name, beside in zip(plan.blocks, plan.beside)]
        _refuse_shared(module, groups)
        owners, objects = _owners(module, groups)
        number_of = {name: number for number, group in enumerate(groups) for name in group}
        spares: dict[str, nn.Module] = {}
        for name in plan.stage_of():
            mine = {number_of.get(name, OUTSIDE)}
            kept = [one for key, one in objects.items() if not owners[key] <= mine]
            part = module.get_submodule(name)
            compiled = [path for path, child in part.named_modules() if child._compiled_call_impl is not None]  # type: ignore[attr-defined]
            if compiled and any(name in group for group in groups):
                raise ConfigError(
                    f"rebalance: block {name!r} is compiled, and a compiled block cannot be moved to another stage; "
                    "valid: rebalance=replicas, rebalance=null, or blocks that are not compiled"
                )
            if any(isinstance(child, Metric) for child in part.modules()) and any(name in group for group in groups):
                raise ConfigError(
                    f"rebalance: block {name!r} holds a torchmetrics object, whose sums do not move with it; valid: "
                    "rebalance=replicas, rebalance=null, or metrics in the LightningModule itself"
                )
            try:
                spares[name] = on_meta(part, [*_hook_functions(part), *kept])
            except Exception as error:
                raise ConfigError(
                    f"rebalance: {name!r} cannot be copied ({type(error).__name__}: {error}), which moving layers "
                    "needs; valid: rebalance=replicas, or rebalance=null"
                ) from error
        kinds = tuple(" + ".join(_kind(spares[name]) for name in group) for group in groups)
        shared = {key: one for key, one in objects.items() if len(owners[key]) > 1 or OUTSIDE in owners[key]}
        return cls(spares, kinds, _shared=shared)

    def is_shared(self, value: Any) -> bool:
        """Whether an attribute is an object that others than the block hold too: each stage has one for all of them."""
        return value is not None and self._shared.get(id(value)) is value

    def fresh(self, name: str) -> nn.Module:
        """A copy of a part, without numbers."""
        part = self.modules[name]
        memo = {**self._shared, **{id(hook): hook for hook in _hook_functions(part)}}
        return copy.deepcopy(part, memo)  # type: ignore[no-any-return]


def _owners(module: nn.Module, groups: Sequence[tuple[str, ...]]) -> tuple[dict[int, set[int]], dict[int, Any]]:
    """By ``id``, in attributes of which blocks an object is held (:data:`OUTSIDE` for modules beside), and the objects.

    Raises:
        ConfigError: for a block, or a parameter of one, that somebody keeps in an attribute.
    """
    group_of = {
        id(child): number
        for number, group in enumerate(groups)
        for name in group
        for child in module.get_submodule(name).modules()
    }
    owner_of = dict(group_of)
    for child in module.modules():
        for parameter in child._parameters.values():
            if parameter is not None and id(child) in group_of:
                owner_of[id(parameter)] = group_of[id(child)]
    owners: dict[int, set[int]] = {}
    objects: dict[int, Any] = {}
    for path, child in module.named_modules():
        here = group_of.get(id(child), OUTSIDE)
        owners.setdefault(id(child), set()).add(here)
        objects[id(child)] = child
        for attribute, value in attributes_of(child).items():
            for one in held_in(value):
                whose = owner_of.get(id(one))
                if whose is not None and (whose != here or isinstance(one, nn.Parameter)):
                    what = "a parameter of " if isinstance(one, nn.Parameter) else ""
                    raise ConfigError(
                        f"rebalance: the attribute {'.'.join(filter(None, (path, attribute)))!r} holds {what}block "
                        f"{whose}, which would be another one after a move; valid: rebalance=replicas, "
                        "rebalance=null, or looking it up when it is needed"
                    )
                owners.setdefault(id(one), set()).add(here)
                objects[id(one)] = one
    return owners, objects


def count_hooks(parts: Mapping[str, nn.Module]) -> dict[str, int]:
    """Hooks on each part, the layers in it and its parameters: a copy would not have those that come later."""
    return {name: _hooks_of(part) for name, part in parts.items()}


def _hooks_of(part: nn.Module) -> int:
    own = sum(len(getattr(child, name)) for child in part.modules() for name in _HOOKS)
    of_parameters = sum(
        len(getattr(p, name, None) or ())
        for p in part.parameters()
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    )
    return own + of_parameters


def _hook_functions(part: nn.Module) -> list[Any]:
    """Somebody's hooks: a copy calls the very same ones, not copies of what they belong to."""
    return [hook for child in part.modules() for name in _HOOKS for hook in getattr(child, name).values()]


def _kind(part: nn.Module) -> str:
    """The layers, their options and shapes, and the figures that a block keeps in attributes (rates, names)."""
    shapes = [f"{name}{tuple(p.shape)}{'' if p.requires_grad else ' frozen'}" for name, p in part.named_parameters()]
    figures = sorted(
        f"{key}={value!r}" for key, value in vars(part).items() if isinstance(value, (float, str)) and key[0] != "_"
    )
    return f"{part!r} {' '.join(shapes)} {' '.join(figures)}"


def _refuse_shared(module: nn.Module, groups: Iterable[tuple[str, ...]]) -> None:
    owner: dict[int, str] = {}
    for number, group in enumerate(groups):
        for name in group:
            part = module.get_submodule(name)
            for tensor in (*part.parameters(), *part.buffers(), *part.modules()):
                other = owner.setdefault(id(tensor), f"block {number}")
                if other != f"block {number}":
                    raise ConfigError(
                        f"rebalance: {name!r} shares a parameter, a buffer or a layer with {other}, so that neither "
                        "can be moved alone; valid: rebalance=replicas, rebalance=null, or tensors of their own"
                    )
    for path, child in module.named_modules(remove_duplicate=False):
        inside = any(path == name or path.startswith(f"{name}.") for group in groups for name in group)
        for name, tensor in () if inside else (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None and id(tensor) in owner:
                raise ConfigError(
                    f"rebalance: {'.'.join(filter(None, (path, name)))!r} belongs to {owner[id(tensor)]} as well, "
                    "which cannot move without it; valid: rebalance=replicas, rebalance=null, or a tensor of its own"
                )
