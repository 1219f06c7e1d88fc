"""Stacks of blocks whose steps do things between, around and beside the blocks."""

from __future__ import annotations

from typing import Any

import hostile
import pytest
import torch
from hostile import Net
from pool import RankError, RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megapar.config import ConfigError


def linears(*after: nn.Module) -> nn.ModuleList:
    return nn.ModuleList([nn.Sequential(nn.Linear(16, 16), *after) if after else nn.Linear(16, 16) for _ in range(4)])


class Between(Net):
    """The nonlinearity stands in the loop, not in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = linears()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden)


class Residual(Between):
    """The residual is added in the loop: a value of the stage before that no block returns."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(hidden)


class InPlaceBetween(Between):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x)
        for block in self.blocks:
            hidden = block(hidden).tanh_()
        return self.head(hidden)


class InPlaceFirst(Net):
    """Each block starts with an operation in place on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16)) for _ in range(4)])


class TwoStreamBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        update = torch.tanh(self.linear(hidden + 0.1 * residual))
        return update, residual + update


class TwoStreams(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TwoStreamBlock() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x)
        residual = torch.zeros_like(hidden)
        for block in self.blocks:
            hidden, residual = block(hidden, residual)
        return self.head(hidden + residual)


class StateBlock(TwoStreamBlock):
    def forward(self, *, state: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return {"hidden": state["hidden"] + torch.tanh(self.linear(state["hidden"])), "count": state["count"] + 1}


class StateDicts(Net):
    """The hidden state is a dict, passed by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([StateBlock() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        state = {"hidden": self.inp(x), "count": torch.zeros(len(x), dtype=torch.int64)}
        for block in self.blocks:
            state = block(state=state)
        assert state["count"].tolist() == [4] * len(x)
        return self.head(state["hidden"])


class AuxiliaryBlock(TwoStreamBlock):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = hidden + torch.tanh(self.linear(hidden))
        return hidden, hidden.pow(2).mean(-1)


class Auxiliary(Net):
    """Adds up a loss of every block, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([AuxiliaryBlock() for _ in range(4)])

    def loss(self, batch: Any) -> Tensor:
        hidden = self.inp(batch[0])
        extra: Any = 0
        for block in self.blocks:
            hidden, one = block(hidden)
            extra = extra + one
        return nn.functional.cross_entropy(self.head(hidden), batch[1]) + 0.1 * extra.mean()


class SharedKeysBlock(TwoStreamBlock):
    def forward(self, hidden: Tensor, shared: dict[str, Tensor], writes: bool) -> Tensor:  # type: ignore[override]
        if writes:
            shared["key"] = self.linear(hidden)
        return hidden + torch.tanh(self.linear(hidden) + shared["key"])


class SharedKeys(Net):
    """Early blocks leave tensors in a dict, without which late ones fail."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SharedKeysBlock() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        hidden, shared = self.inp(x), {}  # type: ignore[var-annotated]
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, shared, index < 2)
        return self.head(hidden)


class Recomputed(Net):
    """Activation checkpointing around each block, dropout in it."""

    recompute = True
    rate = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = linears(nn.Tanh(), nn.Dropout(self.rate))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        return self.head(hidden)


class RecomputedDropout(Recomputed):
    rate = 0.3


class KeptDropout(RecomputedDropout):
    recompute = False


class DropoutAround(Net):
    """Dropout before, between and after the blocks, beside them and in a layer of the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 16))  # type: ignore[assignment]
        self.blocks = linears(nn.Dropout(0.2))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        start = hidden = self.drop(self.drop(self.inp(x)) * 2)
        for block in self.blocks:
            hidden = hidden + nn.functional.dropout(torch.tanh(block(hidden)), 0.3, self.training)
        return self.head(self.drop(hidden) + self.drop(start))


class Hooks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.inp.register_forward_hook(lambda m, args, out: out * 2)
        self.blocks[1].register_forward_hook(lambda m, args, out: out + 1)  # type: ignore[index,operator]
        self.blocks[2].register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))  # type: ignore[index,operator]


class Named(Between):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f"layer{i}": nn.Linear(16, 16) for i in range(4)})  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x)
        for block in self.blocks.values():
            hidden = torch.tanh(block(hidden))
        return self.head(hidden)


class Pairs(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([linears()[:2] for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x)
        for one, two in self.blocks:
            hidden = two(torch.tanh(one(hidden)))
        return self.head(hidden)


class LayerDrop(Between):
    """Leaves out a block: the one before the cut."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x)
        for index, block in enumerate(self.blocks):
            if index != 1:
                hidden = block(hidden)
        return self.head(hidden)


class SharedPartBlock(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(16, 16), shared

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.shared(torch.tanh(self.linear(x)))
        return out


class SharedPart(Net):
    """One module inside all blocks, on every stage under another name."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.blocks = nn.Sequential(*[SharedPartBlock(shared) for _ in range(4)])


class CalledOutside(Net):
    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self(torch.ones(1, 8).double())


@pytest.mark.parametrize("layout", ["pp2", "pp4", "pp2_zbv"])
@pytest.mark.parametrize(
    "module",
    [
        *(Between, Residual, InPlaceBetween, InPlaceFirst, TwoStreams, StateDicts),
        *(Auxiliary, Recomputed, Hooks, LayerDrop),
    ],
    ids=lambda m: m.__name__,
)
def test_like_plain_lightning(pool: RankPool, module: type[Net], layout: str) -> None:
    expected = hostile.fit(hostile.PLAIN, module)
    hostile.agree(pool.run(hostile.fit, hostile.LAYOUTS[layout][0], layout, module, mode="trainer"), expected)


@pytest.mark.parametrize("layout", ["pp2", "dp2_zero1", "tp2_pp2", "dp2_pp2_zero1", "pp2_interleaved"])
def test_values_in_a_shared_dict(pool: RankPool, layout: str) -> None:
    expected = hostile.fit(hostile.PLAIN, SharedKeys)
    hostile.agree(pool.run(hostile.fit, hostile.LAYOUTS[layout][0], layout, SharedKeys, mode="trainer"), expected)


def test_one_module_in_the_blocks_of_several_stages_is_cut_on_each(pool: RankPool) -> None:
    expected = hostile.fit(hostile.PLAIN, SharedPart)
    hostile.agree(pool.run(hostile.fit, 4, "tp2_pp2", SharedPart, mode="trainer"), expected)


def test_named_blocks_when_they_are_named(pool: RankPool) -> None:
    expected = hostile.fit(hostile.PLAIN, Named)
    options = {"pipeline_stack": "blocks"}
    hostile.agree(pool.run(hostile.fit, 2, "pp2", Named, options=options, mode="trainer"), expected)


def test_recomputed_blocks_draw_the_same_dropout(pool: RankPool) -> None:
    kept = pool.run(hostile.fit, 2, "pp2", KeptDropout, mode="trainer")[0]
    recomputed = pool.run(hostile.fit, 2, "pp2", RecomputedDropout, mode="trainer")[0]
    assert hostile.differences(recomputed, kept, tolerance=1e-12) == []


@pytest.mark.parametrize("layout", ["pp2", "pp4", "pp2_interleaved", "pp2_zbv"])
def test_dropout_around_the_blocks_is_the_same_on_all_stages(pool: RankPool, layout: str) -> None:
    """As on ranks that all run the whole module."""
    options = {"num_microbatches": 4}
    uncut = {**options, "sharding_plan": "off"}
    whole = pool.run(hostile.fit, 2, "tp2", DropoutAround, options=uncut, mode="trainer")[0]
    world = hostile.LAYOUTS[layout][0]
    cut = pool.run(hostile.fit, world, layout, DropoutAround, options=options, mode="trainer")
    hostile.agree(cut, whole, tolerance=1e-12)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (CalledOutside, "the stack runs only inside training_step"),
        (Pairs, "its block '0' is an nn.ModuleList, which is not called as a whole"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_refused(pool: RankPool, module: type[Net], message: str) -> None:
    with pytest.raises(RankError, match=message):
        pool.run(hostile.fit, 2, "pp2", module, mode="trainer", timeout=60)


def refit(second: str) -> str:
    """Fit once in halves, then with another schedule; what the second one says."""
    module = Net().double()
    hostile.trainer_for("pp2", max_epochs=1).fit(module, hostile.loader("pp2"))
    again = hostile.trainer_for("pp2", max_epochs=1, options={"pipeline_schedule": second})
    try:
        again.fit(module, hostile.loader("pp2"))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_cut_module_is_fitted_again_only_with_the_same_chunks(pool: RankPool) -> None:
    assert pool.run(refit, 2, "gpipe", mode="trainer") == ["", ""]
    for schedule in ("zbv", "zb_h1"):
        message, _ = pool.run(refit, 2, schedule, mode="trainer")
        assert f"pipeline_schedule='{schedule}'" in message and "Build the module anew" in message
