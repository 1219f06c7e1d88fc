"""A block as a nest that can be sent: its numbers, and what a run has made of it, with its optimizers' state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megapar.data_parallel.parameters import laid_out_like, local_tensor
from lightning_megapar.strategy.balance.attributes import PLAIN, attributes_of, held_in, packed, unpacked
from lightning_megapar.strategy.balance.spares import Spares


def pack(part: nn.Module, spares: Spares, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Everything of a block that a run has made of it, as a nest that can be sent.

    Args:
        part: the block, as this stage has sharded it.
        spares: what of its attributes is shared with others, and stays.
        optimizers: whose groups and state of the block's parameters go along.
    """
    parameters, gradients, trained, marks = {}, {}, {}, {}
    owned: list[dict[str, Any]] = [{} for _ in optimizers]
    for name, parameter in part.named_parameters():
        parameters[name] = local_tensor(parameter.detach())
        gradients[name] = local_tensor(parameter.grad)
        trained[name] = parameter.requires_grad
        marks[name] = {k: v for k, v in vars(parameter).items() if isinstance(v, PLAIN)}
        for index, optimizer in enumerate(optimizers):
            for number, group in enumerate(optimizer.param_groups):
                place = next((i for i, p in enumerate(group["params"]) if p is parameter), None)
                if place is not None:
                    shown = (group.get("param_names") or {place: None})[place]
                    state = {k: _sent(v) for k, v in optimizer.state.get(parameter, {}).items()}
                    owned[index][name] = (number, shown, parameter in optimizer.state, state)
    return {
        "parameters": parameters,
        "gradients": gradients,
        "trained": trained,
        "marks": marks,
        "optimizers": owned,
        "buffers": {
            path: {name: local_tensor(b) for name, b in child._buffers.items()} for path, child in part.named_modules()
        },
        "aliases": _aliases(part),
        "unsaved": {path: sorted(child._non_persistent_buffers_set) for path, child in part.named_modules()},
        "names": {path: sorted(attributes_of(child)) for path, child in part.named_modules()},
        "attributes": {
            path: {
                name: sent
                for name, value in attributes_of(child).items()
                if not spares.is_shared(value) and (sent := packed(value)) is not None
            }
            for path, child in part.named_modules()
        },
    }


def _aliases(part: nn.Module) -> list[list[tuple[str, str]]]:
    """Places of each buffer, and each object in an attribute, that a block has under several names."""
    places: dict[int, list[tuple[str, str]]] = {}
    for path, child in part.named_modules():
        for name, value in (*child._buffers.items(), *attributes_of(child).items()):
            if value is not None and next(held_in(value), None) is value and not callable(value):
                places.setdefault(id(value), []).append((path, name))
    return [found for found in places.values() if len(found) > 1]


def _sent(value: Any) -> tuple[Any, str]:
    """A piece of optimizer state, and what it has to become again."""
    if isinstance(value, DTensor):
        return local_tensor(value), "dtensor"
    return value, value.device.type if isinstance(value, Tensor) else ""


def _received(value: Any, kind: str, parameter: nn.Parameter) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Memory of its own: what came lies in one buffer, which one large state would keep alive.
    return laid_out_like(value.clone(), parameter) if kind == "dtensor" else value.to(kind).clone()


def forget(part: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Take a block's parameters out of the optimizers, and its numbers out of memory."""
    gone = {id(p) for p in part.parameters()}
    for optimizer in optimizers:
        for parameter in [p for p in optimizer.state if id(p) in gone]:
            del optimizer.state[parameter]
        for group in optimizer.param_groups:
            kept = [i for i, p in enumerate(group["params"]) if id(p) not in gone]
            if group.get("param_names"):
                group["param_names"][:] = [group["param_names"][i] for i in kept]
            group["params"][:] = [group["params"][i] for i in kept]
    for parameter in part.parameters():
        parameter.grad = None
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.new_empty(0)


@torch.no_grad()
def unpack(part: nn.Module, nest: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
    """Fill a block with what :func:`pack` has made of it on another stage.

    Args:
        part: built and sharded as this stage does it, with memory and without numbers.
        nest: what came; its tensors are copied.
        optimizers: which get its parameters at the end of their groups.
    """
    for path, values in nest["attributes"].items():
        child = part.get_submodule(path)
        for name in attributes_of(child).keys() - set(nest["names"][path]):
            del vars(child)[name]
        vars(child).update({name: unpacked(sent) for name, sent in values.items()})
    for path, values in nest["buffers"].items():
        child = part.get_submodule(path)
        for name, value in values.items():
            child._buffers[name] = None if value is None else laid_out_like(value.clone(), child._buffers.get(name))
        child._non_persistent_buffers_set.update(nest["unsaved"][path])
    for (first_path, first), *others in nest["aliases"]:
        source = part.get_submodule(first_path)
        for path, name in others:
            target = part.get_submodule(path)
            table = target._buffers if name in target._buffers else vars(target)
            table[name] = source._buffers[first] if first in source._buffers else vars(source)[first]
    for name, parameter in part.named_parameters():
        _set(parameter, nest["parameters"][name])
        parameter.requires_grad_(nest["trained"][name])
        vars(parameter).update(nest["marks"][name])
        gradient = nest["gradients"][name]
        if gradient is not None:
            parameter.grad = laid_out_like(gradient.clone(), parameter)
        for index, optimizer in enumerate(optimizers):
            if name not in nest["optimizers"][index]:
                continue
            number, shown, has_state, state = nest["optimizers"][index][name]
            group = optimizer.param_groups[number]
            group["params"].append(parameter)
            if shown is not None:
                group["param_names"] = [*(group.get("param_names") or ()), shown]
            if has_state:
                optimizer.state[parameter] = {k: _received(v, kind, parameter) for k, (v, kind) in state.items()}


def _set(parameter: nn.Parameter, value: Tensor) -> None:
    local = local_tensor(parameter)
    assert local is not None and local.shape == value.shape
    if local.dtype == value.dtype or isinstance(parameter, DTensor):
        local.copy_(value)
    else:
        parameter.data = value.clone()
