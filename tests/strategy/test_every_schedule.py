"""Every schedule with all that makes a step irregular at once: weights after training equal plain Lightning's."""

from __future__ import annotations

import os
import time
from typing import Any

import hostile
import pytest
import torch
import torch.distributed as dist
from hostile import Net
from lightning.pytorch import Callback, Trainer
from pool import RankPool
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_megapar.checkpoint import gather_full_state_dict
from lightning_megapar.config import AXES, SCHEDULES, Layout
from lightning_megapar.mesh import ParallelMesh, _backends
from lightning_megapar.pipeline.engine.runtime import PipelineError

WORDS = 11
FROZEN = ("blocks.1.", "blocks.6.up.weight")


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
    """A tied embedding, a norm used at both ends, recomputed and frozen blocks, sentences of any length."""

    def __init__(self) -> None:
        super().__init__()
        del self.inp
        self.words = nn.Embedding(WORDS, 8)
        self.blocks = nn.Sequential(*[Block(recomputed=index % 2 == 0) for index in range(8)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, WORDS)
        self.head.weight = self.words.weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(FROZEN))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.norm(self.blocks(self.norm(self.words(batch[:, :-1]))))
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


class Steps(Callback):
    """The norm and every gathered gradient, before each step of the optimizer."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        strategy: Any = trainer.strategy
        if hasattr(strategy, "gradient_norm"):
            records = [record for record in strategy.prepared.parameters if record.parameter.grad is not None]
            local = {record.name: record.as_value(record.parameter.grad.detach()) for record in records}
            trained = [name for name in strategy.prepared.names.parameters if not name.startswith(FROZEN)]
            self.gradients.append(gather_full_state_dict(trained, local))
            self.norms.append(float(strategy.gradient_norm()))
            return
        found = {name: p.grad.clone() for name, p in pl_module.named_parameters() if p.grad is not None}
        self.gradients.append(found)
        self.norms.append(float(torch.cat([g.flatten() for g in found.values()]).norm()))


class IrregularAdam(Irregular):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


TRAININGS: list[tuple[type[Irregular], int, float | None]] = [(Irregular, 1, None), (IrregularAdam, 3, 0.3)]
"""Module, batches per step of the optimizer, largest norm."""
SIZES = ((8, 6), (8, 3), (6, 5))
"""Sentences and words of the batches."""


def train_in_steps(
    layout: str, precision: str = "64-true", sizes: tuple[tuple[int, int], ...] = SIZES, **options: Any
) -> list[dict[str, Any]]:
    """Three steps of each training. Of a batch of six one data rank has fewer sentences than microbatches."""
    found = []
    for module, accumulate, clip in TRAININGS:
        generator = torch.Generator().manual_seed(4)
        batches = [torch.randint(0, WORDS, size, generator=generator) for size in sizes * accumulate]
        if layout != hostile.PLAIN:
            world, degrees = hostile.LAYOUTS[layout]
            place = Layout(**{axis: degrees.get(f"{axis}_parallel_size", 1) for axis in AXES})
            assert place.world_size == world
            own = place.coordinates(int(os.environ["RANK"]))["data"]
            batches = [
                batch.tensor_split([len(batch) - 2])[own] if len(batch) < 8 else batch[own::2] for batch in batches
            ]
        steps = Steps()
        result = hostile.fit(
            layout,
            module,
            train=DataLoader(batches, batch_size=None),  # type: ignore[arg-type]
            callbacks=[steps],
            precision=precision,
            dtype=torch.float64 if precision.startswith("64") else torch.float32,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=clip,
            max_epochs=1,
            use_distributed_sampler=False,
            options=options,
        )
        found.append({"norms": steps.norms, "gradients": steps.gradients, "weights": result["weights"]})
    return found


@pytest.fixture(scope="module")
def in_steps() -> list[dict[str, Any]]:
    return train_in_steps(hostile.PLAIN)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sharded_optimizer_state(pool: RankPool, in_steps: list[dict[str, Any]], schedule: str) -> None:
    mine = pool.run(train_in_steps, 4, "dp2_pp2_zero1", pipeline_schedule=schedule, num_microbatches=4, mode="trainer")
    assert [len(one["norms"]) for one in in_steps] == [3, 3]
    assert hostile.differences(mine[0], in_steps) == []


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_sharded_optimizer_state_with_tensor_ranks(
    pool: RankPool, in_steps: list[dict[str, Any]], schedule: str
) -> None:
    layout = "dp2_tp2_pp2_zero1"
    mine = pool.run(train_in_steps, 8, layout, pipeline_schedule=schedule, num_microbatches=4, mode="trainer")
    assert hostile.differences(mine[0], in_steps) == []


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sharded_optimizer_state_in_fp32(pool: RankPool, schedule: str) -> None:
    expected = train_in_steps(hostile.PLAIN, "32-true")
    options = {"pipeline_schedule": schedule, "num_microbatches": 4}
    mine = pool.run(train_in_steps, 4, "dp2_pp2_zero1", "32-true", mode="trainer", **options)
    assert hostile.differences(mine[0], expected, tolerance=1e-5) == []


@pytest.mark.slow
def test_sharded_optimizer_state_in_mixed_precision(pool: RankPool) -> None:
    """bfloat16 rounds by the cut and the scale of a batch: compared with replicated state, on even batches."""
    options = {"pipeline_schedule": "zbv", "num_microbatches": 4}
    sharded, replicated = (
        pool.run(train_in_steps, 4, layout, "bf16-mixed", SIZES[:2], mode="trainer", **options)[0]
        for layout in ("dp2_pp2_zero1", "dp2_pp2")
    )
    assert hostile.differences(sharded, replicated, tolerance=1e-6) == []


class Collectives(Callback):
    """Per batch the kinds of FSDP2's collectives, each with the number of actions that had run before it."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, int]]] = []
        self.counter: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        runtime = trainer.strategy.stepper.runtime  # type: ignore[attr-defined]
        runtime.spans, seen = [], []

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                for kind, part in (("gather", "c10d::_allgather_base"), ("reduce", "c10d::_reduce_scatter_base")):
                    if func._schema.name.startswith(part):
                        sizes = sorted(t.numel() for t in args[:2])
                        if sizes[1] == 2 * sizes[0]:  # over the two data ranks: what is logged goes over all four
                            seen.append((kind, len(runtime.spans or ())))
                return func(*args, **(kwargs or {}))

        self.batches.append(seen)
        self.counter = Mode()
        self.counter.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.counter.__exit__(None, None, None)


