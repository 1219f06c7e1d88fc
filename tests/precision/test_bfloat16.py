"""``bf16-true``: bfloat16 within a step, float32 masters, gradients and sums around it; ``bf16-mixed`` beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import precision_runs as runs
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from pool import RankPool
from precision_runs import LAYOUTS, train
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megapar import MegaParStrategy

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> dict[str, dict[str, Any]]:
    """One rank, in float32 and in bfloat16."""
    kinds = ("32-true", "bf16-true")
    return {kind: pool.run(train, 1, "single", kind, clip=0.5, mode="trainer")[0] for kind in kinds}


def error(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Relative difference of the first step's gradients, all of them as one vector."""
    mine, theirs = found["gradients"][0], expected["gradients"][0]
    assert mine.keys() == theirs.keys()
    flat = torch.cat([mine[name].flatten() - theirs[name].flatten() for name in theirs])
    return float(flat.norm() / torch.cat([g.flatten() for g in theirs.values()]).norm())


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_every_layout_computes_what_one_rank_does(pool: RankPool, alone: dict[str, Any], layout: str) -> None:
    found = pool.run(train, LAYOUTS[layout][0], layout, "bf16-true", clip=0.5, mode="trainer")[0]
    exact, one = alone["32-true"], alone["bf16-true"]
    assert found["dtypes"] == {torch.float32}
    assert {g.dtype for g in found["gradients"][0].values()} == {torch.float32}
    assert found["losses"] == pytest.approx(one["losses"], rel=2e-3)
    assert found["norms"] == pytest.approx(one["norms"], rel=2e-2)
    # What bfloat16 rounds away is the same amount everywhere: other addends, no worse a sum.
    rounding = error(one, exact)
    assert 1e-3 < rounding < 0.02
    assert error(found, exact) < 1.5 * rounding
    for name, expected in one["gradients"][0].items():
        if name.endswith("key.bias"):
            continue  # exactly zero: softmax does not see what is added to all scores
        cosine = torch.cosine_similarity(found["gradients"][0][name].flatten(), expected.flatten(), dim=0)
        assert float(cosine) > 0.999, name


