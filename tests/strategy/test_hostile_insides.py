"""What steps take from inside a sharded region is a rank's part: everybody is told, whatever plan is in force."""

from __future__ import annotations

import re
import warnings
from typing import Any

import hostile
import pytest
import torch
from lightning.pytorch import LightningModule
from pool import RankError, RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_megapar.batches import alike, fingerprint

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = nn.functional.dropout(torch.tanh(self.up(x)), 0.1, self.training)
        if self.sparse:
            least = self.hidden.topk(8).values[..., -1:]
            self.hidden = torch.where(self.hidden >= least, self.hidden, 0.0)
        return x + self.down(self.hidden)


class Inside(hostile.Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])

    @property
    def hidden(self) -> Tensor:
        found = self.blocks[-1].hidden  # type: ignore[index]
        assert isinstance(found, Tensor)
        return found.detach()


class LogsATensor(Inside):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        self.log("size", self.hidden.norm())
        return loss


class LogsANumberLater(Inside):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        if batch_idx >= 2:
            self.log("size", self.hidden.norm().item())
        return loss


class LogsInValidation(Inside):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("size", self.hidden.abs().mean())


class LogsAMetric(Inside):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)
        self.mean.update(self.hidden)
        self.log("size", self.mean)


class LogsItsWeights(Inside):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("size", self.blocks[-1].up.weight.norm())  # type: ignore[index,union-attr,operator]
        return loss


class ReturnsIt(Inside):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "hidden": self.hidden}


class PredictsIt(Inside):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self(batch[0])
        return self.hidden


class FillsABuffer(Inside):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("typical", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.typical = 0.9 * self.typical + 0.1 * self.hidden.abs().mean()
        return loss


class SparseLater(Inside):
    """Sums over the largest of its hidden units, from the third step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for block in self.blocks:  # type: ignore[union-attr]
            block.sparse = self.global_step >= 2
        return self.loss(batch)


class LogsForRankZero(Inside):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("mine", float(self.global_rank), rank_zero_only=True)
        if self.global_rank == 0:
            self.log("also_mine", 1.0)
        self.log("loss", loss)
        return loss


def told(layout: str, module: type[LightningModule]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hostile.fit(layout, module, validate=True, options={"sharding_plan": PLAN})
    return [str(w.message) for w in caught if "tensor ranks that share" in str(w.message)]


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        (LogsATensor, "tp2"),
        (LogsANumberLater, "tp2"),
        (LogsInValidation, "tp2"),
        (LogsAMetric, "tp2"),
        (LogsItsWeights, "tp2"),
        (LogsInValidation, "tp2_pp2"),
    ],
)
def test_logs_are_told_of_once(pool: RankPool, module: type[LightningModule], layout: str) -> None:
    messages, *others = pool.run(told, hostile.LAYOUTS[layout][0], layout, module, mode="trainer")
    assert others == [[]] * len(others)
    [message] = messages
    assert re.search(r"self.log\('size'\) got \S+ and \S+ on tensor ranks", message)
    assert "from inside a sharded region" in message and "'replicate'" in message


def news(layout: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hostile.fit(layout, SparseLater, options={"sharding_plan": PLAN})
    return [str(w.message) for w in caught if "pieces of sharded layers" in str(w.message)]


def test_a_step_that_begins_to_look_across_pieces_is_told_of(pool: RankPool) -> None:
    """Asked in the first, second, fourth and eighth step."""
    [message], other = pool.run(news, 2, "tp2", mode="trainer")
    assert other == []
    assert "before step 3" in message and "topk (a piece of 'blocks.0.up')" in message and "tanh" not in message


@pytest.mark.parametrize("module", [Inside, LogsForRankZero], ids=lambda m: m.__name__)
def test_what_is_alike_is_not_told_of(pool: RankPool, module: type[LightningModule]) -> None:
    assert pool.run(told, 2, "tp2", module, mode="trainer") == [[], []]


def test_returned_values_are_told_of_once(pool: RankPool) -> None:
    [message], _ = pool.run(told, 2, "tp2", ReturnsIt, mode="trainer")
    assert message.startswith("validation_step returned different values on tensor ranks that share their samples")


class KeepsTimes(Inside):
    """A buffer with a figure of each rank: no fault where nothing is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seconds", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seconds += self.global_rank
        self.log("seconds", self.seconds)
        return self.loss(batch)


def uncut(layout: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hostile.fit(layout, KeepsTimes, options={"sharding_plan": "off"})
    return [str(w.message) for w in caught if "tensor ranks that share" in str(w.message)]


class Adjacent(hostile.Net):
    """A sparse buffer, as graphs have."""

    persistent = False

    def __init__(self) -> None:
        super().__init__()
        places = torch.tensor([[0, 1, 3], [1, 0, 2]])
        edges = torch.sparse_coo_tensor(places, torch.rand(3).double(), (16, 16)).coalesce()
        self.register_buffer("edges", edges, persistent=self.persistent)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x)
        out: Tensor = self.head(self.blocks(hidden + torch.sparse.mm(self.edges, hidden.T).T))
        return out


def test_a_sparse_buffer_is_that_of_rank_zero(pool: RankPool) -> None:
    expected = hostile.fit(hostile.PLAIN, Adjacent)
    hostile.agree(pool.run(hostile.fit, 2, "tp2", Adjacent, mode="trainer"), expected)


class AdjacentAndSaved(Adjacent):
    persistent = True


def test_a_sparse_buffer_in_checkpoints_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match="the buffer 'edges' of AdjacentAndSaved is sparse"):
        pool.run(hostile.fit, 2, "tp2", AdjacentAndSaved, mode="trainer", timeout=60)


