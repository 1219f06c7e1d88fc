"""Between the sharded tensors of a layout and the full state dict of the unsharded module."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megapar.checkpoint.errors import CheckpointError
from lightning_megapar.checkpoint.pieces import Box, coverage_fault, local_pieces, local_tensor
from lightning_megapar.checkpoint.ranks import GroupRanks, Ranks, ranks_of
from lightning_megapar.shards import Value


@dataclass(frozen=True)
class _Route:
    """How one tensor reaches rank 0: its dtype and shape, and per box the rank that sends it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    senders: tuple[tuple[Box, int], ...]


def gather_full_state_dict(
    names: Sequence[str],
    local: Mapping[str, Value],
    *,
    process_group: dist.ProcessGroup | Ranks | None = None,
) -> dict[str, Tensor]:
    """Collect full tensors on rank 0, one piece at a time.

    Every rank of the group calls this with the same ``names`` in the same order. Rank 0 needs the memory of the full
    state plus one piece, the other ranks that of one piece.

    Args:
        names: the keys of the result, in order (that of the unsharded module's ``state_dict()``).
        local: this rank's tensors by name; plain or DTensor, any dtype, 0-dimensional ones included. A name may live on
            some ranks only, rank 0 may hold none of it; of replicas, the lowest rank's values are taken.
        process_group: ``None`` for all ranks, or for this one process without torch.distributed.

    Returns:
        on rank 0 name -> new CPU tensor with the full shape and the dtype it has on its owner; elsewhere ``{}``.

    Raises:
        CheckpointError: on every rank alike: names that no rank holds, ranks that disagree about dtype or shape,
            pieces that do not make up a tensor, different ``names`` on different ranks.
    """
    ranks = ranks_of(process_group)

    def offer() -> tuple[list[str], dict[str, tuple[torch.dtype, tuple[int, ...], list[Box]]]]:
        held = {}
        for name in names:
            if name in local:
                tensor = local[name]
                held[name] = (tensor.dtype, tuple(tensor.shape), [p.box for p in local_pieces(name, tensor)])
        return list(names), held

    def plan(offers: list[Any]) -> list[list[_Route]]:
        return [_routes(offers)] * ranks.size

    routes = ranks.step("gathering the full state", offer, plan)
    if not isinstance(ranks, GroupRanks):
        return {route.name: _assemble_here(route, local[route.name]) for route in routes}
    mine = {name: {p.box: p for p in local_pieces(name, local[name])} for name in names if name in local}
    full: dict[str, Tensor] = {}
    with _transfer_group(ranks) as (group, device):
        for route in routes:
            value = torch.empty(route.shape, dtype=route.dtype) if ranks.rank == 0 else None
            for box, sender in route.senders:
                if sender == ranks.rank:
                    piece = mine[route.name][box].view(local_tensor(local[route.name]))
                    if value is None:
                        _send(piece, 0, device, group)
                    else:
                        value[box.slices()].copy_(piece)
                elif value is not None:
                    value[box.slices()].copy_(_receive(route.dtype, box.sizes, sender, device, group))
            if value is not None:
                full[route.name] = value
    return full


def _routes(offers: list[Any]) -> list[_Route]:
    names = offers[0][0]
    for rank, (other, _) in enumerate(offers):
        if other != names:
            differing = next((a, b) for a, b in zip([*names, None], [*other, None]) if a != b)
            raise CheckpointError(f"rank 0 gathers {differing[0]!r} where rank {rank} gathers {differing[1]!r}")
    missing = [name for name in names if not any(name in held for _, held in offers)]
    if missing:
        raise CheckpointError(f"no rank holds {', '.join(map(repr, missing[:4]))} ({len(missing)} names)")
    routes = []
    for name in names:
        senders: dict[Box, int] = {}
        kinds: dict[Any, int] = {}
        for rank, (_, held) in enumerate(offers):
            if name in held:
                dtype, shape, boxes = held[name]
                kinds.setdefault((dtype, shape), rank)
                for box in boxes:
                    senders.setdefault(box, rank)
        if len(kinds) > 1:
            told = " but ".join(f"{d} {s} on rank {r}" for (d, s), r in kinds.items())
            raise CheckpointError(f"{name!r} is {told}")
        ((dtype, shape),) = kinds
        fault = coverage_fault(shape, list(senders))
        if fault is not None:
            raise CheckpointError(f"the ranks' pieces of {name!r} do not make up the tensor: {fault}")
        routes.append(_Route(name, dtype, shape, tuple(sorted(senders.items()))))
    return routes


