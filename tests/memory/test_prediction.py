"""Predicted bytes of a rank, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_megapar.memory.chain import ChainCosts
from lightning_megapar.memory.measure import BlockMeasure
from lightning_megapar.memory.prediction import (
    Activations,
    ParameterFacts,
    States,
    ZeroLayout,
    activations,
    peak,
    state_tensors,
    states,
)
from lightning_megapar.memory.recomputation import InFlight

FACTS = (ParameterFacts(1000, 4, True, True), ParameterFacts(200, 4, False, True))


@pytest.mark.parametrize(
    ("stage", "expected"),
    # parameters, gradients, optimizer (two tensors), gathered, buffers, reduced; a unit of 400 bytes
    [
        (0, States(4800, 4000, 8000, 0, 4000, 4000)),
        (1, States(2400, 4000, 4000, 4800, 4800 + 800, 0)),
        (2, States(2400, 2000 + 400, 4000, 4800, 4800 + 800, 0)),
        (3, States(2400, 2000 + 400, 4000, 400, 1600, 0)),
    ],
)
def test_states_by_stage(stage: int, expected: States) -> None:
    units = (300, 400) if stage else ()
    assert states(FACTS, ZeroLayout(stage, 2, 2), 2, units=units) == expected


def test_gradients_of_one_microbatch_and_of_several_batches() -> None:
    units = (1000, 2000, 1000)  # bytes, of 4000 in all
    one = ParameterFacts(1000, 4, True, True)

    def gradients(stage: int, microbatches: int, accumulate: int) -> int:
        zero = ZeroLayout(stage, 2, 2)
        return states([one], zero, 0, units=units, microbatches=microbatches, accumulate=accumulate).gradients

    # The second unit is whole, and of the third a shard is left.
    assert gradients(1, 1, 1) == gradients(2, 1, 1) == gradients(3, 1, 1) == 2000 + 500
    assert gradients(1, 1, 2) == gradients(1, 2, 1) == 4000
    assert gradients(2, 2, 1) == 2000 + 2000
    assert gradients(2, 1, 3) == 2500 + 2000
    assert states([one], ZeroLayout(), 0, accumulate=2).gradients == 8000


def test_states_of_one_rank_of_an_offloaded_one_and_with_working_copies() -> None:
    assert states(FACTS, ZeroLayout(), 1) == States(4800, 4000, 4000, 0, 0, 0)
    assert states(FACTS, ZeroLayout(), None).optimizer is None
    assert states(FACTS, ZeroLayout(), 0, working_width=2).parameters == 1200 * 6
    assert states(FACTS, ZeroLayout(2, 2, 2, True), 2) == States(0, 0, 0, 4800, 4800, 0)
    assert states(FACTS, ZeroLayout(1, 4, 2), 2).parameters == 2400  # two replicas of two shards


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: [torch.optim.AdamW(p)], 2),
        (lambda p: [torch.optim.Adam(p, amsgrad=True)], 3),
        (lambda p: [torch.optim.SGD(p, lr=1)], 0),
        (lambda p: [torch.optim.SGD(p, lr=1, momentum=0.9)], 1),
        (lambda p: [torch.optim.RMSprop(p, centered=True, momentum=0.9)], 3),
        (lambda p: [torch.optim.SGD(p, lr=1), torch.optim.AdamW(p)], None),
        (lambda p: [torch.optim.Adadelta(p)], None),
    ],
)
def test_what_optimizers_keep(make: Any, expected: int | None) -> None:
    assert state_tensors(make([nn.Parameter(torch.zeros(2))])) == expected


def measure(all_bytes: int, inputs: int, output: int = 10, waiting: int = 0) -> BlockMeasure:
    saved = {"all": all_bytes, "inputs": inputs}
    taken = {"all": all_bytes + 5, "inputs": inputs + 7}
    return BlockMeasure(
        ChainCosts(saved, {"all": 0.0, "inputs": 1.0}, taken, {"all": 20, "inputs": 120}), output, waiting
    )


def test_activations_of_a_chain() -> None:
    measures = {"a": measure(100, 30), "b": measure(60, 30)}
    held = InFlight((((3,), (0,)),), (False,))
    found = activations([["a", "b"]], measures, {}, held, outside_bytes=11)
    assert found.layers == {"a": 300, "b": 180, "": 11}
    # In the backward of b: everything of three microbatches, and 20 beside.
    assert found == Activations(found.layers, 20, (3,)) and found.kept == 491 and found.in_blocks == 500
    found = activations([["a", "b"]], measures, {"a": "inputs"}, held)
    assert found.layers == {"a": 90, "b": 180}
    # In the backward of a, b of this microbatch is gone (60), and 120 are there.
    assert found.transient == max(20, 120 - 60)
    assert activations([["a"]], measures, {"a": "no_attention"}, held).layers == {"a": 300}  # a block without that one


def test_boundaries_and_weight_gradients_that_wait() -> None:
    measures = {"a": measure(100, 30, 10, 40), "b": measure(60, 30, 10, 40)}
    found = activations([["a"], ["b"]], measures, {}, InFlight((((2, 1), (1, 0)),), (True, False)))
    assert found.layers == {"a": 240, "b": 60, "": 20}


def test_chunks_count_at_the_moment_when_they_keep_most_together() -> None:
    measures = {"a": measure(100, 30, 10, 40), "b": measure(60, 30, 10, 40)}
    held = InFlight((((2, 0), (0, 0)), ((1, 1), (1, 0)), ((0, 1), (2, 0))), (False, False))
    # 100 + 60 + 40 is as much, and 60 + 2 x 40 less; not 200 + 60 + 80.
    assert activations([["a"], ["b"]], measures, {}, held).layers == {"a": 200, "b": 0}


def test_the_peak_is_that_of_the_activations_or_of_the_sums() -> None:
    found = States(100, 50, 200, 0, 50, 50)
    few, many = Activations({"a": 10}, 5), Activations({"a": 1000}, 5)
    assert peak(found, many, 7, 50) == 300 + 1000 + 5 + 7 + 50
    assert peak(found, few, 7, 0) == 300 + 50 + 50
    assert peak(found, None, 0, 0) is None and peak(States(1, 1, None), few, 0, 0) is None
