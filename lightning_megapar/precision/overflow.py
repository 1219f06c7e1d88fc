"""Whether any gradient of a step is infinite or not a number, asked of all ranks at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megapar.data_parallel.norm import local_norms
from lightning_megapar.data_parallel.parameters import LogicalParameter
from lightning_megapar.mesh import ParallelMesh


@torch.no_grad()
def overflowed(parameters: Sequence[LogicalParameter], mesh: ParallelMesh, device: torch.device) -> bool:
    """Whether a gradient of any rank is not finite; the same answer on every rank. Collective over all ranks.

    Tensor ranks and stages hold different gradients: asked alone, one would skip a step that the others take.

    Args:
        parameters: this rank's, with unscaled gradients; the rest counts as finite.
        mesh: the ranks.
        device: of the flag.
    """
    # The largest magnitude is infinite or NaN exactly when one element is; nothing is written.
    largest = local_norms((g for p in parameters if (g := p.local_gradient) is not None), math.inf, device)
    flag = (~torch.isfinite(largest)).any().float()
    if mesh.layout.world_size > 1:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


@torch.no_grad()
def first_nonfinite(parameters: Sequence[LogicalParameter], mesh: ParallelMesh, order: Sequence[str]) -> str:
    """Canonical name of the first parameter of the whole model whose gradient is not finite; ``""`` without one.

    Collective over all ranks, which get the same name.

    Args:
        parameters: this rank's.
        mesh: the ranks.
        order: canonical names of the whole model, in order.
    """
    mine = [p.name for p in parameters if (g := p.local_gradient) is not None and not _finite(g)]
    everyone: list[list[str]] = [mine]
    if mesh.layout.world_size > 1:
        everyone = [[] for _ in range(mesh.layout.world_size)]
        dist.all_gather_object(everyone, mine)
    bad = {name for one in everyone for name in one}
    return next((name for name in order if name in bad), "")


def _finite(gradient: Tensor) -> bool:
    return bool(torch.isfinite(gradient).all())
