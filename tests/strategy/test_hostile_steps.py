"""Steps that write into their batch, draw from every generator, switch gradients and walk over parameters."""

from __future__ import annotations

import copy
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import pytest
import torch
from hostile import Net, WideBlock
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from pool import RankError, RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class WritesIntoItsBatch(Net):
    """Scales the input in place, shifts a mask that all samples share, and takes a key out of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["x"].mul_(0.5)
        batch["shared"].add_(1.0)
        loss = nn.functional.cross_entropy(self(batch["x"] * batch["shared"]), batch.pop("y"))
        self.log("train_loss", loss)
        return loss


def with_a_shared_mask(rows: list[Any]) -> dict[str, Any]:
    return {"shared": torch.ones(()), "x": torch.stack([r[0] for r in rows]), "y": torch.stack([r[1] for r in rows])}


def written(layout: str, stored: bool) -> dict[str, Any]:
    train: Any = hostile.loader(layout, collate_fn=with_a_shared_mask)
    if stored:
        train = DataLoader(list(train), batch_size=None)  # type: ignore[arg-type]
    return hostile.fit(layout, WritesIntoItsBatch, train=train, max_epochs=1)


@pytest.mark.parametrize(("layout", "stored"), [("pp2", False), ("tp2_pp2", True), ("tp2", True)])
def test_a_step_that_writes_into_its_batch(pool: RankPool, layout: str, stored: bool) -> None:
    """The dry pass, the chooser's trials and other microbatches get batches of their own."""
    expected = written(hostile.PLAIN, stored)
    world = hostile.LAYOUTS[layout][0]
    hostile.agree(pool.run(written, world, layout, stored, mode="trainer"), expected)


class Draws(Net):
    """Adds noise from every generator there is: before, in and after the blocks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] + 0.1 * torch.randn_like(batch[0]) + random.random() + float(np.random.rand())
        hidden = self.inp(x)
        for block in self.blocks:  # type: ignore[attr-defined]
            hidden = block(hidden) + 0.1 * random.random()
        loss = nn.functional.cross_entropy(self.head(hidden) + float(np.random.rand()) * hidden[:, :5], batch[1])
        self.log("train_loss", loss)
        return loss


def drawn(layout: str, **options: Any) -> dict[str, Any]:
    """With the generators' state after the fit."""
    random.seed(1)
    np.random.seed(1)
    found = hostile.fit(layout, Draws, options=options, max_epochs=1)
    return {**found, "next": [random.random(), float(np.random.rand()), float(torch.rand(()))]}


def test_all_generators_draw_alike_whatever_the_layout(pool: RankPool) -> None:
    whole = pool.run(drawn, 2, "tp2", mode="trainer", sharding_plan="off", num_microbatches=4)
    for layout, options in {"tp2": {}, "pp2": {}, "pp4": {}}.items():
        world = hostile.LAYOUTS[layout][0]
        hostile.agree(pool.run(drawn, world, layout, mode="trainer", num_microbatches=4, **options), whole[0])


@dataclass
class Statistics:
    """Somebody's own object."""

    steps: int = 0
    seen: list[Any] = field(default_factory=list)


class Remembers(Net):
    """Counts in containers within containers, in an object of its own and in their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = Statistics(seen=[{"sum": torch.zeros(8).double()}])
        self.counts: dict[str, Any] = {"by_kind": {"train": 0}, "history": []}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.statistics.steps += 1
        self.statistics.seen[0]["sum"] += batch[0].sum(0)
        self.counts["by_kind"]["train"] += 1
        self.counts["history"].append(self.statistics.steps)
        scale = 1.0 + self.counts["by_kind"]["train"] + float(self.statistics.seen[0]["sum"].mean())
        loss = self.loss(batch) * scale
        self.log("train_loss", loss)
        return loss


def test_what_a_step_remembers_is_not_touched_by_the_dry_pass(pool: RankPool) -> None:
    expected = hostile.fit(hostile.PLAIN, Remembers)
    options = {"num_microbatches": 1}
    hostile.agree(pool.run(hostile.fit, 2, "pp2", Remembers, options=options, mode="trainer"), expected)


class FreezesInItsStep(Net):
    """Trains the input layer in every second step, and says so in the step itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.inp.requires_grad_(batch_idx % 2 == 1)
        return super().training_step(batch, batch_idx)


