"""Column layers that share an input share its copy in autocast's dtype, with the numbers of a copy for each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_megapar.layers import ColumnParallelLinear
from lightning_megapar.layers.casting import cast_for_each
from lightning_megapar.layers.deferral import Deferral
from lightning_megapar.layers.linear import column_linears
from lightning_megapar.memory.saved import SavedBytes


@pytest.mark.parametrize("used", [(0, 1, 2), (0, 2), (1,)])
@pytest.mark.parametrize("deferred", [False, True])
def test_bit_equal_to_a_cast_for_each(used: tuple[int, ...], deferred: bool) -> None:
    torch.manual_seed(0)
    layers = [ColumnParallelLinear(64, 32) for _ in range(3)]
    if deferred:
        for layer in layers:
            layer.deferral = Deferral()
    x = torch.randn(2, 16, 64, requires_grad=True)
    values = [x, *(p for number in used for p in layers[number].parameters())]
    found = []
    for shared in (True, False):
        with SavedBytes() as saved, torch.autocast("cpu", torch.bfloat16):
            h = F.layer_norm(x, (64,))
            outputs = column_linears(h, *layers) if shared else [layer(h) for layer in layers]
        inputs = sum(one.bytes == 2 * 16 * 64 * 2 and not one.is_weight_copy for one in saved.storages())
        total = sum(outputs[number].float().square().sum() for number in used)
        found.append((outputs, torch.autograd.grad(total, values), inputs))
    (got, grads, copies), (expected, expected_grads, expected_copies) = found
    assert all(map(torch.equal, got, expected)) and all(map(torch.equal, grads, expected_grads))
    assert (copies, expected_copies) == (1, 3)


def test_second_derivatives() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    first, second = cast_for_each(x, torch.bfloat16, 2)
    (grad,) = torch.autograd.grad((first.float().pow(3) + second.float()).sum(), x, create_graph=True)
    grad.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 6 * x.detach(), rtol=0.02, atol=0.02)


def test_without_autocast_nothing_is_cast() -> None:
    layers = [ColumnParallelLinear(8, 8, dtype=torch.float64) for _ in range(2)]
    x = torch.randn(3, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(y.dtype == torch.float64 for y in column_linears(x, *layers))
