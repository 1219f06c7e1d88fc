"""``16-mixed`` under one loss scale for all ranks: skipping, unscaling, clipping, checkpoints, giving up, refusals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import parity
import precision_runs as runs
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from pool import RankError, RankPool
from precision_runs import LAYOUTS, train
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megapar import ConfigError, MegaParStrategy
from lightning_megapar.precision import float16_plugin

SCALE = {"initial": 2.0**12}


class Inject(Callback):
    """An infinite gradient element on one rank in some steps; weights before and after every step."""

    def __init__(self, rank: int, steps: set[int], value: float = float("inf")) -> None:
        self.rank, self.steps, self.value = rank, steps, value
        self.norms: list[float] = []
        self.kept: list[Tensor] = []
        self.moved: list[float] = []
        self.scales: list[float] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.kept = [p.parameter.detach().clone() for p in trainer.strategy.prepared.parameters]

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if trainer.global_step in self.steps and trainer.global_rank == self.rank:
            held = [p for p in trainer.strategy.stepper.parameters if "blocks" in p.name]
            gradient = next(g for p in held if (g := p.local_gradient) is not None)
            gradient.view(-1)[3] = self.value

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        now = [p.parameter.detach() for p in trainer.strategy.prepared.parameters]
        self.moved.append(max(float((a - b).abs().max()) for a, b in zip(now, self.kept)))
        self.scales.append(float(trainer.callback_metrics["loss_scale"]))


def injected(layout: str, rank: int, value: float, **options: Any) -> dict[str, Any]:
    watch = Inject(rank, {1}, value)
    result = train(layout, "16-mixed", steps=3, callbacks=[watch], strategy={"loss_scale": SCALE}, **options)
    return {"moved": watch.moved, "scales": watch.scales, **result}


@pytest.mark.parametrize(
    ("layout", "rank", "value"),
    [("tp2_pp2", 1, float("inf")), ("tp2_pp2", 2, float("nan")), ("dp2_zero2", 1, float("inf"))],
)
def test_an_inf_on_one_rank_skips_the_step_on_every_rank(pool: RankPool, layout: str, rank: int, value: float) -> None:
    for result in pool.run(injected, LAYOUTS[layout][0], layout, rank, value, mode="trainer"):
        before, skipped, after = result["moved"]
        assert before > 0 and skipped == 0 and after > 0
        assert result["scale"].skipped_steps == 1 and result["scale"].scale == SCALE["initial"]  # hysteresis
        assert result["metrics"]["skipped_steps"] == 1 and result["scales"] == [SCALE["initial"]] * 3


@pytest.mark.parametrize("layout", ["single", "tp2_pp2", "dp2", "dp2_zero1", "dp2_tp2_zero3", "pp2_zb_h1"])
def test_gradients_that_hooks_and_clipping_see_are_those_without_a_scale(pool: RankPool, layout: str) -> None:
    """Scaled and unscaled runs agree to float16's rounding; a scale of 1 and of 4096 would differ by 4096."""
    world = LAYOUTS[layout][0]
    options: dict[str, Any] = {"clip": 0.5, "accumulate": 2}
    plain = pool.run(train, world, layout, "32-true", **options, mode="trainer")[0]
    scaled = pool.run(train, world, layout, "16-mixed", strategy={"loss_scale": SCALE}, **options, mode="trainer")[0]
    assert min(plain["norms"]) > 0.5  # so that it clips
    assert scaled["norms"] == pytest.approx(plain["norms"], rel=4e-3)
    assert scaled["losses"] == pytest.approx(plain["losses"], rel=2e-3)
    moved = runs.weights_of(plain) - torch.cat([v.flatten() for _, v in sorted(start().items())])
    difference = runs.weights_of(scaled) - runs.weights_of(plain)
    assert float(difference.norm() / moved.norm()) < 0.01


def start() -> dict[str, Tensor]:
    from lightning_megapar.models.gpt import GPT

    return {f"gpt.{k}": v for k, v in GPT(parity.style("gpt2")).state_dict().items()}


