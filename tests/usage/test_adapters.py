"""Frozen parameters, adapters beside frozen layers, compiled blocks."""

from __future__ import annotations

from typing import Any

import everyday
import pytest
import torch
from everyday import BOTH, Net, PlainBlock, slow
from pool import RankPool
from torch import Tensor, nn

from lightning_megapar.layers import ColumnParallelLinear, RowParallelLinear


class LoRA(nn.Module):
    """``base(x) + b(a(x)) * 2`` with a frozen base, written by hand around any linear layer."""

    def __init__(self, base: nn.Module, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.base, self.a, self.b = base.requires_grad_(False), a, b

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 2


def around_linear(base: nn.Linear, rank: int = 3) -> LoRA:
    return LoRA(base, nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False))


class Adapters(Net):
    """Everything frozen; adapters beside plain linear layers in the blocks and outside of them."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad = False
        for block in self.blocks:
            block.extra = around_linear(nn.Linear(16, 16))
            block.register_forward_hook(lambda block, _, out: out + block.extra(out))
        self.inp, self.head = around_linear(self.inp), around_linear(self.head)  # type: ignore[assignment]


class ShardedAdapters(Net):
    """Adapters beside layers that tensor parallelism shards: ``b`` of a column layer and ``a`` of a row layer too."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            up, down = block.mlp.up, block.mlp.down
            up = LoRA(up, nn.Linear(16, 3, bias=False), ColumnParallelLinear(3, 32, bias=False))
            down = LoRA(down, RowParallelLinear(32, 3, bias=False), nn.Linear(3, 16, bias=False))
            block.mlp.up, block.mlp.down = up, down


class Filtered(Adapters):
    """As people write it: the optimizer gets what is trainable."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class FirstFrozen(Net):
    """The lower half is frozen: the first stage has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.inp.requires_grad_(False)
        for block in self.blocks[:2]:
            block.requires_grad_(False)


class LastFrozen(Net):
    """The upper half is frozen: the last stage trains nothing, but gradients pass through it."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)
        for block in self.blocks[2:]:
            block.requires_grad_(False)


class HeadOnly(Net):
    """A linear probe: no gradient leaves the head; the optimizer gets the head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inp.requires_grad_(False)
        self.blocks.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class InputOnly(Net):
    """Only the first layer is trained, given to the optimizer as a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)
        self.head.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": self.inp.parameters(), "lr": 0.2}], momentum=0.9)


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize(
    "module",
    [slow(Adapters), ShardedAdapters, Filtered, FirstFrozen, slow(LastFrozen), HeadOnly, slow(InputOnly)],
    ids=lambda m: m.__name__,
)
def test_frozen_and_adapted(pool: RankPool, layout: str, module: type[Net]) -> None:
    expected = everyday.compare(pool, everyday.fit, layout, module, gradient_clip_val=0.5, max_epochs=1)
    trained = set(expected["of_rank_0"]["gradients"][0])
    assert 0 < len(trained) < len(list(module().named_parameters()))


class Thawing(FirstFrozen):
    """Thaws the lower half in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.requires_grad_(True)


@pytest.mark.parametrize("layout", BOTH)
def test_thawing(pool: RankPool, layout: str) -> None:
    everyday.compare(pool, everyday.fit, layout, Thawing)


class Compiled(Net):
    """Blocks compiled where Lightning says that this is to be done; their names gain ``_orig_mod``."""

    backend = "eager"

    def __init__(self) -> None:
        super().__init__()
        self.compiled = False

    def configure_model(self) -> None:
        if not self.compiled:
            self.blocks = nn.Sequential(*[torch.compile(b, backend=self.backend) for b in self.blocks])
            self.compiled = True


class CompiledAot(Compiled):
    backend = "aot_eager"


class CompiledInPlace(Net):
    """``module.compile()``: the names stay as they are."""

    def configure_model(self) -> None:
        for block in self.blocks:
            block.compile(backend="aot_eager")


class CompiledPlain(CompiledAot):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[PlainBlock() for _ in range(4)])


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize(
    "module", [slow(Compiled), CompiledAot, slow(CompiledInPlace), slow(CompiledPlain)], ids=lambda m: m.__name__
)
def test_compiled_blocks(pool: RankPool, layout: str, module: type[Net]) -> None:
    expected = everyday.compare(pool, everyday.fit, layout, module, max_epochs=1, validate=True)
    assert any("_orig_mod" in n for n in expected["of_rank_0"]["weights"]) == (module is not CompiledInPlace)
