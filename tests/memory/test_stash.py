"""Gradients in an arena: the same bits, dtypes, strides and absences as autograd's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megapar.layers.deferral import Deferral
from lightning_megapar.memory import GradientStash, TensorArena

Backward = Callable[[nn.Module, int], None]
"""(module, step): some backwards."""


class Net(nn.Module):
    """Parameters of many kinds; ``rare`` is used in every third step only, ``never`` in none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20, 12)
        self.sparse = nn.Embedding(20, 12, sparse=True)
        self.linear = nn.Linear(12, 12)
        self.across = nn.Parameter(torch.randn(7, 12).t())
        self.filters = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
        self.apart = nn.Parameter(torch.randn(12, 24)[:, ::2])
        self.narrow = nn.Parameter(torch.randn(12).bfloat16())
        self.wide = nn.Parameter(torch.randn(12).bfloat16())
        self.wide.grad_dtype = torch.float32
        self.free = nn.Parameter(torch.randn(12).bfloat16())
        self.free.grad_dtype = None
        self.turning = nn.Parameter(torch.randn(12, dtype=torch.complex64))
        self.minus = nn.Parameter(torch.randn(24, 12))
        self.rare = nn.Parameter(torch.randn(12))
        self.never = nn.Parameter(torch.randn(12))
        self.frozen = nn.Parameter(torch.randn(12), requires_grad=False)

    def forward(self, rows: Tensor, step: int) -> Tensor:
        x = self.linear(self.words(rows) + self.sparse(rows) + self.frozen) @ self.apart
        x = x * self.narrow.float() * self.turning.real + self.minus * -0.0
        x = x + self.wide.float() + self.free.float()
        if step % 3 == 0:
            x = x * self.rare
        y = F.conv2d((x @ self.across)[: 3 * 3 * 2].reshape(-1)[:108].view(1, 3, 6, 6), self.filters)
        return y.square().mean() + x.mean()


def rows(step: int, microbatch: int) -> Tensor:
    return torch.randint(0, 20, (24,), generator=torch.Generator().manual_seed(10 * step + microbatch))


def whole(module: nn.Module, step: int) -> None:
    for microbatch in range(3):
        module(rows(step, microbatch), step).backward()


def waiting(module: nn.Module, step: int) -> None:
    deferral = Deferral()
    deferral.connect(module)
    for microbatch in range(3):
        with deferral.collecting((0, microbatch)):
            module(rows(step, microbatch), step).backward()
    for microbatch in range(3):
        deferral.compute((0, microbatch))


def with_graph(module: nn.Module, step: int) -> None:
    for microbatch in range(2):
        module(rows(step, microbatch), step).backward(create_graph=True)


def gradients(backward: Backward, stash: GradientStash | None) -> list[dict[str, Tensor | None]]:
    module = Net()
    found = []
    for step in range(6):
        module.zero_grad()
        if stash is None:
            backward(module, step)
        else:
            with stash.step(module.parameters()):
                backward(module, step)
        found.append({name: None if p.grad is None else p.grad.detach() for name, p in module.named_parameters()})
    return found


def check_same(ours: Tensor | None, theirs: Tensor | None, name: str) -> None:
    assert (ours is None) == (theirs is None), name
    if ours is None or theirs is None:
        return
    assert (ours.dtype, ours.layout, ours.shape) == (theirs.dtype, theirs.layout, theirs.shape), name
    if ours.is_sparse:
        ours, theirs = ours.coalesce().values(), theirs.coalesce().values()
    assert ours.stride() == theirs.stride(), name
    assert (
        ours.numpy(force=True).tobytes() == theirs.numpy(force=True).tobytes()
        if ours.dtype != torch.bfloat16
        else (ours.view(torch.int16).equal(theirs.view(torch.int16)))
    ), name


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("backward", [whole, waiting, with_graph])
@pytest.mark.parametrize("capacity", [None, 1 << 20, 4096])
def test_gradients_are_autograds(backward: Backward, capacity: int | None) -> None:
    arena = TensorArena(capacity)
    expected, got = gradients(backward, None), gradients(backward, GradientStash(arena))
    for step, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        for name in theirs:
            check_same(ours[name], theirs[name], f"{name} in step {step}")
    assert torch.signbit(expected[1]["minus"]).any()  # negative zeros, which 0.0 would lose
    assert expected[0]["rare"] is not None and expected[1]["rare"] is expected[0]["never"] is None
    # Where a graph of the gradients is made, autograd adds out of place.
    assert (arena.stats().allocated_bytes > 0) == (backward is not with_graph)
    del ours, theirs, got
    assert arena.stats().allocated_bytes == 0


