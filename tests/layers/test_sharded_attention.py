"""Attention by heads, grouped key/value heads, rotary positions, norms and dropout on a cut sequence."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import strategies as st
from pool import RankPool
from sharded_cases import compare, for_examples, perturb, piece, tensor_mesh
from torch import Tensor, nn

from lightning_megapar.config import ConfigError
from lightning_megapar.layers import LayerNorm, ParallelAttention, RMSNorm, RotaryPositions, SequenceDropout
from lightning_megapar.sharding import shard_module


def attention_by_hand(module: ParallelAttention, x: Tensor) -> Tensor:
    """One head at a time, softmax written out, rotation as complex numbers."""
    length, size = x.shape[-2], module.head_dim
    group = module.num_heads // module.num_kv_heads
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)

    def project(layer: nn.Module, head: int) -> Tensor:
        rows = slice(head * size, (head + 1) * size)
        return F.linear(x, layer.weight[rows], None if layer.bias is None else layer.bias[rows])

    def rotate(y: Tensor) -> Tensor:
        if module.rotary is None:
            return y
        steps = torch.arange(size // 2, dtype=torch.float64)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * module.rotary.theta ** (-2 * steps / size)
        turned = torch.complex(*y.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1)

    heads = []
    for head in range(module.num_heads):
        query, key = rotate(project(module.query, head)), rotate(project(module.key, head // group))
        scores = (query @ key.transpose(-1, -2) / size**0.5).masked_fill(mask, -torch.inf)
        heads.append(scores.softmax(-1) @ project(module.value, head // group))
    return F.linear(torch.cat(heads, -1), module.output.weight, module.output.bias)


def check_attention(case: dict[str, Any]) -> None:
    size = dist.get_world_size() if dist.is_initialized() else 1
    generator = torch.Generator().manual_seed(case["seed"])
    # Key/value heads: fewer than, as many as and more than the ranks.
    kv_heads = case["kv"] if size % case["kv"] == 0 else size * case["kv"]
    heads = size * kv_heads * case["heads"] if kv_heads % size else kv_heads * case["heads"]
    head_dim = 2 * case["head_dim"]
    module = ParallelAttention(
        case["hidden"],
        heads,
        kv_heads,
        head_dim=head_dim,
        bias=case["bias"],
        rotary=RotaryPositions(head_dim) if case["rotary"] else None,
        dtype=torch.float64,
    )
    layout = "sequence" if case["sequence_parallel"] else "whole"
    compare(
        perturb(module, generator),
        torch.randn(case["batch"], case["sequence"] * size, case["hidden"], generator=generator, dtype=torch.float64),
        lambda y: torch.randn(y.shape, generator=generator, dtype=y.dtype),
        sequence_parallel=case["sequence_parallel"],
        input_layout=layout,
        output_layout=layout,
        exact=False,
        reference=attention_by_hand,
    )


def on_ranks_attention() -> None:
    cases = st.fixed_dictionaries(
        {
            "batch": st.integers(1, 2),
            "sequence": st.integers(1, 3),
            "hidden": st.integers(2, 6),
            "kv": st.integers(1, 3),
            "heads": st.integers(1, 2),
            "head_dim": st.integers(1, 2),
            "bias": st.booleans(),
            "rotary": st.booleans(),
            "sequence_parallel": st.booleans(),
            "seed": st.integers(0, 10**6),
        }
    )
    for_examples(cases, check_attention, max_examples=25)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_attention(pool: RankPool, size: int) -> None:
    pool.run(on_ranks_attention, size)


def on_ranks_grouped() -> tuple[Any, ...]:
    """Two key/value heads on four ranks: two ranks use each; without the sum every rank's gradient is wrong."""
    torch.manual_seed(0)
    mesh = tensor_mesh()
    assert mesh is not None
    dense = ParallelAttention(16, 8, 2, dtype=torch.float64)
    sharded = copy.deepcopy(dense)
    shard_module(sharded, mesh, False)
    assert sharded.key.partial_gradients() == ("weight", "bias") and sharded.query.partial_gradients() == ()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    for module in (dense, sharded):
        module(x).pow(2).sum().backward()
    rank = mesh.get_local_rank()
    own = sharded.value.weight.grad.to_local()
    used = own.abs().sum(1) > 0
    assert used.tolist() == [rank // 2 == 0] * 2 + [rank // 2 == 1] * 2
    expected = dense.value.weight.grad
    alone = float((own - expected).abs().max() / expected.abs().max())
    dist.all_reduce(own)
    together = float((own - expected).abs().max() / expected.abs().max())
    return alone, together


def test_shared_kv_heads_sum_their_gradients(pool: RankPool) -> None:
    for alone, together in pool.run(on_ranks_grouped, 4):
        assert alone > 0.1
        assert together < 1e-12


def check_norm(case: dict[str, Any]) -> None:
    size = dist.get_world_size() if dist.is_initialized() else 1
    generator = torch.Generator().manual_seed(case["seed"])
    kind = case["kind"]
    if kind == "rms":
        module: nn.Module = RMSNorm(case["hidden"], dtype=torch.float64)
    else:
        module = LayerNorm(case["hidden"], bias=kind == "bias", dtype=torch.float64)

    def reference(whole: nn.Module, x: Tensor) -> Tensor:
        if kind == "rms":
            return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * whole.weight
        y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * whole.weight
        return y if whole.bias is None else y + whole.bias

    layout = "sequence" if case["sequence_parallel"] else "whole"
    compare(
        perturb(module, generator),
        torch.randn(2, 2 * size, case["hidden"], generator=generator, dtype=torch.float64),
        lambda y: torch.randn(y.shape, generator=generator, dtype=y.dtype),
        sequence_parallel=case["sequence_parallel"],
        input_layout=layout,
        output_layout=layout,
        exact=False,
        reference=reference,
    )


def on_ranks_norm() -> None:
    cases = st.fixed_dictionaries(
        {
            "hidden": st.integers(4, 9),  # two features normalise to +-1: a gradient of nothing but rounding
            "kind": st.sampled_from(["rms", "bias", "no bias"]),
            "sequence_parallel": st.booleans(),
            "seed": st.integers(0, 10**6),
        }
    )
    for_examples(cases, check_norm, max_examples=25)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_norms(pool: RankPool, size: int) -> None:
    pool.run(on_ranks_norm, size)


def on_ranks_dropout() -> None:
    mesh = tensor_mesh()
    assert mesh is not None
    x = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    layer = SequenceDropout(0.4)
    torch.manual_seed(7)
    expected = layer(x)
    assert 0.2 < float((expected == 0).float().mean()) < 0.6
    torch.manual_seed(7)
    assert torch.equal(expected, F.dropout(x, 0.4))
    layer.shard(mesh, True)
    own = piece(x, "sequence", mesh.get_local_rank(), mesh.size())
    torch.manual_seed(7)
    assert torch.equal(layer(own), piece(expected, "sequence", mesh.get_local_rank(), mesh.size()))
    assert torch.equal(layer.eval()(own), own)


def test_dropout_is_that_of_the_whole_sequence(pool: RankPool) -> None:
    pool.run(on_ranks_dropout, 2)


def test_rotary_tables_are_not_state() -> None:
    rotary = RotaryPositions(8)
    module = ParallelAttention(16, 2, rotary=rotary)
    module(torch.randn(1, 5, 16))
    assert not [name for name in module.state_dict() if "rotary" in name]
    assert copy.deepcopy(module).rotary is not rotary
    assert pickle.loads(pickle.dumps(rotary)).theta == rotary.theta
    # Relative: the product of a rotated query and key depends on their distance alone.
    x = torch.randn(8, dtype=torch.float64).expand(7, 8)
    turned = rotary(x)
    assert torch.allclose((turned[1:] * turned[:-1]).sum(-1), (turned[1] @ turned[0]).expand(6))
    assert torch.equal(rotary(x)[0], x[0])


def on_ranks_refusals() -> None:
    mesh = tensor_mesh()
    assert mesh is not None
    cases = (
        (6, None, r"attention: num_heads=6 is not divisible by tensor_parallel_size=4; .*: 2, 3; .*num_heads: 4, 8"),
        (12, 3, r"attention: num_kv_heads=3 and tensor_parallel_size=4: one must divide .*parallel_size: 3, 6"),
    )
    for heads, kv_heads, message in cases:
        module = nn.ModuleDict({"attention": ParallelAttention(24, heads, kv_heads)})
        with pytest.raises(ConfigError, match=message):
            shard_module(module, mesh, False)
        assert type(module["attention"].query.weight) is nn.Parameter


def test_refusals(pool: RankPool) -> None:
    pool.run(on_ranks_refusals, 4)
    with pytest.raises(ConfigError, match=r"num_heads=5 does not divide hidden_size=16; .*: 2, 4"):
        ParallelAttention(16, 5)
    with pytest.raises(ConfigError, match=r"num_kv_heads=3 does not divide num_heads=8; .*: 2, 4"):
        ParallelAttention(16, 8, 3)
    with pytest.raises(ConfigError, match="even head size, got 5"):
        RotaryPositions(5)
