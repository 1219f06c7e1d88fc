"""Pipelines whose buffers come from an arena: the same bits, and everything is given back."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from torch import Tensor, nn

from lightning_megapar.config import SCHEDULES, Layout
from lightning_megapar.layers.deferral import Deferral
from lightning_megapar.memory import ArenaStats, GradientStash, TensorArena
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.pipeline import build_schedule
from lightning_megapar.pipeline.engine.runtime import PipelineRuntime
from lightning_megapar.pipeline.schedules import Schedule, forward_schedule

MICROBATCHES, WIDTH = 5, 48
ROWS = (6, 6, 6, 9, 3, 9, 6)
"""Of the microbatches, step by step."""
EVALUATED = ("1f1b", "zbv")
"""Schedules whose evaluation is run as well."""

Boundary = tuple[Tensor, dict[str, Tensor], str]


class Chunk(nn.Module):
    """Hands on a nest: a transposed tensor, one without gradient, one that nobody uses, and a word."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, boundary: Boundary) -> Boundary:
        x, more, word = boundary
        x = x.t() if x.shape[0] == WIDTH else x
        y = x + self.second(torch.tanh(self.first(x))) * more["scale"]
        return y.t(), {"scale": more["scale"] + 1, "unused": y * 2}, word


def run(runtime: PipelineRuntime, schedule: Schedule, chunks: nn.ModuleList, rows: int) -> list[Tensor]:
    """Losses or outputs of one step."""
    own = schedule.placement[runtime.rank]
    last = schedule.num_virtual_stages - 1
    deferral = Deferral()
    deferral.connect(chunks)
    torch.manual_seed(rows)
    inputs = torch.randn(MICROBATCHES, rows, WIDTH)
    results: list[Tensor] = []

    def forward(chunk: int, microbatch: int, received: Any) -> tuple[bool, Any]:
        boundary = (inputs[microbatch], {"scale": torch.ones(1)}, "word") if received is None else received
        handed = chunks[chunk](boundary)
        if own[chunk] < last:
            return False, handed
        loss = handed[0].square().mean()
        results.append(loss.detach())
        return True, loss

    with torch.set_grad_enabled(schedule.is_training):
        runtime.run(schedule, forward, lambda _, loss: loss.backward(), postponed=deferral)
    return results


def steps(
    name: str, arena: TensorArena | None, gradients: bool = False
) -> tuple[list[list[Tensor | None]], list[ArenaStats]]:
    rank, stages = dist.get_rank(), dist.get_world_size()
    schedule = build_schedule(name, stages, MICROBATCHES)
    mesh = ParallelMesh(Layout(pipeline=stages), rank, placement=schedule.placement)
    runtime = PipelineRuntime(mesh, torch.device("cpu"), arena)
    chunks = nn.ModuleList([Chunk(number) for number in schedule.placement[rank]])
    stash = GradientStash(arena) if arena is not None and gradients else None
    found: list[list[Tensor | None]] = []
    stats = []
    for rows in ROWS:
        with nullcontext() if stash is None else stash.step(chunks.parameters()):
            results: list[Tensor | None] = [*run(runtime, schedule, chunks, rows)]
        if arena is not None and gradients:
            sizes = sum(p.nbytes for p in chunks.parameters() if p.grad is not None)
            assert arena.stats().allocated_bytes == (sizes if stats else 0)
        found.append(results + [None if p.grad is None else p.grad.clone() for p in chunks.parameters()])
        chunks.zero_grad()
        if name in EVALUATED:
            found.append([*run(runtime, forward_schedule(schedule.placement, MICROBATCHES), chunks, rows)])
        if arena is not None:
            stats.append(arena.stats())
    return found, stats


def compared(names: tuple[str, ...], gradients: bool) -> dict[str, list[ArenaStats]]:
    kept = {}
    for name in names:
        expected, _ = steps(name, None)
        got, kept[name] = steps(name, TensorArena(), gradients)
        for ours, theirs in zip(got, expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert (one is None) == (other is None), name
                if one is not None and other is not None:
                    assert one.view(torch.int32).equal(other.view(torch.int32)), name
    return kept


@pytest.mark.parametrize(("stages", "gradients"), [(2, False), (2, True), (4, False)])
def test_every_bit_is_the_same_and_everything_is_given_back(pool: RankPool, stages: int, gradients: bool) -> None:
    for rank in pool.run(compared, stages, tuple(SCHEDULES), gradients):
        for name, stats in rank.items():
            assert [one.allocated_bytes for one in stats] == [0] * len(ROWS), name
            assert 0 < stats[-1].planned_bytes <= stats[-1].capacity, name
            # What the first step has shown is enough for the next two, and what the longest has for all the others.
            assert [one.overflow_bytes for one in stats[:3]] == [0, 0, 0] or gradients or name in EVALUATED, name
            assert stats[-1].overflow_bytes == stats[4].overflow_bytes, name
