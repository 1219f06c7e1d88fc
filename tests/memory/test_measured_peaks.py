"""Chains of real blocks: measured one by one, planned, and run; peaks by the profiler's memory events."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor, nn

from lightning_megapar.memory.blocks import OPTIONS, BlockForward, choose_for
from lightning_megapar.memory.chain import ChainCosts, chain_peak, plan_chain, smallest_peak
from lightning_megapar.memory.measure import measure_block
from lightning_megapar.memory.meter import metered, quiet_profiler
from lightning_megapar.memory.rerun import AsResult

CPU = torch.device("cpu")


class Scores(nn.Module):
    """Attention that keeps its matrices."""

    is_core_attention = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(query @ key.transpose(-1, -2) * 0.1, -1) @ value


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, dropout: float, activation: nn.Module) -> None:
        super().__init__()
        self.heads, self.activation, self.dropout = heads, activation, nn.Dropout(dropout)
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections = nn.Linear(width, 3 * width) if heads else None
        self.core = Scores() if heads else None
        self.output, self.up, self.down = nn.Linear(width, width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.projections is not None and self.core is not None:
            parts = self.projections(self.norm(x)).chunk(3, -1)
            query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
            x = x + self.dropout(self.output(self.core(query, key, value).transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.down(self.activation(self.up(self.second_norm(x)))))


def chain(seed: int) -> tuple[list[nn.Module], Tensor, int]:
    """Blocks, their input and how many microbatches are in flight."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width, activations = draw.choice([32, 64, 96]), [nn.GELU(), nn.ReLU(), nn.SiLU()]
    blocks: list[nn.Module] = [
        Block(
            width,
            draw.choice([0, 2, 4]),
            width * draw.choice([1, 2, 4]),
            draw.choice([0.0, 0.1]),
            draw.choice(activations),
        )
        for _ in range(draw.randint(2, 7))
    ]
    return blocks, torch.randn(draw.choice([2, 4]), draw.choice([16, 48, 96]), width), draw.randint(1, 4)


def measured(forwards: list[BlockForward], x: Tensor) -> list[ChainCosts]:
    return [measure_block(forward, (x.requires_grad_(),), {}, CPU).costs for forward in forwards]


def peak(blocks: list[nn.Module], x: Tensor, in_flight: int) -> int:
    """Of forwards of all microbatches and their backwards, gradients of parameters left out."""
    for parameter in itertools.chain(*(block.parameters() for block in blocks)):
        parameter.grad = torch.zeros_like(parameter)
    with quiet_profiler(), metered(CPU) as meter:
        ends = []
        anchor = torch.zeros((), requires_grad=True)
        for _ in range(in_flight):
            y: Tensor = AsResult.apply(anchor, x.detach().clone())  # no leaf, as in a model
            for block in blocks:
                y = block(y)
            ends.append(torch.autograd.graph.get_gradient_edge(y * 1.0))
            shape = y.shape
            del y
        while ends:
            torch.autograd.backward([ends.pop(0)], [torch.ones(()).expand(shape)])
    return meter.usages[0].peak_bytes


def shares(costs: list[ChainCosts], in_flight: int) -> list[int]:
    """Budgets from the smallest that there is to what everything needs."""
    low, high = smallest_peak([costs], [in_flight]), chain_peak([costs], ["all"] * len(costs), [in_flight])
    return [int(low + share * (high - low)) for share in (0.0, 0.3, 0.7, 1.0)]


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 50))])
def test_the_measured_peak_is_within_the_budget_and_as_planned(seed: int) -> None:
    blocks, x, in_flight = chain(seed)
    forwards = choose_for([(str(number), block) for number, block in enumerate(blocks)], "all")
    costs = measured(forwards, x)
    peaks = []
    for budget in shares(costs, in_flight):
        plan = plan_chain([costs], budget, [in_flight])
        for forward, option in zip(forwards, plan.choices):
            forward.option = option
        found = peak(blocks, x, in_flight)
        assert found <= budget, (seed, budget)
        assert 0.95 * plan.peak_bytes <= found <= plan.peak_bytes, (seed, budget)
        peaks.append(found)
    assert peaks == sorted(peaks), seed


@pytest.mark.parametrize("seed", range(50, 54))
def test_it_takes_no_longer_than_one_option_for_all_blocks_or_for_some(seed: int) -> None:
    """One option everywhere (``"products"`` is torch's selective policy), or in the first blocks alone."""
    blocks, x, in_flight = chain(seed)
    costs = measured(choose_for([(str(number), block) for number, block in enumerate(blocks)], "all"), x)
    for option in OPTIONS[1:]:
        for count in range(len(costs) + 1):
            uniform = [
                option if number < count and option in one.saved_bytes else "all" for number, one in enumerate(costs)
            ]
            plan = plan_chain([costs], chain_peak([costs], uniform, [in_flight]), [in_flight])
            seconds = sum(one.recompute_seconds[name] for one, name in zip(costs, uniform))
            assert plan.recompute_seconds <= seconds * (1 + 1e-9), (seed, option, count)


def test_measuring_leaves_nothing_behind() -> None:
    blocks, x, _ = chain(2)
    (forward,) = choose_for([("0", blocks[0])], "all")
    before = torch.get_rng_state()
    measure_block(forward, (x.requires_grad_(),), {}, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert x.grad is None and all(parameter.grad is None for parameter in blocks[0].parameters())


def test_frozen_parameters_and_inputs_without_gradients() -> None:
    block = Block(32, 2, 32, 0.0, nn.GELU()).requires_grad_(False)
    block.down.requires_grad_(True)
    (forward,) = choose_for([("0", block)], "all")
    costs = measure_block(forward, (torch.randn(2, 8, 32),), {}, CPU).costs
    assert costs.saved_bytes["all"] >= 2 * 8 * 32 * 4 and costs.saved_bytes["inputs"] <= costs.saved_bytes["all"] + 64
    frozen = Block(32, 2, 32, 0.0, nn.GELU()).requires_grad_(False)
    (forward,) = choose_for([("0", frozen)], "all")
    assert set(measure_block(forward, (torch.randn(2, 8, 32),), {}, CPU).costs.saved_bytes.values()) == {0}
