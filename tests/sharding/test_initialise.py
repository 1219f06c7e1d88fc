"""Values by (seed, name): the same full weights whole or sharded, from meta or not, whole model or a stage of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pool import RankPool
from sharded_cases import tensor_mesh
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_megapar.config import ConfigError
from lightning_megapar.layers import ColumnParallelLinear, LayerNorm
from lightning_megapar.models.gpt import GPT, GPTConfig
from lightning_megapar.sharding import initialise_by_name, shard_module
from lightning_megapar.sharding.initialise import name_seed

SHAPE: dict[str, Any] = {
    "vocab_size": 50, "num_layers": 2, "num_heads": 4, "hidden_size": 16, "max_sequence_length": 12,
    "vocab_multiple": 12,
}  # fmt: skip
STYLES = {"gpt2": GPTConfig.gpt2(**SHAPE), "llama": GPTConfig.llama(**SHAPE, num_kv_heads=1, seed=7)}


class User(nn.Module):
    """Somebody's module: the model inside it, a parallel layer and layers that know nothing of us."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.model = GPT(config)
        self.adapter = ColumnParallelLinear(16, 8)
        self.norm = LayerNorm(16)
        self.probe = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.BatchNorm1d(8))


def full_weights(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in module.named_parameters()
    }


def make(config: GPTConfig, meta: bool) -> User:
    if not meta:
        torch.manual_seed(99)  # the values before must not matter
        return User(config)
    with torch.device("meta"):
        return User(config)


def on_ranks_weights(style: str, meta: bool) -> dict[str, Tensor]:
    module = make(STYLES[style], meta)
    shard_module(module, tensor_mesh(), True)
    state = torch.get_rng_state()
    initialise_by_name(module, seed=3, prefix="user.", only_meta=meta)
    assert torch.equal(torch.get_rng_state(), state)
    if STYLES[style].tied_head:
        assert module.model.head.weight is module.model.embedding.tokens.weight
    assert not any(t.is_meta for t in (*module.parameters(), *module.buffers()))
    return full_weights(module)


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_same_weights_on_every_layout(pool: RankPool, style: str) -> None:
    expected = on_ranks_weights(style, True)
    alone = full_weights(GPT(STYLES[style]))
    for name, value in alone.items():
        assert torch.equal(expected[f"model.{name}"], value), name
    for size, meta in ((1, False), (2, True), (2, False), (4, True)):
        for got in pool.run(on_ranks_weights, size, style, meta):
            assert got.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(got[name], value), f"{name} on {size} ranks, meta={meta}"


def test_values() -> None:
    """Each parameter its own draw, of the stated spread, and no two alike."""
    config = GPTConfig.gpt2(**{**SHAPE, "hidden_size": 64})
    weights = full_weights(GPT(config))
    drawn = [w for name, w in weights.items() if w.ndim == 2]
    for a in range(len(drawn)):
        for b in range(a):
            assert not torch.equal(drawn[a].flatten()[:32], drawn[b].flatten()[:32])
    assert abs(weights["blocks.0.mlp.up.weight"].std().item() / 0.02 - 1) < 0.05
    assert abs(weights["blocks.0.mlp.down.weight"].std().item() / (0.02 / 4**0.5) - 1) < 0.05
    assert bool((weights["final_norm.weight"] == 1).all()) and not weights["blocks.1.attention.query.bias"].any()
    other = full_weights(GPT(GPTConfig.gpt2(**{**SHAPE, "hidden_size": 64, "seed": 1})))
    assert not torch.equal(other["blocks.0.mlp.up.weight"], weights["blocks.0.mlp.up.weight"])


def test_seed_is_stable() -> None:
    """Checkpoints and published runs depend on it: it must not change between versions."""
    assert name_seed(1234, "blocks.0.mlp.up.weight") == 8655495314348619493
    assert 0 <= name_seed(-5, "") < 2**63


