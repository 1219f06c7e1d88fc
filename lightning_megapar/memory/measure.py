"""What each option of a block costs, measured on the block itself with the arguments of a real call.

A forward and a backward of the block run under each option on copies: of the arguments, and of the parameters as far
as autograd is concerned (the same numbers, gradients of their own), so that nobody's gradients, hooks or random numbers
are touched. What surrounds the block in a chain is imitated: its input belongs to it, its output does not, and the
gradient of the output is let go of as soon as it is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megapar.generators import generators_kept, own_generators, set_state_of, state_of
from lightning_megapar.memory.blocks import ALL, INPUTS, NO_ATTENTION, OFFLOAD, PRODUCTS, BlockForward
from lightning_megapar.memory.chain import ChainCosts
from lightning_megapar.memory.contents import Contents
from lightning_megapar.memory.meter import metered, quiet_profiler
from lightning_megapar.memory.products import ProductsChangedError
from lightning_megapar.memory.rerun import AsResult

REPEATS = 3
"""Timed runs of each option, of which the fastest counts."""


class Postponed(Protocol):
    """Where weight gradients wait: a :class:`~lightning_megapar.layers.deferral.Deferral`."""

    def collecting(self, key: tuple[int, int]) -> AbstractContextManager[None]:
        """Inside, they are left under ``key``."""

    def compute(self, key: tuple[int, int]) -> None:
        """Compute what was left under ``key``."""


@dataclass(frozen=True)
class BlockMeasure:
    """What was measured of one call of a block.

    Args:
        costs: of its options.
        output_bytes: of its result.
        waiting_bytes: that weight gradients keep which are computed later; the most of all options.
    """

    costs: ChainCosts
    output_bytes: int
    waiting_bytes: int = 0

    def numbers(self, calls: int = 1) -> list[float]:
        """All of it, for a block that is called so often in a microbatch."""
        costs, found = self.costs, [float(self.output_bytes), float(self.waiting_bytes * calls)]
        for option in costs.saved_bytes:
            found += [costs.saved_bytes[option] * calls, costs.recompute_seconds[option] * calls]
            found += [costs.forward_bytes[option], costs.backward_bytes[option]]
        return found

    def with_numbers(self, numbers: Iterator[float]) -> BlockMeasure:
        """The same with what :meth:`numbers` gives, or the same of another rank."""
        output, waiting = int(next(numbers)), int(next(numbers))
        saved, seconds, forward, backward = {}, {}, {}, {}
        for option in self.costs.saved_bytes:
            saved[option], seconds[option] = int(next(numbers)), next(numbers)
            forward[option], backward[option] = int(next(numbers)), int(next(numbers))
        return BlockMeasure(ChainCosts(saved, seconds, forward, backward), output, waiting)


def measure_block(
    forward: BlockForward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    options: Sequence[str] | None = None,
    postponed: Postponed | None = None,
) -> BlockMeasure:
    """Costs of a block's options.

    A time is at least a share of the forward that is run again (half of it for everything, a hundredth for attention):
    times scatter, and recomputation is never for nothing. Bytes are rounded up to multiples of 64, as allocators do.

    Args:
        forward: of the block.
        args, kwargs: of a call; tensors that require gradients say so.
        device: where it computes.
        options: to be measured, by default all that differ.
        postponed: where weight gradients wait under schedules that split the backward.

    Raises:
        ConfigError: a profiler is running already.
    """
    wanted = forward.options() if options is None else tuple(options)
    saved, seconds, rising, falling = {}, {}, {}, {}
    own = [(one, state_of(one)) for one in own_generators(forward.block)]
    arena, forward.arena = forward.arena, None  # its memory is there whatever lies in it
    trial = _Trial(forward, args, kwargs, device, postponed)
    waiting = 0
    with torch.enable_grad(), generators_kept(), quiet_profiler():
        trial.run(ALL)  # what is made once (tables, workspaces, compiled code) belongs to no option
        for option in wanted:
            try:
                trial.run(option)
            except ProductsChangedError:  # none for this block
                continue
            found = trial.bytes(option)
            saved[option], rising[option], falling[option] = map(_rounded, found[:3])
            waiting = max(waiting, _rounded(found[3]))
        # In turns, so that whatever else the machine does meanwhile meets all of them.
        rounds = [{option: trial.seconds(option) for option in {ALL: 0, **saved}} for _ in range(REPEATS)]
        alone = min(trial.forward_seconds() for _ in range(REPEATS))
    trial.end()
    for one, state in own:
        set_state_of(one, state)
    forward.arena = arena
    base = min(one[ALL] for one in rounds)
    for option in saved:
        least = _LEAST_SHARE[option] * alone
        seconds[option] = max(least, min(one[option] for one in rounds) - base) if option != ALL else 0.0
    return BlockMeasure(ChainCosts(saved, seconds, rising, falling), trial.output_bytes, waiting)


_LEAST_SHARE = {ALL: 0.0, NO_ATTENTION: 0.01, PRODUCTS: 0.02, INPUTS: 0.5, OFFLOAD: 0.01}


def _rounded(number: int) -> int:
    return -(-number // 64) * 64


class _Bare(nn.Module):
    """A block without the hooks on it."""

    def __init__(self, block: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.block = block
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class _Trial:
    """Runs of a block that leave nothing behind."""

    def __init__(
        self, forward: BlockForward, args: Any, kwargs: Any, device: torch.device, postponed: Postponed | None
    ) -> None:
        self._forward, self._args, self._kwargs, self._device = forward, args, kwargs, device
        self._postponed = postponed
        self._objects = Contents([one for one in (*args, *kwargs.values()) if not isinstance(one, Tensor)])
        """What caches and the like among the arguments hold; each run starts with that."""
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._leaves: list[Tensor] = [self._anchor]
        """Where gradients go: to the arguments, all of which hang on the anchor, and to parameters."""
        self.output_bytes = 0
        self._option = ALL
        self._bare = _Bare(forward.block, lambda *a, **k: forward.run(self._option, a, k))
        self._parameters: dict[str, Tensor] = {}
        if forward.is_compiled:
            # Other parameters would be other compiled code. Gradients of all are alive in the end: a few bytes more.
            self._leaves += [parameter for parameter in forward.block.parameters() if parameter.requires_grad]
            return
        made: dict[int, Tensor] = {}
        for name, parameter in forward.block.named_parameters(remove_duplicate=False):
            if id(parameter) not in made:
                leaf = made[id(parameter)] = parameter.detach().requires_grad_(parameter.requires_grad)
                if leaf.requires_grad:
                    leaf.grad = torch.zeros_like(leaf)
                    self._leaves.append(leaf)
            self._parameters[f"block.{name}"] = made[id(parameter)]

    def end(self) -> None:
        """Leave the arguments as they were."""
        self._objects.put_back()

    def run(self, option: str) -> None:
        """Forward and backward."""
        self._backward(self._edges(option))

    def seconds(self, option: str) -> float:
        """Of a forward and a backward."""
        self._wait()
        start = time.perf_counter()
        self.run(option)
        self._wait()
        return time.perf_counter() - start

    def forward_seconds(self) -> float:
        """Of a forward that keeps everything."""
        self._wait()
        start = time.perf_counter()
        self._called(ALL)
        self._wait()
        return time.perf_counter() - start

    def bytes(self, option: str) -> tuple[int, int, int, int]:
        """Kept from forward to backward; most in the forward; most in the backward, beyond what is kept; kept behind
        the backward, if weight gradients wait.
        """
        edges: list[_Edge] = []
        with metered(self._device) as meter:
            outputs = self._called(option)
            self.output_bytes = sum(
                {o.untyped_storage().data_ptr(): o.untyped_storage().nbytes() for o in outputs}.values()
            )
            meter.next_section()
            edges += [_edge_of(output) for output in outputs]
            del outputs
            meter.next_section()
            self._backward(edges)
            edges.clear()
        forward, between, backward = meter.usages
        saved = max(0, forward.kept_bytes + between.kept_bytes)
        waits = 0
        if self._postponed is not None:
            with metered(self._device) as meter:  # all of it: what is freed is not seen if it is older
                edges += self._edges(option)
                with self._postponed.collecting(_KEY):
                    self._backward(edges)
                edges.clear()
            waits = max(0, meter.usages[0].kept_bytes)
            self._postponed.compute(_KEY)
        return saved, forward.peak_bytes, max(0, backward.peak_bytes), waits

    def _called(self, option: str) -> list[Tensor]:
        """Results that gradients come to."""
        self._option = option
        self._objects.put_back()
        made: dict[int, Tensor] = {}

        def copied(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in made:
                copy = value.detach().clone()
                made[id(value)] = AsResult.apply(self._anchor, copy) if value.requires_grad else copy
            return made[id(value)]

        args, kwargs = tree_map(copied, (self._args, self._kwargs))
        made.clear()
        output = functional_call(self._bare, self._parameters, args, kwargs)
        return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def _edges(self, option: str) -> list[_Edge]:
        return [_edge_of(output) for output in self._called(option)]

    def _backward(self, edges: list[_Edge]) -> None:
        if edges:
            ones = [torch.ones((), device=self._device, dtype=dtype).expand(shape) for _, shape, dtype in edges]
            ends = [edge for edge, _, _ in edges]
            # Not beyond the block: what it reads by other ways than its arguments has a graph of the step.
            if self._forward.is_compiled:
                torch.autograd.grad(ends, self._leaves, ones, allow_unused=True)
            else:
                torch.autograd.backward(ends, ones, inputs=self._leaves)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


_KEY = (-1, -1)
"""Under which weight gradients of a trial wait: of no chunk and no microbatch."""
_Edge = tuple[GradientEdge, torch.Size, torch.dtype]


def _edge_of(output: Tensor) -> _Edge:
    """Where the gradient of an output goes in. The product lets go of it at once, as the next block would."""
    return get_gradient_edge(output * 1.0), output.shape, output.dtype
