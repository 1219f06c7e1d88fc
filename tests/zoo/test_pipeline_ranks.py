"""Models of other kinds trained by ``Trainer(strategy=MegaParStrategy(pipeline_parallel_size=2))`` on ranks."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from pool import RankError, RankPool
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from zoo.on_ranks import QUIET, REFUSAL, Gradients, outcomes, train
from zoo.trial import largest_difference, perturbed

pytest.importorskip("transformers")


class Stepping(LightningModule):
    """Somebody's module around any model; the step ignores the batch's numbers."""

    def __init__(self, model: Any, step: Any) -> None:
        super().__init__()
        self.model, self.step = model, [step]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.step[0](self.model)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_models(world: int, options: dict[str, Any]) -> dict[str, float]:
    """One step of each model of :mod:`zoo.models`; rank 0 returns the largest error of gradients and of the state."""
    from zoo.models import MODELS

    from lightning_megapar import MegaParStrategy

    warnings.filterwarnings("ignore")
    found = {}
    for make, step in MODELS:
        torch.manual_seed(0)
        model = perturbed(make())
        alone = copy.deepcopy(model)
        loss = step(alone)
        loss.backward()
        expected = {name: p.grad.clone() for name, p in alone.named_parameters() if p.grad is not None}
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
        gradients = Gradients()
        trainer = Trainer(
            strategy=MegaParStrategy(**options, timeout_seconds=20),
            accelerator="cpu",
            devices=world,
            max_steps=1,
            precision="64-true",
            callbacks=[gradients],
            **QUIET,
        )
        trainer.fit(Stepping(model, step), DataLoader(TensorDataset(torch.zeros(2, 1)), batch_size=2))
        state = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
        if trainer.global_rank == 0:
            actual = {key.removeprefix("model."): value for key, value in gradients.found.items()}
            assert set(actual) == set(expected)
            after = {key.removeprefix("model."): value.double() for key, value in state.items()}
            assert set(after) == set(alone.state_dict())
            found[make.__name__] = max(
                largest_difference(expected, actual),
                largest_difference({key: value.double() for key, value in alone.state_dict().items()}, after),
                abs(float(trainer.callback_metrics["train_loss"]) - float(loss.detach())),
            )
    return found


def test_models_of_other_kinds_on_ranks(pool: RankPool) -> None:
    """One microbatch: batch statistics are of the whole batch then."""
    options = {"pipeline_parallel_size": 2, "num_microbatches": 1}
    found = pool.run(train_models, 2, 2, options, mode="trainer")[0]
    assert len(found) == 11 and max(found.values()) < 1e-9, found


def test_a_refusal_reaches_every_rank(pool: RankPool) -> None:
    with pytest.raises(RankError) as raised:
        pool.run(train, 2, ["reformer"], 32, "pp2", mode="trainer")
    reasons = [REFUSAL.search(text) for text in str(raised.value).split("--- rank 1 ---")]
    assert len(reasons) == 2 and all(reason and "autograd function" in reason[1] for reason in reasons)


def test_a_refusal_under_tensor_ranks_is_told_as_one(pool: RankPool) -> None:
    outcome = outcomes(pool, ["reformer"], 32, "tp2_pp2", 60.0)["reformer"]
    assert outcome.kind == "refused" and "autograd function" in outcome.reason
