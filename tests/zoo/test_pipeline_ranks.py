"""Architectures of transformers trained by ``Trainer(strategy=MegaParStrategy(pipeline_parallel_size=2))`` on ranks."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from pool import RankError, RankPool
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from zoo.architectures import CannotRunAlone, architectures, loss_of, reference, tokens
from zoo.trial import largest_difference, perturbed

pytest.importorskip("transformers")

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
ROWS = 4
ON_RANKS = ("gpt2", "xlm", "gemma3n_text", "mixtral", "openai-gpt", "cpmant")
REFUSED = ("dory", "hrm_text", "reformer")


class Wrapped(LightningModule):
    """Somebody's module around a language model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = loss_of(self.model, batch[0])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


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


class Gradients(Callback):
    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        from lightning_megapar.checkpoint import gather_full_state_dict

        prepared: Any = trainer.strategy.prepared  # type: ignore[attr-defined]
        held_here = [r for r in prepared.parameters if r.parameter.grad is not None]
        local = {r.name: r.as_value(r.parameter.grad) for r in held_here}
        held: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(held, set(local))
        names = [name for name in prepared.names.parameters if name in set().union(*held)]
        self.found = gather_full_state_dict(names, local)


def train(names: Sequence[str], hidden: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    """Each architecture in turn on this rank; rank 0 returns ``(verdict, largest error or reason)`` by name."""
    from lightning_megapar import ConfigError, MegaParStrategy
    from lightning_megapar.pipeline.cut import StageError

    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    ids = tokens(ROWS)
    results: dict[str, Any] = {}
    for name in names:
        try:
            expected = reference(architectures()[name], hidden=hidden, ids=ids)
        except CannotRunAlone as error:
            results[name] = ("alone", str(error))
            continue
        double = expected.dtype is torch.float64
        gradients = Gradients()
        trainer = Trainer(
            strategy=MegaParStrategy(**options, timeout_seconds=20),
            accelerator="cpu",
            devices=world,
            max_steps=1,
            precision="64-true" if double else "32-true",
            callbacks=[gradients],
            **QUIET,  # type: ignore[arg-type]
        )
        try:
            trainer.fit(Wrapped(expected.model), DataLoader(TensorDataset(ids), batch_size=ROWS))
        except (ConfigError, StageError) as error:
            results[name] = ("refused", str(error))
            continue
        if trainer.global_rank == 0:
            actual = {key.removeprefix("model."): value for key, value in gradients.found.items()}
            error = max(
                abs(float(trainer.callback_metrics["train_loss"]) - expected.loss) / abs(expected.loss),
                largest_difference(expected.gradients, actual),
            )
            same = set(actual) == set(expected.gradients)
            # Parts of some models compute in float32 whatever their parameters are, and round otherwise on less rows.
            good = same and error <= 1e-5
            results[name] = ("exact" if good else "wrong", error)
    return results


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
            **QUIET,  # type: ignore[arg-type]
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


def test_kinds_on_ranks(pool: RankPool) -> None:
    options = {"pipeline_parallel_size": 2, "num_microbatches": 2}
    found = pool.run(train, 2, ON_RANKS, 32, 2, options, mode="trainer")[0]
    assert {name: verdict for name, (verdict, _) in found.items()} == dict.fromkeys(ON_RANKS, "exact"), found


def on_ranks(pool: RankPool, names: Sequence[str], hidden: int) -> dict[str, Any]:
    """Many in one set of ranks; one by one where that breaks."""
    options = {"pipeline_parallel_size": 2, "num_microbatches": 2}
    try:
        return pool.run(train, 2, names, hidden, 2, options, mode="trainer", timeout=900)[0]
    except RankError as error:
        if len(names) == 1:
            return {names[0]: ("crash", str(error)[-1500:])}
        return {name: result for one in names for name, result in on_ranks(pool, [one], hidden).items()}


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [32, 64])
def test_every_class_on_ranks(pool: RankPool, hidden: int, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    names = [name for name in architectures() if name not in REFUSED]
    for start in range(0, len(names), 20):
        found |= on_ranks(pool, names[start : start + 20], hidden)
    lines = [f"| {name} | {verdict} | {detail} |" for name, (verdict, detail) in found.items()]
    (tmp_path / "ranks.md").write_text(
        "\n".join(["| model type | result | error or reason |", "|---|---|---|", *lines])
    )
    assert not {name: result for name, result in found.items() if result[0] not in ("exact", "alone")}
    assert sum(verdict == "exact" for verdict, _ in found.values()) >= 170


def test_a_refusal_reaches_every_rank(pool: RankPool) -> None:
    results = pool.run(train, 2, ["reformer"], 32, 2, {"pipeline_parallel_size": 2}, mode="trainer")
    for found in results:
        assert found["reformer"][0] == "refused" and "autograd function" in found["reformer"][1]