class TakesItBack(Net):
    """Switches a frozen layer on for the length of the step: no gradient comes of it, since the backward is later."""

    def __init__(self) -> None:
        super().__init__()
        self.inp.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.inp.requires_grad_(True)
        loss = super().training_step(batch, batch_idx)
        self.inp.requires_grad_(False)
        return loss


@pytest.mark.parametrize(
    ("layout", "module"),
    [("dp2", FreezesInItsStep), ("pp2", FreezesInItsStep), ("dp2", TakesItBack)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_requires_grad_switched_in_the_step(pool: RankPool, layout: str, module: type[Net]) -> None:
    expected = hostile.fit(hostile.PLAIN, module)
    hostile.agree(pool.run(hostile.fit, 2, layout, module, mode="trainer"), expected)


class ClampsAndCounts(Net):
    """Clamps all weights in the step, as Wasserstein critics do, and asks the parameters what they are."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.2, 0.2)
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in self.parameters())
        first = next(self.parameters())
        assert (first.dtype, first.device.type) == (torch.float64, "cpu")
        count = sum(p.numel() for p in self.parameters())
        loss = self.loss(batch) * count / 1000
        self.log("train_loss", loss)
        return loss


class Decays(Net):
    """Adds a penalty on all weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + 0.01 * sum(p.pow(2).sum() for p in self.parameters())


@pytest.mark.parametrize("layout", ["pp2", "pp4"])
def test_a_step_that_walks_over_all_parameters(pool: RankPool, layout: str) -> None:
    expected = hostile.fit(hostile.PLAIN, ClampsAndCounts)
    options = {"num_microbatches": 1}
    world = hostile.LAYOUTS[layout][0]
    hostile.agree(pool.run(hostile.fit, world, layout, ClampsAndCounts, options=options, mode="trainer"), expected)


def test_a_penalty_on_weights_of_other_stages_is_refused(pool: RankPool) -> None:
    """The other stages' weights are not there: to leave them out would change the numbers without a word."""
    with pytest.raises(
        RankError, match=r"a parameter or buffer of '.*' is used on a pipeline stage that does not hold"
    ):
        pool.run(hostile.fit, 2, "pp2", Decays, mode="trainer", timeout=60)


class PartsInEvaluationMode(Net):
    """Dropout in every block, which is switched off for good."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)).eval() for _ in range(4)])


@pytest.mark.parametrize("layout", ["pp2", "pp2_zbv"])
def test_a_part_in_evaluation_mode_stays_in_it(pool: RankPool, layout: str) -> None:
    expected = hostile.fit(hostile.PLAIN, PartsInEvaluationMode, validate=True)
    hostile.agree(pool.run(hostile.fit, 2, layout, PartsInEvaluationMode, validate=True, mode="trainer"), expected)


class ClipsByTorch(Net):
    """Clips with torch's own function, in Lightning's hook; logs the norm that it returns."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.log("norm", norm)


class ClipsEachByTorch(Net):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in self.parameters():
            nn.utils.clip_grad_norm_(parameter, 0.1)


class ClipsByHand(Net):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        nn.utils.clip_grad_norm_(self.parameters(), 0.1, norm_type=3)
        optimizer.step()


def clipped(layout: str, module: type[Net]) -> dict[str, Any]:
    return hostile.fit(layout, module, gradient_clip_val=None, max_epochs=1)


@pytest.mark.parametrize(
    ("layout", "module"),
    [
        *[(layout, ClipsByTorch) for layout in ("tp2", "pp2", "tp2_pp2", "dp2_pp2_zero1")],
        *[("tp2", module) for module in (ClipsEachByTorch, ClipsByHand)],
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_clipping_by_torch_s_function(pool: RankPool, layout: str, module: type[Net]) -> None:
    """The norm that counts is that of the whole model."""
    expected = clipped(hostile.PLAIN, module)
    hostile.agree(pool.run(clipped, hostile.LAYOUTS[layout][0], layout, module, mode="trainer"), expected)


def test_clipping_single_parameters_of_a_pipeline_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"clip_grad_norm_ got 1 gradients, 1 of the .* that this rank holds"):
        pool.run(clipped, 2, "pp2", ClipsEachByTorch, mode="trainer", timeout=60)


class UnlikeByHand(ClipsByHand):
    """Tensor ranks compute different losses."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        rank = torch.distributed.get_rank()
        self.manual_backward(self.loss(batch) * (1 + rank))


def test_unlike_losses_in_manual_optimization_are_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match="the 2 tensor ranks computed different losses"):
        pool.run(hostile.fit, 2, "tp2", UnlikeByHand, options={"sharding_plan": "off"}, mode="trainer", timeout=60)


class Teacher(Net):
    """A copy that follows by a moving average in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(self.inp, *[WideBlock() for _ in range(4)], self.head)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        del self.inp, self.blocks, self.head

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.student(batch[0])
        return nn.functional.cross_entropy(out, batch[1]) + (out - self.teacher(batch[0])).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for followed, follower in zip(self.student.parameters(), self.teacher.parameters()):
                follower.lerp_(followed, 0.1)


def test_a_teacher_is_cut_as_its_student(pool: RankPool) -> None:
    expected = hostile.fit(hostile.PLAIN, Teacher)
    hostile.agree(pool.run(hostile.fit, 2, "tp2", Teacher, mode="trainer"), expected)


class LooksAtItsTrainer(Net):
    """Its rate, its trainer's counts, a logger's own face; and it sets something there."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        self.trainer.looked_at = True  # type: ignore[attr-defined]
        self.logger.experiment.log_metrics({"epochs": float(self.trainer.max_epochs or 0)}, self.global_step)  # type: ignore[union-attr]
        return loss + 0.0 * self.trainer.world_size


def fit_and_see(layout: str, root: str) -> dict[str, Any]:
    seen = Cut()
    logger = CSVLogger(root, version=f"{layout}-{os.environ.get('RANK', 0)}")
    result = hostile.fit(layout, LooksAtItsTrainer, callbacks=[seen], logger=logger, log_every_n_steps=1)
    return {**result, "cut": seen.cut}


class Cut(Callback):
    cut = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.cut = bool(getattr(getattr(trainer.strategy, "prepared", None), "is_cut", True))
        assert not hasattr(trainer, "looked_at"), "of the trial"


def test_a_step_that_looks_at_its_trainer_is_cut(pool: RankPool, tmp_path: Path) -> None:
    expected = fit_and_see(hostile.PLAIN, str(tmp_path))
    hostile.agree(pool.run(fit_and_see, 2, "tp2", str(tmp_path), mode="trainer"), expected)
    rows = next(tmp_path.rglob("tp2-0/metrics.csv")).read_text().splitlines()
    assert len([row for row in rows[1:] if row.startswith("2.0") or ",2.0" in row]) == 8, (
        "one for each step, none of a trial"
    )


def test_batches_are_copied_whole_or_leaf_by_leaf() -> None:
    from lightning_megapar.batches import copied

    class Stubborn:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError

    batch: dict[str, Any] = {"x": torch.zeros(2), "made": torch.zeros(2, requires_grad=True) * 1, "it": Stubborn()}
    for whole in (batch, {"x": torch.zeros(2)}, TensorDataset(torch.zeros(2))):
        other = copied(whole)
        source = whole.tensors[0] if isinstance(whole, TensorDataset) else whole["x"]
        target = other.tensors[0] if isinstance(whole, TensorDataset) else other["x"]
        target += 1
        assert source.tolist() == [0.0, 0.0]
