"""What benchmarks of memory share: a chain of a decoder's blocks, its peak, and works that take turns."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_megapar.memory.blocks import ALL, choose_for
from lightning_megapar.memory.chain import ChainCosts
from lightning_megapar.memory.measure import measure_block
from lightning_megapar.memory.meter import metered, quiet_profiler
from lightning_megapar.models.gpt import GPT, GPTConfig

Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ChainShape:
    """A chain and what goes through it.

    Args:
        name: for tables.
        style: ``"gpt2"`` or ``"llama"``.
        layers, width, heads: of the decoder.
        sequence, batch: of a microbatch.
        is_math: attention by torch's math kernel, which keeps its probabilities, and not by a fused one.
        in_flight: microbatches whose forwards come before the first backward.
        dropout: of what each half of a block adds.
    """

    name: str
    style: str
    layers: int
    width: int
    heads: int
    sequence: int
    batch: int
    is_math: bool = False
    in_flight: int = 1
    dropout: float = 0.0

    @property
    def config(self) -> GPTConfig:
        """The decoder; of it the blocks alone are run."""
        make = GPTConfig.gpt2 if self.style == "gpt2" else GPTConfig.llama
        return make(
            vocab_size=64,
            num_layers=self.layers,
            num_heads=self.heads,
            hidden_size=self.width,
            max_sequence_length=self.sequence,
            dropout=self.dropout,
        )


class Chain:
    """Blocks of a decoder that get options, on one device.

    Args:
        shape: what they are like.
        device: where.
        autocast: in what products are computed, ``None`` for the dtype of the parameters.
    """

    def __init__(self, shape: ChainShape, device: torch.device, autocast: torch.dtype | None = None) -> None:
        self.shape, self.device, self._autocast = shape, device, autocast
        with device:
            self.blocks = nn.Sequential(*GPT(shape.config).blocks)
            self.x = torch.randn(shape.batch, shape.sequence, shape.width)
        self.forwards = choose_for([(str(number), block) for number, block in enumerate(self.blocks)], ALL)
        # There from the beginning: gradients belong to no option.
        for parameter in self.blocks.parameters():
            parameter.grad = torch.zeros_like(parameter)

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Around forwards and backwards."""
        is_on = self._autocast is not None
        # Without a cache, as in Lightning: it would keep copies of all weights until the end of the forward.
        with torch.autocast(self.device.type, dtype=self._autocast, enabled=is_on, cache_enabled=False):
            if self.shape.is_math:
                with sdpa_kernel(SDPBackend.MATH):
                    yield
            else:
                yield

    def choose(self, choices: Sequence[str]) -> None:
        """Give the blocks these options."""
        for forward, option in zip(self.forwards, choices, strict=True):
            forward.option = option

    def costs(self) -> list[ChainCosts]:
        """Of every block, measured on the first: they are alike."""
        with self.kernels():
            found = measure_block(self.forwards[0], (self.x.detach().requires_grad_(),), {}, self.device).costs
        return [found] * len(self.forwards)

    def step(self, forward: Forward | None = None) -> None:
        """Forwards of all microbatches in flight, and their backwards in the same order.

        Args:
            forward: of a microbatch, by default that of the blocks.
        """
        run = self.blocks if forward is None else forward
        ends: list[tuple[Any, torch.Size, torch.dtype]] = []
        with self.kernels():
            for _ in range(self.shape.in_flight):
                y = run(self.x.detach().clone().requires_grad_())
                # As the next module would, the product lets go of the gradient that it gets.
                ends.append((get_gradient_edge(y * 1.0), y.shape, y.dtype))
                del y
            while ends:
                edge, shape, dtype = ends.pop(0)
                one = torch.ones((), device=self.device, dtype=dtype).expand(shape)
                torch.autograd.backward([edge], [one])
                del edge, one

    def peak(self, forward: Forward | None = None) -> int:
        """Most bytes at once in a step, beyond weights and their gradients, when it is not the first of its kind."""
        self.step(forward)
        return self.first_peak(forward)

    def first_peak(self, forward: Forward | None = None) -> int:
        """The same of a step that may be the first of its kind."""
        with quiet_profiler(), metered(self.device) as meter:
            self.step(forward)
        return meter.usages[0].peak_bytes

    def gradients(self, forward: Forward | None = None) -> list[Tensor]:
        """Of the parameters, from one step."""
        for parameter in self.blocks.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        self.step(forward)
        return [parameter.grad.clone() for parameter in self.blocks.parameters() if parameter.grad is not None]


@dataclass(frozen=True)
class Times:
    """Seconds of a work in each round.

    Args:
        wall, cpu: by the clock, and of this process's processors.
    """

    wall: tuple[float, ...]
    cpu: tuple[float, ...]

    def ratio_to(self, other: Times) -> dict[str, float]:
        """Medians over the rounds of the ratios of times."""
        return {
            "wall": statistics.median(a / b for a, b in zip(self.wall, other.wall)),
            "cpu": statistics.median(a / b for a, b in zip(self.cpu, other.cpu)),
        }


def by_turns(works: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, Times]:
    """Time works one after the other, and all of them again: a busy machine is busy for all.

    Each round begins with another one. A round before the first is not counted.

    Args:
        works: by name.
        rounds: that count.
        device: that is waited for.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    names = list(works)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in itertools.chain(names[first:], names[:first]):
            wait(device)
            wall, cpu = time.perf_counter(), time.process_time()
            works[name]()
            wait(device)
            found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: Times(tuple(one[0] for one in each[1:]), tuple(one[1] for one in each[1:]))
        for name, each in found.items()
    }


def wait(device: torch.device) -> None:
    """Until a device has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def counted(choices: Sequence[str]) -> str:
    """Options and how many blocks have them: ``"3 all, 5 inputs"``."""
    return ", ".join(f"{len(list(same))} {option}" for option, same in itertools.groupby(sorted(choices)))


def mib(number: float) -> str:
    """Bytes for a table."""
    return f"{number / 2**20:,.1f}"
