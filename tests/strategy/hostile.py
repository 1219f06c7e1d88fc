"""A small user's module, trained by plain Lightning on one device and by the strategy: everything must agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
PLAIN = "plain"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "dp2": (2, {"data_parallel_size": 2}),
    "dp4": (4, {"data_parallel_size": 4}),
    "dp2_zero1": (2, {"data_parallel_size": 2, "zero_stage": 1}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "pp4": (4, {"pipeline_parallel_size": 4}),
    "pp2_interleaved": (2, {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved_1f1b"}),
    "pp2_zbv": (2, {"pipeline_parallel_size": 2, "pipeline_schedule": "zbv"}),
    "dp2_pp2_zb_h1": (4, {"data_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_schedule": "zb_h1"}),
    "dp2_pp2": (4, {"data_parallel_size": 2, "pipeline_parallel_size": 2}),
    "dp2_pp2_zero1": (4, {"data_parallel_size": 2, "pipeline_parallel_size": 2, "zero_stage": 1}),
    "dp2_tp2_pp2_zero1": (
        8,
        {"data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "zero_stage": 1},
    ),
    "tp2_pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
}
GLOBAL_BATCH = 8


def data(count: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randint(0, 5, (count,), generator=generator))


def data_size(layout: str) -> int:
    return 1 if layout == PLAIN else int(LAYOUTS[layout][1].get("data_parallel_size", 1))


def loader(layout: str, count: int = 32, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(
        kwargs.pop("dataset", None) or data(count), batch_size=GLOBAL_BATCH // data_size(layout), **kwargs
    )


class Net(LightningModule):
    """A stack of four blocks between an input and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.blocks: nn.Module = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.inp(x)))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class WideBlock(nn.Module):
    """A residual block with something for tensor ranks to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Watch(Callback):
    """What a user's callback sees, and the whole weights at the end (on rank 0)."""

    def __init__(self) -> None:
        self.batches: list[dict[str, float]] = []
        self.epochs: list[dict[str, float]] = []
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.batches.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self.epochs.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        if hasattr(strategy, "full_state_dict"):
            self.weights = strategy.full_state_dict()
        else:
            self.weights = {k: v.detach().clone() for k, v in pl_module.state_dict().items()}


def trainer_for(layout: str, callbacks: Sequence[Callback] = (), **kwargs: Any) -> Trainer:
    options = dict(kwargs.pop("options", {}))
    world, strategy = 1, "auto"
    if layout != PLAIN:
        from lightning_megapar import MegaParStrategy

        world, sizes = LAYOUTS[layout]
        strategy = MegaParStrategy(**{"timeout_seconds": 20, **sizes, **options})  # type: ignore[assignment]
    kwargs = {**QUIET, "max_epochs": 2, "precision": "64-true", **kwargs}
    return Trainer(strategy=strategy, accelerator="cpu", devices=world, callbacks=list(callbacks), **kwargs)


def fit(
    layout: str,
    module: type[LightningModule] = Net,
    *,
    train: Any = None,
    validate: Any = None,
    callbacks: Sequence[Callback] = (),
    ckpt_path: str | None = None,
    dtype: torch.dtype = torch.float64,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train on this rank; ``validate=True`` takes twelve samples, ``dtype`` is the parameters'."""
    watch = Watch()
    trainer = trainer_for(layout, [watch, *callbacks], **kwargs)
    torch.manual_seed(0)
    made = module().to(dtype)
    val = loader(layout, 12) if validate is True else validate
    trainer.fit(made, loader(layout) if train is None else train, val, ckpt_path=ckpt_path)
    return {
        "batches": watch.batches,
        "epochs": watch.epochs,
        "weights": watch.weights,
        "steps": trainer.global_step,
    }


def differences(actual: Any, expected: Any, where: str = "", tolerance: float = 1e-9) -> list[str]:
    """Where two nests of numbers and tensors differ, in words."""
    if isinstance(expected, dict):
        if set(actual) != set(expected):
            return [f"{where}: {sorted(set(actual) ^ set(expected))} on one side only"]
        return [d for k in expected for d in differences(actual[k], expected[k], f"{where}.{k}", tolerance)]
    if isinstance(expected, (list, tuple)):
        if len(actual) != len(expected):
            return [f"{where}: {len(actual)} against {len(expected)} items"]
        return [
            d for i, pair in enumerate(zip(actual, expected)) for d in differences(*pair, f"{where}[{i}]", tolerance)
        ]
    if isinstance(expected, Tensor):
        if actual.shape != expected.shape:
            return [f"{where}: shape {tuple(actual.shape)} against {tuple(expected.shape)}"]
        same = torch.allclose(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)
        return [] if same else [f"{where}: off by {float((actual.double() - expected.double()).abs().max()):.1e}"]
    if isinstance(expected, float):
        return (
            [] if abs(actual - expected) <= tolerance * max(1.0, abs(expected)) else [f"{where}: {actual} {expected}"]
        )
    return [] if actual == expected else [f"{where}: {actual!r} against {expected!r}"]


def agree(results: list[dict[str, Any]], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    """Rank 0 has what plain Lightning has, and every rank sees the same numbers."""
    assert differences(results[0], expected, tolerance=tolerance) == []
    for rank, other in enumerate(results[1:], 1):
        mine = {k: v for k, v in results[0].items() if k != "weights"}
        theirs = {k: v for k, v in other.items() if k != "weights"}
        assert differences(theirs, mine, f"rank {rank}") == []
