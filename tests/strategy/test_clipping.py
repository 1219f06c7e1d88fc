"""Clipping by norm and by value, by Lightning's flag and by somebody's own code, is that of one device everywhere."""

from __future__ import annotations

import math
import os
from typing import Any

import hostile
import pytest
import torch
from hostile import Net, WideBlock
from lightning.pytorch import Trainer
from pool import RankPool
from torch import Tensor, nn

from lightning_megapar.config import ConfigError, Layout
from lightning_megapar.data_parallel.norm import clip_gradients
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.strategy import MegaParStrategy
from lightning_megapar.strategy.limits import refuse_clipping


class Fused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[WideBlock() for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(5))  # of the module itself: whole on every data rank

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class OwnClipping(Fused):
    """Clips by torch's function, and keeps what it returns."""

    norm_type = 2.0

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:  # type: ignore[override]
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.2, norm_type=self.norm_type, error_if_nonfinite=True)
        self.log("own_norm", float(norm))


class ByLargest(OwnClipping):
    norm_type = math.inf


class Overflows(OwnClipping):
    """One element of one gradient is no number in the second step, on the rank that has it."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == 1:
            for name, parameter in self.named_parameters():
                if name == "blocks.3.up.weight" and parameter.grad is not None:
                    local = getattr(parameter.grad, "_local_tensor", parameter.grad)
                    local.view(-1)[-1] = math.nan


LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("dp2", 2, {"zero_stage": 3}),
    ("tp2_pp2", 4, {}),
    ("dp4", 4, {"zero_stage": 1, "data_parallel_replicas": 2}),
    ("dp2_pp2", 4, {"zero_stage": 2}),
]
CASES: list[tuple[type[Net], dict[str, Any]]] = [
    (Fused, {"gradient_clip_val": 0.2}),
    (Fused, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    (OwnClipping, {}),
    (ByLargest, {}),
]


def fit_all(layout: str, options: dict[str, Any]) -> list[Any]:
    return [
        hostile.fit(layout, module, options={} if layout == hostile.PLAIN else options, max_epochs=1, **settings)
        for module, settings in CASES
    ]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return fit_all(hostile.PLAIN, {})


@pytest.mark.parametrize(
    ("layout", "world", "options"),
    [pytest.param(*case, marks=() if number < 2 else pytest.mark.slow) for number, case in enumerate(LAYOUTS)],
    ids=["zero3", "tp2_pp2", "hybrid", "zero2_pp2"],
)
def test_clipping(pool: RankPool, expected: list[Any], layout: str, world: int, options: dict[str, Any]) -> None:
    results = pool.run(fit_all, world, layout, options, mode="trainer")
    assert hostile.differences(results[0], expected) == []
    for other in results[1:]:
        assert [one["batches"] for one in other] == [one["batches"] for one in results[0]]


def overflow(layout: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        hostile.fit(layout, Overflows, max_epochs=1, options={"zero_stage": 1} if layout == "dp2" else {})
    return str(caught.value)


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_a_norm_that_is_no_number_stops_every_rank(pool: RankPool, layout: str) -> None:
    for text in pool.run(overflow, 2, layout, mode="trainer"):
        assert "the norm of order 2.0 of the gradients is nan" in text


def test_an_unknown_algorithm_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"gradient_clip_algorithm='nrom' is none of norm, value; did you mean 'norm'\?"
    ):
        clip_gradients([], ParallelMesh(Layout()), 1.0, "nrom")
    with pytest.raises(Exception, match=r"gradient_clip_algorithm. nrom is invalid"):
        hostile.trainer_for("dp2", gradient_clip_val=1.0, gradient_clip_algorithm="nrom")


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        (-1, r"gradient_clip_val=-1: expected a positive number, or None .or 0. for no clipping; nearest valid: 1$"),
        (-0.5, r"gradient_clip_val=-0.5.*nearest valid: 0.5$"),
        (math.nan, r"gradient_clip_val=nan: expected a positive number.*for no clipping$"),
    ],
)
def test_a_bound_that_bounds_nothing_is_refused(bound: float, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(os, "fork", fork)
    trainer = Trainer(
        strategy=MegaParStrategy(), accelerator="cpu", devices=2, gradient_clip_val=bound, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        trainer.fit(Fused(), [])


@pytest.mark.parametrize("bound", [None, 0, 0.0, 1, math.inf])
def test_bounds_that_are_none_or_positive_are_taken(bound: float | None) -> None:
    refuse_clipping(bound)
