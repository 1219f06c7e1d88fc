"""A growing batch: every sample once, each window's gradient that of one batch, resumable anywhere."""

from __future__ import annotations

import math
import pickle
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from pool import RankError, RankPool
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from usage import everyday

from lightning_megapar.config import ConfigError
from lightning_megapar.data.batch import WindowLength
from lightning_megapar.data.sampler import ResumableSampler
from lightning_megapar.optim import BatchSizeRamp, GradientNoiseScale
from lightning_megapar.optim.batch_schedule import BatchSchedule, refuse_indivisible

SAMPLES, UNIT = 40, 4
SCHEDULE = [(0, 4), (8, 8), (24, 12)]
WINDOWS = [4, 4, 8, 8, 12, 4, 12, 12, 12, 4]  # two epochs; the last window of each takes what is left
GROWN = [4, 4, 8, 8, 12, 12, 12, 12, 12, 12]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(SAMPLES, 8, generator=generator), torch.randint(0, 5, (SAMPLES,), generator=generator)
    return TensorDataset(x.double(), y, torch.arange(SAMPLES))


class Net(everyday.PlainNet):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Windows(Callback):
    """Samples of each window, and each window's gradient."""

    def __init__(self) -> None:
        self.samples: list[list[int]] = [[]]
        self.sizes: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.samples[-1] += batch[2].tolist()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.samples.append([])
        self.gradients.append(everyday.gradients(trainer, pl_module))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if not self.samples[-1]:
            self.sizes.append(float(trainer.callback_metrics["batch_size"]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights = everyday.whole(trainer, pl_module)


class Stop(Callback):
    """Saves after so many optimizer steps."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not Path(self.path).exists():
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def train(
    layout: str, root: str, stop: int = 0, resume: str | None = None, batch: int = UNIT, **options: Any
) -> dict[str, Any]:
    """Train on this rank with a ramp; ``batch`` is the loader's, over all data ranks."""
    windows = Windows()
    callbacks: list[Callback] = [BatchSizeRamp(SCHEDULE), windows]
    callbacks += [Stop(stop, f"{root}/middle.ckpt")] if stop else []
    trainer = everyday.make_trainer(layout, callbacks, max_epochs=2, default_root_dir=root, strategy_options=options)
    torch.manual_seed(0)
    loader = DataLoader(data(), batch_size=batch // everyday.data_size(layout))
    trainer.fit(Net().double(), loader, ckpt_path=resume)
    assert trainer.accumulate_grad_batches == 1
    seen = windows.samples[:-1] if not windows.samples[-1] else windows.samples
    return {"samples": seen, "sizes": windows.sizes, "gradients": windows.gradients, "weights": windows.weights}


def by_hand() -> dict[str, Any]:
    """One batch for each window."""
    torch.manual_seed(0)
    module = Net().double()
    made = module.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    x, y, _ = data().tensors
    begin, gradients = 0, []
    for length in WINDOWS:
        optimizer.zero_grad()
        module.loss((x[begin : begin + length], y[begin : begin + length])).backward()
        gradients.append({n: p.grad.clone() for n, p in module.named_parameters()})
        optimizer.step()
        scheduler.step()
        begin = (begin + length) % SAMPLES
    return {"gradients": gradients, "weights": {k: v.clone() for k, v in module.state_dict().items()}}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return by_hand()


def agree(found: dict[str, Any], expected: dict[str, Any], first: int = 0) -> None:
    assert len(found["gradients"]) == len(expected["gradients"]) - first
    for step, (mine, theirs) in enumerate(zip(found["gradients"], expected["gradients"][first:]), first):
        for name, gradient in theirs.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-9, atol=1e-12, msg=f"{name} at step {step}")
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("layout", [everyday.PLAIN, "dp2", "pp2", everyday.slow("tp2"), everyday.slow("dp2_tp2")])
def test_every_sample_once_and_each_window_as_one_batch(
    pool: RankPool, tmp_path: Path, expected: dict[str, Any], layout: str
) -> None:
    if layout == everyday.PLAIN:
        results = [train(layout, str(tmp_path))]
    else:
        results = pool.run(train, everyday.world(layout), layout, str(tmp_path), mode="trainer")
    agree(results[0], expected)
    ranks = results[:: len(results) // everyday.data_size(layout)]  # one of each data rank
    begin = 0
    for index, length in enumerate(WINDOWS):
        together = sorted(sample for one in ranks for sample in one["samples"][index])
        assert together == list(range(begin, begin + length)), index
        begin = (begin + length) % SAMPLES
    assert results[0]["sizes"] == GROWN


@pytest.mark.parametrize("stage", [2, everyday.slow(3)])
def test_with_shards(pool: RankPool, tmp_path: Path, expected: dict[str, Any], stage: int) -> None:
    options = {"zero_stage": stage, "num_microbatches": 2}
    agree(pool.run(train, 2, "dp2", str(tmp_path), mode="trainer", **options)[0], expected)


@pytest.mark.parametrize(
    ("first", "second", "batch", "step"),
    [("dp2", "pp2", UNIT, 3), everyday.slow("pp2", "dp2", 2, 7), everyday.slow("tp2", "dp2", UNIT, 6)],
)
def test_resumed_in_the_middle_on_another_layout(
    pool: RankPool, tmp_path: Path, expected: dict[str, Any], first: str, second: str, batch: int, step: int
) -> None:
    begun = pool.run(train, 2, first, str(tmp_path), step, mode="trainer")
    path = str(tmp_path / "middle.ckpt")
    found = pool.run(train, 2, second, str(tmp_path), 0, path, batch, mode="trainer")
    assert len(begun[0]["gradients"]) == step
    agree(found[0], expected, first=step)
    assert found[0]["sizes"] == GROWN[step:]


def refused(layout: str, schedule: Any, batch: int) -> None:
    trainer = everyday.make_trainer(layout, [BatchSizeRamp(schedule)], max_steps=1)
    trainer.fit(Net().double(), DataLoader(data(), batch_size=batch))


def test_a_ramp_that_is_not_divisible_is_refused_before_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_megapar.launch.ranks import ForkedRanks

    def fork(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was made")

    monkeypatch.setattr(ForkedRanks, "fork", fork)
    with pytest.raises(
        ConfigError,
        match=r"batch size 20 is not divisible by 2 data ranks x 4 samples .* = 8; nearest valid batch sizes: 16, 24",
    ):
        refused("dp2", [(0, 8), (16, 20)], 4)
    with pytest.raises(AssertionError, match="a process was made"):
        refused("dp2", [(0, 8), (16, 24)], 4)


def test_plain_lightning_refuses_too() -> None:
    with pytest.raises(ConfigError, match="batch size 6 is not divisible by 1 data rank x 4"):
        refused(everyday.PLAIN, [(0, 4), (16, 6)], 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of schedule, rampup and noise_ratio .given: none."),
        ({"schedule": [[0, 4]], "rampup": [4, 4, 10], "max_batch_size": 8}, "given: schedule, rampup"),
        ({"rampup": [4, 4, 10]}, "rampup needs max_batch_size"),
        ({"rampup": [4, 4], "max_batch_size": 8}, r"expected \[start, increment, samples\]"),
        ({"rampup": [4, 3, 10], "max_batch_size": 8}, "nearest valid: 7, 10"),
        ({"schedule": []}, "expected pairs"),
        ({"schedule": [[0, 4, 1]]}, "expected pairs"),
        ({"schedule": [[1, 4]]}, "first pair must be of 0"),
        ({"schedule": [[0, 4], [4, 4]]}, "does not rise"),
        ({"schedule": [[0, 4], [4.5, 8]]}, "expected integers"),
        ({"schedule": [[0, 0]]}, "at least 1 sample"),
        ({"schedule": [[0, 4]], "start": 4}, "start and max_batch_size are of"),
        ({"noise_ratio": 0.0, "max_batch_size": 8}, "expected a positive number"),
        ({"noise_ratio": 1.0, "max_batch_size": 8, "start": 16}, "expected 1 to max_batch_size=8"),
        ({"noise_ratio": 1.0, "max_batch_size": 8, "growth": 1.0}, "growth=1.0: expected a number above 1"),
        (
            {"noise_ratio": 1.0, "max_batch_size": 8, "growth": math.inf},
            "growth=inf: expected a number above 1, and a f",
        ),
        ({"noise_ratio": "x", "max_batch_size": 8}, "noise_ratio='x': expected a positive number"),
        ({"noise_ratio": 1.0, "max_batch_size": 0}, "max_batch_size=0: expected a whole number"),
        ({"noise_ratio": 1.0, "max_batch_size": 8.5}, "max_batch_size=8.5: expected a whole number"),
        ({"noise_ratio": 1.0, "max_batch_size": 8, "start": 2.5}, "start=2.5: expected a whole number"),
        ({"noise_ratio": 1.0, "max_batch_size": 8, "hold": 0}, "hold=0: expected a whole number"),
        ({"schedule": [0, 4]}, "expected pairs"),
    ],
)
def test_refused_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchSizeRamp(**options)


def test_company_that_is_refused() -> None:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    def ask(ramp: BatchSizeRamp, *others: Callback, accumulate: int = 1) -> None:
        strategy = SimpleNamespace(layout=SimpleNamespace(data=1))
        ramp.before_launch(
            SimpleNamespace(callbacks=[ramp, *others], accumulate_grad_batches=accumulate, strategy=strategy)  # type: ignore[arg-type]
        )

    with pytest.raises(ConfigError, match="the Trainer has 2"):
        ask(BatchSizeRamp(SCHEDULE), accumulate=2)
    with pytest.raises(ConfigError, match="GradientAccumulationScheduler both set"):
        ask(BatchSizeRamp(SCHEDULE), GradientAccumulationScheduler({0: 2}))
    with pytest.raises(ConfigError, match=r"put GradientNoiseScale.. among the callbacks"):
        ask(BatchSizeRamp(noise_ratio=1.0, max_batch_size=8))
    ask(BatchSizeRamp(noise_ratio=1.0, max_batch_size=8), GradientNoiseScale())


def test_megatron_s_ramp_reaches_its_end_with_its_samples() -> None:
    plan = BatchSchedule.linear(16, 8, 1000, 40)
    assert plan.points == ((0, 16), (333, 24), (666, 32), (1000, 40))
    assert [plan.at(n) for n in (0, 332, 333, 999, 1000, 10**9)] == [16, 16, 24, 32, 40, 40]


def test_by_noise_it_follows_never_falls_and_keeps_its_bounds() -> None:
    ramp = BatchSizeRamp(noise_ratio=0.5, start=8, max_batch_size=64, growth=2.0, hold=2)
    ramp._noise = noise = SimpleNamespace(noise_scale=None, compares_batches=False)  # type: ignore[assignment]
    seen = []
    for scale in [None, 1000.0, 1000.0, 1000.0, 1000.0, 4.0, 4.0, 90.0, 90.0, 1000.0, 1000.0, 1e9, 1e9]:
        noise.noise_scale = scale
        ramp._choose(4)
        ramp._held += 1
        seen.append(ramp.batch_size)
    assert seen == [8, 8, 16, 16, 32, 32, 32, 44, 44, 64, 64, 64, 64]
    again = BatchSizeRamp(noise_ratio=0.5, start=8, max_batch_size=64)
    again.load_state_dict(ramp.state_dict())
    again._noise = noise  # type: ignore[assignment]
    again._choose(8)
    assert again.batch_size == 64


def noise_driven(layout: str, root: str) -> dict[str, Any]:
    """The whole of it: measured, and grown by it."""
    ramp = BatchSizeRamp(noise_ratio=100.0, start=4, max_batch_size=16, hold=1)
    windows = Windows()
    noise = GradientNoiseScale(decay=0.95)
    options = {"strategy_options": {"num_microbatches": 2}, "max_epochs": 2, "default_root_dir": root}
    trainer = everyday.make_trainer(layout, [noise, ramp, windows], **options)
    torch.manual_seed(0)
    trainer.fit(Net().double(), DataLoader(data(), batch_size=UNIT // everyday.data_size(layout)))
    return {"sizes": windows.sizes, "consumed": ramp.consumed, "samples": [*chain(*windows.samples)]}


def test_measured_and_grown(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(noise_driven, 2, "pp2", str(tmp_path), mode="trainer")
    sizes = found[0]["sizes"]
    assert sizes == sorted(sizes) and sizes[0] == 4 and sizes[-1] == 16
    assert found[0]["consumed"] == 2 * SAMPLES and sorted(found[0]["samples"]) == sorted(2 * list(range(SAMPLES)))
    assert found[1]["sizes"] == sizes


def test_a_run_that_has_nothing_to_compare_is_refused() -> None:
    trainer = everyday.make_trainer("dp2", [GradientNoiseScale(source="accumulation")], max_steps=1)
    with pytest.raises(ConfigError, match=r"source='accumulation': accumulate_grad_batches=1; valid values here: data"):
        trainer.fit(Net().double(), DataLoader(data(), batch_size=4))


def nothing_to_compare(validates: bool = False) -> None:
    from lightning_megapar import MegaParStrategy

    trainer = Trainer(
        strategy=MegaParStrategy(), accelerator="cpu", devices=1, callbacks=[GradientNoiseScale()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, max_steps=1, precision="64-true",
    )  # fmt: skip
    if validates:
        trainer.validate(Net(), DataLoader(data(), batch_size=4), verbose=False)
        assert trainer.callback_metrics["val_loss"] > 0
    else:
        trainer.fit(Net(), DataLoader(data(), batch_size=4))


def test_a_validation_has_nothing_to_compare_and_goes_on(pool: RankPool) -> None:
    pool.run(nothing_to_compare, 1, True, mode="trainer")


def test_one_batch_of_one_size_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match="compares gradients over batches of two sizes, and this run has one"):
        pool.run(nothing_to_compare, 1, mode="trainer")


def test_a_window_is_an_integer_that_counts_from_its_beginning() -> None:
    window = WindowLength(3, 7)
    assert [n for n in range(7, 14) if n % window == 0] == [7, 10, 13]
    assert (window, window + 1, 9 / window, window * 2) == (3, 4, 3.0, 6)
    again = pickle.loads(pickle.dumps(window))
    assert (int(again), again.origin) == (3, 7)


def test_loaders_that_are_made_within_a_window_keep_their_batch() -> None:
    from lightning_megapar.data import TextDataModule

    module = TextDataModule(global_batch_size=8)
    strategy = SimpleNamespace(layout=SimpleNamespace(data=2), num_microbatches=2)
    module.trainer = SimpleNamespace(strategy=strategy, accumulate_grad_batches=WindowLength(3, 1))  # type: ignore[assignment]
    assert module.batch_plan.batch_per_rank == 4


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("consumed", [0, 6, 19, 20, 22])
def test_batches_after_are_those_that_come(drop_last: bool, pad: bool, consumed: int) -> None:
    sampler = ResumableSampler(23, 3, 1, 2, False, drop_last=drop_last, pad=pad, consumed=consumed)
    assert sampler.batches_after(consumed) == -(-len(list(sampler)) // 3)


def test_sizes_that_divide() -> None:
    refuse_indivisible([8, 16, 24], 4, 2)
    with pytest.raises(ConfigError, match=r"batch size 4 .* nearest valid batch sizes: 8, 16"):
        refuse_indivisible([4], 4, 2)


def never_grows() -> None:
    from lightning_megapar import MegaParStrategy

    ramp = BatchSizeRamp(noise_ratio=1.0, max_batch_size=16)
    trainer = Trainer(
        strategy=MegaParStrategy(), accelerator="cpu", devices=1, callbacks=[GradientNoiseScale(), ramp], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, max_steps=1, precision="64-true",
    )  # fmt: skip
    trainer.fit(Net().double(), DataLoader(data(), batch_size=4))


def test_a_ramp_that_would_never_grow_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"would never grow; valid: start=8, or num_microbatches >= 2"):
        pool.run(never_grows, 1, mode="trainer")
