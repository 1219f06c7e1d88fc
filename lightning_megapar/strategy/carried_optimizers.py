"""Optimizers that were built before the module was cut and sharded: LightningCLI builds them with the module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from lightning_megapar.config import ConfigError
from lightning_megapar.data_parallel.parameters import LogicalParameter


class OriginalParameters:
    """A module's parameters as they were before it was prepared, without keeping them alive.

    Args:
        module: the whole module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._found = {id(p): (weakref.ref(p), name) for name, p in module.named_parameters()}

    def name(self, parameter: nn.Parameter) -> str | None:
        """The canonical name that a parameter had, ``None`` when it was none of the module's."""
        reference, name = self._found.get(id(parameter), (lambda: None, ""))
        return name if reference() is parameter else None


def carry_over(
    optimizers: Iterable[Optimizer], originals: OriginalParameters | None, parameters: Iterable[LogicalParameter]
) -> None:
    """Put this rank's parameters in the place of the whole ones in optimizers that have not stepped yet.

    Groups keep their number, order and settings; parameters that other ranks hold leave their group.

    Args:
        optimizers: of this run; those that already hold this rank's parameters are left alone.
        originals: the module's parameters before it was prepared.
        parameters: this rank's.

    Raises:
        ConfigError: for tensors that never were the module's, and for an optimizer that has stepped.
    """
    own = {id(record.parameter) for record in parameters}
    by_name = {record.name: record.parameter for record in parameters}
    for optimizer in optimizers:
        if all(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            continue
        for group in optimizer.param_groups:
            kept: list[tuple[nn.Parameter, str | None]] = []
            names = group.get("param_names") or [None] * len(group["params"])
            for parameter, shown in zip(group["params"], names):
                name = None if originals is None else originals.name(parameter)
                if id(parameter) in own:
                    kept.append((parameter, shown))
                elif name is None or optimizer.state:
                    raise ConfigError(
                        "configure_optimizers returned an optimizer over tensors that are not the module's parameters "
                        "(or that it had stepped before the module was sharded); build it inside configure_optimizers"
                    )
                elif name in by_name:
                    kept.append((by_name[name], shown))
            group["params"] = [parameter for parameter, _ in kept]
            if group.get("param_names"):
                group["param_names"] = [shown for _, shown in kept]
