"""Blocks change their pipeline stage between two steps: weights, gradients, buffers and optimizer state go with them.

A block that leaves becomes a stand-in; one that arrives is built from its spare copy, sharded as the stage shards its
own, and filled with what came. Everything that follows from who holds what (the cut, the sums of gradients, the logical
parameters) is made anew. The numbers stay what they are, bit for bit.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megapar.data_parallel.parameters import local_tensor
from lightning_megapar.layers.collectives import TensorRanks
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.pipeline.cutting.chunks import RankCut
from lightning_megapar.pipeline.cutting.stages import StagePlan
from lightning_megapar.pipeline.engine.exchange import BoundaryReceiver, BoundarySender, Link
from lightning_megapar.sharding.apply import parameter_owners, shard_module
from lightning_megapar.sharding.by_plan import apply_assignments
from lightning_megapar.strategy.attributes import attributes_of, held_in, packed, unpacked
from lightning_megapar.strategy.prepare import PreparedModule, keyed_blocks, recorded_parameters
from lightning_megapar.strategy.spares import Spares

PROBE_BYTES = 4 * 2**20

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class Appraisal:
    """What a move would take; the same on every rank.

    Args:
        largest: bytes that the busiest rank sends or receives.
        pinned: blocks that cannot be moved, each with the reason.
        short: bytes that are missing on the rank that has the least free memory; 0 when everything fits.
    """

    largest: int
    pinned: tuple[str, ...]
    short: int


def moves(before: StagePlan, after: StagePlan) -> list[tuple[str, int, int]]:
    """``(name, from, to)`` of what changes its pipeline rank, in the order of the model."""
    rank_of = {k: rank for rank, row in enumerate(before.placement) for k in row}
    old, new = before.stage_of(), after.stage_of()
    return [(name, rank_of[old[name]], rank_of[new[name]]) for name in old if rank_of[old[name]] != rank_of[new[name]]]


def appraise(
    module: nn.Module,
    prepared: PreparedModule,
    ranges: tuple[tuple[int, int], ...],
    mesh: ParallelMesh,
    optimizers: Sequence[Optimizer],
    device: torch.device,
    holders: Iterable[Any] = (),
) -> Appraisal:
    """Look at a move before it is made; collective over all ranks.

    Args:
        module, prepared, ranges, mesh, optimizers, device: as for :func:`move_layers`.
        holders: objects that may keep blocks or their parameters (callbacks).
    """
    assert prepared.plan is not None and prepared.spares is not None
    going = moves(prepared.plan, replace(prepared.plan, ranges=ranges))
    here = mesh.coordinate("pipeline")
    sizes = {name: _bytes_of(module.get_submodule(name), optimizers) for name, source, _ in going if source == here}
    hooked = prepared.spares.hooked({name: module.get_submodule(name) for name, _, _ in going})
    stuck = _referred_to(module, [name for name, _, _ in going], holders)
    stuck.update(dict.fromkeys(hooked, "it got hooks after set-up, which would be lost"))
    for name in sizes:
        reason = _stuck(module.get_submodule(name), prepared.spares, optimizers)
        stuck.update({} if reason is None else {name: reason})
    everyone: list[Any] = [None] * mesh.layout.world_size
    dist.all_gather_object(everyone, (sizes, stuck))
    known = {name: max(one.get(name, 0) for one, _ in everyone) for name, _, _ in going}
    traffic = [0] * mesh.size("pipeline")
    for name, source, target in going:
        traffic[source] += known[name]
        traffic[target] += known[name]
    arriving = sum(known[name] for name, _, target in going if target == here)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else arriving
    missing = torch.tensor(max(0, arriving - free), device=device)
    dist.all_reduce(missing, op=dist.ReduceOp.MAX)
    pinned = sorted({f"{name}: {why}" for _, reasons in everyone for name, why in reasons.items()})
    return Appraisal(max(traffic), tuple(pinned), int(missing))


def seconds_per_byte(mesh: ParallelMesh, device: torch.device) -> float:
    """Of a message to the next stage, measured on :data:`PROBE_BYTES`; the slowest link's, on every rank."""
    here, group = mesh.coordinate("pipeline"), mesh.direction_group("forward")
    token = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device)
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    start = time.perf_counter()
    for stage in range(mesh.size("pipeline") - 1):
        if here == stage:
            dist.send(token, mesh.stage_rank(stage + 1), group=group)
        elif here == stage + 1:
            dist.recv(token, mesh.stage_rank(stage), group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # The last stage has waited for all links in turn.
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken) / PROBE_BYTES / (mesh.size("pipeline") - 1)


