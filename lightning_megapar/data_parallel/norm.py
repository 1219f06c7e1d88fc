"""The global gradient norm: each logical parameter counted once, whatever the layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad

from lightning_megapar.config import ConfigError
from lightning_megapar.data_parallel.parameters import LogicalParameter, local_tensor
from lightning_megapar.mesh import ParallelMesh


def counts_here(record: LogicalParameter, mesh: ParallelMesh) -> bool:
    """Whether this rank's piece enters the global sum.

    Tensor-replicated parameters count on tensor rank 0, data-replicated ones on data rank 0, shards in the first group
    of data ranks that holds them all, tied parameters on the first stage that holds them.
    """
    counts = mesh.holds_first_shards if record.data_sharded else mesh.coordinate("data") == 0
    return counts and counts_in_replica(record, mesh)


def counts_in_replica(record: LogicalParameter, mesh: ParallelMesh) -> bool:
    """Whether this rank's piece enters a sum over the ranks of one replica, see :func:`counts_here`."""
    if mesh.coordinate("pipeline") != record.stages[0]:
        return False
    return mesh.coordinate("tensor") == 0 or record.tensor_sharded


@torch.no_grad()
def local_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all elements: 0-dim float64 on ``device``. Nothing is reduced over ranks."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for dtype in {g.dtype for g in gradients}:
        same = [g for g in gradients if g.dtype == dtype and g.numel()]
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        if same:
            total = total + torch.stack(torch._foreach_norm(same, 2.0, wide)).double().square().sum()
    return total


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


@contextmanager
def torch_norms_are_global(parameters: Sequence[LogicalParameter], mesh: ParallelMesh) -> Iterator[None]:
    """While active, ``torch.nn.utils.clip_grad_norm_`` called by somebody's code takes the norm over all ranks' pieces.

    It sees the gradients that this rank holds, which are pieces under tensor and some of them under pipeline
    parallelism. Norms of other tensors are left to torch. Every rank must make the call, as their code is the same;
    under a pipeline it must be given all gradients of the stage, because another stage may hold none of a part.
    """
    if mesh.size("tensor") * mesh.size("pipeline") == 1:
        yield
        return
    inner = clip_grad._get_total_norm

    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: Any = None,
    ) -> Tensor:
        asked = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        held = {id(p.parameter.grad): p for p in parameters if p.parameter.grad is not None}
        known = [held[id(one)] for one in asked if id(one) in held]
        if asked and not known:
            return inner(asked, norm_type, error_if_nonfinite, foreach)
        if len(known) < len(asked) or (mesh.size("pipeline") > 1 and len(known) < len(held)):
            raise ConfigError(
                f"clip_grad_norm_ got {len(asked)} gradients, {len(known)} of the {len(held)} that this rank holds: "
                f"under tensor_parallel_size={mesh.size('tensor')} and pipeline_parallel_size={mesh.size('pipeline')} "
                "the norm of a part cannot be told from here. Clip all of self.parameters() at once, by "
                "gradient_clip_val or self.clip_gradients(optimizer, ...)"
            )
        norm = gradient_norm(known, mesh, float(norm_type))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of order {norm_type} of the gradients is {float(norm)}")
        return norm.to(asked[0].dtype) if asked else norm

    clip_grad._get_total_norm = total_norm
    try:
        yield
    finally:
        clip_grad._get_total_norm = inner


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