class Tiny(LightningModule):
    """Its gradient is 2^-26, which float16 does not have, times a factor that keeps the forward in range."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).float().mean() * 2.0**-26

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(self.layer.weight.grad.clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def small_gradients(scale: float, root: str) -> Tensor:
    module = Tiny()
    trainer = Trainer(
        strategy=MegaParStrategy(loss_scale=scale),
        accelerator="cpu",
        devices=1,
        max_steps=1,
        plugins=[float16_plugin()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    trainer.fit(module, DataLoader(torch.ones(4, 8), batch_size=4))
    return module.seen[0]


def test_a_scale_of_1_loses_small_gradients_that_32768_keeps(pool: RankPool, tmp_path: Path) -> None:
    lost = pool.run(small_gradients, 1, 1, str(tmp_path), mode="trainer")[0]
    kept = pool.run(small_gradients, 1, 2**15, str(tmp_path), mode="trainer")[0]
    assert float(lost.abs().max()) == 0
    torch.testing.assert_close(kept, torch.full((1, 8), 2.0**-26), rtol=0, atol=0)


def overflows_once(layout: str, root: str, **options: Any) -> Any:
    options.setdefault("steps", 3)
    return train(layout, "16-mixed", callbacks=[Inject(0, {1})], strategy={"loss_scale": SCALE}, root=root, **options)[
        "scale"
    ]


@pytest.mark.parametrize(("first", "second"), [("tp2_pp2", "single"), ("dp2_zero2", "pp2"), ("pp2", "dp2_zero2")])
def test_the_scale_survives_a_checkpoint_of_another_layout(
    pool: RankPool, tmp_path: Path, first: str, second: str
) -> None:
    path, root = str(tmp_path / "run.ckpt"), str(tmp_path)
    saved = pool.run(overflows_once, LAYOUTS[first][0], first, root, save=path, mode="trainer")[0]
    assert (saved.good_steps, saved.hysteresis_left, saved.skipped_steps) == (1, 1, 1)
    for scale in pool.run(overflows_once, LAYOUTS[second][0], second, root, ckpt=path, steps=5, mode="trainer"):
        assert (scale.good_steps, scale.hysteresis_left, scale.skipped_steps) == (3, 1, 1)


def never_finite(root: str) -> None:
    train(
        "pp2",
        "16-mixed",
        steps=9,
        callbacks=[Inject(1, set(range(9)))],
        strategy={"loss_scale": {"initial": 2.0, "hysteresis": 1, "patience": 3}},
        root=root,
    )


def test_endless_overflow_stops_every_rank_with_the_parameter_s_name(pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError) as error:
        pool.run(never_finite, 2, str(tmp_path), mode="trainer")
    said = "not finite for 3 steps in a row at the loss scale 1, which goes no lower; the first parameter concerned is"
    assert str(error.value).count(said) >= 2  # every rank
    assert f"{said} 'gpt.blocks.2." in str(error.value)


class Manual(parity.Model):
    """Two backwards of halves of a batch, one step, by hand."""

    def __init__(self) -> None:
        super().__init__(parity.style("gpt2"), "sgd")
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        half = len(batch["tokens"]) // 2
        for rows in (slice(half), slice(half, None)):
            self.manual_backward(self.gpt(batch["tokens"][rows], batch["labels"][rows]) / 2)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log("train_loss", 1.0)


def by_hand(layout: str, precision: str) -> dict[str, Any]:
    options = {"loss_scale": SCALE} if precision == "16-mixed" else {}
    module = Manual()
    made = MegaParStrategy(seed=7, **LAYOUTS[layout][1], **options)
    trainer = Trainer(
        strategy=made,
        accelerator="cpu",
        devices=LAYOUTS[layout][0],
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **runs.precision_of(precision),
    )
    trainer.fit(module, DataLoader(parity.Tokens(24, 16, 61), batch_size=8 // made.layout.data))
    weights = {k: v.float() for k, v in trainer.strategy.full_state_dict().items()}
    return {"weights": weights, "scale": trainer.strategy.loss_scale}


@pytest.mark.parametrize("layout", ["single", "dp2", "tp2"])
def test_manual_optimization(pool: RankPool, layout: str) -> None:
    world = LAYOUTS[layout][0]
    plain = pool.run(by_hand, world, layout, "32-true", mode="trainer")[0]
    scaled = pool.run(by_hand, world, layout, "16-mixed", mode="trainer")[0]
    assert scaled["scale"].good_steps == 3
    moved = runs.weights_of(plain) - torch.cat([v.flatten() for _, v in sorted(start().items())])
    difference = runs.weights_of(scaled) - runs.weights_of(plain)
    assert float(difference.norm() / moved.norm()) < 0.01


class HalfWeights(parity.Model):
    def configure_model(self) -> None:
        super().configure_model()
        self.gpt.bfloat16()


class HalfState(parity.Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        class Rounding(torch.optim.SGD):
            def __init__(self, params: Any) -> None:
                super().__init__(params, lr=0.1)
                self.param_groups[0]["momentum_dtype"] = torch.bfloat16

        return Rounding(self.parameters())


class Quadratic(parity.Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (HalfWeights, "16-mixed' with bfloat16 parameters .'gpt.*Valid: keep the parameters in float32"),
        (HalfState, "16-mixed' with a bf16 optimizer .Rounding, momentum_dtype=torch.bfloat16.*Valid: float32 state"),
        (Quadratic, "LBFGS calls the step's closure several times.*valid: precision='bf16-mixed'"),
    ],
)
def test_refusals(tmp_path: Path, kind: type[parity.Model], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train("single", "16-mixed", model=kind(parity.style("gpt2"), "sgd"), root=str(tmp_path))


@pytest.mark.parametrize(
    ("scale", "precision", "message"),
    [
        (SCALE, "16-mixed", r"^loss_scale={'initial': 4096.0} is for .* this run's is 'bf16-mixed'.*float16_plugin"),
        (1024, "32-true", r"^loss_scale=1024 is for .* this run's is '32-true'; valid: .* or precision='16-mixed'"),
        (1024, "bf16-true", r"In the recipes: precision.loss_scale=null, or precision=fp16$"),
    ],
)
def test_a_loss_scale_without_16_mixed_is_refused(scale: Any, precision: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(
            strategy=MegaParStrategy(loss_scale=scale), accelerator="cpu", devices=1, precision=precision, logger=False
        )


class Judged(parity.Model):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.gpt(batch["tokens"], batch["labels"]))


def test_16_true_is_for_evaluation_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise AssertionError("a rank was started")

    def trainer(devices: int) -> Trainer:
        return Trainer(
            strategy=MegaParStrategy(),
            accelerator="cpu",
            devices=devices,
            precision="16-true",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
        )

    module = Judged(parity.style("gpt2"), "sgd")
    loader = DataLoader(parity.Tokens(8, 16, 61), batch_size=4)
    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(ConfigError, match=r"precision='16-true'.*valid for fit: '32-true', 'bf16-mixed', 'bf16-true'"):
        trainer(2).fit(module, loader)
    (found,) = trainer(1).validate(module, loader, verbose=False)
    assert 3.0 < found["val_loss"] < 6.0
    assert next(module.parameters()).dtype == torch.float16


def test_options_of_a_grad_scaler_are_refused() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    def trainer(**options: Any) -> Trainer:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **options))
        return Trainer(strategy=MegaParStrategy(), accelerator="cpu", devices=1, plugins=[plugin], logger=False)

    trainer()
    with pytest.raises(ConfigError, match=r"GradScaler was given .'initial': 8.0, 'window': 10.*loss_scale="):
        trainer(init_scale=8.0, growth_interval=10)


def test_a_scale_of_plain_lightning_is_gone_on_with() -> None:
    from lightning_megapar.precision.loss_scale import LossScaleOptions
    from lightning_megapar.precision.plugin import LossScaling

    theirs = torch.amp.GradScaler("cpu", init_scale=512.0)
    theirs.scale(torch.ones(()))
    ours = LossScaling(LossScaleOptions())
    ours.load_state_dict(theirs.state_dict())
    assert (ours.state.scale, ours.state.hysteresis_left, ours.state.skipped_steps) == (512.0, 2, 0)
    again = torch.amp.GradScaler("cpu")
    again.load_state_dict(ours.state_dict())
    assert again.get_scale() == 512.0 and again.get_growth_interval() == 1000
