"""Lightning's checkpoint dictionary as named tensors and a rest, and back, for one rank of any layout.

Tensors are ``model.<state_dict key>`` (tied ones once, under the canonical name), ``current.<state_dict key>`` beside
averaged weights, and ``optimizer.<i>.<parameter>.<state key>``. Everything else (loops, callbacks, schedulers,
hyper-parameters) is the rest, with one entry of our own, ``"megapar"``: parameter names in order, tied names,
state_dict keys, and the optimizers' parameter groups by name over all pipeline stages.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_megapar.checkpoint.errors import CheckpointError
from lightning_megapar.checkpoint.manifest import Manifest
from lightning_megapar.data_parallel.parameters import LogicalParameter, ModuleNames
from lightning_megapar.shards import IndexedTensor, Value, is_value

NUMBER_SUFFIX = "#number"
"""Marks optimizer state that is a Python number; it is stored as a 0-dim float64 or int64 tensor."""

CURRENT = "current_model_state"
"""Entry of Lightning's ``WeightAveraging``: the weights that are trained, while ``state_dict`` holds the average."""


def named_optimizer_state(optimizer: Optimizer, parameters: Sequence[LogicalParameter]) -> dict[str, Any]:
    """``optimizer.state_dict()`` keyed by canonical names instead of positions.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}`` for this rank's parameters.

    Raises:
        CheckpointError: when the optimizer holds a parameter that the module does not have.
    """
    name_of = {id(record.parameter): record.name for record in parameters}
    groups = []
    for group in optimizer.param_groups:
        unknown = [p for p in group["params"] if id(p) not in name_of]
        if unknown:
            shapes = [tuple(p.shape) for p in unknown[:3]]
            raise CheckpointError(f"the optimizer holds {len(unknown)} tensors that are no module parameters: {shapes}")
        groups.append(
            {**{k: v for k, v in group.items() if k != "params"}, "params": [name_of[id(p)] for p in group["params"]]}
        )
    record_of = {id(record.parameter): record for record in parameters}
    state = {
        name_of[id(p)]: {
            key: record_of[id(p)].as_value(value) if isinstance(value, Tensor) else value
            for key, value in values.items()
        }
        for p, values in optimizer.state.items()
        if id(p) in name_of
    }
    return {"state": state, "param_groups": groups}


def pack(checkpoint: dict[str, Any], names: ModuleNames, world_size: int) -> tuple[dict[str, Value], dict[str, Any]]:
    """Split Lightning's checkpoint dictionary. Collective over the default group when ``world_size > 1``.

    Args:
        checkpoint: as ``Trainer.dump_checkpoint`` made it, with this rank's ``state_dict`` and optimizer states from
            :func:`named_optimizer_state`. Not changed.
        names: of the whole module.
        world_size: ranks that take part.

    Returns:
        (tensors of this rank, rest).
    """
    rest = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states", CURRENT)}
    tensors = {
        f"{prefix}.{names.canonical.get(k, k)}": v
        for key, prefix in (("state_dict", "model"), (CURRENT, "current"))
        for k, v in checkpoint.get(key, {}).items()
        if is_value(v)
    }
    optimizers = []
    for index, state in enumerate(checkpoint.get("optimizer_states", [])):
        for name, values in state["state"].items():
            for key, value in values.items():
                if is_value(value):
                    tensors[f"optimizer.{index}.{name}.{key}"] = value
                elif isinstance(value, numbers.Number) and not isinstance(value, complex):
                    dtype = torch.int64 if isinstance(value, int) else torch.float64
                    tensors[f"optimizer.{index}.{name}.{key}{NUMBER_SUFFIX}"] = torch.tensor(value, dtype=dtype)
                elif value is not None:
                    raise CheckpointError(
                        f"optimizer state {key!r} of {name!r} is a {type(value).__name__}, neither tensor nor number"
                    )
        optimizers.append({"param_groups": _merge_groups(state["param_groups"], names, world_size)})
    rest["megapar"] = {
        **rest.get("megapar", {}),
        "parameter_names": list(names.parameters),
        "tied": names.tied,
        "state_dict_keys": list(names.state_dict),
        "optimizers": optimizers,
    }
    return tensors, rest


