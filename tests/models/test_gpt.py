"""The whole decoder: gradients of every layout against one process, collectives against the formula, refusals."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from sharded_cases import CollectiveCounter, full_gradients, partial_names, perturb, same, same_gradients, tensor_mesh
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from lightning_megapar.config import ConfigError
from lightning_megapar.models.gpt import GPT, GPTConfig
from lightning_megapar.sharding import initialise_by_name, shard_module

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "num_layers": 2,
    "num_heads": 4,
    "hidden_size": 16,
    "max_sequence_length": 12,
    "vocab_multiple": 12,
}
STYLES: dict[str, GPTConfig] = {
    "gpt2": GPTConfig.gpt2(**SHAPE),
    "gpt2 untied": GPTConfig.gpt2(**{**SHAPE, "tied_head": False}),
    "llama": GPTConfig.llama(**SHAPE, num_kv_heads=2),
    "llama one kv head, tied": GPTConfig.llama(**{**SHAPE, "tied_head": True}, num_kv_heads=1),
}


def batch(config: GPTConfig, rows: int = 3, length: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens, and labels of which a different number counts in each row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (rows, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(rows):
        labels[row, : 2 * row] = -100
    return tokens[:, :-1], labels


def build(config: GPTConfig, dtype: torch.dtype = torch.float32) -> GPT:
    return perturb(GPT(config).to(dtype), torch.Generator().manual_seed(5))  # type: ignore[return-value]


def on_ranks_parity(sequence_parallel: bool) -> None:
    mesh = tensor_mesh()
    for (name, config), (dtype, tolerance) in product(STYLES.items(), ((torch.float64, 1e-12), (torch.float32, 1e-5))):
        what = f"{name}, {dtype}"
        dense = build(config, dtype)
        sharded = copy.deepcopy(dense)
        shard_module(sharded, mesh, sequence_parallel)
        # Two batches without resetting: gradients accumulate as over microbatches.
        for seed in (0, 1):
            tokens, labels = batch(config, seed=seed)
            expected, loss = dense(tokens, labels), sharded(tokens, labels)
            same(loss.detach(), expected.detach(), False, f"{what}: loss", tolerance)
            expected.backward()
            loss.backward()
        same_gradients(sharded, dense, tolerance=tolerance)
        if config.tied_head:
            assert sharded.head.weight is sharded.embedding.tokens.weight
        assert not full_gradients(sharded)["embedding.tokens.weight"][config.vocab_size :].any()
        with torch.no_grad():
            logits = sharded(tokens)
            assert logits.shape == (*tokens.shape, config.vocab_size)
            same(logits, dense(tokens), False, f"{what}: logits", 10 * tolerance)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_gradients_equal_one_process(pool: RankPool, size: int, sequence_parallel: bool) -> None:
    pool.run(on_ranks_parity, size, sequence_parallel)


def expected_collectives(
    config: GPTConfig, rows: int, length: int, itemsize: int, size: int, sequence_parallel: bool
) -> dict[tuple[str, int], int]:
    """Collectives of one forward and backward, (kind, bytes of the full-size side) -> calls.

    With n = batch x sequence x hidden x itemsize and L blocks, Megatron-LM's count (arXiv 1909.08053, figure 3):
    each block sums its two sublayers' outputs in the forward and their input gradients in the backward, n bytes
    each: 4 L all-reduces. The embedding's output adds one, the head's input gradient another: 4 L + 2.

    Under sequence parallelism (arXiv 2205.05198, section 4.2) each of these is a reduce-scatter, 4 L + 2, and has an
    all-gather as its mirror, 4 L + 2; and as a column layer keeps only its slice of the input, the backward gathers
    it once more for the weight gradient: two per block and one for the head, 2 L + 1.

    The loss adds one all-gather of two numbers per token and rank.
    """
    n = rows * length * config.hidden_size * itemsize
    loss = {("all_gather", size * 2 * rows * length * itemsize): 1}
    pairs = 4 * config.num_layers + 2
    if not sequence_parallel:
        return {("all_reduce", n): pairs, **loss}
    return {("reduce_scatter", n): pairs, ("all_gather", n): pairs + 2 * config.num_layers + 1, **loss}


def on_ranks_collectives() -> None:
    mesh = tensor_mesh()
    assert mesh is not None
    for (_, config), sequence_parallel in product(STYLES.items(), (False, True)):
        model = GPT(config)
        shard_module(model, mesh, sequence_parallel)
        tokens, labels = batch(config)
        counter = CollectiveCounter()
        with counter:
            model(tokens, labels).backward()
        expected = expected_collectives(config, *tokens.shape, 4, mesh.size(), sequence_parallel)
        assert dict(counter.calls) == expected


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_equal_megatrons_formula(pool: RankPool, size: int) -> None:
    pool.run(on_ranks_collectives, size)


def on_ranks_block_collectives() -> None:
    """One block alone, forward and backward apart."""
    mesh = tensor_mesh()
    config = STYLES["llama"]
    n = 2 * 8 * config.hidden_size * 4
    for sequence_parallel, forward, backward in (
        (False, {("all_reduce", n): 2}, {("all_reduce", n): 2}),
        (
            True,
            {("all_gather", n): 2, ("reduce_scatter", n): 2},
            {("all_gather", n): 2 + 2, ("reduce_scatter", n): 2},
        ),
    ):
        block = GPT(config).blocks[0]
        shard_module(block, mesh, sequence_parallel)
        length = 8 // dist.get_world_size() if sequence_parallel else 8
        hidden = torch.randn(2, length, config.hidden_size, requires_grad=True)
        with CollectiveCounter() as first:
            out = block(hidden)
        with CollectiveCounter() as second:
            out.sum().backward()
        assert dict(first.calls) == forward
        assert dict(second.calls) == backward


def test_collectives_of_a_block(pool: RankPool) -> None:
    pool.run(on_ranks_block_collectives, 2)


def on_ranks_dropout() -> None:
    """With one seed on all tensor ranks, dropout is that of one process on every layout."""
    mesh = tensor_mesh()
    for style in ("gpt2", "llama"):
        config = GPTConfig(**{**vars(STYLES[style]), "dropout": 0.3})
        dense = build(config, torch.float64)
        tokens, labels = batch(config)
        torch.manual_seed(3)
        dense(tokens, labels).backward()
        for sequence_parallel in (False, True):
            sharded = copy.deepcopy(dense).requires_grad_()
            sharded.zero_grad()
            shard_module(sharded, mesh, sequence_parallel)
            torch.manual_seed(3)
            sharded(tokens, labels).backward()
            same_gradients(sharded, dense)


def test_dropout_does_not_depend_on_the_layout(pool: RankPool) -> None:
    pool.run(on_ranks_dropout, 2)


def on_ranks_fsdp(sequence_parallel: bool) -> None:
    """FSDP2 over data ranks swaps every parameter in the forward: the layers must read them afresh."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    config = STYLES["gpt2"]
    dense = build(config, torch.float64)
    sharded = copy.deepcopy(dense)
    shard_module(sharded, grid["tensor"], sequence_parallel)
    addends = partial_names(sharded)
    for block in sharded.blocks:
        fully_shard(block, mesh=grid["data"])
    fully_shard(sharded, mesh=grid["data"])
    for module in (sharded, *sharded.blocks):
        module.set_gradient_divide_factor(1.0)
    batches = [batch(config, seed=seed) for seed in (0, 1)]
    for _ in range(2):  # the second step meets parameters that FSDP2 gathered before
        for tokens, labels in batches:
            dense(tokens, labels).backward()
        sharded(*batches[grid.get_local_rank("data")]).backward()
    for name, parameter in sharded.named_parameters():
        gradient = parameter.grad.full_tensor()
        if name in addends:  # every rank's addend is what full_tensor() gave it
            dist.all_reduce(gradient, group=grid["tensor"].get_group())
        same(gradient, dict(dense.named_parameters())[name].grad, False, name, floor=1e-4)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fsdp_on_top(pool: RankPool, sequence_parallel: bool) -> None:
    pool.run(on_ranks_fsdp, 4, sequence_parallel)


