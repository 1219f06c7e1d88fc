"""The chunks of one rank: several virtual stages of one module, of which one at a time runs the user's step.

Between steps the module holds all layers of the rank and stand-ins for the rest: that is what optimizers, checkpoints
and callbacks see. While a chunk runs, the layers of the rank's other chunks are stand-ins as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_megapar.pipeline.cutting.cut import StageCut, StagePlan, children_of
from lightning_megapar.pipeline.cutting.entrance import Boundary
from lightning_megapar.pipeline.cutting.stand_ins import StandIn


class RankCut:
    """One rank's share of a module.

    Args:
        module: the whole module; cut in place.
        plan: of the virtual stages.
        stages: the virtual stage of each of this rank's chunks.
        device: where this rank computes.
        spares: everything that lives on one stage, by dotted name, without numbers and before it was sharded: of a
            module that was cut already, and in which the modules of these chunks stand in their places.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: StagePlan,
        stages: Sequence[int],
        device: torch.device | None = None,
        spares: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.module = module
        self.plan = plan
        self.working_dtype: torch.dtype | None = None
        """Of all floating parameters within a step, where it is not theirs between steps."""
        children = children_of(module, plan)
        self.chunks = tuple(StageCut(module, plan, stage, device, children, spares) for stage in stages)
        self._local = {name: child for cut in self.chunks for name, child in cut.local_modules.items()}
        self.chunks[0].put_stand_ins(name for name in children if name not in self._local)

    @property
    def is_last(self) -> bool:
        """Whether one of the chunks computes the loss."""
        return any(cut.is_last for cut in self.chunks)

    def _resident(self, name: str) -> nn.Module:
        """What the module holds under a name between steps."""
        return self._local[name] if name in self._local else self.chunks[0].stand_ins[name]

    def places_of(self, name: str) -> list[nn.Module]:
        """What a block is on this rank: itself, and whatever stands for it."""
        own = [self._local[name]] if name in self._local else []
        return [*own, *(cut.stand_ins[name] for cut in self.chunks if name in cut.stand_ins)]

    def local_blocks(self) -> dict[int, list[nn.Module]]:
        """Index of each block of this rank -> the block and what runs along with it."""
        groups = enumerate(zip(self.plan.blocks, self.plan.beside))
        return {
            index: [self._local[name] for name in (block, *beside)]
            for index, (block, beside) in groups
            if block in self._local
        }

    def remove_hooks(self) -> None:
        """Undo :meth:`install_hooks`, for blocks that will belong to another cut."""
        for cut in self.chunks:
            cut.remove_hooks()

    def install_hooks(self) -> None:
        """See :meth:`~lightning_megapar.pipeline.cutting.cut.StageCut.install_hooks`; dtypes are what they became."""
        for cut in self.chunks:
            for name, stand_in in cut.stand_ins.items():
                source = self._resident(name)
                if source is not stand_in:
                    _take_over_dtypes(stand_in, source, self.working_dtype)
            cut.install_hooks()

    def call(self, step: Callable[[], Any], received: Boundary | None, chunk: int) -> tuple[bool, Any]:
        """Run the user's step on one chunk; see :meth:`~lightning_megapar.pipeline.cutting.cut.StageCut.call`."""
        cut = self.chunks[chunk]
        hidden = cut.put_stand_ins(cut.stand_ins) if len(self.chunks) > 1 else []
        try:
            return cut.call(step, received)
        finally:
            for owner, name, before in hidden:
                owner._modules[name] = before


def _take_over_dtypes(stand_in: nn.Module, source: nn.Module, working: torch.dtype | None) -> None:
    """The dtypes that a module has by now (a precision has converted it), for what stands for it out of sight."""
    for mine, theirs in zip(stand_in.modules(), source.modules()):
        if not isinstance(mine, StandIn):
            continue
        if isinstance(theirs, StandIn):
            mine._away_dtypes.update(theirs._away_dtypes)
            continue
        for key, shape in mine._away_tensors.items():
            value = theirs._parameters.get(key, theirs._buffers.get(key))
            if shape is not None and value is not None:
                mine._away_dtypes[shape.dtype] = working if working and value.is_floating_point() else value.dtype
