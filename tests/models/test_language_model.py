from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from lightning_megapar.config import ConfigError
from lightning_megapar.models.gpt import GPTConfig
from lightning_megapar.models.language_model import LanguageModel, OptimizerConfig

TINY = GPTConfig.gpt2(vocab_size=20, num_layers=2, num_heads=2, hidden_size=16, max_sequence_length=12)


def batches(count: int = 6, size: int = 4) -> DataLoader:
    """Counting sequences, learnable in a few steps."""
    rows = [(torch.arange(13) * (1 + i % 3) + i) % 20 for i in range(count * size)]
    return DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in rows], batch_size=size)


def trainer(root: Path, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": root,
        **options,
    }
    return Trainer(**settings)


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []
        self.tokens: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.values.append(trainer.callback_metrics["train_loss"].item())
        self.tokens.append(int(outputs["num_valid_tokens"]))


def test_learns_in_plain_lightning(tmp_path: Path) -> None:
    losses = Losses()
    model = LanguageModel(TINY, OptimizerConfig(lr=1e-2, warmup_steps=5))
    fit = trainer(tmp_path, max_steps=150, callbacks=[losses], strategy="auto")
    fit.fit(model, batches(), batches(2))
    assert losses.values[0] == pytest.approx(math.log(20), abs=0.2)
    assert losses.values[-1] < 0.4 * losses.values[0]
    assert set(losses.tokens) == {48}
    assert fit.callback_metrics["val_loss"] < 0.5 * math.log(20)
    (tested,) = fit.test(model, batches(2), verbose=False)
    assert tested["test_loss"] == pytest.approx(fit.callback_metrics["test_loss"].item())
    predicted = fit.predict(model, batches(1))[0]  # type: ignore[index]
    assert predicted.shape == (4, 12) and predicted.dtype == torch.int64
    labels = next(iter(batches(1)))["labels"]
    assert (predicted == labels).float().mean() > 0.5