def test_they_lie_in_the_arena_from_the_second_step_on() -> None:
    arena = TensorArena(1 << 20)
    stash, module = GradientStash(arena), nn.Linear(8, 8)
    for step in range(3):
        module.zero_grad()
        with stash.step(module.parameters()):
            module(torch.ones(2, 8)).sum().backward()
            assert (arena.stats().allocated_bytes > 0) == (step > 0)
        assert arena.stats().allocated_bytes == (0 if step == 0 else 4 * (64 + 8))
    module.zero_grad()
    assert arena.stats().allocated_bytes == 0


def test_what_was_there_is_added_to() -> None:
    arena = TensorArena(1 << 20)
    stash, module = GradientStash(arena), nn.Linear(4, 4)
    for _ in range(3):
        with stash.step(module.parameters()):
            module(torch.ones(2, 4)).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((4, 4), 6.0))
    assert arena.stats().allocated_bytes == 0  # autograd's own, from the first step


def test_hooks_that_replace_gradients() -> None:
    def of(stash: GradientStash | None) -> list[Any]:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for parameter in module.parameters():
            nn.init.constant_(parameter, 0.5)
        module[0].weight.register_hook(lambda grad: grad * 2)
        module[0].bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        module[1].bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.clone() * 3))
        found = []
        for _ in range(3):
            module.zero_grad()
            if stash is None:
                module(torch.ones(2, 4)).sum().backward()
            else:
                with stash.step(module.parameters()):
                    module(torch.ones(2, 4)).sum().backward()
            found.append([None if p.grad is None else p.grad.tolist() for p in module.parameters()])
        return found

    assert of(GradientStash(TensorArena(1 << 20))) == of(None)


def test_after_an_error_nothing_is_left() -> None:
    arena = TensorArena(1 << 20)
    stash, module = GradientStash(arena), nn.Linear(4, 4)
    with stash.step(module.parameters()):
        module(torch.ones(2, 4)).sum().backward()
    module.zero_grad()
    with pytest.raises(RuntimeError, match="in the step"), stash.step(module.parameters()):
        raise RuntimeError("in the step")
    assert module.weight.grad is None and arena.stats().allocated_bytes == 0


def test_gradients_may_be_moved() -> None:
    arena = TensorArena(1 << 20)
    stash = GradientStash(arena)
    parameters = [nn.Parameter(torch.randn(10 + 3 * number)) for number in range(40)]
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = None
        with stash.step(parameters):
            sum(p.square().sum() for p in parameters).backward()
    for parameter in parameters[::3]:
        parameter.grad = None
    left = [p.grad for p in parameters if p.grad is not None]
    sums = [hashlib.sha256(grad.numpy().tobytes()).hexdigest() for grad in left]
    before = [grad.data_ptr() for grad in left]
    assert arena.defragment() > 0
    assert [hashlib.sha256(grad.numpy().tobytes()).hexdigest() for grad in left] == sums
    assert [grad.data_ptr() for grad in left] != before and arena.stats().fragmentation == 0
    assert all(p.grad is None or torch.equal(p.grad, 2 * p.detach()) for p in parameters)
