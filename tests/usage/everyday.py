"""A user's module of parallel layers, trained by plain Lightning on one process and by the strategy on any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from pool import RankPool
from strategy.hostile import differences
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megapar.layers import GeluMLP, LayerNorm

PLAIN = "plain"
SIZES = {"tp2": "tensor_parallel_size", "pp2": "pipeline_parallel_size", "dp2": "data_parallel_size"}
GLOBAL_BATCH = 8
BOTH = ("pp2", "tp2")


def slow(*values: Any) -> Any:
    """Parameters of a case that the default run leaves out: a close one is in it."""
    return pytest.param(*values, marks=pytest.mark.slow)


def options(layout: str) -> dict[str, Any]:
    """``"dp2_pp2"`` -> the strategy's arguments."""
    return {SIZES[part]: 2 for part in layout.split("_")} if layout != PLAIN else {}


def world(layout: str) -> int:
    return int(2 ** len(options(layout)))


def data_size(layout: str) -> int:
    return 2 if "dp2" in layout else 1


def rows(count: int, seed: int = 2) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randint(0, 5, (count,), generator=generator))


def loader(layout: str, count: int = 32, batch: int = GLOBAL_BATCH, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(rows(count), batch_size=batch // data_size(layout), **kwargs)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = LayerNorm(16), GeluMLP(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(LightningModule):
    """Four blocks between an input and an output layer; the blocks are whole until a strategy shards them."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])
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
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class PlainBlock(nn.Module):
    """Of torch's own layers, which a strategy shards by a plan, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class PlainNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[PlainBlock() for _ in range(4)])


class Memory(Logger):
    """A logger that keeps what it is given."""

    def __init__(self, name: str = "memory") -> None:
        super().__init__()
        self._name = name
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.hparams: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, {k: float(v) for k, v in metrics.items()}))

    def log_hyperparams(self, params: Any, *_: Any) -> None:
        self.hparams = dict(params)


def whole(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    """The whole module's weights on rank 0."""
    strategy: Any = trainer.strategy
    if hasattr(strategy, "full_state_dict"):
        return strategy.full_state_dict()
    return {k: v.detach().clone() for k, v in module.state_dict().items()}


def gradients(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    """Every gradient, whole, on rank 0."""
    from lightning_megapar.checkpoint import gather_full_state_dict

    strategy: Any = trainer.strategy
    if not hasattr(strategy, "prepared"):
        return {n: p.grad.detach().clone() for n, p in module.named_parameters() if p.grad is not None}
    records = [r for r in strategy.prepared.parameters if r.parameter.grad is not None]
    held = {r.name: r.as_value(r.parameter.grad.detach()) for r in records}
    # Frozen parameters have none, on any rank.
    everyone: list[Any] = [list(held)] * strategy.layout.world_size
    if len(everyone) > 1:
        dist.all_gather_object(everyone, list(held))
    anywhere = {name for names in everyone for name in names}
    return gather_full_state_dict([n for n in strategy.prepared.names.parameters if n in anywhere], held)


class Watch(Callback):
    """What a user's callback sees, every gradient before each optimizer step, the weights at the end."""

    def __init__(self) -> None:
        self.batches: list[dict[str, float]] = []
        self.validations: list[tuple[int, dict[str, float]]] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.rates: list[list[float]] = []
        self.losses: list[float] = []
        self.weights: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.gradients.append(gradients(trainer, pl_module))
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.batches.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        self.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validations.append((trainer.global_step, {k: float(v) for k, v in trainer.callback_metrics.items()}))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights = whole(trainer, pl_module)


def strategy_of(layout: str, **more: Any) -> Any:
    if layout == PLAIN:
        return "auto"
    from lightning_megapar import MegaParStrategy

    return MegaParStrategy(timeout_seconds=30, **options(layout), **more)


def make_trainer(layout: str, callbacks: Sequence[Callback] = (), **kwargs: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    usual = {"max_epochs": 2, "precision": "64-true", "logger": False, "enable_checkpointing": False, **quiet}
    strategy = strategy_of(layout, **kwargs.pop("strategy_options", {}))
    more = {**usual, **kwargs}
    return Trainer(strategy=strategy, accelerator="cpu", devices=world(layout), callbacks=list(callbacks), **more)


def fit(
    layout: str,
    module: Callable[[], LightningModule] = Net,
    *,
    train: Any = None,
    validate: Any = None,
    callbacks: Sequence[Callback] = (),
    loggers: int = 0,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train on this rank; ``validate=True`` takes twelve samples. What comes back must not depend on the layout."""
    watch = Watch()
    memories = [Memory(f"memory{i}") for i in range(loggers)]
    trainer = make_trainer(layout, [*callbacks, watch], logger=memories or False, **kwargs)
    torch.manual_seed(0)
    made = module().double()
    val = loader(layout, 12, 4) if validate is True else validate
    trainer.fit(made, loader(layout) if train is None else train, val)
    return {
        "batches": watch.batches,
        "validations": watch.validations,
        "rates": watch.rates,
        "losses": watch.losses,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "events": list(getattr(made, "events", [])),
        "of_rank_0": {
            "gradients": watch.gradients,
            "weights": watch.weights,
            "logged": [memory.rows for memory in memories],
        },
    }


def agree(results: list[dict[str, Any]], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    """Rank 0 has what plain Lightning has; every rank saw the same."""
    found = differences(results[0], expected, tolerance=tolerance)
    assert not found, found[:8]
    for rank, other in enumerate(results[1:], 1):
        mine = {k: v for k, v in results[0].items() if k != "of_rank_0"}
        theirs = {k: v for k, v in other.items() if k != "of_rank_0"}
        found = differences(theirs, mine, f"rank {rank}", tolerance)
        assert not found, found[:8]


def compare(pool: RankPool, run: Callable[..., dict[str, Any]], layout: str, *args: Any, **kwargs: Any) -> dict:
    """``run(layout, ...)`` on the ranks of a layout against ``run("plain", ...)`` here; returns the expected."""
    tolerance = kwargs.pop("tolerance", 1e-9)
    expected = run(PLAIN, *args, **kwargs)
    agree(pool.run(run, world(layout), layout, *args, mode="trainer", **kwargs), expected, tolerance)
    return expected
