"""Embedding, positions, head and cross entropy with the vocabulary split over the ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import strategies as st
from pool import RankPool
from sharded_cases import (
    CollectiveCounter,
    compare,
    for_examples,
    full_gradients,
    integers,
    perturb,
    piece,
    same,
    tensor_mesh,
)
from torch import Tensor, nn

from lightning_megapar.config import ConfigError
from lightning_megapar.layers import (
    LearnedPositions,
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy,
)
from lightning_megapar.layers.collectives import TensorRanks
from lightning_megapar.sharding import shard_module


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def shapes(size: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "batch": st.integers(1, 3),
            "sequence": st.integers(1, 3).map(lambda n: n * size),
            "hidden": st.integers(1, 8),
            "vocabulary": st.integers(1, 30),
            "multiple": st.sampled_from([1, 2, 5]).map(lambda n: n * size),
            "sequence_parallel": st.booleans(),
            "seed": st.integers(0, 10**6),
        }
    )


class Embed(nn.Module):
    """Tokens and positions, as a model adds them."""

    def __init__(self, vocabulary: int, hidden: int, multiple: int, longest: int) -> None:
        super().__init__()
        self.tokens = VocabParallelEmbedding(vocabulary, hidden, vocab_multiple=multiple)
        self.positions = LearnedPositions(longest, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(tokens.shape[-1])


def check_embedding(case: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    module = Embed(case["vocabulary"], case["hidden"], case["multiple"], case["sequence"] + 2)
    perturb(module, generator, exact=True)
    tokens = torch.randint(0, case["vocabulary"], (case["batch"], case["sequence"]), generator=generator)
    table = nn.Embedding(*module.tokens.weight.shape)

    def reference(whole: nn.Module, x: Tensor) -> Tensor:
        rows = torch.func.functional_call(table, {"weight": whole.tokens.weight}, (x,))
        return rows + whole.positions.weight[: x.shape[-1]]

    compare(
        module,
        tokens,
        lambda y: integers(tuple(y.shape), generator),
        sequence_parallel=case["sequence_parallel"],
        output_layout="sequence" if case["sequence_parallel"] else "whole",
        reference=reference,
    )


def check_head(case: dict[str, Any]) -> None:
    """Logits of all ranks are nn.Linear's; padding stripped."""
    generator = torch.Generator().manual_seed(case["seed"])
    head = VocabParallelHead(case["vocabulary"], case["hidden"], vocab_multiple=case["multiple"])
    perturb(head, generator, exact=True)
    compare(
        head,
        integers((case["batch"], case["sequence"], case["hidden"]), generator),
        lambda y: integers(tuple(y.shape), generator),
        sequence_parallel=case["sequence_parallel"],
        input_layout="sequence" if case["sequence_parallel"] else "whole",
        reference=lambda whole, x: F.linear(x, whole.weight[: case["vocabulary"]]),
    )


def check_loss(case: dict[str, Any]) -> None:
    """Loss, input gradient and weight gradient of the head in float64, with a ragged set of ignored labels."""
    generator = torch.Generator().manual_seed(case["seed"])
    head = VocabParallelHead(case["vocabulary"], case["hidden"], vocab_multiple=case["multiple"], dtype=torch.float64)
    perturb(head, generator)
    shape = (case["batch"], case["sequence"])
    labels = torch.randint(0, case["vocabulary"], shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = -100
    reduction = ("mean", "sum", "none")[case["seed"] % 3]

    def reference(whole: nn.Module, x: Tensor) -> Tensor:
        logits = F.linear(x, whole.weight[: case["vocabulary"]])
        if bool((labels == -100).all()) and reduction == "mean":
            return logits.sum() * 0.0
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction=reduction)
        return loss.view(shape) if reduction == "none" else loss

    def draw(y: Tensor) -> Tensor:
        return torch.randn(y.shape, generator=generator, dtype=y.dtype)

    compare(
        head,
        torch.randn(*shape, case["hidden"], generator=generator, dtype=torch.float64),
        draw,
        sequence_parallel=case["sequence_parallel"],
        input_layout="sequence" if case["sequence_parallel"] else "whole",
        exact=False,
        call=lambda module, x: module(x, labels, reduction),
        reference=reference,
    )


def on_ranks_theorems() -> None:
    for check in (check_embedding, check_head, check_loss):
        for_examples(shapes(world()), check, max_examples=20)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_theorems(pool: RankPool, size: int) -> None:
    pool.run(on_ranks_theorems, size)


