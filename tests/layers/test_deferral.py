"""Weight gradients that wait are the same gradients, and those of other layers do not wait."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megapar.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelHead
from lightning_megapar.layers.deferral import Deferral


class Block(nn.Module):
    """Every kind of linear layer, a norm, an embedding, a shared and a frozen weight."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        conv1d = pytest.importorskip("transformers").pytorch_utils.Conv1D
        self.table = nn.Embedding(7, 4)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        self.conv = conv1d(5, 4)
        self.column, self.row = ColumnParallelLinear(5, 6), RowParallelLinear(6, 4)
        self.norm = nn.LayerNorm(4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.weight.requires_grad_(False)
        self.head = VocabParallelHead(7, 4, vocab_multiple=1)
        self.shared = nn.Linear(4, 7, bias=False)
        self.shared.weight = self.table.weight  # tied
        self.recompute = recompute

    def inner(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.second(torch.tanh(self.first(hidden)))
        return hidden + self.row(torch.tanh(self.column(self.conv(hidden))))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        hidden = checkpoint(self.inner, hidden, use_reentrant=False) if self.recompute else self.inner(hidden)
        hidden = self.frozen(self.norm(hidden))
        return self.shared(hidden).pow(2).mean() + self.head(hidden).pow(2).mean()


def gradients(block: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
def test_the_same_gradients_in_two_halves(recompute: bool) -> None:
    torch.manual_seed(0)
    block = Block(recompute).double()
    batches = torch.randint(0, 7, (3, 2, 5))
    for ids in batches:
        block(ids).backward()
    expected = gradients(block)
    block.zero_grad()
    names = list(block.state_dict())

    deferral = Deferral()
    deferral.connect(block)
    assert list(block.state_dict()) == names and isinstance(block.first, nn.Linear)
    for microbatch, ids in enumerate(batches):
        loss = block(ids)
        with deferral.collecting((0, microbatch)):
            loss.backward()
    now = gradients(block)
    assert set(now) == {"table.weight", "norm.weight", "norm.bias"}  # of the embedding alone, for the tied weight
    for microbatch in (1, 0, 2):
        deferral.compute((0, microbatch))
    assert not deferral._waiting
    found = gradients(block)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14)


def test_nothing_waits_outside_of_a_split_backward_or_behind_a_hook() -> None:
    layer = nn.Linear(3, 3)
    Deferral().connect(layer)
    layer(torch.ones(2, 3)).sum().backward()
    assert layer.weight.grad is not None

    hooked, seen = nn.Linear(3, 3), []
    deferral = Deferral()
    deferral.connect(hooked)
    hooked.weight.register_hook(lambda gradient: seen.append(gradient))
    loss = hooked(torch.ones(2, 3)).sum()
    with deferral.collecting((0, 0)):
        loss.backward()
    assert len(seen) == 1 and hooked.weight.grad is not None and hooked.bias.grad is None
    deferral.compute((0, 0))
    assert hooked.bias.grad is not None


@pytest.mark.parametrize("kind", ["linear", "own"])
def test_under_autocast(kind: str) -> None:
    torch.manual_seed(0)
    made: dict[str, Any] = {"linear": nn.Linear(8, 8), "own": ColumnParallelLinear(8, 8)}
    layer, x = made[kind], torch.randn(4, 8, requires_grad=True)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        assert y.dtype == torch.bfloat16
        return y.float().pow(2).sum()

    run().backward()
    expected, x_gradient = gradients(layer), x.grad
    layer.zero_grad()
    x.grad = None
    deferral = Deferral()
    deferral.connect(layer)
    loss = run()
    with deferral.collecting((0, 0)):
        loss.backward()
    deferral.compute((0, 0))
    torch.testing.assert_close(x.grad, x_gradient)
    for name, gradient in gradients(layer).items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, expected[name], rtol=2e-2, atol=2e-2)


def test_layers_of_somebody_s_class_keep_it() -> None:
    """One class per kind of layer, and none where the forward or the weight is not torch's."""

    class Same(nn.Linear):
        pass

    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    parts = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), Same(3, 3), Scaled(3, 3), normed])
    kinds = [type(part) for part in parts]
    deferral = Deferral()
    deferral.connect(parts)
    assert type(parts[0]) is type(parts[1]) and isinstance(parts[2], Same)
    assert [type(part) for part in parts[3:]] == kinds[3:]
    loss = sum(part(torch.ones(2, 3)).sum() for part in parts)
    with deferral.collecting((0, 0)):
        loss.backward()
    assert [part.bias.grad is None for part in parts] == [True, True, True, False, False]
    deferral.compute((0, 0))
    assert all(parameter.grad is not None for parameter in parts.parameters())


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), ColumnParallelLinear(4, 4), RowParallelLinear(4, 4)])
def test_what_waits_does_not_keep_what_is_behind_it(layer: nn.Module) -> None:
    deferral = Deferral()
    deferral.connect(layer)
    x = torch.ones(2, 4, requires_grad=True)
    behind = weakref.ref(x)
    output = layer(torch.sin(x * 1.0))
    with deferral.collecting((0, 0)):
        output.sum().backward()
    del x, output
    assert behind() is None and layer.weight.grad is None
    deferral.compute((0, 0))
    assert layer.weight.grad is not None