def _assemble_here(route: _Route, tensor: Value) -> Tensor:
    value = torch.empty(route.shape, dtype=route.dtype)
    for piece in local_pieces(route.name, tensor):
        value[piece.box.slices()].copy_(piece.view(local_tensor(tensor)))
    return value


@contextmanager
def _transfer_group(ranks: GroupRanks) -> Iterator[tuple[dist.ProcessGroup | None, torch.device]]:
    """A gloo group of its own for the transfers, and the device that tensors must lie on.

    Ranks send different numbers of pieces. In the caller's group that would upset torch's count of collectives
    (``TORCH_DISTRIBUTED_DEBUG=DETAIL`` raises), and on NCCL every pair would get a communicator. A group that does not
    span the world cannot be made by its members alone; its own backend is used then.
    """
    if ranks.size == dist.get_world_size():
        group = dist.new_group(backend="gloo")
        try:
            yield group, torch.device("cpu")
            # A rank with nothing to send would close its connections while slower peers are still making theirs. In
            # the caller's group: this one has counted different numbers of transfers on its ranks.
            dist.barrier(ranks.group)
        finally:
            dist.destroy_process_group(group)
    else:
        on_cpu = dist.get_backend(ranks.group) == "gloo"
        yield ranks.group, torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def _send(piece: Tensor, to: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
    # As bytes: backends differ in the dtypes that they know (bool, float8, complex).
    flat = piece.resolve_conj().resolve_neg().to(device).contiguous().reshape(-1)
    dist.send(flat.view(torch.uint8), group_dst=to, group=group)


def _receive(
    dtype: torch.dtype, sizes: tuple[int, ...], sender: int, device: torch.device, group: dist.ProcessGroup | None
) -> Tensor:
    flat = torch.empty(torch.Size(sizes).numel(), dtype=dtype, device=device)
    dist.recv(flat.view(torch.uint8), group_src=sender, group=group)
    return flat.reshape(sizes).cpu()


def load_full_into(
    local: Mapping[str, Value],
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    strict: bool = True,
    cast: bool = False,
) -> list[str]:
    """Fill this rank's (sharded) tensors in place from a full state dict; no communication.

    Args:
        local: name -> tensor or DTensor to fill.
        source: a state dict, a checkpoint dictionary that holds one under ``"state_dict"``, or the path of a
            ``torch.save`` file of either. A file is memory-mapped and loaded with ``weights_only=True``: each rank
            reads only its slices.
        strict: a name of ``local`` that the state lacks is an error.
        cast: accept another dtype and convert.

    Returns:
        the names of the state that this rank did not use.

    Raises:
        CheckpointError: unreadable file, missing names, another shape or dtype. Nothing is changed then.
    """
    state = _full_state(source)
    faults, plan = [], []
    for name, tensor in local.items():
        value = state.get(name)
        if not isinstance(value, Tensor):
            if strict:
                faults.append(f"{name!r} is not in the state dict")
        elif value.shape != tensor.shape:
            faults.append(f"{name!r} has shape {tuple(tensor.shape)}, in the state dict {tuple(value.shape)}")
        elif value.dtype != tensor.dtype and not cast:
            faults.append(f"{name!r} is {tensor.dtype}, in the state dict {value.dtype}")
        else:
            plan.append((value, local_tensor(tensor), local_pieces(name, tensor)))
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise CheckpointError(f"loading a full state dict: {shown}")
    with torch.no_grad():
        for value, target, pieces in plan:
            for piece in pieces:
                piece.view(target).copy_(value[piece.box.slices()])
    return [name for name in state if name not in local]


def _full_state(source: str | os.PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(source, Mapping):
        path = Path(source)
        if not path.is_file():
            from lightning_megapar.checkpoint.reader import what_is

            raise CheckpointError(f"{path} is not a file with a full state dict: {what_is(path)}")
        try:
            source = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{path} cannot be loaded: {str(error).splitlines()[0]}") from error
        if not isinstance(source, Mapping):
            raise CheckpointError(f"{path} holds a {type(source).__name__}, not a state dict")
    inner = source.get("state_dict")
    return inner if isinstance(inner, Mapping) else source