def on_ranks_tied() -> None:
    """One shared Parameter before and after; its gradient is the sum of both uses."""
    mesh = tensor_mesh()
    torch.manual_seed(0)
    embedding = VocabParallelEmbedding(21, 8, vocab_multiple=8, dtype=torch.float64)
    module = nn.ModuleDict(
        {"embedding": embedding, "head": VocabParallelHead(21, 8, vocab_multiple=8, weight=embedding.weight)}
    )
    sharded = copy.deepcopy(module)
    assert sharded["head"].weight is sharded["embedding"].weight
    tokens = torch.randint(0, 21, (2, 8))
    module["head"](module["embedding"](tokens), tokens).backward()
    for sequence_parallel in (False, True):
        twin = copy.deepcopy(sharded)
        shard_module(twin, mesh, sequence_parallel)
        assert twin["head"].weight is twin["embedding"].weight
        assert [n for n, _ in twin.named_parameters()] == ["embedding.weight"]
        twin["head"](twin["embedding"](tokens), tokens).backward()
        same(full_gradients(twin)["embedding.weight"], embedding.weight.grad, False, "tied gradient")
        assert not full_gradients(twin)["embedding.weight"][21:].any()

    # Only one of the two owners is a parallel layer: refused, or the other would hold a DTensor that it cannot use.
    linear = nn.Linear(8, 24, bias=False)
    linear.weight = VocabParallelEmbedding(21, 8, vocab_multiple=8).weight
    mixed = nn.ModuleDict({"embedding": VocabParallelEmbedding(21, 8, vocab_multiple=8, weight=linear.weight)})
    mixed["head"] = linear
    with pytest.raises(ConfigError, match=r"embedding.weight and head.weight share one parameter, but only one"):
        shard_module(mixed, mesh, False)


def test_tied_table(pool: RankPool) -> None:
    pool.run(on_ranks_tied, 2)


def on_ranks_loss_details() -> None:
    mesh = tensor_mesh()
    assert mesh is not None
    ranks = TensorRanks(mesh)
    generator = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(64, 40, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 33, (64,), generator=generator)

    # Padding columns may hold anything, not-a-number included.
    logits[:, 33:] = torch.nan
    own = piece(logits, "columns", ranks.rank, ranks.size).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(own, labels, ranks, vocab_size=33)
    loss.backward()
    x = logits[:, :33].clone().requires_grad_()
    F.cross_entropy(x, labels).backward()
    expected = piece(F.pad(x.grad, (0, 7)), "columns", ranks.rank, ranks.size)
    same(own.grad, expected, False, "gradient beside padding")

    # Half precision: accumulated in float32, so the error is that of rounding the logits, not of the sum.
    wide = torch.randn(32, 4096, generator=generator, dtype=torch.float64).bfloat16()
    target = torch.randint(0, 4096, (32,), generator=generator)
    own = piece(wide, "columns", ranks.rank, ranks.size).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(own, target, ranks, reduction="none")
    assert loss.dtype == torch.float32
    same(loss.detach().double(), F.cross_entropy(wide.double(), target, reduction="none"), False, "bf16 loss", 1e-6)
    loss.sum().backward()
    assert own.grad.dtype == torch.bfloat16
    y = wide.double().requires_grad_()
    F.cross_entropy(y, target, reduction="sum").backward()
    same(own.grad.double(), piece(y.grad, "columns", ranks.rank, ranks.size), False, "bf16 gradient", 4e-3)

    # A rank whose columns are all masked takes no part and gets zero gradient.
    masked = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    masked[:, 4:] = -torch.inf
    own = piece(masked, "columns", ranks.rank, ranks.size).clone().requires_grad_()
    y = masked.clone().requires_grad_()
    for x, cross_entropy in ((own, vocab_parallel_cross_entropy), (y, None)):
        few = torch.arange(6) % 4
        (F.cross_entropy(x, few) if cross_entropy is None else cross_entropy(x, few, ranks)).backward()
    same(own.grad, piece(y.grad, "columns", ranks.rank, ranks.size), False, "masked rank", floor=1.0)

    # A label so certain that half precision has no digits for 1 - probability.
    sure = torch.zeros(1, 4).bfloat16()
    sure[0, 2] = 9.0
    own = piece(sure, "columns", ranks.rank, ranks.size).clone().requires_grad_()
    vocab_parallel_cross_entropy(own, torch.tensor([2]), ranks).backward()
    y = sure.double().requires_grad_()
    F.cross_entropy(y, torch.tensor([2])).backward()
    same(own.grad.double(), piece(y.grad, "columns", ranks.rank, ranks.size), False, "certain label", 4e-3)

    # No token counts: zero and zeros.
    own = torch.full((3, 8), 1e30).requires_grad_()
    loss = vocab_parallel_cross_entropy(own, torch.full((3,), -100), ranks)
    loss.backward()
    assert loss.item() == 0.0 and not own.grad.any()

    with pytest.raises(
        ValueError, match=r"labels outside the vocabulary: valid values are 0 to 32 .*-100; .* 33 to 33"
    ):
        vocab_parallel_cross_entropy(torch.zeros(1, 20), torch.tensor([33]), ranks, vocab_size=33)
    with pytest.raises(ValueError, match="vocab_size=41 is not in 1 to 40"):
        vocab_parallel_cross_entropy(torch.zeros(1, 20), torch.tensor([3]), ranks, vocab_size=41)

    # The logits stay where they are: two numbers per token travel.
    with CollectiveCounter() as counter:
        vocab_parallel_cross_entropy(
            torch.zeros(16, 512).requires_grad_(), torch.zeros(16, dtype=int), ranks
        ).backward()
    assert dict(counter.calls) == {("all_gather", 2 * 2 * 16 * 4): 1}


