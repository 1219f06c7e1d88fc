"""What all ranks take from rank 0 in set-up."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def from_rank_zero(value: Any) -> Any:
    """An object that pickles, as rank 0 has it; collective over all ranks."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


@torch.no_grad()
def take_values_of_rank_zero(module: nn.Module, device: torch.device, loaded: Collection[str] = ()) -> None:
    """Unseeded scripts build different values on every rank; all take rank 0's, as under DDP.

    Tensors named in ``loaded`` get theirs from files.
    """
    seen: set[int] = set()
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if value.is_meta or id(value) in seen or value.numel() == 0 or name in loaded:
            continue
        seen.add(id(value))
        if value.layout != torch.strided:
            value.data.copy_(from_rank_zero(value.data.cpu()))
            continue
        moved = value.data.to(device).contiguous()
        dist.broadcast(moved, src=0)
        if moved.data_ptr() != value.data_ptr():
            value.data.copy_(moved)
