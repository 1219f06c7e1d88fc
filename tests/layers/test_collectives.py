"""Each collective with its gradient, against what it says it computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from pool import RankPool
from sharded_cases import for_examples, integers, tensor_mesh
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_megapar.config import ConfigError
from lightning_megapar.layers import collectives
from lightning_megapar.layers.collectives import TensorRanks

# name -> forward and backward, from all ranks' tensors and the rank to the rank's result
PAIRS = {
    "copy_in": ("own", "sum"),
    "reduce_out": ("sum", "own"),
    "gather_last": ("join -1", "cut -1"),
    "split_last": ("cut -1", "join -1"),
    "sequence_gather": ("join -2", "sum cut -2"),
    "sequence_scatter": ("sum cut -2", "join -2"),
    "sequence_split": ("cut -2", "join -2"),
}


def by_hand(what: str, tensors: list[Tensor], rank: int) -> Tensor:
    verb, _, dim = what.rpartition(" ") if what[-1].isdigit() else (what, "", "0")
    if verb == "own":
        return tensors[rank]
    if verb == "join":
        return torch.cat(tensors, int(dim))
    whole = sum(tensors[1:], tensors[0]) if verb.startswith("sum") else tensors[rank]
    return whole.chunk(len(tensors), int(dim))[rank] if verb.endswith("cut") else whole


def check(case: dict[str, Any]) -> None:
    mesh = tensor_mesh()
    assert mesh is not None
    ranks = TensorRanks(mesh, True)
    forward, backward = PAIRS[case["name"]]
    generator = torch.Generator().manual_seed(case["seed"])
    shape = (*case["lead"], ranks.size * case["rows"], ranks.size * case["columns"])
    inputs = [integers(shape, generator, case["dtype"]) for _ in range(ranks.size)]
    if case["strided"]:
        inputs = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in inputs]
    x = inputs[ranks.rank].clone(memory_format=torch.preserve_format).requires_grad_()
    before = x.detach().clone()
    y = getattr(collectives, case["name"])(x, ranks)
    assert torch.equal(y, by_hand(forward, inputs, ranks.rank))
    upstream = [integers(tuple(y.shape), generator, case["dtype"]) for _ in range(ranks.size)]
    if "gather_last" in case["name"]:
        upstream = upstream[:1] * ranks.size  # the gathered result is used alike on every rank
    gradient = upstream[ranks.rank].clone()
    y.backward(gradient)
    assert torch.equal(x.grad, by_hand(backward, upstream, ranks.rank))
    # Neither the input nor the incoming gradient is the collective's to write on.
    assert torch.equal(x, before) and torch.equal(gradient, upstream[ranks.rank])


def on_ranks() -> None:
    cases = st.fixed_dictionaries(
        {
            "name": st.sampled_from(sorted(PAIRS)),
            "lead": st.sampled_from([(), (1,), (3,), (2, 2)]),
            "rows": st.integers(1, 3),
            "columns": st.integers(1, 3),
            "dtype": st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
            "strided": st.booleans(),
            "seed": st.integers(0, 10**6),
        }
    )
    for_examples(cases, check, max_examples=80)


@pytest.mark.parametrize("size", [2, 3])
def test_pairs(pool: RankPool, size: int) -> None:
    pool.run(on_ranks, size)


def on_ranks_details() -> None:
    mesh = tensor_mesh()
    assert mesh is not None
    ranks = TensorRanks(mesh)
    assert copy.deepcopy(ranks) is ranks and (ranks.rank, ranks.size) == (dist.get_rank(), 2)
    with pytest.raises(ConfigError, match="one-dimensional mesh, got one with 2 axes"):
        TensorRanks(init_device_mesh("cpu", (1, 2)))
    with pytest.raises(ConfigError, match=r"last dimension 3 is not divisible by tensor_parallel_size=2"):
        collectives.split_last(torch.zeros(2, 3), ranks)
    for cut in (collectives.sequence_split, collectives.sequence_scatter):
        with pytest.raises(ConfigError, match=r"sequence length 1 is not divisible by .*=2.* valid lengths: 2$"):
            cut(torch.zeros(1, 3), ranks)


def test_details(pool: RankPool) -> None:
    pool.run(on_ranks_details, 2)


def test_without_ranks_nothing_happens() -> None:
    x = torch.zeros(2, 3)
    for name in PAIRS:
        assert getattr(collectives, name)(x, None) is x