def test_validation_loss_is_the_mean_over_samples_with_a_ragged_last_batch(tmp_path: Path) -> None:
    model = LanguageModel(TINY)
    loader = batches(5, 2)
    ragged = DataLoader(loader.dataset, batch_size=4)  # 4 + 4 + 2
    (result,) = trainer(tmp_path).validate(model, ragged, verbose=False)
    whole = next(iter(DataLoader(loader.dataset, batch_size=10)))
    with torch.no_grad():
        expected = model.model(whole["tokens"], whole["labels"])  # type: ignore[misc]
    assert result["val_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_ignored_labels_count_neither_in_loss_nor_in_tokens() -> None:
    model = LanguageModel(TINY)
    model.configure_model()
    built = model.model
    model.configure_model()
    assert model.model is built
    model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    batch = next(iter(batches(1)))
    labels = batch["labels"].clone()
    labels[:, ::2] = -100
    step = model.training_step({"tokens": batch["tokens"], "labels": labels}, 0)
    assert int(step["num_valid_tokens"]) == 24
    logits = model(batch["tokens"])
    assert logits.shape == (4, 12, 20)
    chosen = torch.nn.functional.cross_entropy(logits[:, 1::2].flatten(0, 1), batch["labels"][:, 1::2].flatten())
    assert float(step["loss"]) == pytest.approx(float(chosen), rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weight_decay_is_for_matrices_only(tmp_path: Path, name: str) -> None:
    model = LanguageModel(TINY, {"name": name, "weight_decay": 0.3, "schedule": "constant"})
    model.configure_model()
    optimizer = model.configure_optimizers()["optimizer"]
    assert type(optimizer).__name__.lower() == name
    decayed, free = optimizer.param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    assert all(p.dim() >= 2 for p in decayed["params"]) and all(p.dim() < 2 for p in free["params"])
    grouped = [id(p) for p in decayed["params"] + free["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())  # each once, tied ones too


def test_schedule() -> None:
    factor = OptimizerConfig(warmup_steps=4, min_lr_ratio=0.1).factor(max_steps=24)
    values = [factor(step) for step in range(30)]
    assert values[:4] == [0.2, 0.4, 0.6, 0.8]
    assert values[4] == 1.0
    assert values[14] == pytest.approx(0.55)  # half-way
    assert values[24:] == pytest.approx([0.1] * 6)
    assert values[4:25] == sorted(values[4:25], reverse=True)
    constant = OptimizerConfig(warmup_steps=1, schedule="constant").factor(math.inf)
    assert [constant(s) for s in (0, 1, 1000)] == [0.5, 1.0, 1.0]


def test_cosine_ends_with_the_trainer(tmp_path: Path) -> None:
    model = LanguageModel(TINY, {"lr": 1.0, "min_lr_ratio": 0.0, "name": "sgd"})
    fit = trainer(tmp_path, max_steps=8)
    fit.fit(model, batches())
    assert fit.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)
    endless = trainer(tmp_path, max_epochs=-1)
    with pytest.raises(ConfigError, match="max_steps=null with schedule='cosine'"):
        endless.fit(LanguageModel(TINY), batches())


def test_checkpoint_opens_with_weights_only_and_rebuilds_the_module(tmp_path: Path) -> None:
    model = LanguageModel(TINY, OptimizerConfig(betas=(0.8, 0.9)))
    fit = trainer(tmp_path, max_steps=3)
    fit.fit(model, batches())
    path = tmp_path / "model.ckpt"
    fit.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    assert saved["hyper_parameters"]["optimizer"]["betas"] == [0.8, 0.9]
    assert saved["hyper_parameters"]["model"]["hidden_size"] == 16
    again = LanguageModel.load_from_checkpoint(path, weights_only=True)
    assert again.config == TINY and again.optimizer_config == model.optimizer_config
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_resumed_training_equals_the_uninterrupted(tmp_path: Path) -> None:
    def run(ckpt: Path | None = None) -> list[float]:
        losses = Losses()
        keep = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
        fit = trainer(tmp_path, max_epochs=2, callbacks=[losses, keep], enable_checkpointing=True)
        fit.fit(LanguageModel(TINY, {"warmup_steps": 2}), batches(), ckpt_path=ckpt)
        return losses.values

    whole = run()
    assert len(whole) == 12
    assert run(tmp_path / "epoch=0.ckpt") == whole[6:]


def test_mappings_from_hydra_become_plain_values() -> None:
    config = OmegaConf.create(
        {
            "model": {"vocab_size": 20, "num_layers": 1, "num_heads": 2, "hidden_size": 8, "max_sequence_length": 4},
            "optimizer": {"betas": [0.7, 0.8], "fused": None},
        }
    )
    model = LanguageModel(config.model, config.optimizer)
    assert model.optimizer_config.betas == (0.7, 0.8)

    def check(value: object) -> None:
        assert type(value) in (dict, list, tuple, int, float, str, bool, type(None)), type(value)
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
            check(inner)

    check(dict(model.hparams)["model"])
    check(dict(model.hparams)["optimizer"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adamv"}, "did you mean 'adamw'"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"betas": (0.9,)}, "betas="),
        ({"betas": (0.9, 1.0)}, "betas="),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"warmup_steps": 5, "max_steps": 5}, "expected at least 6"),
        ({"min_lr_ratio": 2.0}, "min_lr_ratio=2.0"),
    ],
)
def test_optimizer_settings_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**options)


def test_unknown_settings_name_their_neighbour() -> None:
    with pytest.raises(ConfigError, match="optimizer: unknown argument 'learning_rte'"):
        LanguageModel(TINY, {"learning_rte": 1.0})
    with pytest.raises(ConfigError, match="did you mean 'warmup_steps'"):
        LanguageModel(TINY, {"warmup_step": 1})
    with pytest.raises(ConfigError, match="did you mean 'num_layers'"):
        LanguageModel({"num_layer": 2})
    with pytest.raises(ConfigError, match="expected a GPTConfig or a mapping"):
        LanguageModel(3)  # type: ignore[arg-type]
