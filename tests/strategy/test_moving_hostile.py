"""Modules, callbacks and settings with which a block cannot simply change its stage."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import hostile
import pytest
import torch
from hostile import Net, WideBlock
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from pool import RankError, RankPool
from test_moving import Rows, agree, fit
from torch import Tensor, nn
from torchmetrics import MeanMetric

FOUR_BLOCKS = {0: ((0, 1), (1, 4)), 1: ((0, 3), (3, 4)), 2: ((0, 2), (2, 4))}


class Validated(Rows):
    """Validation between the moves, on blocks that came and went."""


class Late(Rows):
    """Built in configure_model."""

    def __init__(self) -> None:
        LightningModule.__init__(self)

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            made = Rows()
            for name, child in made.named_children():
                self.add_module(name, child)


class Shared(Net):
    """One layer in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3][0] = self.blocks[0][0]  # type: ignore[index]


class TiedOutside(Net):
    """The input layer is a block's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.blocks[1][0].weight  # type: ignore[index,union-attr]


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].compile()  # type: ignore[index]


class Metered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].mean = MeanMetric()  # type: ignore[index]


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Odd(Net):
    """A block that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].rows = (row for row in range(3))  # type: ignore[index]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Shared, "shares a parameter, a buffer or a layer with block"),
        (TiedOutside, "belongs to block 1 as well"),
        (Compiled, "is compiled, and a compiled block cannot be moved"),
        (Metered, "holds a torchmetrics object"),
        (Odd, "cannot be copied"),
    ],
)
def test_blocks_that_cannot_be_moved_are_refused(pool: RankPool, module: type[Net], text: str) -> None:
    with pytest.raises(RankError, match=text):
        pool.run(hostile.fit, 2, "pp2", module, mode="trainer", options={"rebalance": "layers"})


def test_steps_by_hand_are_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rebalance needs automatic optimization: ByHand sets"):
        options = {"rebalance": "replicas", "num_microbatches": 2}
        pool.run(hostile.fit, 2, "dp2", ByHand, mode="trainer", options=options)


class Keeps(nn.Module):
    """A block that keeps what it has seen in attributes of all kinds, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls, self.means = 0, {"last": torch.zeros(8, dtype=torch.float64), "all": [0.0]}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.linear(x)) * (1 + 0.1 * self.means["last"]) + 0.01 * self.means["all"][-1]  # type: ignore[index]
        if self.training:
            self.calls += 1
            with torch.no_grad():
                self.means["last"] = 0.9 * self.means["last"] + 0.1 * out.mean(0)  # type: ignore[operator]
                self.means["all"].append(float(self.calls % 5))  # type: ignore[union-attr]
        return out


class Keeping(Rows):
    """One microbatch, so that one process sees the same calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Keeps() for _ in range(8)])


def test_what_blocks_keep_in_attributes_goes_along(pool: RankPool) -> None:
    results = pool.run(fit, 2, "pp2", Keeping, FOUR_STEPS, mode="trainer", samples=True, num_microbatches=1)
    agree(results, fit(hostile.PLAIN, Keeping, samples=True), moves=6)


class Options:
    rate = 0.1


