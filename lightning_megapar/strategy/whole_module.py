"""The module that a notebook gets back: whole again, with the trained values, after ranks that end with each call.

Preparing a module for a rank replaces blocks, parameters, hooks and attributes in place. Where the other ranks end with
the launch (notebooks, prompts, pytest, threads), the caller's module must not stay a fragment: what was replaced is
noted, and put back when the run is over, with the values gathered from all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state

_MISSING = object()


class WholeModule:
    """What a module was before it was prepared; made on the rank that returns to the caller.

    The structure is remembered, not the memory: :meth:`note_changes` lets go of parameters that the rank does not use.

    Args:
        module: the whole module, real or on the meta device.
    """

    def __init__(self, module: nn.Module) -> None:
        self._root = module
        self._before = [
            (child, child.__class__, {key: _copied(value) for key, value in vars(child).items()})
            for child in module.modules()
        ]
        self._dtypes = {name: p.dtype for name, p in module.named_parameters(remove_duplicate=False)}
        self._changes: list[tuple[nn.Module, type, dict[str, Any]]] = []

    def note_changes(self) -> None:
        """What differs now was changed by the preparation; what changes later is the user's, and stays."""
        held = {id(p) for p in self._root.parameters()}
        for child, kind, before in self._before:
            now = vars(child)
            changed = {key: _MISSING for key in now if key not in before}
            changed |= {key: value for key, value in before.items() if not _same(value, now.get(key, _MISSING))}
            if changed or child.__class__ is not kind:
                self._changes.append((child, kind, changed))
            for parameter in before["_parameters"].values():
                if parameter is not None and id(parameter) not in held:
                    parameter.data = parameter.data.new_empty(0)
        self._before = []

    @torch.no_grad()
    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Put everything back.

        Args:
            values: the whole ``state_dict``, gathered.

        Raises:
            RuntimeError: when a parameter is not in it.
        """
        for child, kind, changed in self._changes:
            if child.__class__ is not kind:  # FSDP2 made a class of its own, and refuses a module that it has seen
                getattr(_composable_state, "_module_state_mapping", {}).pop(child, None)
                child.__class__ = kind
            for key, value in changed.items():
                if value is _MISSING:
                    vars(child).pop(key, None)
                else:
                    vars(child)[key] = value
        for child in self._root.modules():
            child.training = self._root.training
        made: dict[int, nn.Parameter] = {}
        dtypes: dict[torch.dtype, torch.dtype] = {}
        for path, child in self._root.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for name, parameter in child._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    made[id(parameter)] = _filled(parameter, prefix + name, values)
                    dtypes[self._dtypes.get(prefix + name, parameter.dtype)] = made[id(parameter)].dtype
                child._parameters[name] = made[id(parameter)]
            for name, buffer in child._buffers.items():
                if buffer is not None and prefix + name in values:
                    child._buffers[name] = values[prefix + name].clone()
                elif buffer is not None:  # not saved, so not gathered: as it was made, in the precision of the run
                    child._buffers[name] = buffer.to(dtypes.get(buffer.dtype, buffer.dtype))


def _filled(parameter: nn.Parameter, name: str, values: Mapping[str, Tensor]) -> nn.Parameter:
    if name not in values:
        raise RuntimeError(f"the module cannot be made whole again: no rank gave {name!r}; load a checkpoint")
    value = values[name].detach().clone()
    parameter.grad = None
    if parameter.is_meta or parameter.device != value.device:
        return nn.Parameter(value, requires_grad=parameter.requires_grad)
    parameter.data = value
    return parameter


def _copied(value: Any) -> Any:
    return copy.copy(value) if type(value) in (dict, set) or isinstance(value, dict) else value


def _same(before: Any, now: Any) -> bool:
    """The same object, or containers of the same objects."""
    if isinstance(before, dict) and isinstance(now, dict):
        same_keys = list(before) == list(now)
        return same_keys and all(one is other for one, other in zip(before.values(), now.values()))
    if isinstance(before, set) and isinstance(now, set):
        return before == now
    return before is now