class Looks(LightningModule):
    """Everything that may hold on to a parameter: a recurrent layer, tied weights, normalisation, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 8)
        self.blocks[3].weight = self.head.weight
        self.register_buffer("offset", torch.ones(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.rnn(x)[0]
        y = self.norm(y[:, -1])
        for block in self.blocks:
            y = torch.relu(block(y))
        return self.head(y) + self.offset

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        y = self(batch)
        kinds = {p.dtype for p in self.parameters()} | {batch.dtype, y.dtype, self.offset.dtype, self.dtype}
        self.seen.append((kinds, self.blocks[3].weight is self.head.weight))
        return y.square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(({self(batch).dtype, *(p.dtype for p in self.parameters())}, True))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert {p.dtype for p in self.parameters()} == {p.grad.dtype for p in self.parameters()} == {torch.float32}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert {p.dtype for p in self.parameters()} == {torch.float32}
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def look(world: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Looks()
    trainer = Trainer(
        strategy=MegaParStrategy(),
        devices=world,
        max_steps=steps,
        precision="bf16-true",
        gradient_clip_val=1.0,
        **QUIET,
    )
    data = DataLoader(torch.randn(64, 5, 8), batch_size=8 // world)
    trainer.fit(module, data, data)
    state = trainer.strategy.full_state_dict()
    return {"seen": module.seen, "state": {k: v.dtype for k, v in state.items()}}


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_step_sees_and_what_is_kept(pool: RankPool, world: int) -> None:
    found = pool.run(look, world, world, 3, mode="trainer")[0]
    assert len(found["seen"]) >= 5
    assert all(kinds == {torch.bfloat16} and tied for kinds, tied in found["seen"])
    assert found["state"].pop("norm.num_batches_tracked") == found["state"].pop("count") == torch.long
    halves = {"offset", "norm.running_mean", "norm.running_var"}  # buffers, as Lightning has them
    assert {k for k, v in found["state"].items() if v == torch.bfloat16} == halves
    assert {v for k, v in found["state"].items() if k not in halves} == {torch.float32}


class Sums(LightningModule):
    """The gradient of each weight is the mean of its inputs."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.blocks = nn.ModuleList([nn.Linear(4, 4, bias=False)])
        nn.init.ones_(self.blocks[0].weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks[0](batch).sum(-1).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def summed(layout: str, rate: float, steps: int, rows: list[float], accumulate: int = 1, pieces: int = 1) -> Tensor:
    world, options = LAYOUTS[layout]
    module = Sums(rate)
    trainer = Trainer(
        strategy=MegaParStrategy(**{**options, "num_microbatches": pieces}),
        devices=world,
        max_steps=steps,
        precision="bf16-true",
        accumulate_grad_batches=accumulate,
        **QUIET,
    )
    size = len(rows) // world // accumulate
    trainer.fit(module, DataLoader(torch.tensor(rows).repeat(steps)[:, None].repeat(1, 4), batch_size=size))
    return trainer.strategy.full_state_dict().get("blocks.0.weight", torch.zeros(0))


@pytest.mark.parametrize("layout", ["single", "dp2", "dp2_zero1", "dp2_zero2"])
def test_masters_keep_updates_that_bfloat16_would_lose(pool: RankPool, layout: str) -> None:
    """Eight steps of 2^-10: each is below half of bfloat16's spacing at 1, 2^-8."""
    weight = pool.run(summed, LAYOUTS[layout][0], layout, 2.0**-10, 8, [1.0, 1.0], mode="trainer")[0]
    assert torch.equal(weight, torch.full((4, 4), 1 - 8 * 2.0**-10))


@pytest.mark.parametrize(
    ("layout", "accumulate", "pieces"), [("single", 4, 1), ("single", 1, 4), ("dp2_zero1", 2, 2), ("dp2_zero2", 2, 2)]
)
def test_gradients_are_summed_in_float32(pool: RankPool, layout: str, accumulate: int, pieces: int) -> None:
    """256 + 1 + 1 + 1 is 256 in bfloat16, however often 1 is added."""
    rows = [256.0, 1.0, 1.0, 1.0] if layout == "single" else [256.0, 1.0, 1.0, 1.0] * 2
    weight = pool.run(summed, LAYOUTS[layout][0], layout, 1.0, 1, rows, accumulate, pieces, mode="trainer")[0]
    assert torch.equal(weight, torch.full((4, 4), 1 - 64.75))


class Half(parity.Model):
    """Weights of a file in bfloat16: the masters are these values."""

    def configure_model(self) -> None:
        if self.gpt is None:
            super().configure_model()
            assert next(self.gpt.parameters()).dtype == torch.float32  # not made in bfloat16
            self.gpt.bfloat16()


def test_weights_given_in_bfloat16_get_masters(pool: RankPool) -> None:
    found = pool.run(half, 2, mode="trainer")[0]
    assert found["dtypes"] == {torch.float32}


def half() -> dict[str, Any]:
    return train("tp2", "bf16-true", steps=1, model=Half(parity.style("gpt2"), "sgd"))


@pytest.mark.parametrize(("first", "second"), [("tp2_pp2", "dp2_zero1"), ("dp2_tp2_zero3", "single")])
def test_checkpoints_hold_the_masters(pool: RankPool, tmp_path: Path, first: str, second: str) -> None:
    path, root = str(tmp_path / "run.ckpt"), str(tmp_path)
    saved = pool.run(train, LAYOUTS[first][0], first, "bf16-true", save=path, root=root, mode="trainer")[0]
    resumed = pool.run(train, LAYOUTS[second][0], second, "bf16-true", ckpt=path, root=root, mode="trainer")[0]
    assert torch.equal(runs.weights_of(saved), runs.weights_of(resumed))
    assert any(bool((v != v.bfloat16().float()).any()) for v in saved["weights"].values())


class Steps(parity.Model):
    """Optimizes by itself: parameters are masters for the optimizer and bfloat16 for the next forward."""

    def __init__(self) -> None:
        super().__init__(parity.style("gpt2"), "sgd")
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            assert next(self.parameters()).dtype == torch.bfloat16
            self.manual_backward(self.gpt(batch["tokens"], batch["labels"]))
            optimizer.step()


def by_hand(layout: str, precision: str) -> dict[str, Any]:
    world, options = LAYOUTS[layout]
    made = MegaParStrategy(seed=7, **options)
    trainer = Trainer(strategy=made, devices=world, max_steps=4, precision=precision, **QUIET)
    module = Steps() if precision == "bf16-true" else Steps32()
    trainer.fit(module, DataLoader(parity.Tokens(16, 16, 61), batch_size=8 // made.layout.data))
    return {"weights": trainer.strategy.full_state_dict()}


class Steps32(Steps):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.gpt(batch["tokens"], batch["labels"]))
            optimizer.step()


@pytest.mark.parametrize("layout", ["single", "dp2", "tp2"])
def test_manual_optimization(pool: RankPool, layout: str) -> None:
    world = LAYOUTS[layout][0]
    plain = pool.run(by_hand, world, layout, "32-true", mode="trainer")[0]
    found = pool.run(by_hand, world, layout, "bf16-true", mode="trainer")[0]
    assert {v.dtype for v in found["weights"].values()} == {torch.float32}
    difference = runs.weights_of(found) - runs.weights_of(plain)
    assert float(difference.norm() / runs.weights_of(plain).norm()) < 0.02


@pytest.mark.parametrize("layout", ["tp2_pp2", "dp2_zero1", "dp2_tp2_zero3", "pp2_zb_h1"])
def test_bf16_mixed_with_a_fused_optimizer_and_clipping(pool: RankPool, layout: str) -> None:
    world = LAYOUTS[layout][0]
    plain = pool.run(fused, world, layout, "32-true", mode="trainer")[0]
    found = pool.run(fused, world, layout, "bf16-mixed", mode="trainer")[0]
    assert min(plain["norms"]) > 0.5 and found["dtypes"] == {torch.float32}
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-2)
    assert found["norms"] == pytest.approx(plain["norms"], rel=5e-2)


class Fused(parity.Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def fused(layout: str, precision: str) -> dict[str, Any]:
    return train(layout, precision, model=Fused(parity.style("gpt2"), "adamw"), clip=0.5)
