from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import SimpleProfiler
from toy import Toy, fake_clock, loader, trainer

from lightning_megapar.callbacks.meter import Meter, MeteredCallback, StepRecord, sample_count, token_count, total_steps


class Reader(MeteredCallback):
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step_ended(self, trainer, pl_module, meter: Meter) -> None:
        self.records.append(meter.record(trainer))


def test_rates_count_training_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes = fake_clock(monkeypatch)
    # a batch is 4 samples of 8 tokens: fetching takes 4 x 0.5 s, a training step 6 s
    module = Toy(on_train=takes(6.0), on_val=takes(1000.0))
    checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2)
    reader = Reader()
    fit = trainer(
        tmp_path, [reader, checkpoint], enable_checkpointing=True, val_check_interval=3, check_val_every_n_epoch=None
    )
    save = fit.strategy.save_checkpoint
    monkeypatch.setattr(fit.strategy, "save_checkpoint", lambda *a, **k: (takes(500.0)(), save(*a, **k)))
    fit.fit(module, loader(on_fetch=takes(0.5)), loader(4))
    assert [r.step for r in reader.records] == list(range(1, 11))
    for record in reader.records:
        assert record.tokens_per_second == pytest.approx(32 / 8.0)
        assert record.data_wait_seconds == pytest.approx(2.0)
        assert record.data_wait_share == pytest.approx(0.25)
        assert record.samples == 4 * record.step
    # wall time and what is left of it hold everything: 10 steps, 3 validations (the last after step 9), 4 saves before
    # the last step's end
    last, total = reader.records[-1], 10 * 8 + 3 * 1000 + 4 * 500
    assert last.seconds == pytest.approx(total)
    assert last.eta_seconds == 0
    assert reader.records[0].eta_seconds == pytest.approx(9 * 8.0)
    assert last.total_steps == 10


def test_rates_are_of_the_last_window_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes = fake_clock(monkeypatch)
    reader = Reader()
    reader.meter = Meter(window=2)
    pace = iter([64.0] * 4 + [8.0] * 6)
    module = Toy(on_train=lambda: takes(next(pace))())
    trainer(tmp_path, [reader]).fit(module, loader())
    rates = [r.tokens_per_second for r in reader.records]
    assert rates[3:6] == pytest.approx([32 / 64, 64 / 72, 32 / 8])


def test_accumulated_batches_are_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes = fake_clock(monkeypatch)
    module, reader = Toy(on_train=takes(1.0)), Reader()
    # 5 batches an epoch: windows of 2, 2 and a ragged 1
    trainer(tmp_path, [reader], accumulate_grad_batches=2, max_steps=6).fit(module, loader())
    seen = module.seen
    windows = [seen[0:2], seen[2:4], seen[4:5], seen[5:7], seen[7:9], seen[9:10]]
    assert [r.train_loss for r in reader.records] == pytest.approx([sum(w) / len(w) for w in windows], rel=1e-12)
    assert [r.samples for r in reader.records] == [8, 16, 20, 28, 36, 40]
    assert all(r.tokens_per_second == pytest.approx(32.0) for r in reader.records)
    assert [r.epoch for r in reader.records] == [0, 0, 0, 1, 1, 1]


def test_loss_that_is_not_logged_is_what_the_step_returned(tmp_path: Path) -> None:
    class Silent(Toy):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.seen.append(loss.item())
            return {"loss": loss}

    module, reader = Silent(), Reader()
    trainer(tmp_path, [reader], accumulate_grad_batches=2, max_steps=2).fit(module, loader())
    assert reader.records[1].train_loss == pytest.approx(sum(module.seen[2:4]) / 2, rel=1e-6)


def test_callbacks_share_one_meter_and_the_profiler_comes_back(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    first, second = Reader(), Reader()
    fit = trainer(tmp_path, [first, second], profiler=profiler, max_steps=3)
    fit.fit(Toy(), loader())
    assert first.meter is second.meter is not None
    assert first.records == second.records and len(first.records) == 3
    assert fit.profiler is profiler
    assert len(profiler.recorded_durations["[_TrainingEpochLoop].train_dataloader_next"]) == 3
    fit.fit_loop.max_epochs, fit.fit_loop.epoch_loop.max_steps = 9, 5
    fit.fit(Toy(), loader())  # goes on, in the same callbacks
    assert [r.step for r in first.records] == [1, 2, 3, 4, 5]
    assert first.records[3].samples == 4


def test_learning_rate_is_the_one_the_step_used(tmp_path: Path) -> None:
    class Scheduled(Toy):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    reader = Reader()
    trainer(tmp_path, [reader], max_steps=3).fit(Scheduled(), loader())
    assert [r.lr for r in reader.records] == [1.0, 0.5, 0.25]


def test_total_steps(tmp_path: Path) -> None:
    reader = Reader()
    fit = trainer(tmp_path, [reader], max_steps=-1, max_epochs=2, accumulate_grad_batches=2)
    fit.fit(Toy(), loader())
    assert total_steps(fit) == len(reader.records) == 6


def test_counts() -> None:
    tokens, mask = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5)
    assert token_count({"mask": mask, "tokens": tokens}) == 15
    assert token_count((mask, [tokens])) == 15
    assert token_count(mask) == 0  # an image has no tokens
    assert sample_count({"mask": mask}) == 3
    assert sample_count(None) == 0
