"""ZeRO 0 to 3 under every layout and schedule: gradients, norms and weights are those of one process."""

from __future__ import annotations

from typing import Any

import hostile
import parity
import pytest
import torch
from hostile import Net
from lightning.pytorch import Trainer
from pool import RankPool
from test_every_schedule import SCHEDULES, train_in_steps
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megapar.config import ConfigError, ParallelConfig
from lightning_megapar.schedule_names import SPLIT_BACKWARDS

WHOLE_BACKWARDS = [name for name in SCHEDULES if name not in SPLIT_BACKWARDS]
FIRST = ((2, "zbv"), (3, "1f1b"), (3, "interleaved_1f1b"))
"""Stages and schedules of the default run."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp2_tp2": (4, {"tensor_parallel_size": 2}),
    "dp2_pp2": (4, {"pipeline_parallel_size": 2}),
    "dp2_tp2_pp2": (8, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
}


# -- one block of everything irregular, ragged microbatches, accumulation, clipping


@pytest.fixture(scope="module")
def in_steps() -> list[dict[str, Any]]:
    return train_in_steps(hostile.PLAIN)


@pytest.mark.parametrize(
    ("stage", "schedule"),
    [
        pytest.param(stage, name, marks=() if (stage, name) in FIRST else pytest.mark.slow)
        for stage, names in ((2, SCHEDULES), (3, WHOLE_BACKWARDS))
        for name in names
    ],
)
def test_every_schedule(pool: RankPool, in_steps: list[dict[str, Any]], stage: int, schedule: str) -> None:
    options = {"zero_stage": stage, "pipeline_schedule": schedule, "num_microbatches": 4}
    mine = pool.run(train_in_steps, 4, "dp2_pp2", mode="trainer", **options)
    assert hostile.differences(mine[0], in_steps) == []


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [2, 3])
def test_without_a_pipeline(pool: RankPool, in_steps: list[dict[str, Any]], stage: int, microbatches: int) -> None:
    options = {"zero_stage": stage, "num_microbatches": microbatches}
    mine = pool.run(train_in_steps, 2, "dp2", mode="trainer", **options)
    assert hostile.differences(mine[0], in_steps) == []


# -- stages x layouts x optimizers


def trained(layout: str, stage: int, optimizers: tuple[str, ...], accumulations: tuple[int, ...]) -> list[Any]:
    world, degrees = LAYOUTS[layout]
    options = {"data_parallel_size": 2, "zero_stage": stage, "num_microbatches": 2, **degrees}
    return [
        parity.run_strategy(
            parity.style("gpt2"), world, kind, options, precision="32-true", global_batch=24, accumulate=number
        )
        for kind in optimizers
        for number in accumulations
    ]


def agree(pool: RankPool, layout: str, stage: int, optimizers: tuple[str, ...], accumulations: tuple[int, ...]) -> None:
    results = pool.run(trained, LAYOUTS[layout][0], layout, stage, optimizers, accumulations, mode="trainer")[0]
    found = iter(results)
    for kind in optimizers:
        expected = parity.run_reference(parity.style("gpt2"), kind, dtype=torch.float32, global_batch=24)
        for number in accumulations:
            parity.compare(next(found), expected, 1e-5, accumulate=number)


@pytest.mark.parametrize(("layout", "stage"), [("dp2", 2), ("dp2", 3), ("dp2_tp2", 3)])
def test_optimizers(pool: RankPool, layout: str, stage: int) -> None:
    agree(pool, layout, stage, ("sgd", "smooth_fused"), (3,))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_stages_layouts_optimizers(pool: RankPool, layout: str, stage: int) -> None:
    agree(pool, layout, stage, ("sgd", "smooth_adamw", "smooth_fused"), (1, 3))


# -- hybrid sharding and host memory


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (4, {"data_parallel_size": 4, "data_parallel_replicas": 2, "zero_stage": 1}),
        (4, {"data_parallel_size": 4, "data_parallel_replicas": 2, "zero_stage": 3, "num_microbatches": 2}),
        (8, {"data_parallel_size": 4, "data_parallel_replicas": 2, "zero_stage": 2, "tensor_parallel_size": 2}),
        (2, {"data_parallel_size": 2, "offload_optimizer": True, "zero_stage": 1}),
        (2, {"data_parallel_size": 2, "offload_optimizer": True, "zero_stage": 3, "num_microbatches": 2}),
    ],
    ids=["hybrid1", "hybrid3", "hybrid2_tp2", "offload1", "offload3"],
)
def test_replicas_and_host_memory(pool: RankPool, world: int, options: dict[str, Any]) -> None:
    results = pool.run(parity.run_strategy, world, parity.style("gpt2"), world, "sgd", options, mode="trainer")
    parity.compare(results[0], parity.run_reference(parity.style("gpt2"), "sgd"), 1e-12)
    for other in results[1:]:
        assert other["losses"] == results[0]["losses"] and other["norms"] == results[0]["norms"]


# -- evaluation and prediction


class Running(nn.Module):
    """A running mean, changed in place, beside a buffer that autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("scale", torch.full((16,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x * self.scale


class Counts(Net):
    """Has a state that its steps change: a microbatch that only fills up must not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Running()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.head(self.blocks(self.norm(self.inp(x))))

    def on_train_epoch_end(self) -> None:
        self.log("seen", float(self.seen), reduce_fx="sum", sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("rows", float(len(batch[0])), reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def ragged(rank: int) -> DataLoader[Any]:
    """Rank 0 has batches of 4 and 4, rank 1 of 4 and 1."""
    rows = hostile.data(13)
    sizes = [(0, 4), (4, 4)] if rank == 0 else [(8, 4), (12, 1)]
    batches = [[torch.stack([rows[i][part] for i in range(at, at + n)]) for part in (0, 1)] for at, n in sizes]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def fit_ragged(stage: int) -> dict[str, Any]:
    import os

    loader = ragged(int(os.environ["RANK"]))
    options = {"zero_stage": stage, "num_microbatches": 4, "data_parallel_size": 2}
    settings = {"max_epochs": 1, "use_distributed_sampler": False}
    watch = hostile.Watch()
    trainer = hostile.trainer_for("dp2", [watch], options=options, **settings)
    torch.manual_seed(0)
    module = Counts().double()
    trainer.fit(module, loader, loader)
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    predictions = trainer.predict(module, loader)
    rows = [len(one) for one in predictions or []]
    return {
        "epochs": watch.epochs,
        "weights": watch.weights,
        "buffers": buffers,
        "rows": rows,
        "first": (predictions or [torch.zeros(0)])[0],
    }


def test_microbatches_that_fill_up_do_not_count(pool: RankPool) -> None:
    """Where data ranks have different numbers of microbatches, all gather equally often; nothing else differs."""
    expected = pool.run(fit_ragged, 2, 0, mode="trainer")
    for stage in (2, 3):
        mine = pool.run(fit_ragged, 2, stage, mode="trainer")
        assert hostile.differences(mine, expected) == []
    assert [one["rows"] for one in expected] == [[4, 4], [4, 1]]
    assert expected[0]["epochs"][0]["rows"] == 13.0


def resume(layout: str, ckpt_path: str | None, save: str | None, **options: Any) -> dict[str, Tensor]:
    watch = hostile.Watch()
    settings: dict[str, Any] = {"max_epochs": 1 if save else 2, "options": options}
    trainer: Trainer = hostile.trainer_for(layout, [watch], **settings)
    torch.manual_seed(0)
    trainer.fit(Net().double(), hostile.loader(layout, shuffle=False), ckpt_path=ckpt_path)
    if save:
        trainer.save_checkpoint(save)
    return watch.weights


@pytest.mark.parametrize(
    ("world", "before", "after"),
    [
        (4, {"data_parallel_size": 4, "data_parallel_replicas": 2, "zero_stage": 3}, {"zero_stage": 2}),
        (2, {"zero_stage": 2}, {"data_parallel_size": 2, "zero_stage": 3, "offload_optimizer": True}),
    ],
    ids=["hybrid", "offload"],
)
def test_checkpoints(pool: RankPool, tmp_path: Any, world: int, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Saved under one stage, resumed under another: the weights of an uninterrupted run."""
    path = str(tmp_path / "half.ckpt")
    layout = "dp2"
    pool.run(save_wide, world, path, before, mode="trainer")
    mine = pool.run(resume, 2, layout, path, None, mode="trainer", **after)[0]
    whole = hostile.fit(hostile.PLAIN, Net, train=hostile.loader(hostile.PLAIN, shuffle=False))["weights"]
    assert hostile.differences(mine, whole) == []


def save_wide(path: str, options: dict[str, Any]) -> None:
    """One epoch with batches of eight, whatever the number of ranks."""
    size = int(options.get("data_parallel_size", 2))
    trainer = hostile.trainer_for("dp2" if size == 2 else "dp4", max_epochs=1, options=options)
    torch.manual_seed(0)
    trainer.fit(Net().double(), DataLoader(hostile.data(), batch_size=8 // size))
    trainer.save_checkpoint(path)


class SkipsWhenEvaluating(Net):
    """Its validation leaves out the blocks that mostly follow the first, whose gather has been started by then."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inner = self.blocks[0](self.inp(batch[0]))
        self.log("val_loss", nn.functional.cross_entropy(self.head(inner), batch[1]))

    def on_validation_epoch_end(self) -> None:
        # Other weights between validation and the next step, as a swapped average is.
        with torch.no_grad():
            for parameter in self.parameters():
                getattr(parameter, "_local_tensor", parameter).mul_(1.25)


def skip_when_evaluating(layout: str) -> dict[str, Tensor]:
    options = {"zero_stage": 3} if layout != hostile.PLAIN else {}
    settings: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": 0}
    result = hostile.fit(layout, SkipsWhenEvaluating, validate=True, options=options, **settings)
    return result["weights"]  # type: ignore[no-any-return]


def test_what_was_gathered_ahead_for_nothing_is_not_used_later(pool: RankPool) -> None:
    mine = pool.run(skip_when_evaluating, 2, "dp2", mode="trainer")[0]
    assert hostile.differences(mine, skip_when_evaluating(hostile.PLAIN)) == []


class CompiledInPlace(Net):
    """``compile()`` compiles a block's call with the hooks of whoever shards it."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks.children():
            block.compile(backend="aot_eager")


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_blocks_compiled_in_place(pool: RankPool, stage: int) -> None:
    mine = pool.run(hostile.fit, 2, "dp2", CompiledInPlace, max_epochs=1, options={"zero_stage": stage}, mode="trainer")
    assert hostile.differences(mine[0]["weights"], hostile.fit(hostile.PLAIN, Net, max_epochs=1)["weights"]) == []


# -- refusals


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"zero_stage": 4}, r"zero_stage=4 is none of ZeRO's; valid values: 0, 1, 2, 3"),
        ({"zero_stage": True}, r"zero_stage=True is none"),
        ({"zero_stage": "2"}, r"zero_stage='2' is none"),
        *(
            (
                {"zero_stage": 3, "pipeline_schedule": name, "pipeline_parallel_size": 2},
                rf"zero_stage=3 with pipeline_schedule='{name}': a block lets go of its parameters .*Valid values: "
                "zero_stage=2, or pipeline_schedule=1f1b",
            )
            for name in SPLIT_BACKWARDS
        ),
        ({"zero_stage": 1, "data_parallel_replicas": 0}, "data_parallel_replicas=0: expected a positive integer"),
        (
            {"zero_stage": 1, "data_parallel_replicas": 3, "data_parallel_size": 8},
            "data_parallel_replicas=3 does not divide data_parallel_size=8; nearest valid values: 2, 4",
        ),
        ({"data_parallel_replicas": 2}, "data_parallel_replicas=2 is for sharded data ranks, but zero_stage=0"),
        ({"offload_optimizer": True}, "offload_optimizer=True is for sharded data ranks, but zero_stage=0"),
        ({"offload_optimizer": 1, "zero_stage": 1}, "offload_optimizer=1: expected true or false"),
        (
            {"offload_optimizer": True, "zero_stage": 1, "data_parallel_size": 1},
            "offload_optimizer=True keeps the shards of several data ranks .*data_parallel_size is 1",
        ),
    ],
)
def test_settings_are_refused_by_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ParallelConfig(**settings)


def test_replicas_are_compared_with_the_ranks_that_there_are() -> None:
    with pytest.raises(ConfigError, match="data_parallel_replicas=4 does not divide data_parallel_size=2; nearest"):
        ParallelConfig(zero_stage=1, data_parallel_replicas=4, tensor_parallel_size=2).resolve(4)