class Sharer(nn.Module):
    """It also has one buffer under two names, a list that two layers share, and collections of its own."""

    def __init__(self, options: Options, shared: dict[str, Tensor], rate: Any) -> None:
        super().__init__()
        self.options, self.shared, self.rate = options, shared, rate
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("first", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("second", self.first)
        self.one.seen = self.two.seen = [0.0]  # type: ignore[assignment]
        self.last, self.kinds, self.warm = deque([0.0], maxlen=2), Counter({"a": 1}), True

    def forward(self, x: Tensor) -> Tensor:
        more = self.shared["scale"] * self.options.rate * self.rate() + self.second + self.two.seen[-1]  # type: ignore[index]
        out: Tensor = x + torch.tanh(self.two(torch.tanh(self.one(x)))) * (1 + more + self.last[0] + self.kinds["a"])
        if self.training:
            self.first.add_(0.01)  # type: ignore[operator]
            self.one.seen.append(0.02 * len(self.one.seen))  # type: ignore[operator,union-attr,arg-type]
            self.last.append(self.last[-1] + 0.01)
            self.kinds["a"] += 1
            if hasattr(self, "warm"):
                del self.warm
            else:
                out = out * 0.99
        return out


class Sharing(Rows):
    """Blocks that share objects with the module, which changes them, and among themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.options, self.shared = Options(), {"scale": torch.ones(8, dtype=torch.float64)}
        self.blocks = nn.Sequential(*[Sharer(self.options, self.shared, self.pace) for _ in range(8)])
        self.steps_done = 0

    def pace(self) -> float:
        return 1 + 0.1 * self.steps_done

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.options.rate *= 0.9
        self.shared["scale"] = self.shared["scale"] * 1.1
        self.steps_done += 1


def test_shared_objects_stay_shared(pool: RankPool) -> None:
    results = pool.run(fit, 2, "pp2", Sharing, FOUR_STEPS, mode="trainer", samples=True, num_microbatches=1)
    agree(results, fit(hostile.PLAIN, Sharing, samples=True), moves=6)


class SharedBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(16, dtype=torch.float64))
        for block in self.blocks:
            block.register_buffer("table", self.table)  # type: ignore[arg-type]


class OwnList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].kept = [self.blocks[1][0].weight]  # type: ignore[index]


class ListOfBlocks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.every_second = [self.blocks[0], self.blocks[2]]  # type: ignore[index]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (SharedBuffer, "shares a parameter, a buffer or a layer with block 0|belongs to block"),
        (OwnList, "'blocks.1.kept' holds a parameter of block 1"),
        (ListOfBlocks, "'every_second' holds block 0"),
    ],
)
def test_what_would_go_stale_is_refused(pool: RankPool, module: type[Net], text: str) -> None:
    with pytest.raises(RankError, match=text):
        pool.run(hostile.fit, 2, "pp2", module, mode="trainer", options={"rebalance": "layers"})


class KeepsParameters(Callback):
    """Keeps parameters of a block from the start of the run."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.kept = [p for block in module.blocks for p in block.parameters()]


def kept() -> dict[str, Any]:
    return fit("pp2", Rows, {0: ((0, 2), (2, 8))}, samples=True, more=[KeepsParameters()])


def test_a_callback_that_keeps_parameters_keeps_blocks_where_they_are(pool: RankPool) -> None:
    results = pool.run(kept, 2, mode="trainer")
    assert set(results[0]["_moves"]) == {"declined"} and set(results[0]["_held"]) == {4}


def test_averages_of_a_stage_s_weights_are_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match="layers cannot be moved beside WeightAveraging"):
        pool.run(hostile.fit, 2, "pp2", mode="trainer", callbacks=[WeightAveraging()], options={"rebalance": "layers"})


class HooksABlock(Callback):
    """Puts a hook on a block once the run has begun: a copy of the block would not call it."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.blocks[2].register_forward_hook(lambda *_: None)


def hooked() -> dict[str, Any]:
    return fit("pp2", Rows, {0: ((0, 2), (2, 8)), 2: ((0, 1), (1, 8))}, samples=True, more=[HooksABlock()])


def test_hooks_that_came_later_keep_a_block_where_it_is(pool: RankPool) -> None:
    results = pool.run(hooked, 2, mode="trainer")
    assert results[0]["_moves"] == ["declined"] * len(results[0]["_moves"]) and results[0]["_moves"]
    assert set(results[0]["_held"]) == {4}


@pytest.mark.parametrize("module", [Validated, Late])
def test_odd_modules(pool: RankPool, module: type[Rows]) -> None:
    options: dict[str, Any] = {"samples": True, "validate": True}
    results = pool.run(fit, 2, "pp2", module, FOUR_STEPS, mode="trainer", **options)
    agree(results, fit(hostile.PLAIN, module, **options), moves=6)


FOUR_STEPS = {0: ((0, 1), (1, 8)), 1: ((0, 7), (7, 8)), 2: ((0, 4), (4, 8))}


class Wide(Net):
    """Blocks that tensor ranks cut, for each data rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[WideBlock() for _ in range(4)])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, amsgrad=True)


