"""Metrics, logs and outputs as people write them, seen by every rank as by plain Lightning."""

from __future__ import annotations

from typing import Any

import hostile
import pytest
import torch
from hostile import Net
from lightning.pytorch import Callback
from pool import RankError, RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score


def accuracy() -> MulticlassAccuracy:
    return MulticlassAccuracy(5, average="micro")


class BestSoFar(Net):
    """The pattern of the popular Lightning and Hydra template."""

    def __init__(self) -> None:
        super().__init__()
        self.train_loss, self.val_acc, self.val_acc_best = MeanMetric(), accuracy(), MaxMetric()

    def on_train_start(self) -> None:
        self.val_acc.reset()
        self.val_acc_best.reset()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.train_loss(loss, weight=len(batch[0]))
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_acc(self(batch[0]), batch[1])
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True)


class Collections(Net):
    """A collection logged as a whole, another one computed by hand, a metric inside a metric, a plain sum."""

    def __init__(self) -> None:
        super().__init__()
        both = MetricCollection({"acc": accuracy(), "f1": MulticlassF1Score(5, average="macro")})
        self.train_metrics, self.val_metrics = both.clone(prefix="train_"), both.clone(prefix="val_")
        self.range, self.samples = MinMaxMetric(accuracy()), SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        self.train_metrics(out, batch[1])
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(out, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.val_metrics.update(out, batch[1])
        self.range.update(out, batch[1])
        self.samples.update(len(out))

    def on_validation_epoch_end(self) -> None:
        self.log_dict({**self.val_metrics.compute(), **self.range.compute(), "samples": self.samples.compute()})
        for metric in (self.val_metrics, self.range, self.samples):
            metric.reset()


class Everything(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("integer", torch.tensor(3))
        self.log("number", 4)
        self.log("flag", True)
        self.log_dict({"a": loss * 2, "b": 1.5}, on_step=True, on_epoch=True)
        if batch_idx % 2 == 0:
            self.log("every_second", loss, on_step=True, on_epoch=True)
        self.log("samples", float(len(batch[0])), reduce_fx=torch.sum, on_step=False, on_epoch=True)
        self.log("largest", batch[0].max(), reduce_fx=max, on_step=False, on_epoch=True)
        self.log("twice", loss, on_step=True, on_epoch=True)
        self.log("twice", loss * 2, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("from_a_hook", float(batch_idx))

    def on_train_epoch_end(self) -> None:
        self.log("epoch", torch.tensor(float(self.current_epoch)), sync_dist=True)
        self.log("epoch_integer", torch.tensor(self.current_epoch), sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("val", loss)
        self.log(f"own_name_{dataloader_idx}", loss, add_dataloader_idx=False)


class Outputs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        return {"loss": nn.functional.cross_entropy(out, batch[1]), "out": out, "note": "x"}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Reader(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in outputs.items()})

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs.clone())


class BeforeTheStack(Net):
    since = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.inp(batch[0])
        if batch_idx >= self.since:
            self.log("before", hidden.mean())
        return nn.functional.cross_entropy(self.head(self.blocks(hidden)), batch[1])


class BeforeTheStackLater(BeforeTheStack):
    since = 2


class PerRank(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log(f"rank{self.global_rank}", loss)
        return loss


def fit(layout: str, module: type[Net], validate: bool = True, **kwargs: Any) -> dict[str, Any]:
    loaders: Any = hostile.loader(layout, 12)
    if module is Everything:
        loaders = [loaders, hostile.loader(layout, 20)]
    return hostile.fit(layout, module, validate=loaders if validate else None, **kwargs)


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "dp2_pp2", "pp2_zbv"])
@pytest.mark.parametrize("module", [BestSoFar, Collections, Everything], ids=lambda m: m.__name__)
def test_every_rank_sees_what_plain_lightning_logs(pool: RankPool, module: type[Net], layout: str) -> None:
    expected = fit(hostile.PLAIN, module)
    # torchmetrics keeps its states in float32.
    hostile.agree(pool.run(fit, hostile.LAYOUTS[layout][0], layout, module, mode="trainer"), expected, 1e-6)


def outputs(layout: str) -> dict[str, Any]:
    reader = Reader()
    hostile.fit(layout, Outputs, validate=True, callbacks=[reader], max_epochs=1)
    return {"seen": reader.seen}


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_callbacks_get_the_steps_outputs_on_every_rank(pool: RankPool, layout: str) -> None:
    expected = outputs(hostile.PLAIN)
    assert {"loss", "out", "note"} in [set(x) for x in expected["seen"] if isinstance(x, dict)]
    assert any(isinstance(x, Tensor) for x in expected["seen"])
    hostile.agree(pool.run(outputs, 2, layout, mode="trainer"), expected)


def warned(layout: str) -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hostile.fit(layout, BeforeTheStackLater, max_epochs=1)
    return [str(w.message) for w in caught if "not-a-number" in str(w.message)]


def test_values_from_before_the_stack_are_logged(pool: RankPool) -> None:
    expected = hostile.fit(hostile.PLAIN, BeforeTheStack)
    assert "before" in expected["batches"][0]
    hostile.agree(pool.run(hostile.fit, 2, "pp2", BeforeTheStack, mode="trainer"), expected)


def test_a_log_that_the_last_stage_cannot_know_is_said(pool: RankPool) -> None:
    first, last = pool.run(warned, 2, "pp2", mode="trainer")
    assert first == [] and last
    assert "['before']" in last[0] and "computed on an earlier pipeline stage" in last[0]


def test_names_that_differ_between_data_ranks(pool: RankPool) -> None:
    with pytest.raises(RankError, match="data ranks logged different names in one step"):
        pool.run(fit, 2, "dp2", PerRank, False, mode="trainer", timeout=60)


class LogsANorm(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("norm", self.head.weight.norm())


def test_a_norm_of_sharded_weights_is_the_whole_one(pool: RankPool) -> None:
    expected = fit(hostile.PLAIN, LogsANorm)
    assert "norm" in expected["epochs"][0]
    hostile.agree(pool.run(fit, 2, "dp2_zero1", LogsANorm, mode="trainer"), expected)


class Waits(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.strategy.barrier()
        return self.loss(batch)


def test_waiting_for_all_ranks_in_a_pipelined_step_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"strategy.barrier\(\) was called in a step of a pipeline"):
        pool.run(fit, 2, "pp2", Waits, False, mode="trainer", timeout=60)


def predict(layout: str) -> list[Any]:
    torch.manual_seed(0)
    trainer = hostile.trainer_for(layout)
    loaders = [hostile.loader(layout, 12), DataLoader(hostile.data(5), batch_size=5)]
    return trainer.predict(Predictor().double(), loaders)  # type: ignore[return-value]


class Predictor(Net):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"logits": self(batch[0]), "labels": batch[1], "loader": dataloader_idx}


def test_predictions_of_several_loaders(pool: RankPool) -> None:
    expected = predict(hostile.PLAIN)
    for rank in pool.run(predict, 2, "pp2", mode="trainer"):
        assert hostile.differences(rank, expected) == []
