"""torchmetrics objects and reductions: each sample counts once, whatever the layout."""

from __future__ import annotations

from typing import Any

import everyday
import pytest
import torch
from everyday import Net
from pool import RankPool
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

LAYOUTS = ("dp2", "tp2", "pp2", "dp2_pp2", "dp2_tp2")


class Metrics(Net):
    """Logged as objects, as values at the epoch's end, updated by hand, with list states; in all four loops."""

    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy = MulticlassAccuracy(5, average="micro")
        both = {"accuracy": MulticlassAccuracy(5, average="macro"), "auroc": MulticlassAUROC(5, thresholds=None)}
        self.val = MetricCollection(both, prefix="val_")  # type: ignore[arg-type]
        self.test = MulticlassAccuracy(5, average="micro")
        self.confusion = MulticlassConfusionMatrix(5)
        self.mean_loss = MeanMetric()
        self.matrices: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        self.train_accuracy(out, batch[1])
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        return nn.functional.cross_entropy(out, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.val.update(out.softmax(-1), batch[1])
        self.confusion.update(out, batch[1])
        self.mean_loss.update(nn.functional.cross_entropy(out, batch[1]), len(out))
        self.log_dict(self.val)
        self.log("val_mean_loss", self.mean_loss)

    def on_validation_epoch_end(self) -> None:
        matrix = self.confusion.compute()
        self.matrices.append(matrix.clone())
        self.confusion.reset()
        self.log("on_diagonal", matrix.diag().sum().float())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.test(self(batch[0]), batch[1])
        self.log("test_accuracy", self.test)


def metrics(layout: str) -> dict[str, Any]:
    watch, memory = everyday.Watch(), everyday.Memory()
    # Samples divide evenly: a padded validation set would count a sample twice on the data ranks.
    trainer = everyday.make_trainer(layout, [watch], logger=memory, log_every_n_steps=1, inference_mode=False)
    torch.manual_seed(0)
    module = Metrics().double()
    data = everyday.loader(layout, 16, 4)
    before = trainer.validate(module, data, verbose=False)
    trainer.fit(module, everyday.loader(layout), data)
    tested = trainer.test(module, data, verbose=False)
    return {
        "before": before,
        "tested": tested,
        "matrices": module.matrices,
        "batches": watch.batches,
        "validations": watch.validations,
        "of_rank_0": {"logged": memory.rows, "weights": watch.weights},
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metric_objects(pool: RankPool, layout: str) -> None:
    expected = everyday.compare(pool, metrics, layout, tolerance=1e-6)  # their states are float32
    assert int(expected["matrices"][0].sum()) == 16  # every sample once
    assert {"val_accuracy", "val_auroc", "val_mean_loss", "on_diagonal"} <= set(expected["before"][0])


class Sums(Net):
    """``reduce_fx="sum"`` and its kin, with and without ``sync_dist``, inside steps and at epoch ends."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows, loss = float(len(batch[0])), self.loss(batch)
        self.log("samples", rows, sync_dist=True, reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("samples_here", rows, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log(
            "label_sum", batch[1].sum().double(), sync_dist=True, reduce_fx=torch.sum, on_step=False, on_epoch=True
        )
        self.log("largest", batch[0].max(), sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
        self.log("smallest", batch[0].min(), sync_dist=True, reduce_fx="min", on_step=False, on_epoch=True)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("weighed", loss, sync_dist=True, batch_size=len(batch[0]) * 3, on_step=False, on_epoch=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.seen = torch.zeros((), dtype=torch.float64)

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += len(batch[0])  # runs once per data rank's batch, on every stage and tensor rank

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_samples", float(len(batch[0])), sync_dist=True, reduce_fx="sum")
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_seen", self.seen, sync_dist=True, reduce_fx="sum")
        self.log("val_seen_here", self.seen, sync_dist=True, reduce_fx="max")


def sums(layout: str) -> dict[str, Any]:
    data = everyday.loader(layout, 16, 4)
    result = everyday.fit(layout, Sums, validate=data, loggers=1, log_every_n_steps=1, num_sanity_val_steps=0)
    for epoch in (*result["batches"], *(row for _, row in result["validations"])):
        seen = epoch.pop("val_seen_here", None)  # the one value here that is a data rank's own
        assert seen in (None, 16.0 / everyday.data_size(layout))
    for _, row in result["of_rank_0"]["logged"][0]:
        row.pop("val_seen_here", None)
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_count_each_sample_once(pool: RankPool, layout: str) -> None:
    expected = everyday.compare(pool, sums, layout)
    last = expected["validations"][-1][1]
    assert last["val_samples"] == 16.0 and last["val_seen"] == 16.0
    rows: dict[str, float] = {}
    for _, row in expected["of_rank_0"]["logged"][0]:
        rows |= row
    assert rows["samples_epoch"] == rows["samples_here"] == 32.0 and rows["samples_step"] == 8.0


class Manual(Sums):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("samples", float(len(batch[0])), sync_dist=True, reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return {"loss": torch.zeros(())}


def manual_sums(layout: str) -> dict[str, Any]:
    return everyday.fit(layout, Manual, loggers=1, log_every_n_steps=1)


@pytest.mark.parametrize("layout", ["tp2", "dp2_tp2"])
def test_sums_under_manual_optimization(pool: RankPool, layout: str) -> None:
    expected = everyday.compare(pool, manual_sums, layout)
    assert expected["batches"][-1]["samples_step"] == 8.0


class Collecting(Net):
    """Collects in a list and looks at it at the epoch's end, as people used to since Lightning 2."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] = []
        self.counts: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.collected.append(loss.detach())
        self.log("val_loss", loss)

    def on_validation_epoch_end(self) -> None:
        self.counts.append(len(self.collected))
        self.collected.clear()


def collect(layout: str) -> list[int]:
    trainer = everyday.make_trainer(layout, max_epochs=1, num_sanity_val_steps=0)
    module = Collecting().double()
    trainer.fit(module, everyday.loader(layout), everyday.loader(layout, 12, 4))
    return module.counts


def test_lists_of_the_last_stage(pool: RankPool) -> None:
    """What a step does after the stack happens on the last stage only, once per microbatch: the documented limit."""
    assert collect(everyday.PLAIN) == [3]
    assert pool.run(collect, 2, "tp2", mode="trainer") == [[3], [3]]
    assert pool.run(collect, 2, "pp2", mode="trainer") == [[0], [12]]  # 3 batches x 4 microbatches
