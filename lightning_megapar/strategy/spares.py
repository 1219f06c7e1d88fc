"""Blocks of all stages without their numbers, so that a stage can take one over; and why one cannot be moved."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline.cutting.stages import StagePlan
from lightning_megapar.sharding.blueprint import on_meta

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
    _hooks: dict[str, int] = field(default_factory=dict)

    @classmethod
    def record(cls, module: nn.Module, plan: StagePlan) -> Spares:
        """Copies of a whole module's parts, before any stage is cut.

        Raises:
            ConfigError: for blocks that cannot be moved: those that share a parameter with something else, that are
                there twice, that are compiled, that hold metrics, or that cannot be copied.
        """
        groups = [(name, *beside) for name, beside in zip(plan.blocks, plan.beside)]
        _refuse_shared(module, groups)
        spares: dict[str, nn.Module] = {}
        for name in plan.stage_of():
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
                spares[name] = on_meta(part, _hook_functions(part))
            except Exception as error:
                raise ConfigError(
                    f"rebalance: {name!r} cannot be copied ({type(error).__name__}: {error}), which moving layers "
                    "needs; valid: rebalance=replicas, or rebalance=null"
                ) from error
        return cls(spares, tuple(" + ".join(_kind(spares[name]) for name in group) for group in groups))

    def fresh(self, name: str) -> nn.Module:
        """A copy of a part, without numbers."""
        part = self.modules[name]
        return copy.deepcopy(part, {id(hook): hook for hook in _hook_functions(part)})  # type: ignore[no-any-return]

    def note_hooks(self, parts: Mapping[str, nn.Module]) -> None:
        """The hooks that are there now are known to whoever rebuilds a stage."""
        self._hooks.clear()
        self._hooks.update({name: _hooks_of(part) for name, part in parts.items()})

    def hooked(self, parts: Mapping[str, nn.Module]) -> list[str]:
        """Names of parts that somebody has put hooks on since :meth:`note_hooks`: a copy would not have them."""
        return sorted(name for name, part in parts.items() if _hooks_of(part) != self._hooks.get(name, 0))


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
            for tensor in (*part.parameters(), *part.modules()):
                other = owner.setdefault(id(tensor), f"block {number}")
                if other != f"block {number}":
                    raise ConfigError(
                        f"rebalance: {name!r} shares a parameter or a layer with {other}, so that neither can be moved "
                        "alone; valid: rebalance=replicas, rebalance=null, or blocks with parameters of their own"
                    )
    for path, child in module.named_modules(remove_duplicate=False):
        inside = any(path == name or path.startswith(f"{name}.") for group in groups for name in group)
        for name, parameter in () if inside else child._parameters.items():
            if parameter is not None and id(parameter) in owner:
                raise ConfigError(
                    f"rebalance: {path}.{name} is a parameter of {owner[id(parameter)]} as well, which cannot be moved "
                    "without it; valid: rebalance=replicas, rebalance=null, or a parameter of its own"
                )