def move_layers(
    module: nn.Module,
    prepared: PreparedModule,
    ranges: tuple[tuple[int, int], ...],
    mesh: ParallelMesh,
    optimizers: Sequence[Optimizer],
    *,
    device: torch.device,
    convert: Callable[[nn.Module], nn.Module] = lambda m: m,
    partial: Iterable[str] = (),
) -> PreparedModule:
    """Let the stages hold other ranges of blocks; collective over all ranks, between two steps.

    Args:
        module: this rank's share.
        prepared: what is known about it; it has spares, and no FSDP2 units.
        ranges: blocks of each virtual stage from now on.
        mesh: the ranks.
        optimizers: their groups and state follow the parameters.
        device: where this rank computes.
        convert: the precision plugin's ``convert_module``.
        partial: names of parameters whose gradients were found to be addends over the tensor ranks.

    Returns:
        what is known about the share from now on.
    """
    assert prepared.plan is not None and prepared.cut is not None and prepared.spares is not None
    plan = replace(prepared.plan, ranges=tuple(ranges))
    here, spares = mesh.coordinate("pipeline"), prepared.spares
    going = moves(prepared.plan, plan)
    prepared.cut.remove_hooks()
    arrived = _exchanged(module, going, spares, mesh, optimizers, device)
    # Before anything new: a stage may be as full as it was.
    for name, source, _ in going:
        if source == here:
            _forget(module.get_submodule(name), optimizers)
    fresh = _rebuilt(list(arrived), prepared, mesh, device, convert)
    for name, part in fresh.items():
        owner, _, key = name.rpartition(".")
        module.get_submodule(owner)._modules[key] = part
    cut = RankCut(module, plan, plan.placement[here], device, spares.modules)
    for stand_in in (one for chunk in cut.chunks for one in chunk.stand_ins.values()):
        convert(stand_in)  # so that it tells the dtypes that the originals have by now
    for name, nest in arrived.items():
        _fill(fresh[name], nest, optimizers, device)
    if arrived:
        _in_order(module, prepared, optimizers)
    if prepared.streams is not None:
        prepared.streams.rekey(keyed_blocks(module, cut, plan))
    cut.install_hooks()
    parameters, stages = recorded_parameters(module, prepared.names, mesh, partial=partial)
    return replace(prepared, plan=plan, cut=cut, parameters=parameters, stages=stages)


# -- what travels ----------------------------------------------------------------------------------------------------


def _exchanged(
    module: nn.Module,
    going: Sequence[tuple[str, int, int]],
    spares: Spares,
    mesh: ParallelMesh,
    optimizers: Sequence[Optimizer],
    device: torch.device,
) -> dict[str, Any]:
    """What came for each block that arrives here. Sends do not wait, so that the order alone keeps ranks apart."""
    here, group = mesh.coordinate("pipeline"), mesh.direction_group("forward")
    senders: list[BoundarySender] = []
    arrived: dict[str, Any] = {}
    with torch.no_grad():
        for name, source, target in going:
            if source == here:
                sender = BoundarySender(Link(mesh.stage_rank(target), group, device))
                sender.send(_packed(module.get_submodule(name), spares, optimizers), 0)
                senders.append(sender)
            elif target == here:
                arrived[name], _ = BoundaryReceiver(Link(mesh.stage_rank(source), group, device)).take(0)
        for sender in senders:
            sender.drain()
    return arrived


