"""The arena that recorded training steps need under several rules of allocation, against the most bytes alive at once.

Steps of small models (GPT in GPT-2 and in Llama style, a perceptron, a convolutional net) are recorded on the CPU by
torch's profiler: with one length of batches and with several, with no block, every second block and all blocks
recomputed. Each recording is then replayed under each rule (:mod:`lightning_megapar.memory.replay`). All steps are run
and recorded twice: what is replayed is the second recording, and the planned rule has its places from the first.

    python recipes/benchmarks/allocator.py --out allocator.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from lightning_megapar.memory import BestFitAllocator, TensorArena, Trace, plan_offline
from lightning_megapar.memory.replay import RULES, planned
from lightning_megapar.models.gpt import GPT, GPTConfig

MODELS = ("GPT-2 style", "Llama style", "perceptron", "convolutions")
PLANNED = "planned"
"""The rule that is aimed with, among :data:`RULES`."""
AIM = 1.03
"""Largest ratio of the planned arena to the most bytes alive."""


@dataclass(frozen=True)
class Case:
    """What is recorded.

    Args:
        model: one of :data:`MODELS`.
        sizes: tokens (or the edge of images) of the batches, one step each.
        every: one block of so many is recomputed; 0 for none.
    """

    model: str
    sizes: tuple[int, ...]
    every: int

    @property
    def name(self) -> str:
        recomputed = {0: "kept", 1: "recomputed", 2: "half recomputed"}[self.every]
        return f"{self.model}, {len(set(self.sizes))} length{'s' * (len(set(self.sizes)) > 1)}, {recomputed}"


class Perceptron(nn.Module):
    """Rows of numbers, one for each token."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
             for _ in range(layers)]
        )  # fmt: skip
        self.width = width

    def batch(self, size: int) -> tuple[Tensor, ...]:
        return (torch.randn(8 * size, self.width),)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Images(nn.Module):
    """A residual net without a change of resolution."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
                           nn.Conv2d(width, width, 3, padding=1)) for _ in range(layers)]
        )  # fmt: skip

    def batch(self, size: int) -> tuple[Tensor, ...]:
        return (torch.randn(4, 3, size // 2, size // 2),)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Text(GPT):
    """Tokens and the ones that follow."""

    def batch(self, size: int) -> tuple[Tensor, ...]:
        rows = torch.randint(0, 256, (4, size + 1))
        return rows[:, :-1], rows[:, 1:]


def models(width: int, layers: int, sequence: int) -> dict[str, Callable[[], Any]]:
    """The model of each name, new at each call."""
    sizes = {"vocab_size": 257, "num_layers": layers, "num_heads": 4, "hidden_size": width}
    gpt2 = GPTConfig.gpt2(**sizes, max_sequence_length=sequence)
    llama = GPTConfig.llama(**sizes, max_sequence_length=sequence)
    made: list[Callable[[], Any]] = [
        lambda: Text(gpt2),
        lambda: Text(llama),
        lambda: Perceptron(width, layers),
        lambda: Images(width // 4, layers),
    ]
    return dict(zip(MODELS, made, strict=True))


def cases(sequence: int) -> list[Case]:
    """Twenty."""
    one, several = (sequence,) * 3, tuple(sequence * part // 8 for part in (8, 5, 7, 3, 8, 2, 6))
    every = [Case(name, sizes, share) for name in MODELS for sizes in (one, several) for share in (0, 1)]
    return every + [Case(name, several, 2) for name in MODELS]


def record(make: Callable[[], Any], case: Case) -> tuple[Trace, Trace]:
    """Some training steps, behind one that is not recorded, and the same once more."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, block in enumerate(model.blocks):
        if case.every and number % case.every == 0:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def step(size: int) -> None:
        optimizer.zero_grad()
        model(*model.batch(size)).backward()
        optimizer.step()

    def recorded() -> Trace:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            for size in case.sizes:
                step(size)
        return Trace.of_profile(seen)

    step(case.sizes[0])
    return recorded(), recorded()


