"""Between DTensor parameters, which carry global shapes, and the local tensors that kernels and collectives see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


def local_value(parameter: Tensor) -> Tensor:
    """This rank's piece of ``parameter``, outside autograd (inside an autograd Function, or under ``no_grad``)."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def like_parameter(parameter: Tensor, local: Tensor) -> Tensor:
    """``local`` as this rank's piece of a gradient of ``parameter``.

    The placement is the parameter's own. A replicated parameter's gradient may differ between ranks until the
    partial gradients are summed (:meth:`ParallelLayer.partial_gradients`); DTensor does not look.
    """
    if isinstance(parameter, DTensor):
        # The constructor and not DTensor.from_local: 2 us against 30 us, once per parameter and microbatch.
        return DTensor(local, parameter._spec, requires_grad=False)
    return local


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.spec = parameter._spec  # type: ignore[attr-defined]
        local = local_value(parameter)
        return local.view_as(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return DTensor(gradient, ctx.spec, requires_grad=False)


def local(parameter: Tensor) -> Tensor:
    """This rank's piece of ``parameter`` inside the graph: half the price of ``DTensor.to_local``."""
    return _Local.apply(parameter) if isinstance(parameter, DTensor) else parameter


def local_bounds(size: int, shards: int, index: int) -> tuple[int, int]:
    """Start and length of piece ``index`` of ``size`` rows cut in ``shards``, as DTensor cuts them."""
    step = -(-size // shards)
    start = min(index * step, size)
    return start, min(step, size - start)


def own_piece(full: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """The view of ``full`` that this rank holds under ``placements``.

    Raises:
        NotImplementedError: for placements other than ``Shard`` and ``Replicate``.
    """
    piece = full
    for axis, placement in enumerate(placements):
        if type(placement) is Shard:
            start, length = local_bounds(piece.shape[placement.dim], mesh.size(axis), mesh.get_local_rank(axis))
            piece = piece.narrow(placement.dim, start, length)
        elif not isinstance(placement, Replicate):
            raise NotImplementedError(f"cannot cut a full tensor for the placement {placement}")
    return piece


def distribute(full: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """A DTensor from this rank's piece of ``full`` (copied, so that the full storage can go), without communication.

    On the meta device the piece is meta too.
    """
    piece = own_piece(full.detach(), mesh, (placement,))
    piece = torch.empty_like(piece) if full.is_meta else piece.clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        piece,
        mesh,
        (placement,),
        run_check=False,
        shape=full.shape,
        stride=torch.empty(full.shape, device="meta").stride(),
    )


def replace_parameter(old: Tensor, value: Tensor) -> nn.Parameter:
    """A Parameter around ``value`` with the ``requires_grad`` and the Python attributes of ``old``."""
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    for name, attribute in vars(old).items():
        if name not in ("_local_tensor", "_spec", "_is_param"):
            setattr(new, name, attribute)
    return new


def fill(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's piece of ``full`` (any dtype and device) into ``parameter``.

    Raises:
        ValueError: when the shapes differ.
    """
    if full.shape != parameter.shape:
        raise ValueError(f"expected a full tensor of shape {tuple(parameter.shape)}, got {tuple(full.shape)}")
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            full = own_piece(full, parameter.device_mesh, parameter.placements)
        local_value(parameter).copy_(full)
