"""Tensors without numbers: what can be done with them, and what asks for the numbers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megapar.pipeline.cutting.away import OWNED, Away, Ledger, Source, StageError

EMBED = Source("embed", 0, 0)


def away(ledger: Ledger, *size: int, source: Source = EMBED, dtype: torch.dtype = torch.float32) -> Away:
    return Away.make(
        torch.empty(size or (2, 3), dtype=dtype, device="meta"), ledger.device, ledger, frozenset([source])
    )


WEIGHT = torch.randn(3, 3)
SHAPES: list[Callable[[Any], Tensor]] = [
    lambda x: nn.functional.linear(x, WEIGHT) + 1,
    lambda x: torch.cat([x, torch.ones(2, 3)]),
    lambda x: nn.functional.layer_norm(x, (3,)),
    lambda x: nn.functional.dropout(x, 0.5),
    lambda x: x.to(torch.float64)[:, :2].transpose(0, 1),
    lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    lambda x: torch.where(torch.tensor([True, False, True]), x, 0.0),
    lambda x: checkpoint(lambda y: y * 2, x, use_reentrant=False),
    lambda x: torch.func.vmap(lambda y: y + 1)(x),
    lambda x: x.clone().detach().requires_grad_(),
    lambda x: x.max(-1).values,
]


@pytest.mark.parametrize("operation", SHAPES)
def test_operations_keep_shape_and_sources(operation: Callable[[Any], Tensor]) -> None:
    ledger = Ledger()
    found: Any = operation(away(ledger))
    expected = operation(torch.zeros(2, 3))
    assert isinstance(found, Away) and found._sources == {EMBED}
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)


def test_in_place_operations_add_sources() -> None:
    ledger = Ledger()
    other = Source("norm", 1, 0)
    tensor: Any = away(ledger)
    assert tensor.add_(away(ledger, source=other)) is tensor
    assert tensor._sources == {EMBED, other}


@pytest.mark.parametrize(
    "make", [torch.zeros_like, torch.ones_like, lambda x: x.new_full((2, 3), 7.0), lambda x: torch.full_like(x, 7)]
)
def test_what_depends_on_the_shape_alone_has_numbers(make: Callable[[Any], Tensor]) -> None:
    found = make(away(Ledger()))
    assert not isinstance(found, Away) and torch.equal(found, make(torch.empty(2, 3)))


def written(x: Any) -> Tensor:
    kept = torch.zeros(2, 3)
    kept[:, 0] = x[:, 0]
    return kept


NUMBERS: list[Callable[[Any], Any]] = [
    lambda x: x.sum().item(),
    lambda x: bool((x > 0).any()),
    lambda x: x.tolist(),
    lambda x: x.numpy(),
    lambda x: x.nonzero(),
    lambda x: x[x > 0],
    lambda x: pickle.dumps(x),
    written,
]


@pytest.mark.parametrize("operation", NUMBERS)
def test_what_needs_numbers_asks_for_them(operation: Callable[[Any], Any]) -> None:
    ledger = Ledger(recording=True)
    operation(away(ledger))
    assert ledger.needs == {EMBED}
    with pytest.raises(StageError, match="needs what 'embed' returned on a later pipeline stage"):
        operation(away(Ledger()))


def test_a_parameter_of_another_stage_cannot_be_had() -> None:
    ledger = Ledger(recording=True)
    weight: Any = away(ledger, source=Source("embed", 0, OWNED))
    assert weight.dtype == torch.float32
    with pytest.raises(StageError, match=r"a parameter or buffer of 'embed' .* pipeline_keep=\{'embed': 'all'\}"):
        weight.sum().item()


def test_copies_and_words() -> None:
    tensor = away(Ledger())
    assert isinstance(copy.deepcopy(tensor), Away)
    assert "of another pipeline stage, from embed" in repr(tensor)
