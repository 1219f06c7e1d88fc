"""What a move of blocks would take, and why one cannot be made; asked before it is."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megapar.data_parallel.parameters import local_tensor
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.strategy.balance.attributes import attributes_of, held_in, packed
from lightning_megapar.strategy.balance.spares import Spares, count_hooks
from lightning_megapar.strategy.prepare import PreparedModule

PROBE_BYTES = 4 * 2**20
"""Size of the message by which a link is measured."""


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


def appraise(
    module: nn.Module,
    prepared: PreparedModule,
    ranges: tuple[tuple[int, int], ...],
    mesh: ParallelMesh,
    optimizers: Sequence[Optimizer],
    device: torch.device,
    hooks: Mapping[str, int],
    holders: Iterable[Any] = (),
) -> Appraisal:
    """Look at a move before it is made; collective over all ranks.

    Args:
        module, prepared, ranges, mesh, optimizers, device: as for
            :func:`~lightning_megapar.strategy.balance.moving.move_layers`.
        hooks: what :func:`~lightning_megapar.strategy.balance.spares.count_hooks` found when the stage was made.
        holders: objects that may keep blocks or their parameters (callbacks).
    """
    assert prepared.plan is not None and prepared.spares is not None
    going = prepared.plan.moves_to(ranges)
    here = mesh.coordinate("pipeline")
    sizes = {name: _bytes_of(module.get_submodule(name), optimizers) for name, source, _ in going if source == here}
    now = count_hooks({name: module.get_submodule(name) for name, _, _ in going})
    stuck = _referred_to(module, [name for name, _, _ in going], holders)
    hooked = (name for name, number in now.items() if number != hooks.get(name, 0))
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


def _bytes_of(part: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    total = 0
    for parameter in part.parameters():
        held: list[Any] = [parameter, parameter.grad]
        for optimizer in optimizers:
            held += optimizer.state.get(parameter, {}).values()
        local = (local_tensor(value) for value in held if isinstance(value, Tensor))
        total += sum(value.numel() * value.element_size() for value in local if value is not None)
    return total + sum(b.numel() * b.element_size() for b in part.buffers())