def test_cross_entropy_details(pool: RankPool) -> None:
    pool.run(on_ranks_loss_details, 2)


def test_cross_entropy_without_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5, 17, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 17, (4, 5), generator=generator)
    labels[0] = -1
    loss = vocab_parallel_cross_entropy(logits, labels, ignore_index=-1)
    (got,) = torch.autograd.grad(loss, logits)
    (expected,) = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1), logits)
    same(got, expected, False, "gradient")
    with pytest.raises(ValueError, match=r"found values from -1 to 17"):
        labels[1, 1] = 17
        vocab_parallel_cross_entropy(logits, labels)
    with pytest.raises(ValueError, match=r"reduction='avg' is not one of mean, sum, none"):
        vocab_parallel_cross_entropy(logits, labels, reduction="avg")
    with pytest.raises(ValueError, match=r"labels of shape \(4,\) do not fit"):
        vocab_parallel_cross_entropy(logits, labels[:, 0])


def test_padding_rows() -> None:
    embedding = VocabParallelEmbedding(50, 4, vocab_multiple=16)
    assert embedding.full_shape("weight") == (64, 4) and not embedding.weight[50:].any() and embedding.weight[:50].all()
    first = embedding.initial_value("weight", torch.Generator().manual_seed(0))
    wider = VocabParallelEmbedding(50, 4, vocab_multiple=128).initial_value("weight", torch.Generator().manual_seed(0))
    assert torch.equal(first[:50], wider[:50])
    embedding.assign_full("weight", torch.ones(50, 4))
    assert bool((embedding.weight[:50] == 1).all()) and not embedding.weight[50:].any()
    with pytest.raises(ValueError, match=r"tokens outside the vocabulary: valid values are 0 to 49; .* from -1 to 50"):
        embedding(torch.tensor([3, 50, -1]))
    with pytest.raises(ConfigError, match=r"max_sequence_length=4; nearest valid length: 4"):
        LearnedPositions(4, 2)(5)
    with pytest.raises(ConfigError, match=r"tied weight must have shape \(64, 4\), got \(50, 4\)"):
        VocabParallelHead(50, 4, weight=nn.Parameter(torch.zeros(50, 4)))


def on_ranks_refusals() -> None:
    mesh = tensor_mesh()
    with pytest.raises(
        ConfigError, match=r"head: vocab_multiple=64 pads vocab_size=100 to 128 rows, .*=3 .*nearest valid .*: 63, 66"
    ):
        shard_module(nn.ModuleDict({"head": VocabParallelHead(100, 4)}), mesh, False)
    embedding = VocabParallelEmbedding(6, 4, vocab_multiple=3)
    shard_module(embedding, mesh, True)
    with pytest.raises(ConfigError, match=r"sequence length 4 is not divisible by .*=3.* valid lengths: 3, 6"):
        embedding(torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="tokens outside the vocabulary"):
        embedding(torch.full((1, 3), 6))


def test_refusals(pool: RankPool) -> None:
    pool.run(on_ranks_refusals, 3)
