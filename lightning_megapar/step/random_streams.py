"""Random numbers that do not depend on where a block runs.

Before each microbatch, and again before and after each block of the stack, the generators are seeded from (seed, step,
data rank, microbatch, block). Tensor ranks then draw the same dropout mask where they hold the same activations,
two stages never draw each other's, and a block draws the same mask on whatever stage it lives. (A sample's mask still
depends on the microbatch it falls into.)

Outside the steps, where the data is loaded, ranks that share their samples must draw alike (augmentations, the seeds of
workers): they start from one state, and a step leaves the generators as it found them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_megapar.generators import generator_states, seed_generators, set_generator_states
from lightning_megapar.mesh import ParallelMesh


def uses_dropout(module: nn.Module) -> bool:
    """Whether any submodule drops something (a ``*Dropout*`` class with ``p > 0``, a positive ``*drop*`` attribute)."""
    for child in module.modules():
        if "dropout" in type(child).__name__.lower() and getattr(child, "p", 0) > 0:
            return True
        for name, value in vars(child).items():
            if "drop" in name and isinstance(value, float) and value > 0:
                return True
    return False


def share_generators(mesh: ParallelMesh) -> None:
    """Give the ranks that share their samples one state of the generators: that of the first of them.

    Collective over the tensor and pipeline ranks. After ``seed_everything`` nothing changes.
    """
    box = [generator_states()]
    for axis in ("tensor", "pipeline"):
        group = mesh.group(axis)
        if group is not None:
            dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    set_generator_states(box[0])


class RandomStreams:
    """Seeds the generators for one rank.

    Args:
        seed: of the run.
        data_rank: ranks that see different samples draw different numbers.
        blocks: for each of the stack's blocks, in global order, what it is on this rank (itself, stand-ins); empty
            where there is no dropout to key.
    """

    def __init__(self, seed: int, data_rank: int, blocks: Sequence[Sequence[nn.Module]] = ()) -> None:
        self.seed = seed
        self.data_rank = data_rank
        self._place = ""
        self._handles: list[Any] = []
        self.rekey(blocks)

    def rekey(self, blocks: Sequence[Sequence[nn.Module]]) -> None:
        """Key these blocks from now on, instead of those that were keyed; see the class."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for index, block in ((index, block) for index, places in enumerate(blocks) for block in places):
            self._handles.append(block.register_forward_pre_hook(self._before(index)))
            # Also after it: what is drawn between two blocks must not depend on whether this one ran here.
            self._handles.append(block.register_forward_hook(self._after(index)))

    def begin_microbatch(self, step: int, microbatch: int, data_rank: int | None = None) -> None:
        """Seed for everything before the stack.

        Args:
            step: number of the batch.
            microbatch: number in its batch.
            data_rank: whose batch it is of, by default this rank's.
        """
        self.begin_backward(step, microbatch, data_rank)
        seed_generators(zlib.crc32(self._place.encode()))

    def begin_backward(self, step: int, microbatch: int, data_rank: int | None = None) -> None:
        """Blocks that are recomputed in this microbatch's backward draw what they drew in its forward."""
        self._place = f"{self.seed}:{step}:{self.data_rank if data_rank is None else data_rank}:{microbatch}"

    def _before(self, index: int) -> Any:
        def seed(block: nn.Module, args: tuple[Any, ...]) -> None:
            if block.training and self._place:
                seed_generators(zlib.crc32(f"{self._place}:{index}".encode()))

        return seed

    def _after(self, index: int) -> Any:
        def seed(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if block.training and self._place:
                seed_generators(zlib.crc32(f"{self._place}:after {index}".encode()))

        return seed
