"""The global gradient norm: each logical parameter counted once, whatever the layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megapar.data_parallel.parameters import LogicalParameter, local_tensor
from lightning_megapar.mesh import ParallelMesh


def counts_here(record: LogicalParameter, mesh: ParallelMesh) -> bool:
    """Whether this rank's piece enters the global sum.

    Tensor-replicated parameters count on tensor rank 0, data-replicated ones on data rank 0, tied ones on the first
    stage that holds them.
    """
    if mesh.coordinate("pipeline") != record.stages[0]:
        return False
    if mesh.coordinate("tensor") != 0 and not record.tensor_sharded:
        return False
    return record.data_sharded or mesh.coordinate("data") == 0


@torch.no_grad()
def gradient_norm(parameters: Sequence[LogicalParameter], mesh: ParallelMesh, norm_type: float = 2.0) -> Tensor:
    """Norm of all gradients together, equal on every rank.

    Args:
        parameters: this rank's logical parameters; those without a gradient do not count.
        mesh: the ranks.
        norm_type: ``2.0``, any positive power, or ``math.inf``.

    Returns:
        0-dim float64 tensor: ``(sum over all elements |g|^p)^(1/p)``.
    """
    gradients = [g for p in parameters if counts_here(p, mesh) and (g := p.local_gradient) is not None and g.numel()]
    if gradients:
        norms = torch.stack([n.double() for n in torch._foreach_norm(gradients, norm_type)])
    else:
        device = local_tensor(parameters[0].parameter).device if parameters else None  # type: ignore[union-attr]
        norms = torch.zeros(1, dtype=torch.float64, device=device)
    if math.isinf(norm_type):
        total = norms.max()
        if mesh.layout.world_size > 1:
            dist.all_reduce(total, op=dist.ReduceOp.MAX)
        return total
    total = norms.pow(norm_type).sum()
    if mesh.layout.world_size > 1:
        dist.all_reduce(total)
    return total.pow(1.0 / norm_type)


@torch.no_grad()
def clip_by_norm(parameters: Sequence[LogicalParameter], norm: Tensor, limit: float) -> None:
    """Scale every local gradient by ``min(1, limit / (norm + 1e-6))`` (torch's ``clip_grad_norm_`` rule)."""
    gradients = [g for p in parameters if (g := p.local_gradient) is not None]
    if gradients:
        coefficient = torch.clamp(limit / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(gradients, coefficient.to(gradients[0].device, gradients[0].dtype))


@torch.no_grad()
def clip_by_value(parameters: Sequence[LogicalParameter], limit: float) -> None:
    """Clamp every local gradient element to ``[-limit, limit]``."""
    gradients = [g for p in parameters if (g := p.local_gradient) is not None]
    if gradients:
        torch._foreach_clamp_min_(gradients, -limit)
        torch._foreach_clamp_max_(gradients, limit)