def on_ranks_recompute(sequence_parallel: bool) -> None:
    """Blocks recomputed in the backward: same gradients, dropout included; the block's forward collectives twice."""
    mesh = tensor_mesh()
    config = GPTConfig(**{**vars(STYLES["gpt2"]), "dropout": 0.2})
    kept = build(config, torch.float64)
    shard_module(kept, mesh, sequence_parallel)
    again = build(config, torch.float64)
    shard_module(again, mesh, sequence_parallel)
    for block in again.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    tokens, labels = batch(config)
    counters = []
    for model in (kept, again):
        torch.manual_seed(1)
        with CollectiveCounter() as counter:
            model(tokens, labels).backward()
        counters.append(sum(counter.calls.values()))
    for (name, a), b in zip(kept.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local()), name
    # Megatron-LM's six all-reduces per recomputed block instead of four (or their halves).
    assert counters[1] - counters[0] == config.num_layers * (4 if sequence_parallel else 2)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputed_blocks(pool: RankPool, sequence_parallel: bool) -> None:
    pool.run(on_ranks_recompute, 2, sequence_parallel)


def on_ranks_huge_world() -> tuple[int, dict[tuple[str, int], int]]:
    """One rank of 4096 on the fake backend, with tensors that have shapes only."""
    size = 8
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)  # checking what ranks call needs ranks
    dist.init_process_group("fake", store=FakeStore(), rank=1234, world_size=4096)
    try:
        mesh = init_device_mesh("cpu", (4096 // size, size), mesh_dim_names=("data", "tensor"))["tensor"]
        config = GPTConfig.llama(
            vocab_size=128256, num_layers=4, num_heads=64, num_kv_heads=8, hidden_size=8192, max_sequence_length=8192
        )
        with torch.device("meta"):
            model = GPT(config)
        shard_module(model, mesh, True)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            tokens = torch.zeros(1, 8192, dtype=torch.int64)
            with CollectiveCounter() as counter:
                model(tokens, tokens).backward()
            held = sum(p.to_local().numel() for p in model.parameters() if p.grad is not None)
        return held, dict(counter.calls)
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(level)


def test_one_rank_of_a_huge_world(pool: RankPool) -> None:
    ((held, calls),) = pool.run(on_ranks_huge_world, 1)
    ffn, width, vocabulary = 21888, 8192, 128256
    matrices = 2 * vocabulary * width + 4 * (2 * width * width + 2 * width * width // 8 + 3 * width * ffn)
    assert held == matrices // 8 + (2 * 4 + 1) * width
    config = GPTConfig.llama(
        vocab_size=vocabulary, num_layers=4, num_heads=64, num_kv_heads=8, hidden_size=width, max_sequence_length=8192
    )
    assert calls == expected_collectives(config, 1, 8192, 4, 8, True)


class StandIn(nn.Module):
    """What a pipeline leaves of a module that another stage holds: a shape."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *_: Tensor) -> Tensor:
        return self.hidden


def on_ranks_stage() -> None:
    """A last stage: no embedding, no first block; the head holds the tied table alone."""
    config = STYLES["gpt2"]
    dense = build(config, torch.float64)
    tokens, labels = batch(config)
    dense(tokens, labels).backward()
    hidden = dense.blocks[0](dense.embedding(tokens)).detach()
    expected = build(config, torch.float64)
    expected.embedding, expected.blocks[0] = StandIn(hidden), nn.Identity()
    expected(tokens, labels).backward()
    stage = build(config, torch.float64)
    stage.embedding, stage.blocks[0] = StandIn(hidden), nn.Identity()
    shard_module(stage, tensor_mesh(), False)
    stage(tokens, labels).backward()
    same_gradients(stage, expected)
    assert {n for n, _ in stage.named_parameters()} >= {"head.weight", "blocks.1.mlp.up.weight"}


def test_a_stage_without_the_embedding(pool: RankPool) -> None:
    pool.run(on_ranks_stage, 2)


def on_ranks_refusals() -> None:
    mesh = tensor_mesh()
    for change, message in (
        ({"num_heads": 2}, r"^blocks.0.attention: num_heads=2 is not divisible by tensor_parallel_size=4"),
        ({"num_heads": 12, "hidden_size": 24, "num_kv_heads": 3}, "num_kv_heads=3 and tensor_parallel_size=4"),
        ({"ffn_hidden_size": 30}, r"^blocks.0.mlp.up: ffn_hidden_size=30 is not .*nearest valid ffn.*: 28, 32"),
        ({"vocab_multiple": 10}, r"^embedding.tokens: vocab_multiple=10 pads vocab_size=50 to 50 .*: 8, 12"),
    ):
        with torch.device("meta"):
            model = GPT(GPTConfig.gpt2(**{**SHAPE, **change}))
        with pytest.raises(ConfigError, match=message):
            shard_module(model, mesh, False)
    model = GPT(STYLES["gpt2"])
    shard_module(model, mesh, True)
    with pytest.raises(
        ConfigError, match=r"sequence length 10 .*tensor_parallel_size=4.* nearest valid lengths: 8, 12"
    ):
        model(torch.zeros(1, 10, dtype=torch.int64))


def test_refusals_at_sharding(pool: RankPool) -> None:
    pool.run(on_ranks_refusals, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, r"num_layers=0: expected a positive integer"),
        ({"position": "rotary"}, r"position='rotary' is not one of learned, rope"),
        ({"mlp": "swigLU2"}, r"mlp='swigLU2' .*did you mean 'swiglu'"),
        ({"dropout": 1.0}, r"dropout=1.0: expected 0 <= dropout < 1"),
        ({"num_heads": 3}, r"num_heads=3 does not divide hidden_size=16; nearest valid num_heads: 2, 4"),
        ({"num_kv_heads": 3}, r"num_kv_heads=3 does not divide num_heads=4"),
        ({"num_heads": 16, "position": "rope"}, r"needs an even head size"),
        ({"tied_head": "yes"}, r"tied_head='yes': expected true or false"),
        ({"seed": 0.5}, r"seed=0.5: expected an integer"),
        ({"norm_eps": 0.0}, r"norm_eps=0.0 .*must be above 0"),
    ],
)
def test_config_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPTConfig(**{**SHAPE, **change})


def test_plain_model() -> None:
    """No process group: an ordinary module, real or on the meta device."""
    assert not dist.is_initialized()
    config = STYLES["llama"]
    model = GPT(config)
    tokens, labels = batch(config)
    loss = model(tokens, labels)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert abs(loss.item() - torch.tensor(50.0).log().item()) < 0.3
    assert model(tokens).shape == (3, 8, 50)
    assert model(tokens, torch.full_like(labels, -100)).item() == 0.0
    assert config.ffn_size == 64 and STYLES["gpt2"].ffn_size == 64
    with torch.device("meta"):
        shadow = GPT(config)
    assert all(p.is_meta for p in shadow.parameters())
    initialise_by_name(shadow, seed=0)  # the model brings its own seed
    for (name, a), (_, b) in zip(model.named_parameters(), shadow.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(ConfigError, match=r"sequence length 13 is above max_sequence_length=12"):
        model(torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(ValueError, match="tokens outside the vocabulary"):
        model(tokens + 50)


def test_causality() -> None:
    for name, config in STYLES.items():
        model = build(config, torch.float64)
        tokens, _ = batch(config)
        changed = tokens.clone()
        changed[:, 5] = (changed[:, 5] + 1) % config.vocab_size
        before, after = model(tokens), model(changed)
        assert torch.equal(before[:, :5], after[:, :5]), name
        assert not torch.allclose(before[:, 5:], after[:, 5:]), name


def test_style_names() -> None:
    names = {
        name.replace("blocks.1.", "") for name, _ in GPT(STYLES["llama"]).named_parameters() if "blocks.0" not in name
    }
    assert names == {
        "embedding.tokens.weight",
        "attention_norm.weight",
        *(f"attention.{part}.weight" for part in ("query", "key", "value", "output")),
        "mlp_norm.weight",
        *(f"mlp.{part}.weight" for part in ("gate", "up", "down")),
        "final_norm.weight",
        "head.weight",
    }
