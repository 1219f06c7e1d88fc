"""How long a rank's actions and blocks take, without waiting for a GPU while a step runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from lightning_megapar.pipeline.schedules import Action

Mark = Any
"""A point in time: seconds, or a CUDA event on the stream of the computation."""


class Stopwatch:
    """Times of the actions of a step and of the forwards of blocks in it.

    On a GPU the times are those of the work and not of its launch: events are recorded and read when the step is over.

    Args:
        device: where this rank computes.
        is_forward: whether a step of the user is running; what blocks are called for otherwise is recomputation.
    """

    def __init__(self, device: torch.device, is_forward: Callable[[], bool] = lambda: True) -> None:
        self._cuda = device.type == "cuda"
        self._is_forward = is_forward
        self._begun: Mark = None
        self._actions: list[tuple[Action, Mark, Mark]] = []
        self._blocks: list[tuple[int, Mark, Mark]] = []
        self._entered: dict[int, Mark] = {}
        self._handles: list[Any] = []
        self._running = False

    def start(self) -> None:
        """A step begins that is to be measured."""
        self._actions, self._blocks, self._entered = [], [], {}
        self._running = True

    def stop(self) -> None:
        self._running = False

    def begin(self) -> None:
        """An action begins; the wait for what it needs is over."""
        if self._running:
            self._begun = self._mark()

    def note(self, action: Action) -> None:
        """The action that began last has ended."""
        if self._running:
            self._actions.append((action, self._begun, self._mark()))

    def watch(self, blocks: Mapping[int, Sequence[nn.Module]]) -> None:
        """Measure the forwards of these blocks from now on, instead of those that were watched.

        Args:
            blocks: index in the stack -> the block and what runs along with it.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for index, modules in blocks.items():
            for module in modules:
                self._handles.append(module.register_forward_pre_hook(self._enter(index), prepend=True))
                self._handles.append(module.register_forward_hook(self._leave(index)))

    def _enter(self, index: int) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            if self._running and self._is_forward():
                self._entered[id(module)] = self._mark()

        return enter

    def _leave(self, index: int) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            mark = self._entered.pop(id(module), None)
            if mark is not None:
                self._blocks.append((index, mark, self._mark()))

        return leave

    def _mark(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Mark, end: Mark) -> float:
        if not self._cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    @property
    def forwards(self) -> int:
        """Microbatches that went forward through the first chunk in the measured step."""
        return sum(action.kind == "forward" and action.chunk == 0 for action, _, _ in self._actions)

    def actions(self, num_chunks: int) -> dict[str, tuple[float, ...]]:
        """Kind of action -> for each chunk the median seconds of the measured step's actions; 0 where there is none."""
        found: dict[tuple[str, int], list[float]] = {}
        for action, start, end in self._actions:
            kind = "backward_input" if action.kind == "backward" else action.kind
            found.setdefault((kind, action.chunk), []).append(self._seconds(start, end))
        kinds = ("forward", "backward_input", "backward_weight")
        return {kind: tuple(median(found.get((kind, chunk), [0.0])) for chunk in range(num_chunks)) for kind in kinds}

    def blocks(self) -> dict[int, float]:
        """Index of each block that ran -> median seconds of its forward, with what runs along with it."""
        found: dict[int, list[float]] = {}
        for index, start, end in self._blocks:
            found.setdefault(index, []).append(self._seconds(start, end))
        calls = min((len(values) for values in found.values()), default=0)
        # Several modules of one block: their forwards of a microbatch add up.
        return {index: median(values) * round(len(values) / calls) for index, values in found.items()} if calls else {}
