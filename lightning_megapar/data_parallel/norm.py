"""The global gradient norm and clipping: each logical parameter counted once, whatever the layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad

from lightning_megapar.config import ConfigError, nearest_name
from lightning_megapar.data_parallel.parameters import LogicalParameter, local_tensor
from lightning_megapar.mesh import ParallelMesh

ALGORITHMS = ("norm", "value")
"""What Lightning's ``gradient_clip_algorithm`` can say."""


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
    return local_norms(gradients, 2.0, device).square().sum()


def local_norms(gradients: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of each gradient: float64 on ``device``, in any order; none for empty ones.

    Gradients of half precision are summed in float32, whose range their squares would leave.
    """
    found = [torch.zeros(0, dtype=torch.float64, device=device)]
    for (_, dtype), same in _alike(gradients).items():
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        found.append(torch.stack(torch._foreach_norm(same, norm_type, wide)).to(device, torch.float64))
    return torch.cat(found)


def _alike(gradients: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Gradients with elements by device and dtype (shards may be kept in host memory)."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return groups


@torch.no_grad()
def gradient_norm(parameters: Sequence[LogicalParameter], mesh: ParallelMesh, norm_type: float = 2.0) -> Tensor:
    """Norm of all gradients together, equal on every rank.

    Args:
        parameters: this rank's logical parameters; those without a gradient do not count.
        mesh: the ranks.
        norm_type: ``2.0``, any positive power, or ``math.inf``.

    Returns:
        0-dim float64 tensor, where the ranks' group computes: ``(sum over all elements |g|^p)^(1/p)``.
    """
    here = (g for p in parameters if counts_here(p, mesh) and (g := p.local_gradient) is not None)
    norms = local_norms(here, norm_type, _device_of(parameters, mesh))
    if math.isinf(norm_type):
        total = norms.max() if norms.numel() else norms.new_zeros(())
        if mesh.layout.world_size > 1:
            dist.all_reduce(total, op=dist.ReduceOp.MAX)
        return total
    total = norms.pow(norm_type).sum()
    if mesh.layout.world_size > 1:
        dist.all_reduce(total)
    return total.pow(1.0 / norm_type)


def _device_of(parameters: Sequence[LogicalParameter], mesh: ParallelMesh) -> torch.device:
    """Where the ranks' group computes, which need not be where shards are kept."""
    if mesh.device_mesh is not None:
        return torch.device(mesh.device_mesh.device_type)
    local = local_tensor(parameters[0].parameter) if parameters else None
    return torch.device("cpu") if local is None else local.device


@torch.no_grad()
def clip_gradients(
    parameters: Sequence[LogicalParameter],
    mesh: ParallelMesh,
    limit: float,
    algorithm: str = "norm",
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor | None:
    """Clip all gradients together, each logical parameter counted once, whatever the layout and the optimizer.

    Args:
        parameters: this rank's logical parameters; those without a gradient do not count.
        mesh: the ranks; all of them make the call.
        limit: largest norm, or largest absolute value of an element.
        algorithm: ``"norm"``: every element times ``min(1, limit / (norm + 1e-6))``, as torch's ``clip_grad_norm_``;
            ``"value"``: every element clamped to ``[-limit, limit]``.
        norm_type: as in :func:`gradient_norm`.
        error_if_nonfinite: raise for a norm that is no finite number, before any gradient is changed.

    Returns:
        the norm before clipping (0-dim float64, the same on every rank); ``None`` for ``"value"``.

    Raises:
        ConfigError: for an unknown algorithm.
        RuntimeError: with ``error_if_nonfinite``, on every rank.
    """
    if algorithm not in ALGORITHMS:
        near = nearest_name(str(algorithm), ALGORITHMS)
        raise ConfigError(
            f"gradient_clip_algorithm={algorithm!r} is none of {', '.join(ALGORITHMS)}"
            + (f"; did you mean {near!r}?" if near else "")
        )
    groups = _alike(g for p in parameters if (g := p.local_gradient) is not None)
    if algorithm == "value":
        for same in groups.values():
            torch._foreach_clamp_min_(same, -limit)
            torch._foreach_clamp_max_(same, limit)
        return None
    norm = gradient_norm(parameters, mesh, norm_type)
    if error_if_nonfinite:
        _refuse_nonfinite(norm, norm_type)
    _scale(groups, norm, limit)
    return norm


def _refuse_nonfinite(norm: Tensor, norm_type: float) -> None:
    if not torch.isfinite(norm):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {float(norm)}, so that they cannot be clipped"
        )


@contextmanager
def torch_norms_are_global(parameters: Sequence[LogicalParameter], mesh: ParallelMesh) -> Iterator[None]:
    """While active, ``torch.nn.utils.clip_grad_norm_`` called by somebody's code takes the norm over all ranks' pieces.

    It sees the gradients that this rank holds, which are pieces under tensor parallelism and ZeRO, and some of them
    under pipeline parallelism. Norms of other tensors are left to torch. Every rank must make the call, as their code
    is the same; under a pipeline it must be given all gradients of the stage, because another stage may hold none of a
    part.
    """
    if mesh.size("tensor") * mesh.size("pipeline") == 1 and not any(p.data_sharded for p in parameters):
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
                f"with tensor_parallel_size={mesh.size('tensor')}, pipeline_parallel_size={mesh.size('pipeline')} and "
                "sharded data ranks the norm of a part cannot be told from here. Clip all of self.parameters() at "
                "once, by gradient_clip_val or self.clip_gradients(optimizer, ...)"
            )
        norm = gradient_norm(known, mesh, float(norm_type))
        if error_if_nonfinite:
            _refuse_nonfinite(norm, float(norm_type))
        return norm.to(asked[0].device, asked[0].dtype) if asked else norm

    scale = clip_grad._clip_grads_with_norm_
    clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_ = total_norm, _scale_pieces
    try:
        yield
    finally:
        clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_ = inner, scale


@torch.no_grad()
def _scale_pieces(
    parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Torch's function of the same arguments, for DTensors of any mesh beside plain tensors."""
    asked = [parameters] if isinstance(parameters, Tensor) else parameters
    _scale(_alike(g for p in asked if (g := local_tensor(p.grad)) is not None), total_norm, max_norm)


def _scale(groups: Mapping[tuple[torch.device, torch.dtype], list[Tensor]], norm: Tensor, limit: float) -> None:
    coefficient = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for (device, dtype), same in groups.items():
        torch._foreach_mul_(same, coefficient.to(device, dtype))
