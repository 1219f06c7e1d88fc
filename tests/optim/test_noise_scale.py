"""The measured noise scale: the exact value of a known problem, and the same numbers on every layout."""

from __future__ import annotations

from typing import Any

import dense
import parity
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from pool import RankPool
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megapar.config import ConfigError
from lightning_megapar.optim import GradientNoiseScale

DP2, TP2, PP2 = {"data_parallel_size": 2}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
Windows = list[list[list[int]]]


def rows(*starts: int, length: int) -> list[list[int]]:
    return [list(range(start, start + length)) for start in starts]


# Layout -> (ranks, options, source, batch of a data rank, accumulated batches, small batches of 2 windows)
CASES: dict[str, tuple[int, dict[str, Any], str, int, int, Windows]] = {
    "dp2": (2, DP2, "data", 8, 1, [rows(0, 8, length=8), rows(16, 24, length=8)]),
    "dp2_accumulated": (
        2, DP2, "data", 4, 2,
        [[[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]],
         [[16, 17, 18, 19, 24, 25, 26, 27], [20, 21, 22, 23, 28, 29, 30, 31]]],
    ),
    "dp2_zero1": (
        2, {**DP2, "zero_stage": 1}, "data", 4, 2,
        [[[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]],
         [[16, 17, 18, 19, 24, 25, 26, 27], [20, 21, 22, 23, 28, 29, 30, 31]]],
    ),
    "tp2": (2, TP2, "accumulation", 8, 2, [rows(0, 8, length=8), rows(16, 24, length=8)]),
    "tp2_sp": (
        2, {**TP2, "sequence_parallel": True, "num_microbatches": 4}, "auto", 16, 1,
        [rows(0, 4, 8, 12, length=4), rows(16, 20, 24, 28, length=4)],
    ),
    "pp2": (2, PP2, "microbatches", 16, 1, [rows(0, 4, 8, 12, length=4), rows(16, 20, 24, 28, length=4)]),
    "pp2_accumulated": (2, PP2, "accumulation", 8, 2, [rows(0, 8, length=8), rows(16, 24, length=8)]),
    "dp2_tp2": (4, {**DP2, **TP2}, "data", 8, 1, [rows(0, 8, length=8), rows(16, 24, length=8)]),
    "dp2_pp2_microbatches": (
        4, {**DP2, **PP2, "num_microbatches": 2}, "microbatches", 8, 1,
        [rows(0, 4, 8, 12, length=4), rows(16, 20, 24, 28, length=4)],
    ),
    "dp2_tp2_zero1": (4, {**DP2, **TP2, "zero_stage": 1}, "data", 8, 1, [rows(0, 8, length=8), rows(16, 24, length=8)]),
    "dp2_pp2_zbv_zero1": (
        4, {**DP2, **PP2, "zero_stage": 1, "pipeline_schedule": "zbv"}, "data", 8, 1,
        [rows(0, 8, length=8), rows(16, 24, length=8)],
    ),
    "dp2_zero2_accumulated": (
        2, {**DP2, "zero_stage": 2, "num_microbatches": 2}, "auto", 4, 2,
        [rows(*range(0, 16, 2), length=2), rows(*range(16, 32, 2), length=2)],
    ),
    "dp2_tp2_zero3": (4, {**DP2, **TP2, "zero_stage": 3}, "auto", 8, 1, [rows(0, 8, length=8), rows(16, 24, length=8)]),
    "dp2_pp2_zero3": (
        4, {**DP2, **PP2, "zero_stage": 3, "num_microbatches": 2}, "microbatches", 8, 1,
        [rows(0, 4, 8, 12, length=4), rows(16, 20, 24, 28, length=4)],
    ),
    "single_accumulated": (1, {}, "accumulation", 4, 4, [rows(0, 4, 8, 12, length=4), rows(16, 20, 24, 28, length=4)]),
}  # fmt: skip
DEFAULT = ("dp2_accumulated", "dp2_zero1", "dp2_tp2_zero3", "tp2", "pp2", "dp2_tp2", "single_accumulated")