def _packed(part: nn.Module, spares: Spares, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Everything of a block that a run has made of it, as a nest that can be sent."""
    parameters, gradients, trained, marks = {}, {}, {}, {}
    owned: list[dict[str, Any]] = [{} for _ in optimizers]
    for name, parameter in part.named_parameters():
        parameters[name] = local_tensor(parameter.detach())
        gradients[name] = local_tensor(parameter.grad)
        trained[name] = parameter.requires_grad
        marks[name] = {k: v for k, v in vars(parameter).items() if isinstance(v, _PLAIN)}
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


def _referred_to(module: nn.Module, going: Iterable[str], holders: Iterable[Any]) -> dict[str, str]:
    """Blocks that somebody outside of them keeps, whole or by a part or a parameter, each with who does."""
    owner: dict[int, str] = {}
    inside: set[int] = set()
    for name in going:
        part = module.get_submodule(name)
        inside.update(map(id, part.modules()))
        owner.update({id(one): name for one in (*part.modules(), *part.parameters())})
    found: dict[str, str] = {}
    outside = [child for child in module.modules() if id(child) not in inside]
    for holder in (*outside, *holders):
        attributes = attributes_of(holder) if isinstance(holder, nn.Module) else vars(holder)
        for attribute, value in attributes.items():
            for one in held_in(value):
                if id(one) in owner:
                    kept = f"{type(holder).__name__} keeps it, or a part of it, in the attribute {attribute!r}"
                    found.setdefault(owner[id(one)], kept)
    return found


def _stuck(part: nn.Module, spares: Spares, optimizers: Sequence[Optimizer]) -> str | None:
    """Why a block cannot be sent."""
    for path, child in part.named_modules():
        for name, value in attributes_of(child).items():
            if not spares.is_shared(value):
                try:
                    packed(value)
                except pickle.PicklingError as error:
                    return f"its attribute {'.'.join(filter(None, (path, name)))!r} cannot be sent ({error})"
    own = {id(p) for p in part.parameters()}
    for optimizer in optimizers:
        for name, value in vars(optimizer).items():
            if name not in ("state", "param_groups") and any(id(one) in own for one in held_in(value)):
                return f"{type(optimizer).__name__} keeps its parameters in the attribute {name!r}"
    return None


def _sent(value: Any) -> tuple[Any, str]:
    """A piece of optimizer state, and what it has to become again."""
    if isinstance(value, DTensor):
        return local_tensor(value), "dtensor"
    return value, value.device.type if isinstance(value, Tensor) else ""


def _received(value: Any, kind: str, parameter: nn.Parameter) -> Any:
    if kind == "dtensor":
        assert isinstance(parameter, DTensor)
        return DTensor.from_local(
            value,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    # Memory of its own: what came lies in one buffer, which one large state would keep alive.
    return value.to(kind).clone() if isinstance(value, Tensor) else value


def _bytes_of(part: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    total = 0
    for parameter in part.parameters():
        held: list[Any] = [parameter, parameter.grad]
        for optimizer in optimizers:
            held += optimizer.state.get(parameter, {}).values()
        local = (local_tensor(value) for value in held if isinstance(value, Tensor))
        total += sum(value.numel() * value.element_size() for value in local if value is not None)
    return total + sum(b.numel() * b.element_size() for b in part.buffers())


# -- leaving ---------------------------------------------------------------------------------------------------------


def _forget(part: nn.Module, optimizers: Sequence[Optimizer]) -> None:
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


# -- arriving --------------------------------------------------------------------------------------------------------


def _rebuilt(
    names: Sequence[str],
    prepared: PreparedModule,
    mesh: ParallelMesh,
    device: torch.device,
    convert: Callable[[nn.Module], nn.Module],
) -> dict[str, nn.Module]:
    """The arriving blocks as this stage shards them, with memory and without numbers."""
    assert prepared.spares is not None
    root = nn.Module()
    for name in names:
        owner: nn.Module = root
        *parts, key = name.split(".")
        for part in parts:
            if part not in owner._modules:
                owner._modules[part] = nn.Module()
            owner = owner.get_submodule(part)
        owner._modules[key] = prepared.spares.fresh(name)
    if prepared.deferral is not None:
        prepared.deferral.connect(root)
    tensor = mesh.submesh("tensor")
    shard_module(root, tensor, prepared.config.sequence_parallel and tensor is not None)
    inside = [
        one
        for one in prepared.choice.assignments
        if any(path == name or path.startswith(f"{name}.") for path in (one.path, *one.aliases) for name in names)
    ]
    if inside and tensor is not None:
        apply_assignments(root, inside, TensorRanks(tensor))
    owners = parameter_owners(root)
    root.to_empty(device=device)
    for (_, first, first_name), *others in owners.values():
        for _, other, name in others:
            other._parameters[name] = first._parameters[first_name]
    convert(root)
    return {name: root.get_submodule(name) for name in names}


@torch.no_grad()
def _fill(part: nn.Module, nest: Mapping[str, Any], optimizers: Sequence[Optimizer], device: torch.device) -> None:
    for path, values in nest["attributes"].items():
        child = part.get_submodule(path)
        for name in attributes_of(child).keys() - set(nest["names"][path]):
            del vars(child)[name]
        vars(child).update({name: unpacked(sent) for name, sent in values.items()})
    for path, values in nest["buffers"].items():
        child = part.get_submodule(path)
        for name, value in values.items():
            child._buffers[name] = None if value is None else _like(value, child._buffers.get(name))
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
            parameter.grad = _received(
                gradient, "dtensor" if isinstance(parameter, DTensor) else device.type, parameter
            )
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


def _like(value: Tensor, there: Tensor | None) -> Tensor:
    if isinstance(there, DTensor):
        made = DTensor.from_local(
            value.clone(),
            there.device_mesh,
            there.placements,
            run_check=False,
            shape=there.shape,
            stride=there.stride(),
        )
        return made
    return value.clone()


def _in_order(module: nn.Module, prepared: PreparedModule, optimizers: Sequence[Optimizer]) -> None:
    """Parameters in each group as the module names them, as an optimizer that was made now would hold them."""
    canonical = prepared.names.canonical
    order = {name: position for position, name in enumerate(prepared.names.parameters)}
    place = {id(p): order[canonical[name]] for name, p in module.named_parameters(remove_duplicate=False)}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            indices = sorted(range(len(group["params"])), key=lambda i: place.get(id(group["params"][i]), len(order)))
            if group.get("param_names"):
                group["param_names"][:] = [group["param_names"][i] for i in indices]
            group["params"][:] = [group["params"][i] for i in indices]
