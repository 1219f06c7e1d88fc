"""Blocks that change their stage while a run goes on: nothing of the numbers changes."""

from __future__ import annotations

from typing import Any

import hostile
import pytest
import torch
from hostile import Net
from lightning.pytorch import Callback
from pool import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_megapar.pipeline.balance.decide import Proposal

WORDS = 11


class Block(nn.Module):
    """With a buffer that training changes, dropout-free, and a counter in a plain attribute."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.full((8,), 1.25), persistent=False)
        self.recomputed = recomputed

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.shape[0]
        if self.recomputed and self.training:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.inner(x)


class Stack(Net):
    """A tied embedding, recomputed and frozen blocks, AdamW with two groups."""

    def __init__(self) -> None:
        super().__init__()
        del self.inp
        self.words = nn.Embedding(WORDS, 8)
        self.blocks = nn.Sequential(*[Block(recomputed=index % 2 == 0) for index in range(8)])
        self.head = nn.Linear(8, WORDS)
        self.head.weight = self.words.weight
        self.blocks[1].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.blocks(self.words(batch[:, :-1]))
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


class Rows(Stack):
    """The same blocks for rows of numbers."""

    def __init__(self) -> None:
        super().__init__()
        del self.words
        self.inp, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


class Momentum(Stack):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.named_parameters(), lr=0.1, momentum=0.9)


class Dropped(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:  # type: ignore[union-attr]
            block.drop = nn.Dropout(0.5)
            block.norm = nn.Sequential(block.norm, block.drop)


def sentences() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    shapes = ((8, 6), (8, 3), (8, 9), (3, 5), (8, 4), (8, 6), (8, 2), (8, 7))
    batches = [torch.randint(0, WORDS, shape, generator=generator) for shape in shapes]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


class Move(Callback):
    """Orders moves as the first rank would."""

    def __init__(self, ranges: dict[int, tuple[tuple[int, int], ...]], save: tuple[int, str] | None) -> None:
        self.ranges, self.save = ranges, save
        self.held: list[int] = []
        self.events: list[str] = []
        self.strategy: Any = None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.strategy = trainer.strategy
        rebalancer = trainer.strategy._rebalancer
        if self.save is not None and batch_idx == self.save[0]:
            trainer.save_checkpoint(self.save[1])
        cut = trainer.strategy.prepared.cut
        self.held.append(0 if cut is None else len(cut.local_blocks()))
        if batch_idx in self.ranges:
            rebalancer._agenda = Proposal("layers", self.ranges[batch_idx], rebalancer.shares, 1.0, 0.5)


def fit(layout: str, module: type[Net] = Stack, ranges: Any = None, **options: Any) -> dict[str, Any]:
    """As :func:`hostile.fit`, with the moves that were made and the blocks that each rank held in each step."""
    names = (
        "accumulate_grad_batches",
        "gradient_clip_val",
        "max_epochs",
        "validate",
        "ckpt_path",
        "precision",
        "dtype",
    )
    kwargs = {name: options.pop(name) for name in names if name in options}
    save, more = options.pop("save", None), options.pop("more", [])
    train = hostile.loader(layout) if options.pop("samples", False) else sentences()
    if layout == hostile.PLAIN:
        return hostile.fit(layout, module, train=train, options=options, **kwargs)
    options = {"rebalance": {"min_gain": 0.9, "replicas": False}, **options}
    move = Move(ranges or {}, save)
    result = hostile.fit(layout, module, train=train, callbacks=[move, *more], options=options, **kwargs)
    move.events = [event.kind for event in move.strategy.balance_events if event.kind not in ("slow", "measured")]
    return {**result, "_moves": move.events, "_held": move.held, "_cut": move.strategy.prepared.is_cut}


def agree(results: list[dict[str, Any]], expected: dict[str, Any], moves: int) -> None:
    for one in results:
        assert one["_moves"] == ["layers"] * moves
    shown = [{key: value for key, value in one.items() if key[0] != "_"} for one in results]
    hostile.agree(shown, expected)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return fit(hostile.PLAIN)


THERE_AND_BACK = {0: ((0, 2), (2, 8)), 2: ((0, 7), (7, 8)), 4: ((0, 1), (1, 8)), 5: ((0, 4), (4, 8))}
FOUR_CHUNKS = {
    0: ((0, 1), (1, 2), (2, 3), (3, 8)),
    2: ((0, 5), (5, 6), (6, 7), (7, 8)),
    4: ((0, 1), (1, 3), (3, 7), (7, 8)),
}


def test_there_and_back(pool: RankPool, expected: dict[str, Any]) -> None:
    first, second = pool.run(fit, 2, "pp2", Stack, THERE_AND_BACK, mode="trainer")
    agree([first, second], expected, moves=8)
    assert first["_held"] == [4, 2, 2, 7, 7, 1, 4, 4, 4, 2, 2, 7, 7, 1, 4, 4]
    assert second["_held"] == [8 - held for held in first["_held"]]


@pytest.mark.parametrize("layout", ["pp2_zbv", "tp2_pp2"])
def test_chunks_and_pieces(pool: RankPool, expected: dict[str, Any], layout: str) -> None:
    ranks = hostile.LAYOUTS[layout][0]
    ranges = FOUR_CHUNKS if ranks == 2 else THERE_AND_BACK
    results = pool.run(fit, ranks, layout, Stack, ranges, mode="trainer")
    agree(results, expected, moves=2 * len(ranges))
    assert results[0]["_cut"] == (layout == "tp2_pp2")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "zb_h2", "interleaved_1f1b", "dualpipe_v"])
def test_every_schedule(pool: RankPool, expected: dict[str, Any], schedule: str) -> None:
    ranges = FOUR_CHUNKS if schedule in ("interleaved_1f1b", "dualpipe_v") else THERE_AND_BACK
    results = pool.run(fit, 2, "pp2", Stack, ranges, mode="trainer", pipeline_schedule=schedule)
    agree(results, expected, moves=2 * len(ranges))


def test_an_accumulation_window_and_clipping(pool: RankPool) -> None:
    """Moves wait for the window's end; gradients that nobody has zeroed yet go along."""
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}
    expected = fit(hostile.PLAIN, Momentum, **options)
    results = pool.run(fit, 2, "pp2", Momentum, THERE_AND_BACK, mode="trainer", **options)
    shown = [{key: value for key, value in one.items() if key[0] != "_"} for one in results]
    hostile.agree(shown, expected)
    assert results[0]["_moves"] == ["layers"] * 4 and set(results[0]["_held"]) == {4, 7}


def test_dropout_masks_do_not_depend_on_the_stage(pool: RankPool) -> None:
    still = pool.run(fit, 2, "pp2", Dropped, {}, mode="trainer")
    moved = pool.run(fit, 2, "pp2", Dropped, THERE_AND_BACK, mode="trainer")
    expected = {key: value for key, value in still[0].items() if key[0] != "_"}
    agree(moved, expected, moves=8)


def test_checkpoints_of_moved_blocks_open_anywhere(pool: RankPool, tmp_path: Any) -> None:
    """Saved in the middle of an epoch on other stages than the run began with; another layout goes on with it."""
    path = str(tmp_path / "moved.ckpt")
    expected = fit(hostile.PLAIN, Rows, samples=True)
    ranges = {0: ((0, 1), (1, 8)), 1: ((0, 7), (7, 8))}
    pool.run(fit, 2, "pp2", Rows, ranges, mode="trainer", max_epochs=1, save=(2, path), samples=True)
    options = {"samples": True, "rebalance": None, "ckpt_path": path}
    results = pool.run(fit, 2, "tp2", Rows, None, mode="trainer", **options)
    assert hostile.differences(results[0]["weights"], expected["weights"]) == []
