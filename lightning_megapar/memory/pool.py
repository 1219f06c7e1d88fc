"""The arena of a GPU: a pool of torch's caching allocator of its own, and the choice between the two kinds.

``torch.cuda.MemPool`` keeps the pipeline's buffers apart from the rest, so that neither cuts up the other's segments.
With expandable segments a segment grows where it lies, in virtual memory, which takes the place of compaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megapar.memory.arena import Arena, ArenaStats, TensorArena


class PoolArena(Arena):
    """An arena over ``torch.cuda.MemPool``; it takes what it needs, so steps and capacities mean nothing to it.

    Args:
        device: a GPU.
        expandable_segments: let segments grow, where torch can be told so at run time and has not been told otherwise.
            It is told for the whole process: there is no such setting for one pool.
        api: torch itself, or what stands for it.
    """

    def __init__(self, device: torch.device, expandable_segments: bool = True, api: Any = torch) -> None:
        self.device = device
        self._torch = api
        if expandable_segments:
            _let_segments_expand(api._C)
        self._pool = api.cuda.MemPool()
        self._peak = 0

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype | None = None, strides: Sequence[int] | None = None
    ) -> Tensor:
        """As :meth:`Arena.empty`."""
        with self._torch.cuda.use_mem_pool(self._pool, self.device):
            if strides is None:
                tensor: Tensor = self._torch.empty(tuple(shape), dtype=dtype, device=self.device)
            else:
                tensor = self._torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=self.device)
        return tensor

    def begin_step(self) -> None:
        """Nothing is planned."""

    def end_step(self) -> None:
        """Notes how much is held."""
        self.stats()

    def stats(self) -> ArenaStats:
        """As :meth:`Arena.stats`; ``peak_bytes`` is the most that any call of this has seen."""
        segments = self._pool.snapshot()
        capacity = sum(one["total_size"] for one in segments)
        allocated = sum(one["allocated_size"] for one in segments)
        free = [block["size"] for one in segments for block in one["blocks"] if block["state"] == "inactive"]
        self._peak = max(self._peak, allocated)
        fragmentation = 1.0 - max(free) / sum(free) if free else 0.0
        return ArenaStats(capacity, allocated, self._peak, fragmentation, 0, 0, 0)


def _let_segments_expand(own: Any) -> None:
    # A call resets what it does not name, so the settings so far are said again.
    change = getattr(own, "_accelerator_setAllocatorSettings", None)
    settings = getattr(own, "_accelerator_getAllocatorSettings", str)()
    if change is not None and "expandable_segments" not in settings:
        change(",".join([*filter(None, [settings]), "expandable_segments:True"]))


def make_arena(device: torch.device, capacity: int | None = None) -> Arena | None:
    """The arena for a device; ``None`` for kinds of devices that have none.

    Args:
        device: of the tensors.
        capacity: bytes, see :class:`TensorArena`.
    """
    if device.type == "cpu":
        return TensorArena(capacity)
    return PoolArena(device) if device.type == "cuda" else None
