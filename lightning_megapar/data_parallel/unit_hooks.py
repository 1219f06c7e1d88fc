"""Hooks on the modules that FSDP2 shards: gather together, keep arguments, sum in the reduction's dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that ``module.compile()`` does not trace.

    That compiles a module's call with its hooks, and what a traced hook notes would be lost.
    """

    @wraps(hook)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            hook_alone = torch._dynamo.disable(hook, recursive=True, reason="a hook of sharded units")
            return hook_alone(*args, **kwargs)
        return hook(*args, **kwargs)

    return called


class Together(nn.Module):
    """Modules that share parameters, as one unit. It is no part of the user's module; calling it gathers them."""

    def __init__(self, owners: Sequence[nn.Module]) -> None:
        super().__init__()
        self.owners = nn.ModuleList(owners)

    def forward(self) -> None:
        """Nothing: FSDP2's hooks do it."""


def gather_for(owners: Sequence[nn.Module], unit: nn.Module) -> None:
    """Gather ``unit`` before any part of ``owners`` that has parameters of its own is called."""

    @untraced
    def gather(*_: Any) -> None:
        unit()

    for part in {id(part): part for owner in owners for part in owner.modules()}.values():
        if next(part.parameters(recurse=False), None) is not None:
            part.register_forward_pre_hook(gather, prepend=True)


@untraced
def accumulate_in(dtype: torch.dtype | None, unit: Any, _: Any) -> None:
    """Sum the gathered parameters' gradients in the reduction's dtype from the first microbatch on.

    FSDP2 would leave those that waited (see :mod:`lightning_megapar.layers.deferral`) in the parameters' own, and
    refuses to reduce gradients of two dtypes.
    """
    for parameter in unit.parameters():
        if parameter.requires_grad and parameter.grad_dtype != dtype:
            parameter.grad_dtype = dtype


def keep_containers(unit: nn.Module) -> None:
    """Call a unit with the very lists and dicts that it was called with.

    FSDP2 copies the containers among the arguments, so that what a block puts into a dict that all blocks share would
    be lost without a word.
    """
    given: list[tuple[dict[int, Any], dict[str, Any]]] = []

    @untraced
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions = {index: value for index, value in enumerate(args) if isinstance(value, (list, dict))}
        given[:] = [(positions, {key: value for key, value in kwargs.items() if isinstance(value, (list, dict))})]

    @untraced
    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions, named = given.pop()
        if not positions and not named:
            return None
        return tuple(positions.get(index, value) for index, value in enumerate(args)), {**kwargs, **named}

    unit.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    unit.register_forward_pre_hook(after, with_kwargs=True)


@torch.no_grad()
def keep_changes(parameter: Any) -> None:
    """Where a gathered parameter (an ``FSDPParam``) is no longer what was gathered, change this rank's shard alike."""
    whole, shard = _local(parameter._unsharded_param), _local(parameter.sharded_param)
    ranks, rank = parameter.mesh_info.shard_mesh_size, parameter.mesh_info.shard_mesh_rank
    pieces = whole.detach().chunk(ranks, dim=parameter.fsdp_placement.dim)
    if rank >= len(pieces) or not shard.numel():
        return
    piece = pieces[rank].to(shard.device)
    changed = piece != shard.to(piece.dtype)
    shard.copy_(torch.where(changed, piece.to(shard.dtype), shard))


def _local(value: torch.Tensor) -> torch.Tensor:
    """This rank's own tensor inside of any DTensors."""
    while isinstance(value, DTensor):
        value = value._local_tensor
    return value
