"""Data ranks whose batches take different ways through a module, under every stage of ZeRO."""

from __future__ import annotations

from typing import Any

import hostile
import pytest
import torch
from hostile import Net
from pool import RankError, RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Experts(nn.Module):
    """A block that sends its batch to one of two experts, by a number in the batch; a third one is never asked."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.experts[int(x.detach().sum() > 0)](x))
        return out


class Routed(Net):
    """Each batch of one sample gives gradients to one expert of a block only. Weight decay tells None from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Experts() for _ in range(3)])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5, eps=1e-3)


class Ordered(Routed):
    """Calls its blocks in an order that the batch chooses; where it is one's own, leaves one of them out."""

    leaves_out = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x)
        blocks = list(self.blocks.children())
        if float(x.detach().sum()) > 0:
            blocks = blocks[:1:-1] if self.leaves_out else blocks[::-1]
        for block in blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


class OrderedLater(Ordered):
    """In one order in the first batch, from which sums learn when they can start within a backward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(-x.abs() if self.calls == 1 else x)


class LeftOut(Ordered):
    leaves_out = True


class Manual(LeftOut):
    """Optimizes by itself, and calls itself once more afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        with torch.no_grad():
            self.log("loss_behind", self.loss(batch))


class ManualExperts(Manual):
    """Of which each step asks one in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Experts() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def train(layout: str, module: type[Net], options: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """One sample for each microbatch, so that one process takes for each sample the way that a rank does."""
    batch = 1 if issubclass(module, Manual) else 4 // hostile.data_size(layout)
    sizes = {"num_microbatches": batch} if layout != hostile.PLAIN else {}
    rows = DataLoader(hostile.data(24), batch_size=batch)
    return hostile.fit(
        layout, module, train=rows, validate=True, max_epochs=1, options={**sizes, **options}, **settings
    )


def alone(module: type[Net], accumulate: int = 1) -> dict[str, Any]:
    """One process, sample by sample."""
    watch = hostile.Watch()
    trainer = hostile.trainer_for(hostile.PLAIN, [watch], max_epochs=1, accumulate_grad_batches=4 * accumulate)
    torch.manual_seed(0)
    trainer.fit(module().double(), DataLoader(hostile.data(24), batch_size=1))
    return {"weights": watch.weights}


@pytest.mark.parametrize("module", [Routed, Ordered, LeftOut])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_each_rank_its_own_way(pool: RankPool, stage: int, module: type[Net]) -> None:
    mine = pool.run(train, 2, "dp2", module, {"zero_stage": stage}, mode="trainer")[0]
    assert hostile.differences(mine["weights"], alone(module)["weights"]) == []


@pytest.mark.parametrize(
    ("world", "layout", "options"),
    [
        (2, "dp2", {"zero_stage": 3}),
        (2, "dp2", {"zero_stage": 1, "offload_optimizer": True}),
        (4, "dp2_pp2", {"zero_stage": 2}),
        (4, "dp2_pp2_zb_h1", {"zero_stage": 1}),
        (4, "dp4", {"zero_stage": 2, "data_parallel_replicas": 2}),
    ],
)
def test_experts_of_one_block(pool: RankPool, world: int, layout: str, options: dict[str, Any]) -> None:
    mine = pool.run(train, world, layout, Routed, options, mode="trainer", accumulate_grad_batches=2)[0]
    assert hostile.differences(mine["weights"], alone(Routed, 2)["weights"]) == []


@pytest.mark.parametrize(("module", "stage"), [(Manual, 1), (Manual, 2), (ManualExperts, 3)])
def test_a_step_that_optimizes_by_itself(pool: RankPool, module: type[Net], stage: int) -> None:
    mine = pool.run(train, 2, "dp2", module, {"zero_stage": stage}, mode="trainer")[0]
    expected = pool.run(train, 2, "dp2", module, {"zero_stage": 0}, mode="trainer")[0]
    assert hostile.differences(mine, expected) == []


OTHER_ORDER = {"zero_stage": 3, "num_microbatches": 1, "timeout_seconds": 5}


def test_stage_3_tells_another_order(pool: RankPool) -> None:
    """Blocks are alike in size, so that a gather takes one for another without noticing."""
    with pytest.raises(RankError) as told:
        pool.run(train, 2, "dp2", Ordered, OTHER_ORDER, mode="trainer")
    says = "StepContractError: zero_stage=3: in validation_step data ranks called different blocks, or in another order"
    assert str(told.value).count(says) == 2


def test_ranks_that_wait_for_one_another_are_told_why(pool: RankPool) -> None:
    """In a backward other orders take a gather for a reduction, which the backend waits for until its timeout."""
    with pytest.raises(RankError, match="zero_stage=3: unless a rank has ended by itself, look for a step or a hook"):
        pool.run(train, 2, "dp2", OrderedLater, OTHER_ORDER, mode="trainer", num_sanity_val_steps=0)


def test_another_order_in_the_first_step_is_told_at_its_end(pool: RankPool) -> None:
    """Before anything is known of backwards, sums wait for their end: no gather is taken for a reduction."""
    with pytest.raises(RankError) as told:
        pool.run(train, 2, "dp2", Ordered, OTHER_ORDER, mode="trainer", num_sanity_val_steps=0)
    says = "StepContractError: zero_stage=3: in training_step data ranks called different blocks, or in another order"
    assert str(told.value).count(says) == 2


class Penalized(Net):
    """A term of the loss that is made of weights, behind the forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss + 0.05 * sum(p.pow(2).sum() for p in self.parameters())


class Scaled(Net):
    """A weight's number in a computation with activations."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss((batch[0] * self.head.weight[0, :8], batch[1]))


@pytest.mark.parametrize("stage", [1, 2])
def test_a_term_of_weights_behind_the_forward(pool: RankPool, stage: int) -> None:
    mine = pool.run(train, 2, "dp2", Penalized, {"zero_stage": stage}, mode="trainer")[0]
    assert hostile.differences(mine["weights"], alone(Penalized)["weights"]) == []


@pytest.mark.parametrize("module", [Penalized, Scaled])
def test_a_term_of_shards_is_refused_by_name(pool: RankPool, module: type[Net]) -> None:
    with pytest.raises(RankError, match="StepContractError: the step reckons with a parameter where its module"):
        pool.run(train, 2, "dp2", module, {"zero_stage": 3}, mode="trainer")