def seconds_of_a_pair() -> float:
    """Of an allocation and its release in an arena with two hundred holes; the best of some repetitions."""
    allocator = BestFitAllocator(1 << 30)
    held = [allocator.allocate(1000 * (1 + number % 50)) for number in range(400)]
    for block in held[::2]:
        allocator.free(block)
    count = 20_000
    return min(timeit.repeat(lambda: allocator.free(allocator.allocate(20_000)), number=count, repeat=5)) / count


def seconds_of_a_tensor() -> dict[str, float]:
    """Of making a tensor and letting go of it again, in an arena that holds two hundred, and in torch."""
    arena = TensorArena(1 << 28)
    held = [arena.empty((1000 * (1 + number % 50),), torch.uint8) for number in range(400)]
    del held[::2]
    count = 5_000

    def best(make: Callable[[], Tensor]) -> float:
        return min(timeit.repeat(make, number=count, repeat=5)) / count

    return {"arena": best(lambda: arena.empty((4, 8, 128))), "torch": best(lambda: torch.empty((4, 8, 128)))}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes of every case under every rule."""
    made = models(args.width, args.layers, args.sequence)
    rows = {}
    for case in track(cases(args.sequence), "recording and replaying", console=Console(stderr=True), transient=True):
        first, trace = record(made[case.model], case)
        if args.traces is not None:
            args.traces.mkdir(parents=True, exist_ok=True)
            trace.save(args.traces / f"{case.name.replace(', ', '-').replace(' ', '_')}.json")
        live = trace.aligned(512).max_live_bytes
        begin = time.perf_counter()
        plan_offline(first)
        seconds = time.perf_counter() - begin
        rows[case.name] = {
            "max_live_bytes": live,
            "buffers": len(trace.lifetimes),
            "seconds_to_plan": seconds,
            **{
                rule: replay(trace) / live for rule, replay in {**RULES, PLANNED: partial(planned, first=first)}.items()
            },
        }
    return {
        "cases": rows,
        "largest": {rule: max(row[rule] for row in rows.values()) for rule in RULES},
        "median": {rule: statistics.median(row[rule] for row in rows.values()) for rule in RULES},
        "seconds_to_plan": max(row["seconds_to_plan"] for row in rows.values()),
        "seconds_of_a_pair": seconds_of_a_pair(),
        "seconds_of_a_tensor": seconds_of_a_tensor(),
        "aim": AIM,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """A row for each case, and what was aimed at."""
    table = Table(title="bytes of the arena to the most bytes alive at once")
    table.add_column("recorded steps")
    table.add_column("MiB alive", justify="right")
    table.add_column("buffers", justify="right")
    for rule in RULES:
        table.add_column(rule, justify="right")
    for name, row in result["cases"].items():
        ratios = [f"{row[rule]:.3f}" for rule in RULES]
        table.add_row(name, f"{row['max_live_bytes'] / 2**20:.1f}", str(row["buffers"]), *ratios)
    table.add_section()
    for kind in ("median", "largest"):
        table.add_row(kind, "", "", *(f"{result[kind][rule]:.3f}" for rule in RULES))
    console.print(table)
    tensor = result["seconds_of_a_tensor"]
    console.print(
        f"planned from the first recording, the second one needs at most {result['largest'][PLANNED]:.3f} of "
        f"the most bytes alive (aim: at most {AIM}; best fit: {result['largest']['best fit']:.3f}); a plan takes up to "
        f"{result['seconds_to_plan']:.1f} s; an allocation by best fit and its release take "
        f"{result['seconds_of_a_pair'] * 1e6:.1f} microseconds (aim: at most 5), a tensor of "
        f"the arena {tensor['arena'] * 1e6:.1f} (torch's: {tensor['torch'] * 1e6:.1f})"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=128, help="tokens of the longest batch")
    parser.add_argument("--traces", type=Path, help="folder to write the recordings to")
    parser.add_argument("--out", type=Path, help="JSON file to write the figures to")
    args = parser.parse_args(arguments)
    for name, least in (("layers", 1), ("width", 16), ("sequence", 8)):
        if getattr(args, name) < least:
            parser.error(f"--{name}={getattr(args, name)}: expected at least {least}")
    if args.width % 16:
        parser.error(f"--width={args.width}: expected a multiple of 16, such as {args.width // 16 * 16 or 16}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    result = measure(args)
    show(result, Console())
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
