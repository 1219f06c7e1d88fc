from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from toy import Toy, loader, trainer

from lightning_megapar.callbacks import GradNorm, MetricsCSV
from lightning_megapar.config import ConfigError


def rows(path: Path) -> list[dict[str, str]]:
    with open(path / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


class Watch(Callback):
    """What Lightning itself reports, and what stands in the file at that moment."""

    def __init__(self, root: Path) -> None:
        self.root, self.norms, self.validations = root, [], {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if "grad_norm" in trainer.callback_metrics:
            self.norms.append(trainer.callback_metrics["grad_norm"].item())
        text = (self.root / "metrics.csv").read_text()
        assert text.endswith("\n")
        assert len(text.splitlines()) == 1 + trainer.global_step

    def on_validation_end(self, trainer, pl_module) -> None:
        self.validations[trainer.global_step] = trainer.callback_metrics["val_loss"].item()


def test_one_row_per_step_at_full_precision(tmp_path: Path) -> None:
    module, watch = Toy(), Watch(tmp_path)
    fit = trainer(tmp_path, [GradNorm(), MetricsCSV(), watch], val_check_interval=3, check_val_every_n_epoch=None)
    fit.fit(module, loader(), loader(8))
    table = rows(tmp_path)
    assert list(table[0])[:5] == ["step", "train_loss", "val_loss", "grad_norm", "tokens_per_second"]
    assert [int(r["step"]) for r in table] == list(range(1, 11))
    assert [float(r["train_loss"]) for r in table] == module.seen  # bit for bit
    assert [float(r["grad_norm"]) for r in table] == watch.norms
    assert {int(r["step"]): float(r["val_loss"]) for r in table if r["val_loss"]} == watch.validations
    assert sorted(watch.validations) == [3, 6, 9]
    assert [int(r["consumed_samples"]) for r in table] == [4 * k for k in range(1, 11)]
    assert all(float(r["tokens_per_second"]) > 0 and float(r["lr"]) == 0.5 for r in table)
    assert all(float(r["data_wait_seconds"]) >= 0 and int(r["peak_memory_bytes"]) > 1e7 for r in table)


def test_interval_keeps_steps_with_a_validation(tmp_path: Path) -> None:
    fit = trainer(tmp_path, [MetricsCSV(every_n_steps=4)], val_check_interval=3, check_val_every_n_epoch=None)
    fit.fit(Toy(), loader(), loader(8))
    assert [int(r["step"]) for r in rows(tmp_path)] == [3, 4, 6, 8, 9]
    assert [bool(r["val_loss"]) for r in rows(tmp_path)] == [True, False, True, False, True]
    with pytest.raises(ConfigError, match="every_n_steps=0"):
        MetricsCSV(every_n_steps=0)


def test_sanity_check_writes_nothing(tmp_path: Path) -> None:
    trainer(tmp_path, [MetricsCSV()], num_sanity_val_steps=2, max_steps=2).fit(Toy(), loader(), loader(8))
    assert [int(r["step"]) for r in rows(tmp_path)] == [1, 2]


def test_validation_within_an_accumulation_window_stands_in_the_last_step(tmp_path: Path) -> None:
    fit = trainer(
        tmp_path, [MetricsCSV()], accumulate_grad_batches=2, val_check_interval=3, check_val_every_n_epoch=None,
        max_steps=4,
    )  # fmt: skip
    fit.fit(Toy(), loader(count=80), loader(8))
    assert [(int(r["step"]), bool(r["val_loss"])) for r in rows(tmp_path)] == [
        (1, True), (2, False), (3, True), (4, False),
    ]  # fmt: skip


class Crash(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("crash")


def test_resumed_file_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    def run(root: Path, extra: list[Callback], ckpt: Path | None = None) -> None:
        root.mkdir(exist_ok=True)
        keep = ModelCheckpoint(dirpath=root / "c", filename="{step}", every_n_train_steps=5, save_top_k=-1)
        fit = trainer(
            root, [GradNorm(), MetricsCSV(), keep, *extra], enable_checkpointing=True, max_steps=14,
            check_val_every_n_epoch=1,
        )  # fmt: skip
        fit.fit(Toy(), loader(), loader(8), ckpt_path=ckpt)

    run(tmp_path / "whole", [])
    with pytest.raises(RuntimeError, match="crash"):
        run(tmp_path / "broken", [Crash(8)])
    assert len(rows(tmp_path / "broken")) == 8
    with open(tmp_path / "broken" / "metrics.csv", "a") as file:
        file.write("9,1.2345,")  # torn by a power cut
    run(tmp_path / "broken", [], tmp_path / "broken" / "c" / "step=5.ckpt")
    whole, resumed = rows(tmp_path / "whole"), rows(tmp_path / "broken")
    for name in ("step", "train_loss", "val_loss", "grad_norm", "lr", "consumed_samples", "epoch"):
        assert [r[name] for r in resumed] == [r[name] for r in whole], name
    assert (tmp_path / "broken" / "metrics.csv").read_text().count("step") == 1
    seconds = [float(r["seconds"]) for r in resumed]
    assert seconds == sorted(seconds)


def test_a_new_run_from_a_checkpoint_goes_on_counting(tmp_path: Path) -> None:
    def run(root: Path, steps: int, ckpt: Path | None = None, **options) -> list[dict[str, str]]:
        keep = ModelCheckpoint(dirpath=root / "c", filename="{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks = [MetricsCSV(root, **options), MetricsCSV(root / "second"), keep]
        trainer(root, callbacks, enable_checkpointing=True, max_steps=steps).fit(Toy(), loader(), ckpt_path=ckpt)
        return rows(root)

    first = run(tmp_path / "a", 3)
    second = run(tmp_path / "b", 6, tmp_path / "a" / "c" / "step=2.ckpt", every_n_steps=3)
    assert [(row["step"], row["consumed_samples"]) for row in second] == [("3", "12"), ("6", "24")]
    assert float(second[0]["seconds"]) > float(first[1]["seconds"])
    # The last row before it is of step 3: the checkpoint knows what there was at step 4.
    resumed = run(tmp_path / "b", 7, tmp_path / "b" / "c" / "step=4.ckpt", every_n_steps=7)
    assert [(row["step"], row["consumed_samples"]) for row in resumed] == [("3", "12"), ("7", "28")]


def test_a_checkpoint_that_does_not_know_leaves_cells_empty(tmp_path: Path) -> None:
    keep = ModelCheckpoint(dirpath=tmp_path / "c", filename="{step}", every_n_train_steps=2)
    trainer(tmp_path, [keep], enable_checkpointing=True, max_steps=2).fit(Toy(), loader())
    trainer(tmp_path, [MetricsCSV()], max_steps=3).fit(Toy(), loader(), ckpt_path=tmp_path / "c" / "step=2.ckpt")
    assert [(row["step"], row["consumed_samples"], row["seconds"]) for row in rows(tmp_path)] == [("3", "", "")]


def test_fresh_run_moves_an_older_file_aside(tmp_path: Path) -> None:
    for number in range(3):
        trainer(tmp_path, [MetricsCSV()], max_steps=2 + number).fit(Toy(), loader())
    lengths = {p.name: len(p.read_text().splitlines()) - 1 for p in tmp_path.glob("metrics*.csv")}
    assert lengths == {"metrics_1.csv": 2, "metrics_2.csv": 3, "metrics.csv": 4}


def test_columns_of_an_older_file_stay(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("note,step,train_loss\nhello,1,2.5\n,2,2.25\n")
    metrics = MetricsCSV(tmp_path)
    fit = trainer(tmp_path, [metrics])
    fit.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 1
    assert fit.global_step == 1
    metrics.on_train_start(fit, Toy())
    metrics._close()
    table = rows(tmp_path)
    assert len(table) == 1
    assert (table[0]["note"], table[0]["train_loss"], table[0]["grad_norm"]) == ("hello", "2.5", "")


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match=r"metrics\.csv is no metrics file of ours"):
        trainer(tmp_path, [MetricsCSV()]).fit(Toy(), loader())
    assert (tmp_path / "metrics.csv").read_text() == "a,b\n1,2\n"


def train_two_ranks(root: str) -> tuple[bool, list[dict[str, str]], int]:
    rank, level = os.environ["RANK"], dist.get_debug_level()
    folder = Path(root) / f"rank{rank}"
    metrics = MetricsCSV(folder)
    fit = trainer(Path(root), [GradNorm(), metrics], strategy="ddp", devices=2, max_steps=4)
    try:
        # torch 2.13's DistributedDataParallel crashes in its constructor at the pool's level DETAIL.
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
        dist.set_debug_level(dist.DebugLevel.OFF)
        fit.fit(Toy(), loader(80))
    finally:
        dist.set_debug_level(level)
    assert metrics.meter is not None
    wrote = (folder / "metrics.csv").exists()
    return wrote, rows(folder) if wrote else [], metrics.meter.record(fit).samples


def test_rank_0_writes_and_counts_all_data_ranks(tmp_path: Path, pool) -> None:
    (wrote0, table, _), (wrote1, _, samples) = pool.run(train_two_ranks, 2, str(tmp_path), mode="trainer")
    assert wrote0 and not wrote1
    assert [int(r["consumed_samples"]) for r in table] == [8, 16, 24, 32]
    assert samples == 32
    assert all(r["grad_norm"] for r in table)