def count(schedule: str) -> tuple[list[list[tuple[str, int]]], list[tuple[str, int]]]:
    """What :class:`Collectives` sees, and the rank's actions as (letter, chunk)."""
    batches = [torch.randint(0, WORDS, (4, 5), generator=torch.Generator().manual_seed(4)) for _ in range(4)]
    seen = Collectives()
    options = {"pipeline_schedule": schedule, "num_microbatches": 4}
    settings = {"max_epochs": 1, "accumulate_grad_batches": 2, "use_distributed_sampler": False}
    trainer = hostile.trainer_for("dp2_pp2_zero1", [seen], options=options, **settings)
    trainer.fit(Irregular().double(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    strategy: Any = trainer.strategy
    row = strategy.stepper._schedule(schedule, 4).ranks[strategy.mesh.coordinate("pipeline")]
    return seen.batches, [(str(action)[0], action.chunk) for action in row]


BOTH_ENDS = 1
"""The norm: a module that several chunks of a rank, and several stages, use."""


@pytest.mark.parametrize(
    ("schedule", "units"),
    [
        # Per stage: for each chunk the units that are complete with it, what is so only behind the last chunk although
        # that one gives it no gradient, and what is gathered without being trained.
        ("1f1b", [([3 + 1 + BOTH_ENDS], 0, 1), ([4 + 1 + BOTH_ENDS], 0, 0)]),
        ("interleaved_1f1b", [([1 + 1 + BOTH_ENDS, 2], 0, 1), ([2, 2 + 1], BOTH_ENDS, 0)]),
        ("zb_h1", [([3 + 1 + BOTH_ENDS], 0, 1), ([4 + 1 + BOTH_ENDS], 0, 0)]),
        ("zbv", [([1 + 1 + BOTH_ENDS, 2], 0, 1), ([2, 2], 0, BOTH_ENDS)]),  # the tied embedding waits for both chunks
    ],
)
def test_each_unit_is_gathered_and_reduced_once_when_it_is_complete(
    pool: RankPool, schedule: str, units: list[tuple[list[int], int, int]]
) -> None:
    for rank, (batches, actions) in enumerate(pool.run(count, 4, schedule, mode="trainer")):
        trained, late, others = units[rank // 2]
        # The first batch's rehearsal has gathered before; each window is two batches long.
        assert [kind for kind, _ in batches[1]] == ["reduce"] * (sum(trained) + late), (schedule, rank)
        assert [kind for kind, _ in batches[2]] == ["gather"] * (sum(trained) + late + others), (schedule, rank)
        assert batches[3] == batches[1]
        last = [max(i for i, (kind, c) in enumerate(actions) if c == chunk) for chunk in range(len(trained))]
        behind = "W" in {kind for kind, _ in actions}
        expected = [last[chunk] + behind for chunk, number in enumerate(trained) for _ in range(number)]
        assert [at for _, at in batches[1]] == sorted(expected + late * [max(last) + 1]), (schedule, rank)


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
