"""Rules around an optimizer's step: a rate by the noise, a decay that keeps its time; both are gone behind the step."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from pool import RankPool
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from usage import everyday

from lightning_megapar.callbacks import MetricsCSV
from lightning_megapar.config import ConfigError
from lightning_megapar.optim import BatchSizeRamp, DynamicWeightDecay, NoiseScaleLR
from lightning_megapar.optim.around_step import AroundStep

RAMP = [(0, 4), (8, 8), (24, 16)]  # 40 samples: windows of 4, 4, 8, 8, 16


class Net(LightningModule):
    """Two groups, one without decay, a rate that a chainable scheduler halves at every second step."""

    kind: Any = torch.optim.AdamW
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.5}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(3, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.line(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.line.weight]}, {"params": [self.line.bias], "weight_decay": 0.0}]
        optimizer = self.kind(groups, **self.options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Used(Callback):
    """What the step itself reads, what stands there afterwards, and what is logged."""

    def __init__(self) -> None:
        self.used: list[list[tuple[float, float]]] = []
        self.after: list[list[tuple[float, float]]] = []
        self.logged: list[dict[str, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def note(optimizer: Any, *_: Any) -> None:
            self.used.append([(float(g["lr"]), float(g["weight_decay"])) for g in optimizer.param_groups])

        trainer.optimizers[0].register_step_pre_hook(note)  # behind those of the callbacks before this one

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.after):
            self.after.append([(g["lr"], g["weight_decay"]) for g in trainer.optimizers[0].param_groups])
            self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def run(*callbacks: Callback, module: type[Net] = Net, ramp: Any = RAMP, **options: Any) -> Used:
    used = Used()
    usual: dict[str, Any] = {"max_epochs": 1, "precision": "64-true"}
    data = TensorDataset(torch.randn(40, 3, generator=torch.Generator().manual_seed(1)).double())
    first = [BatchSizeRamp(ramp)] if ramp else []
    trainer = everyday.make_trainer(everyday.PLAIN, [*first, *callbacks, used], **{**usual, **options})
    trainer.fit(module(), DataLoader(data, batch_size=4), ckpt_path=None)
    return used


RATES = [0.1, 0.1, 0.05, 0.05, 0.025]  # StepLR's, undisturbed
AFTER = [0.1, 0.05, 0.05, 0.025, 0.025]


def test_the_rate_rises_with_the_batch_and_the_scheduler_sees_its_own() -> None:
    used = run(NoiseScaleLR(exponent=0.5, noise_scale=24.0))
    factors = [(1 + 24 / batch) ** -0.5 for batch in (4, 4, 8, 8, 16)]
    assert [u[0][0] for u in used.used] == pytest.approx([r * f for r, f in zip(RATES, factors)], rel=1e-12)
    assert [u[1][0] for u in used.used] == [u[0][0] for u in used.used]
    assert [a[0][0] for a in used.after] == pytest.approx(AFTER) and {a[0][1] for a in used.after} == {0.5}
    assert [row["lr_factor"] for row in used.logged] == pytest.approx(factors, rel=1e-6)


def test_the_rate_is_the_user_s_at_the_reference() -> None:
    used = run(NoiseScaleLR(exponent=1.0, reference_batch_size=8, noise_scale=24.0))
    factors = [4 * batch / (batch + 24) for batch in (4, 4, 8, 8, 16)]
    assert factors[2] == 1.0
    assert [u[0][0] for u in used.used] == pytest.approx([r * f for r, f in zip(RATES, factors)], rel=1e-12)


class Sgd(Net):
    kind = torch.optim.SGD


def test_sgd_has_the_exponent_one() -> None:
    used = run(NoiseScaleLR(noise_scale=12.0), module=Sgd)
    assert used.used[0][0][0] == pytest.approx(0.1 / (1 + 12 / 4), rel=1e-12)
    with pytest.raises(ConfigError, match=r"exponent=0.5: SGD has 1"):
        run(NoiseScaleLR(exponent=0.5, noise_scale=12.0), module=Sgd)
    with pytest.raises(ConfigError, match=r"AdamW divides by the gradient's size.* state one: 0.5 "):
        run(NoiseScaleLR(noise_scale=12.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give reference_batch_size .* or noise_scale"),
        ({"exponent": 0.4, "noise_scale": 1.0}, r"exponent=0.4: expected 0.5 to 1 \(nearest valid: 0.5\)"),
        ({"exponent": 1.1, "noise_scale": 1.0}, r"nearest valid: 1.0"),
        ({"noise_scale": 0.0}, "noise_scale=0.0: expected a positive number"),
        ({"reference_batch_size": -1}, "reference_batch_size=-1: expected a positive number"),
        ({"reference_batch_size": "16"}, "reference_batch_size='16': expected a positive number"),
        ({"reference_batch_size": True}, "reference_batch_size=True: expected a positive number"),
        ({"exponent": "x", "noise_scale": 1.0}, "exponent='x': expected a positive number"),
    ],
)
def test_refused_rates(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NoiseScaleLR(**options)


def test_a_rate_by_a_noise_that_nobody_measures_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"NoiseScaleLR without noise_scale follows .* put GradientNoiseScale"):
        run(NoiseScaleLR(exponent=0.5, reference_batch_size=8))


def products(used: Used) -> list[float]:
    return [u[0][0] * u[0][1] for u in used.used]


def test_the_timescale_in_samples_stays() -> None:
    used = run(DynamicWeightDecay())
    timescales = [batch / product for batch, product in zip((4, 4, 8, 8, 16), products(used))]
    assert timescales == pytest.approx([4 / (0.1 * 0.5)] * 5, rel=1e-12)
    assert all(u[1][1] == 0.0 for u in used.used)
    assert [a[0][1] for a in used.after] == [0.5] * 5
    assert [row["weight_decay"] for row in used.logged] == pytest.approx([u[0][1] for u in used.used], rel=1e-6)


def test_the_timescale_holds_for_the_rate_that_the_noise_sets() -> None:
    for order in ((DynamicWeightDecay(), NoiseScaleLR(exponent=0.5, noise_scale=24.0)), None):
        callbacks = order or (NoiseScaleLR(exponent=0.5, noise_scale=24.0), DynamicWeightDecay())
        used = run(*callbacks)
        assert [b / p for b, p in zip((4, 4, 8, 8, 16), products(used))] == pytest.approx([80.0] * 5, rel=1e-12)


def test_given_timescales_in_every_unit() -> None:
    assert products(run(DynamicWeightDecay(200.0))) == pytest.approx([b / 200 for b in (4, 4, 8, 8, 16)], rel=1e-12)
    assert products(run(DynamicWeightDecay(5.0, "epochs"))) == pytest.approx(
        [b / 200 for b in (4, 4, 8, 8, 16)], rel=1e-12
    )
    assert products(run(DynamicWeightDecay(50.0, "steps"))) == pytest.approx([1 / 50] * 5, rel=1e-12)


def test_a_decoupled_schedule_follows_itself_and_not_the_rate() -> None:
    used = run(DynamicWeightDecay(unit="steps", schedule="linear", floor=0.3), ramp=None, max_steps=8)
    assert products(used) == pytest.approx([0.05 * max(0.3, 1 - k / 8) for k in range(8)], rel=1e-12)
    used = run(DynamicWeightDecay(unit="steps", schedule="linear"))  # by batches: windows begin after 0, 1, 2, 4 and 6
    assert products(used) == pytest.approx([0.05 * (1 - done / 10) for done in (0, 1, 2, 4, 6)], rel=1e-12)
    used = run(DynamicWeightDecay(unit="steps", schedule=lambda progress: progress), ramp=None, max_steps=4)
    assert products(used) == pytest.approx([0.05 * k / 4 for k in range(4)], rel=1e-12)


def test_weights_shrink_by_what_is_said() -> None:
    """The update itself, with gradients of zero: only the decay moves weights."""

    class Idle(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.line(batch[0]).mean() * 0.0

    class Weights(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            self.first = pl_module.line.weight.detach().clone()

        def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
            self.last = pl_module.line.weight.detach().clone()

    weights = Weights()
    run(DynamicWeightDecay(), weights, module=Idle)
    expected = weights.first.clone()
    for batch in (4, 4, 8, 8, 16):
        expected *= 1 - batch / 80
    torch.testing.assert_close(weights.last, expected, rtol=1e-12, atol=0)


class Adam(Net):
    kind = torch.optim.Adam


class Momentum(Sgd):
    options = {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.9}  # noqa: RUF012


@pytest.mark.parametrize("module", [Adam, Momentum])
def test_a_coupled_decay_is_refused(module: type[Net]) -> None:
    with pytest.raises(ConfigError, match=r"adds weight_decay=0.5 to the gradient"):
        run(DynamicWeightDecay(), module=module)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timescale": 0.0}, "expected a positive number of samples"),
        ({"unit": "tokens"}, "expected samples, epochs, steps$"),
        ({"unit": "sample"}, "unit='sample': expected samples, epochs, steps; did you mean 'samples'"),
        ({"schedule": "triangle"}, "expected constant, linear, cosine, or a function$"),
        ({"schedule": "cosin"}, "schedule='cosin': expected .*, or a function; did you mean 'cosine'"),
        ({"floor": 2.0}, "floor=2.0: expected 0 to 1"),
    ],
)
def test_refused_decays(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DynamicWeightDecay(**options)


def test_a_schedule_needs_an_end() -> None:
    with pytest.raises(ConfigError, match="needs the length of the run"):
        run(DynamicWeightDecay(schedule="cosine"), max_epochs=-1, limit_train_batches=2, max_time={"seconds": 1})


def test_a_step_that_fails_leaves_the_user_s_values() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    around = AroundStep([optimizer], "lr", lambda index, number, group: 0.25)

    def fail() -> float:
        assert optimizer.param_groups[0]["lr"] == 0.25
        raise RuntimeError

    with pytest.raises(RuntimeError):
        optimizer.step(fail)
    around.remove()
    assert optimizer.param_groups[0]["lr"] == 1.0
    weight.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.zeros(2))


def test_an_unknown_noise_leaves_the_reference_s_rate() -> None:
    callback = NoiseScaleLR(exponent=0.5, reference_batch_size=8)
    callback._trainer = SimpleNamespace()  # type: ignore[assignment]
    callback._noise = SimpleNamespace(noise_scale=None)  # type: ignore[assignment]
    assert callback._factor(0.5) == 1.0


def resumed(layout: str, root: str, resume: str | None) -> dict[str, Any]:
    """All rules together, from the beginning or from the middle."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_megapar.optim import GradientNoiseScale

    torch.manual_seed(0)
    rules: list[Callback] = [
        GradientNoiseScale(decay=0.9, source="accumulation"),
        BatchSizeRamp(noise_ratio=4.0, start=8, max_batch_size=16, hold=2),
        NoiseScaleLR(exponent=0.5, reference_batch_size=8),
        DynamicWeightDecay(),
    ]
    watch = everyday.Watch()
    saver = ModelCheckpoint(root, "middle", every_n_train_steps=4, save_top_k=1)
    saving = [] if resume else [saver]
    options: dict[str, Any] = {"max_epochs": 4, "default_root_dir": root, "enable_checkpointing": not resume}
    trainer = everyday.make_trainer(layout, [*rules, watch, *saving], **options)
    module = Decayed().double()
    trainer.fit(module, everyday.loader(layout, batch=4), ckpt_path=resume)
    return {"weights": watch.weights, "steps": trainer.global_step, "first": f"{root}/middle.ckpt"}


