"""The recipe's parts under ``MegaParStrategy``: same numbers on every layout, one file, one voice."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from pathlib import Path

import pytest

STEPS, SAVED = 8, 5


def train(root: str, texts: str, options: dict[str, int], accumulate: int = 1, resume: str | None = None) -> str:
    """Train a small GPT in ``root`` on this rank; returns what it printed."""
    from lightning.pytorch import Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_megapar.callbacks import GradNorm, MetricsCSV, RunLine, SampleText
    from lightning_megapar.data import TextDataModule
    from lightning_megapar.models.gpt import GPTConfig
    from lightning_megapar.models.language_model import LanguageModel
    from lightning_megapar.strategy import MegaParStrategy

    seed_everything(1, verbose=False)
    config = GPTConfig.gpt2(vocab_size=257, num_layers=2, num_heads=2, hidden_size=32, max_sequence_length=32)
    data = TextDataModule(
        texts, sequence_length=32, global_batch_size=16, cache_dir=f"{texts}/.cache", validation_limit=32
    )
    checkpoint = ModelCheckpoint(f"{root}/checkpoints", filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = Trainer(
        strategy=MegaParStrategy(**options),
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_steps=STEPS,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        val_check_interval=4 * accumulate,
        check_val_every_n_epoch=None,
        default_root_dir=root,
        logger=False,
        enable_model_summary=False,
        callbacks=[GradNorm(), MetricsCSV(), RunLine(4), SampleText(length=16), checkpoint],
    )
    spoken = io.StringIO()
    with contextlib.redirect_stdout(spoken):
        trainer.fit(LanguageModel(config, {"lr": 3e-3}), datamodule=data, ckpt_path=resume)
    return spoken.getvalue()


def read(root: Path) -> list[dict[str, str]]:
    with open(root / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def assert_equal(table: list[dict[str, str]], reference: list[dict[str, str]]) -> None:
    assert len(table) == len(reference) == STEPS
    for row, expected in zip(table, reference):
        for name in ("step", "epoch", "lr", "consumed_samples"):
            assert row[name] == expected[name], (name, row)
        for name in ("train_loss", "grad_norm", "val_loss"):
            assert bool(row[name]) == bool(expected[name]), (name, row)
            if row[name]:
                assert float(row[name]) == pytest.approx(float(expected[name]), rel=2e-5), (name, row)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (folder / f"{number}.txt").write_text("".join(f"{number} times {k} is {number * k}\n" for k in range(60)))
    return folder


@pytest.fixture(scope="module")
def reference(pool, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("single")
    pool.run(train, 1, str(root), str(texts), {}, mode="trainer")
    return root


LAYOUTS = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_file_on_every_layout_and_rank_0_speaks(
    pool, texts: Path, reference: Path, tmp_path: Path, layout: str
) -> None:
    first, second = pool.run(train, 2, str(tmp_path), str(texts), LAYOUTS[layout], mode="trainer")
    assert_equal(read(tmp_path), read(reference))
    lines = [line for line in first.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["4/8", "8/8"]
    assert "--- sample" in first and "unigram entropy" in first
    assert second == ""


def test_interrupted_run_goes_on_in_its_file_on_another_layout(
    pool, texts: Path, reference: Path, tmp_path: Path
) -> None:
    checkpoint = str(reference / "checkpoints" / f"step={SAVED}.ckpt")
    (tmp_path / "metrics.csv").write_text((reference / "metrics.csv").read_text())
    pool.run(train, 2, str(tmp_path), str(texts), LAYOUTS["dp2"], resume=checkpoint, mode="trainer")
    table = read(tmp_path)
    assert_equal(table, read(reference))
    assert [row["seconds"] for row in table[:SAVED]] == [row["seconds"] for row in read(reference)[:SAVED]]
    assert table[SAVED]["seconds"] != read(reference)[SAVED]["seconds"]


def test_accumulated_batches_see_the_same_samples(pool, texts: Path, reference: Path, tmp_path: Path) -> None:
    pool.run(train, 2, str(tmp_path), str(texts), LAYOUTS["dp2"], 2, mode="trainer")
    assert_equal(read(tmp_path), read(reference))