def test_a_stage_draws_what_the_whole_model_draws() -> None:
    """Blocks and embedding missing: the rest is unchanged, the tied table of the last stage included."""
    for config in STYLES.values():
        expected = full_weights(GPT(config))
        with torch.device("meta"):
            last, first = GPT(config), GPT(config)
        last.embedding, last.blocks[0] = nn.Identity(), nn.Identity()
        first.head, first.blocks[1], first.final_norm = nn.Identity(), nn.Identity(), nn.Identity()
        for stage in (first, last):
            initialise_by_name(stage, seed=0)
        for name, value in full_weights(first).items():
            assert torch.equal(value, expected[name]), name
        for name, value in full_weights(last).items():
            canonical = "embedding.tokens.weight" if name == "head.weight" and config.tied_head else name
            assert torch.equal(value, expected[canonical]), name


def test_aliases_for_any_module() -> None:
    """A tied parameter whose canonical owner is elsewhere, without the model's help."""
    whole, part = nn.ModuleDict(), nn.ModuleDict()
    with torch.device("meta"):
        whole["a"], whole["b"] = ColumnParallelLinear(4, 4), ColumnParallelLinear(4, 4)
        whole["b"].weight = whole["a"].weight
        part["b"] = ColumnParallelLinear(4, 4)
    initialise_by_name(whole, seed=1)
    assert whole["b"].weight is whole["a"].weight
    initialise_by_name(part, seed=1, aliases={"b.weight": "a.weight"})
    assert torch.equal(part["b"].weight, whole["a"].weight)
    assert torch.equal(part["b"].bias, whole["b"].bias)


def test_real_parameters_stay() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    kept = copy.deepcopy(module[0].state_dict())
    module[1].weight.requires_grad_(False).tag = "mine"
    initialise_by_name(module, seed=0)
    assert all(torch.equal(kept[k], v) for k, v in module[0].state_dict().items())
    assert module[1].weight.tag == "mine" and not module[1].weight.requires_grad and module[1].bias.requires_grad
    assert 0 < module[1].weight.abs().max() <= 1 / 3**0.5
    initialise_by_name(module, seed=0, only_meta=False)
    assert not torch.equal(kept["weight"], module[0].weight)


def test_dtype_and_default_device() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        low = GPT(STYLES["gpt2"])
    finally:
        torch.set_default_dtype(torch.float32)
    for (name, a), b in zip(low.named_parameters(), GPT(STYLES["gpt2"]).parameters(), strict=True):
        assert a.dtype == torch.bfloat16 and torch.equal(a, b.bfloat16()), name


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.empty(3))


class Half(Bare):
    """Fills the parameter and forgets the buffer."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def test_what_nothing_fills_is_refused() -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"bare": Bare(), "partly": Half(), "linear": nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match=r"how to fill bare.scale, bare.table, partly.table: on the meta device"):
        initialise_by_name(module, seed=0)
    initialise_by_name(Bare(), seed=0, only_meta=False)  # real values that nobody can draw again are kept


def test_a_child_that_its_parent_resets_too() -> None:
    """nn.MultiheadAttention writes its child's bias: the child keeps the value drawn under its own name."""
    with torch.device("meta"):
        module = nn.MultiheadAttention(8, 2)
    initialise_by_name(module, seed=0)
    twin = nn.MultiheadAttention(8, 2)
    initialise_by_name(twin, seed=0, only_meta=False)
    for (name, a), b in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b) and a.isfinite().all(), name


def on_ranks_uneven() -> None:
    """Any DTensor can be filled, uneven pieces included."""
    mesh = tensor_mesh()
    assert mesh is not None
    linear = nn.Linear(4, 5, device="meta")
    twin = nn.Linear(4, 5, device="meta")
    for name in ("weight", "bias"):
        whole = getattr(linear, name)
        rows = 3 if mesh.get_local_rank() == 0 else 2
        local = torch.empty(rows, *whole.shape[1:], device="meta")
        piece = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        setattr(linear, name, nn.Parameter(piece))
    for module in (linear, twin):
        initialise_by_name(module, seed=0)
    assert torch.equal(linear.weight.full_tensor(), twin.weight)
    assert torch.equal(linear.bias.full_tensor(), twin.bias)


def test_uneven_pieces(pool: RankPool) -> None:
    pool.run(on_ranks_uneven, 2)


def test_one_mesh_or_none_changes_nothing() -> None:
    model = GPT(STYLES["gpt2"])
    shard_module(model, None, True)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