class Decayed(everyday.PlainNet):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1)


@pytest.mark.parametrize(("first", "second"), [("tp2", "pp2"), everyday.slow("pp2", "tp2")])
def test_a_run_under_all_rules_goes_on_on_another_layout(
    pool: RankPool, tmp_path: Path, first: str, second: str
) -> None:
    whole = pool.run(resumed, 2, first, str(tmp_path), None, mode="trainer")[0]
    found = pool.run(resumed, 2, second, str(tmp_path), whole["first"], mode="trainer")[0]
    assert found["steps"] == whole["steps"]
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-7, atol=1e-10, msg=name)


def test_metrics_csv_has_what_they_log_whichever_stands_first(tmp_path: Path) -> None:
    """The file's callback comes before those that change the step, as in the recipes."""
    rules = [NoiseScaleLR(exponent=0.5, noise_scale=24.0), DynamicWeightDecay()]
    for number, callbacks in enumerate(([MetricsCSV(tmp_path / "0"), *rules], [*rules, MetricsCSV(tmp_path / "1")])):
        used = run(*callbacks)
        with open(tmp_path / str(number) / "metrics.csv", newline="") as file:
            table = list(csv.DictReader(file))
        assert [float(row["batch_size"]) for row in table] == [4, 4, 8, 8, 16]
        for name in ("lr_factor", "weight_decay"):
            assert [float(row[name]) for row in table] == pytest.approx([row[name] for row in used.logged], rel=1e-6)
