"""Loaders and batches of every kind: the same data on the ranks that must share it, never a wait for a batch."""

from __future__ import annotations

import os
import random
from collections import UserDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hostile
import numpy as np
import pytest
import torch
from hostile import Net
from pool import RankError, RankPool
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from lightning_megapar.batches import batch_size_of, split_batch
from lightning_megapar.config import ConfigError


@dataclass
class Record:
    x: Tensor
    y: Tensor
    names: list[str]


Named = namedtuple("Named", "x y names")


class Encoding(UserDict):  # type: ignore[type-arg]
    """What a tokenizer returns: a mapping that is no dict."""


X, Y = torch.arange(24.0).view(8, 3), torch.arange(8)
NAMES = [str(i) for i in range(8)]
BATCHES: dict[str, Any] = {
    "dataclass": Record(X, Y, NAMES),
    "namedtuple": Named(X, Y, tuple(NAMES)),
    "mapping": Encoding(x=X, y=Y, names=NAMES),
    "nested": {"in": {"x": X, "scale": torch.tensor(2.0), "mask": torch.ones(3, 3)}, "out": (Y, tuple(NAMES))},
    "list": [X, Y, NAMES],
}


def parts(batch: Any) -> tuple[Tensor, Tensor, Any]:
    if isinstance(batch, (Record, Named)):
        return batch.x, batch.y, batch.names
    if isinstance(batch, Encoding):
        return batch["x"], batch["y"], batch["names"]
    if isinstance(batch, dict):
        assert batch["in"]["mask"].shape == (3, 3) and batch["in"]["scale"].ndim == 0
        return batch["in"]["x"], *batch["out"]
    return tuple(batch)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", list(BATCHES))
def test_containers_are_cut(kind: str) -> None:
    pieces = split_batch(BATCHES[kind], 3)
    assert [samples for _, samples in pieces] == [2, 3, 3]
    assert all(type(piece) is type(BATCHES[kind]) for piece, _ in pieces)
    assert torch.equal(torch.cat([parts(piece)[0] for piece, _ in pieces]), X)
    assert torch.equal(torch.cat([parts(piece)[1] for piece, _ in pieces]), Y)
    assert [name for piece, _ in pieces for name in parts(piece)[2]] == NAMES
    assert batch_size_of(BATCHES[kind]) == 8
    assert torch.equal(parts(BATCHES[kind])[0], X)  # the batch itself is left alone


def test_tensors_per_sample_are_cut_by_samples() -> None:
    images = [torch.full((3, 2, 2), float(i)) for i in range(8)]
    targets = [{"boxes": torch.zeros(i, 4)} for i in range(8)]
    pieces = split_batch((images, targets), 4, nominal=8)
    assert [len(piece[0]) for piece, _ in pieces] == [len(piece[1]) for piece, _ in pieces] == [2, 2, 2, 2]
    assert float(pieces[3][0][0][1][0, 0, 0]) == 7.0


class Graph:
    def to(self, device: Any) -> Graph:
        return self


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([torch.zeros(16, 8, 4), torch.zeros(8)], "has 16 there and the loader's batch_size is 8"),
        ([torch.zeros(5, 8, 4), torch.zeros(8)], "has 5 there and the loader's batch_size is 8"),
        ([X, pack_sequence([torch.zeros(3), torch.zeros(2)])], "PackedSequence in the batch cannot be cut"),
        ([X, Graph()], "holds a Graph, which cannot be cut"),
        ({"text": ["a", "b"]}, "holds no tensor to cut"),
    ],
)
def test_batches_that_cannot_be_cut(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_batch(batch, 4, nominal=8)


def test_a_ragged_batch_is_no_surprise() -> None:
    assert [n for _, n in split_batch([X[:5], Y[:5]], 4, nominal=8)] == [1, 1, 1, 2]
    # One sample of a loader that gives two, as two tensors: no list of two samples.
    ((piece, samples),) = split_batch([X[:1], Y[:1]], 2, nominal=2)
    assert samples == 1 and torch.equal(piece[0], X[:1]) and torch.equal(piece[1], Y[:1])


def as_record(rows: list[Any]) -> Record:
    return Record(torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows]), [str(int(r[1])) for r in rows])