def test_nothing_is_compared_where_nothing_is_cut(pool: RankPool) -> None:
    assert pool.run(uncut, 2, "tp2", mode="trainer") == [[], []]


def test_fingerprints_tell_large_and_mixed_nests_apart() -> None:
    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    for shape in ((8, 32), (64, 3, 224, 224), (8, 1024, 512)):
        one, other = drawn(*shape), drawn(*shape)
        assert not alike(fingerprint(one, device).tolist(), fingerprint(other, device).tolist(), 1e-4)
        rounded = one * (1 + 1e-8 * drawn(*shape))
        assert alike(fingerprint(one, device).tolist(), fingerprint(rounded, device).tolist(), 1e-6)
    large, heads, others = 1e4 * drawn(64, 128, 64), drawn(8, 2, 12, 12).softmax(-1), drawn(8, 2, 12, 12).softmax(-1)
    many = [large] * 10
    one, other = fingerprint([*many, heads], device), fingerprint([*many, others], device)
    assert not alike(one.tolist(), other.tolist(), 1e-4)
    assert alike(fingerprint(torch.zeros(3), device).tolist(), fingerprint(torch.zeros(3), device).tolist(), 0.0)
    assert not alike(fingerprint(torch.zeros(3), device).tolist(), fingerprint(torch.ones(3), device).tolist(), 1e-4)
    assert not alike(fingerprint(one, device).tolist(), fingerprint(2 * one, device).tolist(), 1e-4)


def predict(layout: str) -> Any:
    trainer = hostile.trainer_for(layout, options={"sharding_plan": PLAN})
    return trainer.predict(PredictsIt().double(), hostile.loader(layout, 12))


def test_predictions_from_inside_are_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match="predict_step returned other values on each of the tensor ranks"):
        pool.run(predict, 2, "tp2", mode="trainer", timeout=60)


class Attends(hostile.Net):
    """transformers' Llama with its published plan: each rank has its own heads' attention."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager")
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.model(input_ids=batch, output_attentions=True, output_hidden_states=True)
        return {"hidden": out.hidden_states, "logits": out.logits, "attentions": out.attentions}


def attend(layout: str) -> Any:
    words = torch.randint(0, 50, (8, 12), generator=torch.Generator().manual_seed(0))
    trainer, module = hostile.trainer_for(layout, max_steps=1), Attends().double()
    loader: DataLoader[Any] = DataLoader(words, batch_size=8)  # type: ignore[arg-type]
    trainer.fit(module, loader)  # the plan is proven for its training
    return trainer.predict(module, loader)


def test_attentions_of_a_rank_s_heads_are_no_prediction(pool: RankPool) -> None:
    with pytest.raises(RankError, match="predict_step returned other values on each of the tensor ranks"):
        pool.run(attend, 2, "tp2", mode="trainer", timeout=60)


def test_buffers_from_inside_are_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match="the buffers typical differ between tensor ranks"):
        pool.run(told, 2, "tp2", FillsABuffer, mode="trainer", timeout=60)
