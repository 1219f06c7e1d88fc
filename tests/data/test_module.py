from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_megapar.config import ConfigError, Layout
from lightning_megapar.data import TextDataModule


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"This is text number {number}.\n" * 40)
    return folder


def module(source: Path, trainer: object = None, **options: object) -> TextDataModule:
    settings = {"sequence_length": 32, "global_batch_size": 24, "cache_dir": source.parent / "cache", **options}
    data = TextDataModule(source=source, **settings)  # type: ignore[arg-type]
    data.prepare_data()
    data.trainer = trainer  # type: ignore[assignment]
    data.setup()
    return data


def attached(data: int | None = None, world: int = 1, accumulate: int = 1, **more: object) -> SimpleNamespace:
    """The part of a Trainer that a data module looks at."""
    strategy = SimpleNamespace(broadcast=lambda value: value, root_device=torch.device("cpu"), **more)
    if data is not None:
        strategy.layout = Layout(data=data, tensor=world // data)
    return SimpleNamespace(strategy=strategy, world_size=world, accumulate_grad_batches=accumulate, global_rank=0)


@pytest.mark.parametrize(
    ("trainer", "batch"),
    [
        (None, 24),
        (attached(), 24),
        (attached(world=4), 6),  # plain DDP
        (attached(data=2, world=4), 12),
        (attached(data=1, world=4, accumulate=2), 12),
        (attached(data=2, world=2, accumulate=3), 4),
        (attached(data=2, world=2, num_microbatches=4), 12),
    ],
)
def test_batch_per_data_rank_keeps_the_global_batch(source: Path, trainer: object, batch: int) -> None:
    data = module(source, trainer)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        first = next(iter(loader))
        assert first["tokens"].shape == first["labels"].shape == (batch, 32)
        assert first["tokens"].dtype == torch.int64
        assert torch.equal(first["tokens"][:, 1:], first["labels"][:, :-1])
    plan = data.batch_plan
    assert plan.batch_per_rank * plan.data_size * plan.accumulate == 24


def test_loaders_order(source: Path) -> None:
    first, second = module(source), module(source)
    a = torch.cat([b["tokens"] for b in first.train_dataloader()])
    torch.manual_seed(99)  # the global generator plays no part
    b = torch.cat([b["tokens"] for b in second.train_dataloader()])
    assert torch.equal(a, b)
    other = torch.cat([b["tokens"] for b in module(source, seed=5).train_dataloader()])
    assert not torch.equal(a, other)
    dataset = first.corpus.dataset("train", 32)
    assert not torch.equal(a[0], dataset[0]["tokens"])
    assert len(a) == len(dataset) // 24 * 24
    validation = first.val_dataloader()
    assert torch.equal(next(iter(validation))["tokens"][0], first.corpus.dataset("validation", 32)[0]["tokens"])


def test_validation_is_a_multiple_of_the_global_batch_or_whole(source: Path) -> None:
    count = len(module(source).corpus.dataset("validation", 32))
    assert count > 24 and count % 24

    def taken(**options: object) -> int:
        return len(module(source, **options).val_dataloader().dataset)  # type: ignore[arg-type]

    assert taken() == count // 24 * 24
    assert taken(validation_limit=10) == 10
    assert taken(validation_limit=30) == 24


def test_workers_give_the_same_batches(source: Path) -> None:
    plain = [b["tokens"] for b in module(source).train_dataloader()]
    workers = [b["tokens"] for b in module(source, num_workers=2).train_dataloader()]
    assert len(plain) == len(workers) > 3
    assert all(torch.equal(a, b) for a, b in zip(plain, workers))


def test_impossible_batches_are_refused(source: Path) -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size=24 .* valid global batch sizes: 20, 25"):
        module(source, attached(data=5, world=5)).train_dataloader()
    with pytest.raises(ConfigError, match="num_microbatches"):
        module(source, attached(data=1, num_microbatches=7)).train_dataloader()
    with pytest.raises(ConfigError, match=r"global_batch_size=100000.*expected at most \d+"):
        module(source, global_batch_size=100_000).train_dataloader()


@pytest.mark.parametrize(
    "options", [{"sequence_length": 0}, {"num_workers": -1}, {"validation_limit": 0}, {"global_batch_size": 0}]
)
def test_settings_are_checked_at_construction(options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        TextDataModule(**options)


def test_unreadable_source_is_refused_when_prepared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing-here"):
        TextDataModule(source=tmp_path / "nothing-here").prepare_data()


def test_statistics_are_exposed(source: Path) -> None:
    data = module(source)
    assert data.vocab_size == 257
    assert 2.0 < data.entropy < 3.5
    assert data.entropy == data.statistics.unigram_entropy
    assert f"{data.statistics.train_tokens:,} tokens" in data.describe()


def test_ranks_with_other_text_are_refused(source: Path) -> None:
    trainer = attached(world=2)
    trainer.strategy.broadcast = lambda value: "0" * 64
    with pytest.raises(ConfigError, match="reads other text than rank 0"):
        module(source, trainer)


def test_checkpoint_of_other_data_warns(source: Path) -> None:
    data = module(source)
    state = data.state_dict()
    data.load_state_dict(dict(state))
    with pytest.warns(UserWarning, match="sequence_length 64 -> 32"):
        data.load_state_dict({**state, "sequence_length": 64})
