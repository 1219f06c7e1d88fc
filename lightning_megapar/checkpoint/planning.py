"""Who writes what: the ranks' offers merged into one plan, each box of each tensor once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megapar.checkpoint.errors import CheckpointError
from lightning_megapar.checkpoint.pieces import Box, coverage_fault, local_pieces, local_tensor
from lightning_megapar.shards import Value, is_value


@dataclass(frozen=True)
class Offer:
    """What a rank has of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


PIECE_OVERHEAD = 2048
"""Bytes that torch.save adds to a tensor, at most; for the estimate of the room needed."""


def make_offer(name: str, tensor: Value) -> Offer:
    if not isinstance(name, str) or not is_value(tensor):
        raise CheckpointError(f"{name!r}: expected a name and a tensor, got {type(tensor).__name__}")
    local = local_tensor(tensor)
    if type(local) is not Tensor or local.layout != torch.strided or local.is_quantized:
        raise CheckpointError(
            f"{name!r} is a {type(local).__name__} of layout {local.layout}; only dense ones are saved"
        )
    if local.device.type == "meta":
        raise CheckpointError(f"{name!r} is on the meta device and has no values")
    boxes = tuple(piece.box for piece in local_pieces(name, tensor))
    return Offer(name, tensor.dtype, tuple(tensor.shape), boxes)


def estimate_bytes(offer: Offer, box: Box) -> int:
    return box.volume * offer.dtype.itemsize + PIECE_OVERHEAD


def check_agreement(offers: list[tuple[str, int, list[Offer]]]) -> None:
    for rank, (path, step, _) in enumerate(offers):
        if (path, step) != offers[0][:2]:
            raise CheckpointError(
                f"ranks disagree about the save: rank 0 has step {offers[0][1]} to {offers[0][0]}, "
                f"rank {rank} has step {step} to {path}"
            )


def share_out(tables: list[list[Offer]]) -> tuple[dict[str, Offer], list[list[tuple[str, Box]]]]:
    """Who writes what: every box once, by the holder that has the fewest bytes so far.

    Returns:
        every tensor of the save (its boxes being those of all ranks), and per rank the boxes to write.

    Raises:
        CheckpointError: ranks disagree about a tensor, or its pieces do not cover it exactly once.
    """
    known: dict[str, tuple[int, Offer]] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, table in enumerate(tables):
        for offer in table:
            first, like = known.setdefault(offer.name, (rank, offer))
            if (offer.dtype, offer.shape) != (like.dtype, like.shape):
                raise CheckpointError(
                    f"{offer.name!r} is {like.dtype} {like.shape} on rank {first} "
                    f"but {offer.dtype} {offer.shape} on rank {rank}"
                )
            boxes = holders.setdefault(offer.name, {})
            for box in offer.boxes:
                boxes.setdefault(box, []).append(rank)
    load = [0] * len(tables)
    assigned: list[list[tuple[str, Box]]] = [[] for _ in tables]
    merged = {}
    for name, boxes in holders.items():
        offer = known[name][1]
        merged[name] = Offer(name, offer.dtype, offer.shape, tuple(sorted(boxes)))
        for box in merged[name].boxes:
            writer = min(boxes[box], key=lambda r: (load[r], r))
            load[writer] += estimate_bytes(offer, box)
            assigned[writer].append((name, box))
        _check_cover(merged[name])
    return merged, assigned


def _check_cover(offer: Offer) -> None:
    fault = coverage_fault(offer.shape, list(offer.boxes))
    if fault is not None:
        raise CheckpointError(f"the ranks' pieces of {offer.name!r} do not make up the tensor: {fault}")
