"""Predicted savings against bytes by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_megapar.config import Layout
from lightning_megapar.memory.prediction import ParameterFacts, ZeroLayout
from lightning_megapar.strategy import savings
from lightning_megapar.strategy.savings import Saving, Situation, best_savings

P = 1000
ONE = Situation(
    layout=Layout(),
    zero=ZeroLayout(),
    facts=(ParameterFacts(P, 4),),
    optimizer_tensors=2,
    activations={"none": 34_000, "selective": 30_000, "full": 9_000},
    samples=8,
    is_plain=True,
)
"""Parameters and gradients of 4000 bytes each, 8000 of the optimizer."""
TWO = replace(ONE, layout=Layout(data=2), zero=ZeroLayout(0, 2, 2), is_plain=False)


def said(found: Saving | None) -> tuple[str, int] | None:
    return None if found is None else (found.setting, found.saved_bytes)


def units(schedule: str, microbatches: int) -> float:
    """Of the first of two stages."""
    alive = {"gpipe": microbatches, "1f1b": min(2, microbatches), "zb_h2": min(3, microbatches)}
    return alive[schedule] / microbatches


CASES: list[tuple[Any, Situation, tuple[str, int] | None]] = [
    (savings.by_recomputation, ONE, ("recompute='full'", 25_000)),
    (savings.by_recomputation, replace(ONE, recompute="full"), ("recompute='full'", 0)),
    (savings.by_recomputation, replace(ONE, activations={}), None),
    (savings.by_sharding, ONE, None),
    # Of 16000 bytes: parameters gathered and a half of them, gradients, half of the state is 14000 at stage 1; a half
    # of everything is 8000 at stage 3.
    (savings.by_sharding, TWO, ("zero_stage=3", 8_000)),
    (savings.by_sharding, replace(TWO, schedule="zb_h1"), ("zero_stage=2", 4_000)),
    (savings.by_sharding, replace(TWO, rebalances=True), None),
    (savings.by_offload, TWO, None),
    (savings.by_microbatches, ONE, ("num_microbatches=2", 17_000)),
    (savings.by_microbatches, replace(ONE, microbatches=2, samples=6), ("num_microbatches=6", 22_667)),
    (savings.by_microbatches, replace(ONE, samples=1), None),
    # Several ranks take gradients out of the way before a step, but not between microbatches.
    (savings.by_microbatches, TWO, ("num_microbatches=2", 13_000)),
    (
        savings.by_microbatches,
        replace(ONE, schedule="1f1b", microbatches=4, units=units),
        ("num_microbatches=8", 17_000),
    ),
    (savings.by_microbatches, replace(ONE, schedule="gpipe", microbatches=4, units=units), ("num_microbatches=8", 0)),
    (savings.by_schedule, ONE, None),
    (
        savings.by_schedule,
        replace(ONE, schedule="gpipe", microbatches=4, units=units),
        ("pipeline_schedule='1f1b'", 17_000),
    ),
    (
        savings.by_schedule,
        replace(ONE, schedule="zb_h2", microbatches=4, units=units),
        ("pipeline_schedule='1f1b'", 11_333),
    ),
    (savings.by_schedule, replace(ONE, schedule="1f1b", microbatches=4, units=units), None),
    # Half of 16000, and 12/34 of the activations.
    (savings.by_tensor_ranks, ONE, ("tensor_parallel_size=2", 8_000 + 12_000)),
    (savings.by_stages, ONE, None),
    (savings.by_stages, replace(ONE, blocks=4), ("pipeline_parallel_size=2", 8_000)),
    (savings.by_precision, ONE, ("precision='bf16-true'", 17_000 - 2_000)),
    (savings.by_precision, replace(ONE, precision="bf16-mixed"), None),
    (savings.by_allocator, replace(ONE, fragmented=5000, device_bytes=10_000), None),
    (
        savings.by_allocator,
        replace(ONE, is_cuda=True, fragmented=5000, device_bytes=10_000),
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", 5000),
    ),
    (savings.by_allocator, replace(ONE, is_cuda=True, fragmented=400, device_bytes=10_000), None),
    (savings.by_allocator, replace(ONE, is_cuda=True, fragmented=5000, device_bytes=10_000, expandable=True), None),
]


@pytest.mark.parametrize(("family", "situation", "expected"), CASES)
def test_savings_by_hand(family: Any, situation: Situation, expected: tuple[str, int] | None) -> None:
    assert said(family(situation)) == expected


def test_what_offload_takes_away() -> None:
    sharded = (ParameterFacts(P, 4, True, True),)
    one = replace(TWO, facts=sharded, zero=ZeroLayout(1, 2, 2), is_cuda=True)
    # Shards of 2000 and half of the state; gradients of stage 1 stay until they are reduced.
    assert said(savings.by_offload(one)) == ("offload_optimizer=True", 2_000 + 4_000)
    two = replace(one, zero=ZeroLayout(2, 2, 2))
    assert said(savings.by_offload(two)) == ("offload_optimizer=True", 2_000 + 2_000 + 4_000)
    assert savings.by_offload(replace(two, zero=replace(two.zero, is_offloaded=True))) is None


def test_ranks_come_from_data_parallelism_where_they_can() -> None:
    assert "data_parallel_size=1" in getattr(savings.by_tensor_ranks(TWO), "price", "")
    assert "with 2 ranks" in getattr(savings.by_tensor_ranks(ONE), "price", "")
    # Shards of all four data ranks become shards of two pairs: nothing is saved but what was gathered.
    sharded = (ParameterFacts(P, 4, True, True),)
    four = replace(ONE, activations={}, layout=Layout(data=4), zero=ZeroLayout(2, 4, 4), facts=sharded)
    assert said(savings.by_tensor_ranks(four)) == ("tensor_parallel_size=2", 2_000)


def test_the_three_best_in_order_and_none_that_saves_nothing() -> None:
    found = best_savings(replace(ONE, blocks=4))
    assert [said(one) for one in found] == [
        ("recompute='full'", 25_000),
        ("tensor_parallel_size=2", 20_000),
        ("num_microbatches=2", 17_000),
    ]
    assert [one.setting for one in best_savings(replace(ONE, recompute="full", activations={"full": 0}))] == [
        "tensor_parallel_size=2"
    ]
