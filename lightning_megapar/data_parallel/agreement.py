"""Do the tensor ranks agree about what they hold alike? Asked on the first step and ever more rarely after it.

A parameter that is whole on every tensor rank has the same gradient on all of them, unless it is used inside a sharded
region: then each rank's gradient is an addend, the ranks drift apart without a word, and the loss of the first step is
exact all the same. Published sharding plans miss such parameters (transformers 5.24: Apertus, SarvamMoE, Inkling).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megapar.batches import alike, fingerprint
from lightning_megapar.data_parallel.parameters import LogicalParameter, local_tensor, trainable
from lightning_megapar.layers.base import ParallelLayer
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.shards import own_shards

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Relative difference of gradients that rounding may explain, by dtype."""


@torch.no_grad()
def undeclared_addends(
    parameters: Sequence[LogicalParameter], mesh: ParallelMesh, working: torch.dtype | None = None
) -> list[str]:
    """Names of whole parameters whose gradients differ between tensor ranks and that no layer names as addends.

    Collective over all ranks, which return the same names: those that any of them found.

    Args:
        parameters: of this rank, with the gradients of a whole step, not yet summed over anything.
        mesh: the ranks.
        working: what the step computes in, where gradients are wider.
    """
    group = mesh.group("tensor")
    if group is None:
        return []
    asked = [p for p in trainable(parameters) if not p.tensor_sharded and not p.partial_over_tensor]
    ratios = torch.zeros(len(asked), dtype=torch.float64)
    for position, record in enumerate(asked):
        own = local_tensor(record.parameter)
        assert own is not None
        gradient = record.local_gradient
        gradient = torch.zeros_like(own) if gradient is None else gradient
        # Float32 at least: a mean in bfloat16 would round as much as it is to show.
        mean = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous().clone()
        dist.all_reduce(mean, group=group)
        mean /= mesh.size("tensor")
        ratios[position] = _ratio(gradient, mean) / TOLERANCE.get(working or gradient.dtype, 1e-4)
    worst = ratios.to(mean.device) if asked else ratios
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    mine = [record.name for record, ratio in zip(asked, worst.tolist()) if ratio > 1.0]
    everyone: list[list[str]] = [[] for _ in range(mesh.layout.world_size)]
    dist.all_gather_object(everyone, mine)
    return sorted({name for one in everyone for name in one})


@torch.no_grad()
def unlike_buffers(buffers: Mapping[str, Tensor], mesh: ParallelMesh) -> list[str]:
    """Names of buffers that differ between tensor ranks, which fill them from the same samples.

    Collective over all ranks, which return the same names: those that any of them found.

    Args:
        buffers: of this rank, without those of layers that are cut themselves.
        mesh: the ranks.
    """
    group = mesh.group("tensor")
    if group is None:
        return []
    mine = {
        name: (tuple(buffer.shape), fingerprint(buffer, buffer.device).tolist())
        for name, buffer in buffers.items()
        if buffer.is_floating_point() and not buffer.is_meta
    }
    peers: list[Any] = [None] * mesh.size("tensor")
    dist.all_gather_object(peers, mine, group=group)
    names: set[str] = set()
    for other in peers[1:]:
        for name in other.keys() | peers[0].keys():
            one, two = peers[0].get(name), other.get(name)
            if one is None or two is None or one[0] != two[0] or not alike(one[1], two[1]):
                names.add(name)
    everyone: list[list[str]] = [[] for _ in range(mesh.layout.world_size)]
    dist.all_gather_object(everyone, sorted(names))
    return sorted({name for one in everyone for name in one})


def whole_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers of a module by name, without those of layers that are cut."""
    found: dict[str, Tensor] = {}
    for path, child in module.named_modules():
        if isinstance(child, ParallelLayer) or own_shards(child):
            continue
        own = child.named_buffers(recurse=False)
        found.update({f"{path}.{name}" if path else name: buffer for name, buffer in own})
    return found


def _ratio(gradient: Tensor, mean: Tensor) -> float:
    if not gradient.numel():
        return 0.0
    scale = float(mean.abs().max() + gradient.abs().max())
    return float((gradient - mean).abs().max()) / scale if scale > 0 else 0.0


def declared(parameters: Sequence[LogicalParameter], names: Sequence[str]) -> list[LogicalParameter]:
    """The same records, with these parameters' gradients marked as addends over the tensor ranks."""
    return [replace(p, partial_over_tensor=True) if p.name in names else p for p in parameters]


def losses_differ(loss: Tensor, mesh: ParallelMesh, tolerance: float) -> bool:
    """Whether the tensor ranks of the last stage computed different losses. Collective over the tensor ranks.

    Args:
        loss: 0-dim float64, this rank's sum of microbatch losses.
        mesh: the ranks.
        tolerance: relative difference that rounding may explain.
    """
    group = mesh.group("tensor")
    if group is None:
        return False
    number, unlike = torch.nan_to_num(loss, nan=0.0), torch.isnan(loss).double()
    ends = torch.stack([number, -number, unlike, -unlike])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    if float(ends[2]) != -float(ends[3]):  # not a number on some ranks only
        return True
    high, low = float(ends[0]), -float(ends[1])
    return high - low > tolerance * max(abs(high), abs(low), 1e-30)