class Records(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert [int(name) for name in batch.names] == batch.y.tolist()
        loss = nn.functional.cross_entropy(self(batch.x), batch.y)
        self.log("train_loss", loss)
        return loss


class Detection(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        x = torch.stack([image.flatten() for image in images])
        return nn.functional.cross_entropy(self(x), torch.stack([t["label"] for t in targets]))


def as_detection(rows: list[Any]) -> Any:
    return [r[0].view(2, 4) for r in rows], [{"label": r[1]} for r in rows]


def fit(layout: str, kind: str) -> dict[str, Any]:
    module: type[Net] = Net
    generator = torch.Generator().manual_seed(1)
    if kind == "records":
        module, train = Records, hostile.loader(layout, collate_fn=as_record)
    elif kind == "detection":
        module, train = Detection, hostile.loader(layout, collate_fn=as_detection)
    elif kind == "weighted":
        train = hostile.loader(
            layout, sampler=WeightedRandomSampler(torch.arange(32).double(), 32, generator=generator)
        )
    elif kind == "ragged":
        train = hostile.loader(layout, 30)
    else:
        train = hostile.loader(layout, 2)
    return hostile.fit(layout, module, train=train, validate=True)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("pp2", "records"),
        ("dp2", "records"),
        ("pp2", "detection"),
        ("dp2", "weighted"),
        ("pp2", "weighted"),
        ("dp2_pp2", "ragged"),
        ("dp2", "tiny"),
        ("pp2", "tiny"),
    ],
)
def test_like_plain_lightning(pool: RankPool, layout: str, kind: str) -> None:
    expected = fit(hostile.PLAIN, kind)
    hostile.agree(pool.run(fit, hostile.LAYOUTS[layout][0], layout, kind, mode="trainer"), expected)


class Noisy(Dataset[Any]):
    """Augments in the main process, with every generator there is."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(8) + float(np.random.randn()) + random.gauss(0, 1)
        return noise, torch.tensor(index % 5)


class Remembers(Net):
    """Draws in its step as well, differently on every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 5))  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        np.random.rand(), random.random()
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.sums.append(float(batch[0].sum()))


def augmented(layout: str) -> list[float]:
    module = Remembers().double()
    trainer = hostile.trainer_for(layout, max_epochs=1)
    rank = int(os.environ["RANK"])  # an unseeded script: every rank starts elsewhere
    torch.manual_seed(rank), np.random.seed(rank), random.seed(rank)
    trainer.fit(module, hostile.loader(layout, dataset=Noisy(), collate_fn=doubles))
    return module.sums


def doubles(rows: list[Any]) -> Any:
    return torch.stack([r[0] for r in rows]).double(), torch.stack([r[1] for r in rows])


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_ranks_that_share_samples_share_augmentations(pool: RankPool, layout: str) -> None:
    first, second = pool.run(augmented, 2, layout, mode="trainer")
    assert first == second and len(set(first)) == 4


def test_data_ranks_augment_differently(pool: RankPool) -> None:
    first, second = pool.run(augmented, 2, "dp2", mode="trainer")
    assert not set(first) & set(second)


class Shards(IterableDataset[Any]):
    """Splits itself; the first data rank has one batch more."""

    def __init__(self, rank: int, size: int, extra: int) -> None:
        self.rank, self.size, self.extra = rank, size, extra

    def __iter__(self) -> Iterator[Any]:
        rows = hostile.data(32)
        for index in range(16 + (self.extra if self.rank == 0 else 0)):
            yield rows[(index * self.size + self.rank) % 32]


def iterate(layout: str, by_global_rank: bool, where: str) -> dict[str, Any]:
    trainer = hostile.trainer_for(layout, max_epochs=1, num_sanity_val_steps=0)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not by_global_rank:
        kwargs = trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
        rank, size = kwargs["rank"], kwargs["num_replicas"]
    shards = DataLoader(Shards(rank, size, 4), batch_size=4)
    even = hostile.loader(layout)
    torch.manual_seed(0)
    trainer.fit(Net().double(), *((shards, even) if where == "train" else (even, shards)))
    return {"steps": trainer.global_step, "logged": {k: float(v) for k, v in trainer.callback_metrics.items()}}


@pytest.mark.parametrize("where", ["train", "validate"])
def test_uneven_iterable_datasets_end_together(pool: RankPool, where: str) -> None:
    results = pool.run(iterate, 2, "dp2", False, where, mode="trainer", timeout=60)
    assert results[0]["steps"] == results[1]["steps"] == 4
    assert "val_loss" in results[0]["logged"] and results[0]["logged"] == results[1]["logged"]


def unlike(layout: str) -> None:
    rank = int(os.environ["RANK"])
    hostile.fit(layout, train=hostile.loader(layout, 32 - 8 * rank))


def one_sample(layout: str) -> None:
    hostile.fit(layout, train=hostile.loader(layout, 1))


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_dataset_split_by_global_rank_is_refused(pool: RankPool, layout: str) -> None:
    with pytest.raises(RankError, match=r"got another batch than rank 0.*distributed_sampler_kwargs"):
        pool.run(iterate, 2, layout, True, "train", mode="trainer", timeout=60)


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_datasets_of_unlike_length_are_refused(pool: RankPool, layout: str) -> None:
    with pytest.raises(RankError, match=r"datasets differ in length .rank 0: 32 samples .* rank 1: 24 samples"):
        pool.run(unlike, 2, layout, mode="trainer", timeout=60)


def test_too_few_samples_for_the_data_ranks(pool: RankPool) -> None:
    with pytest.raises(RankError, match="training dataset has 1 samples: too few for one batch on each of the 2"):
        pool.run(one_sample, 2, "dp2", mode="trainer", timeout=60)
