"""``MemoryReport`` on ranks: every rank's bytes as predicted, and weights bit for bit those without it."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import Decoder
from lightning.pytorch import LightningModule, Trainer
from pool import RankPool
from torch.utils.data import DataLoader

from lightning_megapar import MegaParStrategy
from lightning_megapar.callbacks import MemoryReport
from lightning_megapar.data_parallel.parameters import local_tensor
from lightning_megapar.memory.report import RankMemory
from lightning_megapar.memory.timeline import ACTIVATIONS, GRADIENTS, MESSAGES, OPTIMIZER, PARAMETERS

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
STEPS = 4


class Model(Decoder):
    num_layers = 4


class Weights(MemoryReport):
    """Sees this rank's weights at the end."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self.weights = [local_tensor(one).detach().clone() for one in pl_module.parameters()]  # type: ignore[union-attr]


class Unmeasured(Weights):
    def on_train_batch_start(self, *_: Any) -> None:
        self._stage = "done"


def train(root: str, layout: dict[str, Any], accumulate: int) -> tuple[list[RankMemory], bool, str]:
    """The reports that this rank has, whether weights are as without one, and what it printed."""
    found = []
    rows = torch.randint(0, 64, (16 * STEPS, 33), generator=torch.Generator().manual_seed(1))
    spoken = io.StringIO()
    for kind in (Unmeasured, Weights):
        report = kind()
        trainer = Trainer(
            strategy=MegaParStrategy(seed=3, timeout_seconds=30, **layout),
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            max_steps=STEPS,
            accumulate_grad_batches=accumulate,
            callbacks=[report],
            default_root_dir=root,
            **QUIET,
        )
        with contextlib.redirect_stdout(spoken):
            trainer.fit(Model(), DataLoader(rows, batch_size=8))
        found.append(report)
    alike = all(torch.equal(one, other) for one, other in zip(found[0].weights, found[1].weights))
    return found[1].ranks, alike, spoken.getvalue()


LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "tp2": ({"tensor_parallel_size": 2}, 1),
    "pp2": ({"pipeline_parallel_size": 2, "num_microbatches": 4}, 1),
    "pp2 zbv": ({"pipeline_parallel_size": 2, "num_microbatches": 4, "pipeline_schedule": "zbv"}, 1),
    "dp2": ({"data_parallel_size": 2}, 2),
    "dp2 zero1": ({"data_parallel_size": 2, "zero_stage": 1}, 1),
    "dp2 zero2": ({"data_parallel_size": 2, "zero_stage": 2}, 2),
    "dp2 zero3": ({"data_parallel_size": 2, "zero_stage": 3, "recompute": "full"}, 1),
}


SLOW = ("pp2 zbv", "dp2", "dp2 zero2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LAYOUTS])
def test_every_rank_as_predicted(pool: RankPool, tmp_path: Path, name: str) -> None:
    layout, accumulate = LAYOUTS[name]
    (ranks, alike, spoken), (others, alike_there, silent) = pool.run(
        train, 2, str(tmp_path), layout, accumulate, mode="trainer"
    )
    assert alike and alike_there
    assert others == [] and [one.rank for one in ranks] == [0, 1]
    assert "memory of training step 2" in spoken and "memory of training" not in silent
    assert (tmp_path / "memory.json").exists() and (tmp_path / "memory.svg").read_text().count("rank ") >= 2
    for one in ranks:
        for use in (PARAMETERS, OPTIMIZER, GRADIENTS):
            assert one.measured[use] == pytest.approx(one.predicted[use], rel=0.02), (use, one.rank)
        # Where weight gradients wait, what is predicted for them has gradients of outputs in it, which are temporary.
        room = 0.35 if "zb" in name else 0.1
        assert one.measured[ACTIVATIONS] == pytest.approx(one.predicted[ACTIVATIONS], rel=room, abs=2**16), one.rank
        assert one.measured_peak == pytest.approx(one.predicted_peak, rel=0.12), one.rank
        assert (one.measured[MESSAGES] > 0) == (name != "tp2")
    if "pp2" in name:
        assert [one.stage for one in ranks] == [0, 1] and ranks[0].place == "pipeline 0"
        assert sum(ranks[0].microbatches) >= sum(ranks[1].microbatches)
