"""What a step's buffers are for, on modules whose bytes are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from lightning_megapar.config import ConfigError
from lightning_megapar.marks import communicating
from lightning_megapar.memory.recorder import StepRecorder, recorded_step, storages
from lightning_megapar.memory.saved import SavedBytes
from lightning_megapar.memory.timeline import (
    ACTIVATIONS,
    BACKWARD,
    CATEGORIES,
    FORWARD,
    GRADIENTS,
    MESSAGES,
    OPTIMIZER,
    OTHER,
    OUTSIDE,
    PARAMETERS,
    TEMPORARY,
    UPDATE,
    Timeline,
)
from lightning_megapar.models.gpt import GPT, GPTConfig

CPU = torch.device("cpu")
ROWS, WIDTH = 256, 128
UNIT = ROWS * WIDTH * 4
WEIGHTS = WIDTH * WIDTH * 4


class Layer(nn.Module):
    """Keeps its input (of the product) and the sine's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x))


class Recomputed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class Chain(nn.Module):
    def __init__(self, kind: type[Layer] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * 2.0).requires_grad_()
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def known(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, list[Tensor]]:
    state = [] if optimizer is None else [v for one in optimizer.state.values() for v in one.values()]
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return {PARAMETERS: list(module.parameters()), OPTIMIZER: state, GRADIENTS: gradients}


def recorded(module: Chain, step: Any, optimizer: torch.optim.Optimizer | None = None) -> Timeline:
    blocks = {str(number): layer for number, layer in enumerate(module.layers)}
    with recorded_step(CPU, blocks, known(module, optimizer), module.parameters()) as found:
        step()
    return found[0]


def test_every_buffer_of_a_step_by_what_it_is_for() -> None:
    module, x = Chain(), torch.rand(ROWS, WIDTH)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def step() -> None:
        loss = module(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    line = recorded(module, step, optimizer)
    assert line.most[PARAMETERS] == 3 * WEIGHTS
    assert line.most[OPTIMIZER] == 3 * WEIGHTS
    assert line.most[GRADIENTS] == 3 * WEIGHTS  # the old ones went before the new ones came
    assert line.layers["0"] == line.layers["1"] == line.layers["2"] == 2 * UNIT
    assert 0 <= line.most[ACTIVATIONS] - 6 * UNIT - line.layers.get(OUTSIDE, 0) < 64
    assert line.most[MESSAGES] == 0
    assert UNIT <= line.most[TEMPORARY] <= 3 * UNIT
    # Behind the step there are parameters, their state and gradients.
    assert [line.held[-1][CATEGORIES.index(use)] for use in (PARAMETERS, OPTIMIZER, GRADIENTS)] == [3 * WEIGHTS] * 3
    assert sum(line.held[-1]) - 9 * WEIGHTS < 64
    assert line.peak_bytes == max(map(sum, line.held)) == sum(line.peak.values())
    phases = [kind for kind, _, _ in line.phases if kind != OTHER]  # a busy machine makes pauses
    assert list(dict.fromkeys(phases)) == [FORWARD, BACKWARD, UPDATE] and phases[-1] == UPDATE
    assert line.phases[0][1] == 0.0 and line.phases[-1][2] == pytest.approx(line.end)


def test_what_is_recomputed_is_no_activation_but_its_inputs_are() -> None:
    module, x = Chain(Recomputed), torch.rand(ROWS, WIDTH)
    line = recorded(module, lambda: module(x).backward())
    for layer in "012":
        assert UNIT <= line.layers[layer] < UNIT + 8192  # the state of the random numbers is kept as well
    assert 3 * UNIT <= line.most[ACTIVATIONS] < 4 * UNIT
    assert line.most[TEMPORARY] >= 2 * UNIT


def test_activations_are_what_autograd_keeps() -> None:
    torch.manual_seed(0)
    config = GPTConfig.gpt2(vocab_size=64, num_layers=2, num_heads=2, hidden_size=64, max_sequence_length=64)
    model, tokens = GPT(config), torch.randint(0, 64, (4, 65))
    with SavedBytes(model) as saved:
        loss = model(tokens[:, :-1], tokens[:, 1:])
    kept = saved.bytes
    del loss
    blocks = {f"blocks.{number}": block for number, block in enumerate(model.blocks)}
    with recorded_step(CPU, blocks, known(model), model.parameters()) as found:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert found[0].most[ACTIVATIONS] == pytest.approx(kept, rel=0.01)


def test_two_microbatches_in_flight_and_what_is_sent() -> None:
    module, x = Chain(), torch.rand(ROWS, WIDTH)

    def step() -> None:
        first, second = module(x), module(x)
        with communicating():
            sent = torch.empty(5 * UNIT, dtype=torch.uint8)
        first.backward()
        del sent
        second.backward()

    line = recorded(module, step)
    assert line.layers["1"] == 4 * UNIT
    assert line.most[MESSAGES] == 5 * UNIT
    assert line.most[GRADIENTS] == 3 * WEIGHTS


def test_a_message_that_is_a_block_s_input_is_kept_by_it() -> None:
    module = Chain()

    def step() -> None:
        with communicating():
            received = torch.rand(ROWS, WIDTH)
        x = received.requires_grad_()
        for layer in module.layers:
            x = layer(x)
        x.sum().backward()

    line = recorded(module, step)
    assert line.layers["0"] == 2 * UNIT and line.most[MESSAGES] == 0


def test_fewer_moments_keep_the_peak() -> None:
    module, x = Chain(), torch.rand(ROWS, WIDTH)
    line = recorded(module, lambda: module(x).backward())
    few = line.thinned(7)
    assert len(few.seconds) <= 7 < len(line.seconds)
    assert max(map(sum, few.held)) == line.peak_bytes == few.peak_bytes
    assert line.thinned(10_000) is line


def test_shared_memory_counts_once() -> None:
    weight = torch.zeros(8, 4)
    assert list(storages([weight, weight.t(), weight[2:]], CPU).values()) == [128]
    assert storages([weight], torch.device("cuda")) == {}


def test_hooks_go_and_another_profiler_is_refused() -> None:
    module = Chain()
    recorder = StepRecorder(CPU, {"0": module.layers[0]}, known(module), module.parameters())
    recorder.start()
    recorder.abandon()
    assert not module.layers[0]._forward_hooks and not module.layers[0]._forward_pre_hooks
    assert all(not parameter._post_accumulate_grad_hooks for parameter in module.parameters())
    with profile(), pytest.raises(ConfigError, match="another one is running"):
        recorder.start()