@pytest.mark.parametrize("layout", ["tp2_pp2", "dp2_pp2_zb_h1"])
def test_pieces_and_replicas(pool: RankPool, layout: str) -> None:
    results = pool.run(fit, 4, layout, Wide, FOUR_BLOCKS, mode="trainer", samples=True)
    agree(results, fit(hostile.PLAIN, Wide, samples=True), moves=6)
    assert results[0]["_cut"] == (layout == "tp2_pp2")


def precise(precision: str, ranges: Any) -> dict[str, Any]:
    return fit("pp2", Rows, ranges, samples=True, precision=precision, dtype=torch.float32)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_low_precision_is_moved_bit_for_bit(pool: RankPool, precision: str) -> None:
    still = pool.run(precise, 2, precision, {}, mode="trainer")
    moved = pool.run(precise, 2, precision, FOUR_STEPS, mode="trainer")
    for name, value in still[0]["weights"].items():
        assert torch.equal(moved[0]["weights"][name], value), name


class Wide16(Rows):
    """Linear layers that can multiply in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(8, 16), nn.Linear(16, 5)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))


def in_8_bits(ranges: Any) -> dict[str, Any]:
    options = {"samples": True, "precision": "bf16-mixed", "dtype": torch.float32, "fp8": "rowwise"}
    return fit("pp2", Wide16, ranges, **options)


def test_blocks_that_multiply_in_8_bits_still_do_when_moved(pool: RankPool) -> None:
    pytest.importorskip("torchao")
    still = pool.run(in_8_bits, 2, {}, mode="trainer")
    moved = pool.run(in_8_bits, 2, FOUR_STEPS, mode="trainer")
    for name, value in still[0]["weights"].items():
        assert torch.equal(moved[0]["weights"][name], value), name


def twice() -> list[dict[str, Any]]:
    """Two runs of one strategy, trainer and module; blocks are where the first one left them."""
    from lightning.pytorch import Trainer
    from test_moving import Move

    from lightning_megapar import MegaParStrategy

    strategy = MegaParStrategy(pipeline_parallel_size=2, rebalance={"min_gain": 0.9}, timeout_seconds=20)
    move, watch = Move({1: ((0, 1), (1, 8))}, None), hostile.Watch()
    quiet = {**hostile.QUIET, "precision": "64-true"}
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, callbacks=[move, watch], **quiet)
    torch.manual_seed(0)
    module = Rows().double()
    trainer.fit(module, hostile.loader("pp2"))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, hostile.loader("pp2"))
    return [{"held": move.held, "weights": watch.weights}]


def test_a_second_run_goes_on_with_the_blocks_where_they_are(pool: RankPool) -> None:
    results = pool.run(twice, 2, mode="trainer")
    assert results[0][0]["held"][:3] == [4, 4, 1]


class Looks(Rows):
    """A step that reads shapes and options of all blocks, whichever stage holds them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        widths = sum(block.up.out_features + block.up.weight.shape[0] for block in self.blocks)  # type: ignore[union-attr]
        return self.loss(batch) * (widths / 256)


def test_a_step_that_looks_at_blocks_of_other_stages(pool: RankPool) -> None:
    results = pool.run(fit, 2, "pp2", Looks, FOUR_STEPS, mode="trainer", samples=True)
    agree(results, fit(hostile.PLAIN, Looks, samples=True), moves=6)
