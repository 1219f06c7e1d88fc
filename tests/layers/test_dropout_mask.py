"""Dropout keeps one byte an element for the backward, and computes what a product with the drawn values computes."""

from __future__ import annotations

import pytest
import torch
from pool import RankPool
from sharded_cases import tensor_mesh

from lightning_megapar.layers import SequenceDropout
from lightning_megapar.memory.saved import SavedBytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.37, 0.5])
def test_as_a_product(dtype: torch.dtype, p: float) -> None:
    x, upstream = torch.randn(2, 4, 33, 65).to(dtype).unbind()
    x.requires_grad_()
    found = []
    for by_hand in (False, True):
        torch.manual_seed(0)
        with SavedBytes() as saved:
            y = SequenceDropout(p)(x) if not by_hand else x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
        kept = saved.bytes
        found.append((y, torch.autograd.grad(y, x, upstream)[0], torch.rand(1), kept))
    (y, grad, after, kept), (expected, expected_grad, expected_after, product_kept) = found
    assert torch.equal(y, expected) and torch.equal(grad, expected_grad) and torch.equal(after, expected_after)
    assert y.dtype == dtype and kept == 4 * 33 * 65 + dtype.itemsize
    assert product_kept == 4 * 33 * 65 * dtype.itemsize


def kept_of_a_slice() -> int:
    mesh = tensor_mesh()
    assert mesh is not None
    layer = SequenceDropout(0.5)
    layer.shard(mesh, sequence_parallel=True)
    x = torch.randn(2, 8, 16, requires_grad=True)
    with SavedBytes() as saved:
        y = layer(x)
    kept = saved.bytes
    y.sum().backward()
    return kept


def test_a_rank_keeps_its_own_part_of_the_mask(pool: RankPool) -> None:
    assert pool.run(kept_of_a_slice, 2) == [2 * 8 * 16 + 4] * 2
