"""Blocks change their pipeline stage between two steps: weights, gradients, buffers and optimizer state go with them.

A block that leaves becomes a stand-in; one that arrives is built from its spare copy, sharded as the stage shards its
own, and filled with what came. Everything that follows from who holds what (the cut, the sums of gradients, the logical
parameters) is made anew. The numbers stay what they are, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_megapar.layers.collectives import TensorRanks
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.pipeline.cutting.chunks import RankCut
from lightning_megapar.pipeline.engine.exchange import BoundaryReceiver, BoundarySender, Link
from lightning_megapar.sharding.apply import parameter_owners, shard_module
from lightning_megapar.sharding.by_plan import apply_assignments
from lightning_megapar.strategy.balance.parcels import forget, pack, unpack
from lightning_megapar.strategy.balance.spares import Spares
from lightning_megapar.strategy.prepare import PreparedModule, keyed_blocks, recorded_parameters
from lightning_megapar.strategy.recomputing import keep_activations


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
    going = prepared.plan.moves_to(plan.ranges)
    prepared.cut.remove_hooks()
    arrived = _exchanged(module, going, spares, mesh, optimizers, device)
    # Before anything new: a stage may be as full as it was.
    for name, source, _ in going:
        if source == here:
            forget(module.get_submodule(name), optimizers)
    fresh = _rebuilt(list(arrived), prepared, mesh, device, convert)
    for name, part in fresh.items():
        owner, _, key = name.rpartition(".")
        module.get_submodule(owner)._modules[key] = part
    cut = RankCut(module, plan, plan.placement[here], device, spares.modules)
    cut.working_dtype = None if prepared.cut is None else prepared.cut.working_dtype
    for stand_in in (one for chunk in cut.chunks for one in chunk.stand_ins.values()):
        convert(stand_in)  # so that it tells the dtypes that the originals have by now
    for name, nest in arrived.items():
        unpack(fresh[name], nest, optimizers)
    if arrived:
        _in_order(module, prepared, optimizers)
    if prepared.streams is not None:
        prepared.streams.rekey(keyed_blocks(module, cut, plan))
    cut.install_hooks()
    parameters, stages = recorded_parameters(module, prepared.names, mesh, partial=partial)
    recomputation = keep_activations(
        module, prepared.config, prepared.compression, plan, cut, prepared.deferral, device, prepared.arena
    )
    return replace(prepared, plan=plan, cut=cut, parameters=parameters, stages=stages, recomputation=recomputation)


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
                sender.send(pack(module.get_submodule(name), spares, optimizers), 0)
                senders.append(sender)
            elif target == here:
                arrived[name], _ = BoundaryReceiver(Link(mesh.stage_rank(source), group, device)).take(0)
        for sender in senders:
            sender.drain()
    return arrived


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
    if prepared.float8 is not None:
        prepared.float8.connect(root)
    tensor = mesh.submesh("tensor")
    shard_module(root, tensor, prepared.config.sequence_parallel and tensor is not None)
    inside = [
        one
        for one in prepared.choice.assignments
        if any(path == name or path.startswith(f"{name}.") for path in (one.path, *one.aliases) for name in names)
    ]
    if inside and tensor is not None:
        apply_assignments(root, inside, TensorRanks(tensor))
    if prepared.float8 is not None:
        prepared.float8.settle(root)
    owners = parameter_owners(root)
    root.to_empty(device=device)
    for (_, first, first_name), *others in owners.values():
        for _, other, name in others:
            other._parameters[name] = first._parameters[first_name]
    convert(root)
    return {name: root.get_submodule(name) for name in names}


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