def from_plain(
    index: int,
    optimizer: Optimizer,
    parameters: Sequence[LogicalParameter],
    names: ModuleNames,
    saved: Mapping[str, Any],
    world_size: int,
) -> tuple[dict[str, Value], dict[str, Tensor], dict[str, Any]]:
    """An optimizer state of plain Lightning (numbered parameters) in our terms. Collective when ``world_size > 1``.

    Numbers are taken in ``named_parameters`` order within each group, which is how optimizers number the parameters
    that they are given in that order.

    Returns:
        (empty targets in this rank's layout, the full tensors by the same names, groups for
        :func:`install_optimizer_state`).

    Raises:
        CheckpointError: when groups or shapes do not fit.
    """
    groups = _merge_groups(named_optimizer_state(optimizer, parameters)["param_groups"], names, world_size)
    old_groups = saved["param_groups"]
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in old_groups]:
        raise CheckpointError(
            f"optimizer {index}: groups of {[len(g['params']) for g in old_groups]} parameters in the checkpoint, "
            f"{[len(g['params']) for g in groups]} in this run"
        )
    number_of = {n: i for new, old in zip(groups, old_groups) for n, i in zip(new["params"], old["params"])}
    full: dict[str, Tensor] = {}
    targets: dict[str, Value] = {}
    for record in parameters:
        for key, value in saved["state"].get(number_of.get(record.name), {}).items():
            if value is None:
                continue
            tensor = value if isinstance(value, Tensor) else torch.tensor(value)
            name = f"optimizer.{index}.{record.name}.{key}" + ("" if isinstance(value, Tensor) else NUMBER_SUFFIX)
            shape = names.shapes[record.name]
            if tensor.ndim and tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"optimizer {index}: {key} of {record.name!r} is {tuple(tensor.shape)}, the parameter {shape}"
                )
            if tensor.ndim:
                targets[name] = record.as_value(torch.zeros_like(record.parameter.detach(), dtype=tensor.dtype))
            else:
                targets[name] = torch.zeros_like(tensor)
            full[name] = tensor
    renamed = [{**old, "params": new["params"]} for new, old in zip(groups, old_groups)]
    return targets, full, {"param_groups": renamed}


def _merge_groups(groups: list[dict[str, Any]], names: ModuleNames, world_size: int) -> list[dict[str, Any]]:
    """Each group's names over all ranks, in canonical order."""
    mine = [list(group["params"]) for group in groups]
    everyone: list[Any] = [mine]
    if world_size > 1:
        everyone = [None] * world_size
        dist.all_gather_object(everyone, mine)
    if len({len(one) for one in everyone}) > 1:
        raise CheckpointError(
            f"ranks have different numbers of parameter groups ({sorted({len(one) for one in everyone})}): "
            "configure_optimizers must make the same groups on every rank, also empty ones"
        )
    order = {name: position for position, name in enumerate(names.parameters)}
    merged = []
    for index, group in enumerate(groups):
        members = {name for one in everyone for name in one[index]}
        merged.append({**group, "params": sorted(members, key=order.__getitem__)})
    return merged


def optimizer_targets(
    index: int, optimizer: Optimizer, parameters: Sequence[LogicalParameter], manifest: Manifest
) -> dict[str, Value]:
    """Empty tensors, in this rank's layout, for the optimizer state that a checkpoint holds.

    State of a parameter's own shape gets the parameter's layout (a DTensor for a sharded one); any other shape is
    replicated.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    targets: dict[str, Value] = {}
    for record in parameters:
        if id(record.parameter) not in held:
            continue
        prefix = f"optimizer.{index}.{record.name}."
        for key in (k for k in manifest.tensors if k.startswith(prefix) and "." not in k[len(prefix) :]):
            saved = manifest.tensors[key]
            if tuple(saved.shape) == tuple(record.as_value(record.parameter).shape) and saved.shape:
                targets[key] = record.as_value(torch.zeros_like(record.parameter.detach(), dtype=saved.dtype))
            else:
                targets[key] = torch.zeros(saved.shape, dtype=saved.dtype)
    return targets


def install_optimizer_state(
    index: int,
    optimizer: Optimizer,
    parameters: Sequence[LogicalParameter],
    tensors: Mapping[str, Value],
    saved: Mapping[str, Any],
) -> None:
    """Put loaded state and hyper-parameters into an optimizer.

    Args:
        index: position of the optimizer.
        optimizer: of this run; its groups keep their parameters.
        parameters: this rank's logical parameters.
        tensors: filled targets of :func:`optimizer_targets`.
        saved: ``rest["megapar"]["optimizers"][index]``.

    Raises:
        CheckpointError: when the number of groups differs or a parameter moved to another group.
    """
    groups = saved["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"optimizer {index} has {len(optimizer.param_groups)} parameter groups, the checkpoint {len(groups)}"
        )
    name_of = {id(record.parameter): record.name for record in parameters}
    for position, (group, old) in enumerate(zip(optimizer.param_groups, groups)):
        moved = [name_of[id(p)] for p in group["params"] if name_of[id(p)] not in set(old["params"])]
        if moved:
            raise CheckpointError(f"optimizer {index}: {moved[:3]} are not in group {position} of the checkpoint")
        group.update({k: v for k, v in old.items() if k != "params"})
        for parameter in group["params"]:
            prefix = f"optimizer.{index}.{name_of[id(parameter)]}."
            state: dict[str, Any] = {}
            for key, value in tensors.items():
                if key.startswith(prefix) and "." not in key[len(prefix) :]:
                    short = key[len(prefix) :]
                    value = value.local if isinstance(value, IndexedTensor) else value
                    if short.endswith(NUMBER_SUFFIX):
                        state[short[: -len(NUMBER_SUFFIX)]] = value.item()
                    else:
                        fused = group.get("fused") or group.get("capturable")
                        state[short] = value.to(parameter.device) if fused or value.ndim else value
            if state:
                optimizer.state[parameter] = state
