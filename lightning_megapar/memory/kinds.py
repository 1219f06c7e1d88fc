"""Blocks that cost the same are measured once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_megapar.memory.blocks import BlockForward
from lightning_megapar.memory.measure import BlockMeasure, Postponed, measure_block

StateKept = Callable[[nn.Module], AbstractContextManager[Any]]
"""Leaves a module as it was around runs that do not count."""


class KindMeasures:
    """What each kind of block costs; see :func:`~lightning_megapar.memory.measure.measure_block`.

    Args:
        device: where blocks compute.
        state_kept: see :data:`StateKept`.
        postponed: where weight gradients wait under schedules that split the backward.
        options: that are measured, as far as a block has them; ``None`` for all.
    """

    def __init__(
        self,
        device: torch.device,
        state_kept: StateKept,
        postponed: Postponed | None = None,
        options: Sequence[str] | None = None,
    ) -> None:
        self._device, self._state_kept, self._postponed, self._options = device, state_kept, postponed, options
        self._known: dict[Any, BlockMeasure] = {}

    def of(self, forward: BlockForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockMeasure:
        """Of the block of a forward, for a call with these arguments; measured if none of its kind has been."""
        kind = kind_of(forward.block, args, kwargs)
        if kind not in self._known:
            wanted = [one for one in forward.options() if self._options is None or one in self._options]
            with self._state_kept(forward.block):
                self._known[kind] = measure_block(forward, args, kwargs, self._device, wanted, self._postponed)
        return self._known[kind]


def kind_of(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What blocks have in common that cost the same: classes, settings, shapes of parameters and arguments."""

    def shape(value: Any) -> Any:
        return (tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, Tensor) else type(value)

    parts = tuple((type(part), part.training, part.extra_repr()) for part in block.modules())
    parameters = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in block.parameters())
    given = tuple(shape(value) for value in tree_leaves((args, kwargs)))
    return parts, parameters, given