@pytest.mark.parametrize("case", [c if c in DEFAULT else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
@pytest.mark.parametrize("style", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_sharded_equals_dense(pool: RankPool, case: str, style: str) -> None:
    world, options, source, per_rank, accumulate, windows = CASES[case]
    config = parity.style(style)
    expected = dense.expected_moments(config, windows)
    for found in pool.run(
        dense.measure, world, config, world, options, source, per_rank, 32, accumulate, mode="trainer"
    ):
        assert len(found) == 2
        for mine, theirs in zip(found, expected):
            assert mine == pytest.approx(theirs, rel=1e-6)


def test_counted_from_labels(pool: RankPool) -> None:
    world, options, source, per_rank, accumulate, windows = CASES["dp2_accumulated"]
    config, options = parity.style("gpt2"), {**options, "count_tokens": "labels"}
    expected = dense.expected_moments(config, windows)
    found = pool.run(
        dense.measure, world, config, world, options, source, per_rank, 32, accumulate, False, mode="trainer"
    )[0]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("case", ["single_accumulated", pytest.param("pp2", marks=pytest.mark.slow)])
def test_without_counted_tokens_samples_weigh(pool: RankPool, case: str) -> None:
    world, options, source, per_rank, accumulate, windows = CASES[case]
    config = parity.style("gpt2")
    expected = dense.expected_moments(config, windows, by_tokens=False)
    found = pool.run(
        dense.measure, world, config, world, options, source, per_rank, 32, accumulate, False, mode="trainer"
    )[0]
    assert len(found) == 2
    for mine, theirs in zip(found, expected):
        assert mine == pytest.approx(theirs, rel=1e-6)


SPREAD = torch.linspace(0.3, 2.0, 12, dtype=torch.float64)  # standard deviation of each input
NOISE = 0.7  # of the targets


class Regression(Dataset[tuple[Tensor, Tensor]]):
    """Gaussian inputs of known covariance, targets that are linear but for noise; the true weights are 1."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 12, generator=generator, dtype=torch.float64) * SPREAD
        self.y = self.x.sum(1) + NOISE * torch.randn(count, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Line(LightningModule):
    """Least squares, at weights that stay 0.5 away from the truth in every direction."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(12, 1, bias=False)
        torch.nn.init.constant_(self.line.weight, 1.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0.5 * (self.line(batch[0])[:, 0] - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def exact_noise_scale() -> tuple[float, float]:
    """``|G|^2`` and ``tr(Sigma)`` of the regression, by the fourth moments of a Gaussian (Isserlis)."""
    variance, away = SPREAD.square(), torch.full((12,), 0.5, dtype=torch.float64)
    grad_sq = float((variance * away).square().sum())
    second = variance.sum() * (variance * away.square()).sum() + 2 * (variance * away).square().sum()
    return grad_sq, float(second + NOISE**2 * variance.sum()) - grad_sq


def known(world: int, options: dict[str, Any], per_rank: int, accumulate: int, root: str) -> list[float]:
    from lightning_megapar import MegaParStrategy

    noise = GradientNoiseScale(decay=0.998)
    trainer = Trainer(
        strategy=MegaParStrategy(**options), accelerator="cpu", devices=world, max_epochs=1, precision="64-true",
        accumulate_grad_batches=accumulate, callbacks=[noise], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=root,
    )  # fmt: skip
    trainer.fit(Line(), DataLoader(Regression(12000), batch_size=per_rank))
    assert noise.noise_scale is not None and noise.running.grad_sq is not None and noise.running.trace is not None
    return [noise.noise_scale, noise.running.grad_sq, noise.running.trace]


@pytest.mark.parametrize("layout", ["dp2", pytest.param("dp2_zero1", marks=pytest.mark.slow), "accumulated"])
def test_within_a_tenth_of_the_exact_value(pool: RankPool, tmp_path: Any, layout: str) -> None:
    grad_sq, trace = exact_noise_scale()
    world, options, per_rank, accumulate = {
        "dp2": (2, DP2, 15, 1),
        "dp2_zero1": (2, {**DP2, "zero_stage": 1}, 15, 1),
        "accumulated": (1, {}, 10, 3),
    }[layout]
    for found in pool.run(known, world, world, options, per_rank, accumulate, str(tmp_path), mode="trainer"):
        assert found == pytest.approx([trace / grad_sq, grad_sq, trace], rel=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": True}, "every_n_steps=True: expected an integer"),
        ({"source": "dat"}, "source='dat': expected auto, .*did you mean 'data'"),
        ({"decay": "x"}, "decay='x': expected a number"),
        ({"decay": 1.0}, "decay=1.0: expected 0 <= decay < 1"),
        ({"decay": 1.5}, "^GradientNoiseScale decay=1.5: expected 0 <= decay < 1 .nearest valid: 0.99"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientNoiseScale(**options)
