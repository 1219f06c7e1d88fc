"""What every block of a rank costs under each option of recomputation, measured in a training step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megapar.memory.blocks import ALL, BlockForward, choose_for, forward_of
from lightning_megapar.memory.kinds import KindMeasures, StateKept
from lightning_megapar.memory.measure import BlockMeasure, Postponed
from lightning_megapar.memory.saved import Left, SavedBytes


class BlockCostsWatch:
    """Measures each kind of block at its first call between :meth:`begin` and :meth:`end`.

    Beside them it counts what autograd keeps outside of the blocks. The step's numbers stay what they are.

    Args:
        module: this rank's share.
        blocks: name -> block, on this rank; compiled ones are not measured.
        device: where they compute.
        state_kept: leaves a module as it was around runs that do not count.
        postponed: where weight gradients wait under schedules that split the backward.
        known: what has been measured already, for a plan of recomputation; then nothing is measured again.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        device: torch.device,
        state_kept: StateKept,
        postponed: Postponed | None = None,
        known: Mapping[str, BlockMeasure] | None = None,
    ) -> None:
        self.measures: dict[str, BlockMeasure] = dict(known or {})
        """By name, in the order of the blocks' first calls."""
        self.calls: dict[str, int] = {}
        """How often each block was called."""
        self.outside_bytes = 0
        """The most that autograd kept at once outside of blocks."""
        self._module, self._blocks = module, blocks
        self._kinds = KindMeasures(device, state_kept, postponed)
        self._forwards: dict[str, BlockForward] = {}
        self._asked: list[BlockForward] = []
        self._added: list[BlockForward] = []
        self._outside: _Outside | None = None

    def begin(self) -> None:
        """A training step is about to run."""
        for name, block in self._blocks.items():
            forward = forward_of(block)
            if forward is None:
                (forward,) = choose_for([(name, block)], ALL)
                self._added.append(forward)
            forward.calls = 0
            self._forwards[name] = forward
            if not forward.is_compiled and name not in self.measures:
                forward.measure = partial(self._note, name)
                self._asked.append(forward)
        self._outside = _Outside(self._module, set(self._blocks))
        self._outside.__enter__()

    def end(self) -> None:
        """It has run, or failed."""
        if self._outside is not None:
            self._outside.__exit__(None, None, None)
            self.outside_bytes = self._outside.peak_bytes
        for forward in self._asked:
            forward.measure = None
        for name, forward in self._forwards.items():
            self.calls[name] = forward.calls
        for forward in self._added:
            forward.remove()
        self._asked, self._added, self._forwards, self._outside = [], [], {}, None

    def _note(self, name: str, forward: BlockForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A block is called for the first time."""
        self.measures[name] = self._kinds.of(forward, args, kwargs)


class _Outside(SavedBytes):
    """Counts what is saved while no block runs."""

    def __init__(self, module: nn.Module, blocks: set[str]) -> None:
        super().__init__(module)
        self._blocks = blocks

    def _pack(self, tensor: Tensor) -> Any:
        return (Left(tensor, None), []) if self._is_inside() else super()._pack(tensor)

    def _is_inside(self) -> bool:
        return any(name in self._blocks for name, _ in self.stack()) or torch._C._current_graph_task_id() >= 0
