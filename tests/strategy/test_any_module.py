"""Modules of all sorts, written without a thought of parallelism, under pipeline and data parallelism."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class TupleBlock(nn.Module):
    """Returns (hidden, something without gradient), takes its hidden state by keyword and a mask built outside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_type = "full"
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, *, hidden_states: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        update = torch.tanh(self.linear(self.norm(hidden_states))) * scale
        return hidden_states + update, update.detach().abs().mean()


class Tuples(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 16)
        self.positions = nn.Parameter(torch.randn(1, 16, 16) * 0.1)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.layers = nn.ModuleList([TupleBlock(16) for _ in range(5)])
        self.head = nn.Linear(16, 61)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch
        hidden = self.frozen(self.embed(tokens)) + self.positions
        scale = (tokens >= 0).double()[:, :, None]
        for layer in self.layers:
            assert layer.attention_type == "full"
            hidden = layer(hidden_states=hidden, scale=scale)[0]
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Encoder(Tuples):
    """torch's own encoder layers in an nn.Sequential, a tied output by plain assignment."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.embed = nn.Embedding(61, 16)
        make = lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)  # noqa: E731
        self.blocks = nn.Sequential(*[make() for _ in range(4)])
        self.head = nn.Linear(16, 61, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch
        logits = self.head(self.blocks(self.embed(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Plain(Tuples):
    """No stack at all: data parallelism only."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.embed = nn.Embedding(61, 16)
        self.head = nn.Linear(16, 61)
        self.scale = nn.Parameter(torch.ones(16))
        self.unused = nn.Linear(3, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.head(self.embed(batch[0]) * self.scale)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class HeadFirst(Tuples):
    """The head is registered before the stack."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.embed = nn.Embedding(61, 16)
        self.head = nn.Linear(16, 61)
        self.blocks = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.head(torch.tanh(self.blocks(self.embed(batch[0]))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class Skip(Encoder):
    """Adds the embedding again behind the stack: a value that only the first stage computes."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.embed(batch[0])
        logits = self.head(self.blocks(hidden) + hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class Manual(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = Encoder.training_step(self, batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()


MODULES = {m.__name__: m for m in (Tuples, Encoder, Plain, HeadFirst, Skip, Manual)}


class Weights(Callback):
    def __init__(self) -> None:
        self.full: dict[str, Tensor] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if hasattr(strategy, "full_state_dict"):
            self.full = strategy.full_state_dict()
        else:
            self.full = {k: v.clone() for k, v in pl_module.state_dict().items()}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(
        torch.randint(0, 61, (48, 16), generator=generator), torch.randint(0, 61, (48, 16), generator=generator)
    )


def train(kind: str, strategy: Any, world: int, batch: int, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    module = MODULES[kind]().double()
    weights = Weights()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world,
        max_epochs=1,
        precision="64-true",
        callbacks=[weights],
        **QUIET,
    )
    trainer.fit(module, DataLoader(data(), batch_size=batch))
    return weights.full


def train_megapar(kind: str, world: int, options: dict[str, Any], unseeded: bool = False) -> dict[str, Tensor]:
    import os

    from lightning_megapar import MegaParStrategy

    strategy = MegaParStrategy(**options)
    batch = 16 // strategy.config.resolve(world)[0].data
    rank = int(os.environ["RANK"])
    return train(kind, strategy, world, batch, seed=rank if unseeded else 0)


PP2 = {"pipeline_parallel_size": 2}
CASES = [
    ("Tuples", 2, PP2),
    ("Tuples", 3, {"pipeline_parallel_size": 3, "num_microbatches": 4}),
    ("Tuples", 4, {"pipeline_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 1}),
    ("Encoder", 2, PP2),
    ("Encoder", 2, {"data_parallel_size": 2}),
    ("Encoder", 2, {"data_parallel_size": 2, "zero_stage": 1}),
    ("Encoder", 2, {"tensor_parallel_size": 2}),
    ("Plain", 2, {"data_parallel_size": 2, "zero_stage": 1}),
    ("Plain", 2, {"data_parallel_size": 2, "num_microbatches": 2}),
    ("HeadFirst", 2, PP2),
    ("HeadFirst", 2, {**PP2, "pipeline_keep": {"head": "last"}}),
    ("Skip", 2, PP2),
    ("Skip", 3, {"pipeline_parallel_size": 3, "num_microbatches": 4}),
    ("Skip", 2, {**PP2, "pipeline_keep": {"embed": "all"}}),
    ("Manual", 2, {"data_parallel_size": 2}),
]


@pytest.mark.parametrize(("kind", "world", "options"), CASES)
def test_weights_equal_plain_lightning(pool: RankPool, kind: str, world: int, options: dict[str, Any]) -> None:
    expected = train(kind, "auto", 1, 16)
    # Ranks other than 0 build other values, as an unseeded script does: all must take rank 0's.
    mine = pool.run(train_megapar, world, kind, world, options, True, mode="trainer")[0]
    assert list(mine) == list(expected)
    for name, weight in expected.items():
        assert parity.relative(mine[name], weight) < 1e-12, name


class Lengths(Encoder):
    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        batches = [
            [torch.randint(0, 61, (rows, length), generator=generator) for _ in range(2)]
            for length, rows in ((16, 8), (9, 8), (16, 5), (3, 8), (12, 2))
        ]
        return DataLoader(batches, batch_size=None)


class LengthsHeadFirst(Lengths, HeadFirst):
    """Its loader comes from a hook, and only a run of the step says where the head belongs."""

    def __init__(self) -> None:
        HeadFirst.__init__(self)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return HeadFirst.training_step(self, batch, batch_idx)


def train_lengths(options: dict[str, Any] | None, world: int, kind: type[Lengths] = Lengths) -> dict[str, Tensor]:
    from lightning_megapar import MegaParStrategy

    torch.manual_seed(0)
    weights = Weights()
    trainer = Trainer(
        strategy="auto" if options is None else MegaParStrategy(**options),
        accelerator="cpu",
        devices=world,
        max_epochs=2,
        precision="64-true",
        callbacks=[weights],
        **QUIET,
    )
    trainer.fit(kind())
    return weights.full


@pytest.mark.parametrize("kind", [Lengths, LengthsHeadFirst])
def test_shapes_and_batch_sizes_may_change_every_step(pool: RankPool, kind: type[Lengths]) -> None:
    expected = train_lengths(None, 1, kind)
    mine = pool.run(train_lengths, 2, PP2, 2, kind, mode="trainer")[0]
    for name, weight in expected.items():
        assert parity.relative(mine[name], weight) < 1e-12, name


def fit_twice(options: dict[str, Any], world: int) -> tuple[list[str], int]:
    """fit, validate on the same trainer, and a second trainer on the same module."""
    from lightning_megapar import MegaParStrategy

    torch.manual_seed(0)
    module = Encoder()
    loader = DataLoader(data(), batch_size=16)
    shapes = []
    for _ in range(2):
        trainer = Trainer(strategy=MegaParStrategy(**options), accelerator="cpu", devices=world, max_epochs=1, **QUIET)
        trainer.fit(module, loader)
        shapes.append(str({k: tuple(v.shape) for k, v in module.state_dict().items()}))
    return shapes, trainer.global_step


def test_a_second_trainer_goes_on_with_the_same_module(pool: RankPool) -> None:
    for shapes, steps in pool.run(fit_twice, 2, PP2, 2, mode="trainer"):
        assert shapes[0] == shapes[1] and steps == 3


def test_bf16(pool: RankPool) -> None:
    world, options = 4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    for precision in ("bf16-mixed", "bf16-true"):
        results = pool.run(
            parity.run_strategy, world, parity.style("llama"), world, "sgd", options, precision=precision,
            mode="trainer",
        )  # fmt: skip
        expected = parity.run_reference(parity.style("llama"), "sgd", dtype=torch.float32)
        assert results[0]["losses"] == pytest.approx(expected["losses"], rel=0.02)
        assert results[0]["norms"] == pytest.approx(expected["norms"], rel=0.05)
