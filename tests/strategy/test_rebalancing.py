"""A slow rank is found and relieved while a run goes on, and the loss curve stays plain Lightning's.

The times are made up (a rank's blocks, its slowness, noise), so that nothing here depends on how busy a machine is;
``recipes/benchmarks/rebalance.py`` measures.
"""

from __future__ import annotations

import random
from typing import Any

import hostile
import pytest
import torch
from hostile import Net
from lightning.pytorch import Callback
from pool import RankPool
from test_moving import Stack
from torch import nn
from torch.utils.data import DataLoader

WORDS = 11


class Clock:
    """Stands for a stopwatch: every block takes 1, its backward 2, times the rank's slowness from a step on.

    With ``sized`` these are the seconds of a batch, of which a microbatch takes its part.

    Args:
        strategy: of the run.
        slow: (pipeline rank, data rank) -> slowness.
        since: the batch with which it begins.
        noise: standard deviation of the logarithm of each median.
    """

    def __init__(
        self, strategy: Any, slow: dict[tuple[int, int], float], since: int, noise: float, sized: bool
    ) -> None:
        self.sized = sized
        self.strategy, self.slow, self.since, self.noise = strategy, slow, since, noise
        self.real = strategy._rebalancer._watch
        self.random = random.Random(strategy.global_rank)
        self.batch = -1

    def start(self) -> None:
        self.batch += 1
        self.real.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def _taken(self) -> dict[int, float]:
        place = self.strategy.mesh.coordinate("pipeline"), self.strategy.mesh.coordinate("data")
        factor = self.slow.get(place, 1.0) if self.batch >= self.since else 1.0
        factor /= self.strategy.stepper.num_microbatches if self.sized else 1
        cut = self.strategy.prepared.cut
        held = cut.local_blocks() if cut is not None else {0: []}
        return {index: factor * self.random.lognormvariate(0, self.noise) for index in held}

    def actions(self, num_chunks: int) -> dict[str, tuple[float, ...]]:
        self.now = self._taken()
        cut = self.strategy.prepared.cut
        sums = []
        for chunk in range(num_chunks):
            mine = range(cut.chunks[chunk].start, cut.chunks[chunk].stop) if cut is not None else [0]
            sums.append(sum(self.now[index] for index in mine))
        zeros = (0.0,) * num_chunks
        return {"forward": tuple(sums), "backward_input": tuple(2 * s for s in sums), "backward_weight": zeros}

    def blocks(self) -> dict[int, float]:
        return self.now if self.strategy.prepared.cut is not None else {}


class Slowed(Callback):
    def __init__(self, slow: dict[tuple[int, int], float], since: int, noise: float = 0.0, sized: bool = False) -> None:
        self.sized = sized
        self.slow, self.since, self.noise = slow, since, noise
        self.strategy: Any = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.strategy = trainer.strategy
        self.strategy._rebalancer._watch = Clock(self.strategy, self.slow, self.since, self.noise, self.sized)


