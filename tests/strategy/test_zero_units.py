"""What zero_stage=1 shards together, and the ties that it cannot keep."""

from __future__ import annotations

from typing import Any, cast

import hostile
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from pool import RankPool
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_megapar.config import ConfigError
from lightning_megapar.data_parallel.reduction import ReduceOnce
from lightning_megapar.data_parallel.units import units_of
from lightning_megapar.data_parallel.zero import _refuse_unknown


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks: Any = nn.ModuleList([nn.ModuleDict({"mlp": nn.Linear(4, 4)}) for _ in range(3)])

    def units(self) -> list[tuple[nn.Module, ...]]:
        return units_of(self, list(dict.fromkeys(self.blocks)))


def alone(*modules: nn.Module) -> list[tuple[nn.Module, ...]]:
    return [(module,) for module in modules]


def tie_two_blocks(body: Any) -> None:
    body.blocks[2].mlp.weight = body.blocks[0].mlp.weight


def share_a_module(body: Any) -> None:
    body.blocks[2].mlp = body.blocks[0].mlp


def tie_to_the_input(body: Any) -> None:
    body.blocks[1].mlp.bias = body.inp.bias


def tie_to_the_root(body: Any) -> None:
    body.scale = nn.Parameter(body.blocks[1].mlp.bias.detach().clone())
    body.blocks[1].mlp.bias = body.scale


@pytest.mark.parametrize(
    ("tie", "says"),
    [
        (tie_two_blocks, r"'blocks.0.mlp.weight' and 'blocks.2.mlp.weight' are one parameter.*which two blocks share"),
        (share_a_module, r"'blocks.0.mlp.weight' and 'blocks.2.mlp.weight' are one parameter.*which two blocks share"),
        (tie_to_the_input, r"'inp.bias' and 'blocks.1.mlp.bias' are one.*a block shares with a module outside"),
        (tie_to_the_root, r"'scale' and 'blocks.1.mlp.bias' are one.*a block shares with a module outside"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_parameters_tied_to_a_block_are_refused(tie: Any, says: str) -> None:
    body = Body()
    tie(body)
    with pytest.raises(ConfigError, match=rf"zero_stage=1: {says}.*Valid values: zero_stage=0, or give each its own"):
        body.units()


def test_a_module_around_the_blocks_and_one_beside_them() -> None:
    body = Body()
    body.bias = body.head.bias
    says = (
        "zero_stage=1: 'bias' and 'head.bias' are one parameter .*module around the blocks.*Valid values: zero_stage=0"
    )
    with pytest.raises(ConfigError, match=says):
        body.units()


def test_a_parameter_without_dimensions_is_refused_by_name() -> None:
    body = Body()
    body.scale = nn.Parameter(torch.ones(()))  # of the module around the blocks: stays whole
    body.units()
    body.blocks[1].gain = nn.Parameter(torch.ones(()))
    with pytest.raises(ConfigError, match=r"zero_stage=1: 'blocks.1.gain' has no dimension.*give it the shape \(1,\)"):
        body.units()


def test_other_ties_are_kept() -> None:
    body = Body()
    body.head.weight = body.inp.weight  # beside the stack: one unit of both
    assert body.units() == [*alone(*body.blocks), (body.inp, body.head)]
    body = Body()
    body.norms = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])  # a list has no forward that could gather it
    body.norms[0].weight, body.norms[1].bias, body.head.weight = body.inp.weight, body.head.bias, body.norms[1].weight
    assert body.units() == [*alone(*body.blocks), (body.inp, body.norms[0]), (body.head, body.norms[1])]
    body = Body()
    body.blocks[2] = body.blocks[0]  # a whole block in two places
    assert body.units() == alone(body.blocks[0], body.blocks[1], body.inp, body.head)
    body = Body()
    body.alias = body.blocks[1].mlp  # another name of a part of a block
    assert body.units() == alone(*body.blocks, body.inp, body.head)


def test_a_torch_that_cannot_be_told_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"FSDP2 of torch .* has no FSDPState._root_post.*or a torch from 2.11 to 2.13"
    ):
        _refuse_unknown(cast("FSDPModule", nn.Linear(1, 1)), 1)


class Units:
    """What a :class:`ReduceOnce` needs of the units: notes when they would be reduced."""

    def __init__(self) -> None:
        users = {"block 0": {0}, "block 1": {1}, "tied": {0, 1}}
        self.units, self.users = list(users), list(users.values())
        self.opened: list[str] = []
        self.reduced: list[str] = []

    def open(self, units: list[str]) -> None:
        assert not self.opened
        self.opened = list(units)

    def close(self) -> None:
        self.reduced += self.opened
        self.opened = []

    def finish(self, reshards: bool) -> None:
        assert reshards and not self.opened


def reduction(order: tuple[int, ...], early: bool) -> tuple[ReduceOnce, Units]:
    units = Units()
    return ReduceOnce(cast("Any", units), order, early), units


def test_the_order_of_the_sums_is_that_of_a_whole_batch() -> None:
    """A data rank with fewer microbatches may complete its chunks in another order; its peers wait in this one."""
    made, units = reduction((1, 0), early=False)
    assert [made.after(0, True), list(units.reduced)] == [False, []]
    assert [made.after(1, True), list(units.reduced)] == [True, ["block 1", "block 0", "tied"]]
    made, units = reduction((1, 0), early=False)
    assert [made.after(1, True), list(units.reduced)] == [True, ["block 1"]]
    assert [made.after(0, True), list(units.reduced)] == [True, ["block 1", "block 0", "tied"]]
    made.finish()
    assert len(units.reduced) == 3


def test_units_are_reduced_within_whole_backwards_and_nowhere_else() -> None:
    made, units = reduction((1, 0), early=True)
    made.before(1, False)
    assert not units.opened and not made.after(1, False)
    made.before(1, True)
    assert units.opened == ["block 1"]
    assert not made.after(1, True) and units.reduced == ["block 1"]
    made.before(0, True)
    assert units.opened == ["block 0", "tied"]
    assert not made.after(0, True) and units.reduced == ["block 1", "block 0", "tied"]
    made, units = reduction((1, 0), early=True)
    made.before(0, True)  # not its turn
    assert not units.opened
    assert not made.after(0, True) and not units.reduced
    made.before(1, True)
    assert units.opened == ["block 1"]
    assert not made.after(1, True) and units.reduced == ["block 1", "block 0", "tied"]
    made, units = reduction((1, 0), early=False)
    made.before(1, True)  # this rank's last action is a whole backward, its peers' may be another
    assert not units.opened


class LeavesOnce(Callback):
    """Ends the first run between the two batches of a step."""

    left = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and not self.left:
            self.left = True
            raise KeyError("left")


def leave_and_begin_again(layout: str) -> dict[str, Tensor]:
    watch = hostile.Watch()
    trainer = hostile.trainer_for(layout, [LeavesOnce(), watch], max_epochs=1, accumulate_grad_batches=2)
    torch.manual_seed(0)
    module = hostile.Net().double()
    with pytest.raises(KeyError, match="left"):
        trainer.fit(module, hostile.loader(layout))
    trainer.fit(module, hostile.loader(layout))
    return watch.weights


def test_gradients_of_a_window_that_was_left_are_forgotten(pool: RankPool) -> None:
    mine = pool.run(leave_and_begin_again, 2, "dp2_zero1", mode="trainer")[0]
    assert hostile.differences(mine, leave_and_begin_again(hostile.PLAIN)) == []
