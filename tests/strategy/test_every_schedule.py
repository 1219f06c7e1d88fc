"""Every schedule with all that makes a step irregular at once: weights after training equal plain Lightning's."""

from __future__ import annotations

import time
from typing import Any

import hostile
import pytest
import torch
import torch.distributed as dist
from hostile import Net
from lightning.pytorch import Trainer
from pool import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_megapar.config import SCHEDULES, Layout
from lightning_megapar.mesh import ParallelMesh, _backends
from lightning_megapar.pipeline.engine.runtime import PipelineError

WORDS = 11


class Block(nn.Module):
    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.recomputed = recomputed

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputed and self.training:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.inner(x)


class Irregular(Net):
    """A tied embedding, recomputed blocks, a frozen block and one with frozen weights, sentences of any length."""

    def __init__(self) -> None:
        super().__init__()
        del self.inp
        self.words = nn.Embedding(WORDS, 8)
        self.blocks = nn.Sequential(*[Block(recomputed=index % 2 == 0) for index in range(8)])
        self.head = nn.Linear(8, WORDS)
        self.head.weight = self.words.weight
        self.blocks[1].requires_grad_(False)
        self.blocks[6].up.weight.requires_grad_(False)  # type: ignore[union-attr,operator]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.blocks(self.words(batch[:, :-1]))
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss


def sentences() -> DataLoader[Any]:
    """Batches of 8, 8, 8 and 3 sentences; each batch has a length of its own."""
    generator = torch.Generator().manual_seed(4)
    batches = [
        torch.randint(0, WORDS, (count, length), generator=generator)
        for count, length in ((8, 6), (8, 3), (8, 9), (3, 5))
    ]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def fit(layout: str, schedule: str | None = None, microbatches: int = 4, **options: Any) -> dict[str, Any]:
    if schedule is not None:
        options |= {"pipeline_schedule": schedule, "num_microbatches": microbatches}
    return hostile.fit(layout, Irregular, train=sentences(), options=options)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return fit(hostile.PLAIN)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages(pool: RankPool, expected: dict[str, Any], schedule: str) -> None:
    hostile.agree(pool.run(fit, 2, "pp2", schedule, mode="trainer"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("layout", "microbatches"), [("pp4", 4), ("pp4", 8), ("pp4", 3), ("tp2_pp2", 4)])
def test_four_ranks(pool: RankPool, expected: dict[str, Any], layout: str, microbatches: int, schedule: str) -> None:
    hostile.agree(pool.run(fit, 4, layout, schedule, microbatches, mode="trainer"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 3, 5, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_number_of_microbatches(pool: RankPool, expected: dict[str, Any], schedule: str, microbatches: int) -> None:
    hostile.agree(pool.run(fit, 2, "pp2", schedule, microbatches, mode="trainer"), expected)


class Hangs(Net):
    """The last stage does not come back from the second batch's third microbatch."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        strategy: Any = self.trainer.strategy
        self.calls += 1
        if batch_idx == 1 and strategy.mesh.has_loss and self.calls % 4 == 3:
            time.sleep(9)
        return loss


def hang(schedule: str) -> str:
    from lightning_megapar import MegaParStrategy

    strategy = MegaParStrategy(
        pipeline_parallel_size=2, num_microbatches=4, pipeline_schedule=schedule, timeout_seconds=3
    )
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **hostile.QUIET)
    module = Hangs()
    module.calls = -1  # the rehearsal's
    start = time.monotonic()
    try:
        trainer.fit(module, hostile.loader("pp2"))
    except PipelineError as error:
        return f"{time.monotonic() - start < 9} {error}"
    except Exception as error:  # the last stage: the others have left
        return type(error).__name__
    return "went on"


@pytest.mark.parametrize("schedule", ["1f1b"])
def test_a_stage_that_hangs_is_told_of_by_action_and_microbatch(pool: RankPool, schedule: str) -> None:
    waiting, hanging = pool.run(hang, 2, schedule, mode="trainer", timeout=60)
    assert "pipeline stage 0 waits for its input of the backward of microbatch" in waiting, waiting
    assert waiting.startswith("True") and hanging != "went on"


def timeouts() -> set[float]:
    """Of every group that a mesh has, in seconds."""
    layout = Layout(pipeline=2, data=1, tensor=2)
    mesh = ParallelMesh(layout, dist.get_rank())
    assert mesh.device_mesh is not None
    groups = [*mesh.device_mesh.get_all_groups(), *(mesh.direction_group(name) for name in ("forward", "backward"))]
    return {backend.options._timeout.total_seconds() for group in groups for backend in _backends(group)}


def test_no_group_waits_longer_than_the_default_group(pool: RankPool) -> None:
    assert pool.run(timeouts, 4) == [{30.0}] * 4