class Long(Stack):
    """Sixteen blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks, *[type(self.blocks[0])(False) for _ in range(8)])  # type: ignore[arg-type,index]


def sentences(layout: str, batches: int = 24) -> DataLoader[Any]:
    """Of one global batch each data rank loads its rows; every fifth is short."""
    generator = torch.Generator().manual_seed(4)
    size = hostile.data_size(layout)
    rows = [torch.randint(0, WORDS, (4 if i % 5 == 4 else 16, 6), generator=generator) for i in range(batches)]
    if size == 1:
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]
    samples = [row for batch in rows for row in batch]
    return DataLoader(samples, batch_size=16 // size)  # type: ignore[arg-type]


def fit(layout: str, module: Any, slow: Any, since: int, noise: float = 0.0, **options: Any) -> dict[str, Any]:
    train = options.pop("train", None) or sentences(layout)
    if layout == hostile.PLAIN:
        return hostile.fit(layout, module, train=train, max_epochs=1)
    slowed = Slowed(slow, since, noise, options.pop("sized", False))
    options = {"rebalance": True, "num_microbatches": 4, **options}
    result = hostile.fit(layout, module, train=train, callbacks=[slowed], max_epochs=1, options=options)
    strategy = slowed.strategy
    events = [(event.step, event.kind, event.text) for event in strategy.balance_events]
    return {**result, "_events": events, "_ranges": strategy._rebalancer.ranges, "_shares": strategy._rebalancer.shares}


def shown(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if key[0] != "_"} for one in results]


def test_layers_leave_a_slow_stage(pool: RankPool) -> None:
    results = pool.run(fit, 2, "pp2", Long, {(1, 0): 2.0}, 3, mode="trainer")
    events = results[0]["_events"]
    kinds = [kind for _, kind, _ in events]
    assert kinds == ["slow", "layers", "measured"], events
    assert results[1]["_events"] == events  # on every rank
    assert 3 < events[0][0] <= 3 + 5 and events[1][0] <= 3 + 7, events
    assert "stage 1 takes 2.00 times as long" in events[0][2]
    # Sixteen blocks at speeds 1 and 1/2: eleven take 11, five take 10.
    assert [one["_ranges"] for one in results] == [((0, 11), (11, 16))] * 2
    hostile.agree(shown(results), fit(hostile.PLAIN, Long, {}, 0))


def test_microbatches_leave_a_slow_replica(pool: RankPool) -> None:
    options = {"rebalance": "replicas", "num_microbatches": 4, "train": hostile.loader("dp2", 96, shuffle=False)}
    results = pool.run(fit, 2, "dp2", Net, {(0, 1): 2.0}, 3, mode="trainer", **options)
    events = results[0]["_events"]
    assert [kind for _, kind, _ in events][:2] == ["slow", "replicas"], events
    assert events[0][0] <= 3 + 5 and "replica 1 takes 2.00 times" in events[0][2]
    assert [one["_shares"] for one in results] == [(5, 3)] * 2
    expected = fit(hostile.PLAIN, Net, {}, 0, train=hostile.loader(hostile.PLAIN, 96, shuffle=False))
    hostile.agree(shown(results), expected)


@pytest.mark.parametrize(("sized", "numbers"), [(True, [8, 16]), (False, [8, 4])])
def test_the_number_of_microbatches_is_tried_and_settled(pool: RankPool, sized: bool, numbers: list[int]) -> None:
    """Where an action takes as long for one sample as for many, more of them are given up again."""
    options = {"rebalance": "microbatches", "train": sentences("pp2", 16), "sized": sized}
    results = pool.run(fit, 2, "pp2", Long, {}, 0, mode="trainer", **options)
    texts = [text for _, kind, text in results[0]["_events"] if kind == "microbatches"]
    assert texts == [f"batches are cut into {number} microbatches" for number in numbers]
    hostile.agree(shown(results), fit(hostile.PLAIN, Long, {}, 0, train=sentences("pp2", 16)))


@pytest.mark.slow
def test_noise_alone_moves_nothing(pool: RankPool) -> None:
    train = [torch.randint(0, WORDS, (8, 4)) for _ in range(100)]
    loader: Any = DataLoader(train, batch_size=None)  # type: ignore[arg-type]
    results = pool.run(fit, 2, "pp2", Long, {}, 0, 0.05, mode="trainer", train=loader)
    assert results[0]["_events"] == []


class Counted(Net):
    """Tells how many tokens count, which differ widely between samples, and looks at its outputs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        wanted = batch[1] < 3
        each = nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")
        loss = (each * wanted).sum() / wanted.sum().clamp(min=1)
        self.log("train_loss", loss)
        return {"loss": loss, "num_valid_tokens": wanted.sum(), "seen": batch[1]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert torch.equal(outputs["seen"].cpu(), batch[1].cpu()), (outputs["seen"], batch[1])
        assert int(outputs["num_valid_tokens"]) == int((batch[1] < 3).sum())


@pytest.mark.parametrize("layout", ["dp2_zero1", "dp2_pp2"])
def test_shared_microbatches_count_for_what_they_are(pool: RankPool, layout: str) -> None:
    """Losses by tokens, outputs with their own samples, a last batch that is short."""
    ranks = hostile.LAYOUTS[layout][0]
    options = {"rebalance": "replicas", "train": hostile.loader(layout, 84)}
    results = pool.run(fit, ranks, layout, Counted, {(0, 1): 3.0}, 2, mode="trainer", **options)
    assert [one["_shares"] for one in results] == [(6, 2)] * ranks, results[0]["_events"]
    expected = fit(hostile.PLAIN, Counted, {}, 0, train=hostile.loader(hostile.PLAIN, 84))
    hostile.agree(shown(results), expected)


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.4)) for _ in range(4)])


def still(layout: str, module: Any) -> dict[str, Any]:
    """The same run, with even shares."""
    options = {"num_microbatches": 4}
    return hostile.fit(layout, module, train=hostile.loader(layout, 64), max_epochs=1, options=options)


def test_a_sample_draws_its_own_mask_wherever_it_runs(pool: RankPool) -> None:
    options = {"rebalance": "replicas", "train": hostile.loader("dp2", 64)}
    shared = pool.run(fit, 2, "dp2", Dropping, {(0, 1): 3.0}, 1, mode="trainer", **options)
    assert [one["_shares"] for one in shared] == [(6, 2)] * 2
    hostile.agree(shown(shared), pool.run(still, 2, "dp2", Dropping, mode="trainer")[0])
