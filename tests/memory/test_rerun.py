"""A forward that is run again in the backward: like the first time, and as if it had not been run."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_megapar.config import ConfigError
from lightning_megapar.generators import generator_states
from lightning_megapar.memory.blocks import OPTIONS, choose_for, forward_of
from lightning_megapar.memory.measure import measure_block
from lightning_megapar.memory.products import ProductsChangedError
from lightning_megapar.models.gpt import GPT, GPTConfig

AGAIN = ("no_attention", "products", "inputs")


class Draws(nn.Module):
    """Draws from every kind of generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.own = torch.Generator().manual_seed(3)
        self.python = random.Random(4)
        self.numbers = numpy.random.default_rng(5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(nn.functional.dropout(x, 0.3))) * random.random() * float(numpy.random.rand())
        mask = torch.rand(x.shape, generator=self.own)
        return torch.sin(x * mask) * self.python.random() * float(self.numbers.random())


class Statistics(nn.Module):
    """Running statistics, and a buffer that the result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * 1.25  # another tensor each time
        return torch.tanh(self.norm(self.linear(x)) * self.scale)


class Spectral(nn.Module):
    """Power iterations: each forward moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Remembers(nn.Module):
    """Counts, and keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls = 0
        self.means: list[float] = []
        self.table: dict[str, int] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.tanh(self.linear(x) * self.calls)
        self.means.append(float(x.detach().mean()))
        self.table["calls"] = self.table.get("calls", 0) + 1
        self.last = x.detach()
        return torch.sin(x)


class Writes(nn.Module):
    """Adds to its argument in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return torch.sin(self.linear(x))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.sin(x)))


def train(make: Callable[[], nn.Module], option: str | None, steps: int = 3) -> dict[str, Any]:
    """Steps of two blocks, each with two microbatches in flight."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    blocks = nn.ModuleList([make().double(), make().double()])
    if option is not None:
        choose_for([(str(number), block) for number, block in enumerate(blocks)], option)
    data = torch.randn(steps, 2, 8, 6, dtype=torch.float64)
    gradients = []
    for pieces in data:
        losses = []
        for piece in pieces:
            x = piece * 1.0
            for block in blocks:
                x = block(x)
            losses.append(x.square().sum())
        for loss in reversed(losses):
            loss.backward()
        gradients.append([p.grad.clone() for p in blocks.parameters() if p.grad is not None])
        with torch.no_grad():
            for parameter in blocks.parameters():
                parameter -= 0.01 * parameter.grad  # type: ignore[operator]
    plain = {name: getattr(blocks[0], name, None) for name in ("calls", "means", "table")}
    return {
        "gradients": gradients,
        "buffers": [buffer.clone() for buffer in blocks.buffers()],
        "states": generator_states(),
        "own": [torch.rand(3, generator=one.own) for one in blocks if isinstance(one, Draws)],
        "python": [one.python.random() for one in blocks if isinstance(one, Draws)],
        "numpy": [float(one.numbers.random()) for one in blocks if isinstance(one, Draws)],
        "last": [one.last for one in blocks if isinstance(one, Remembers)],
        "plain": plain,
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize("option", AGAIN)
@pytest.mark.parametrize("make", [Plain, Draws, Statistics, Spectral, Remembers, Writes])
def test_numbers_and_all_that_is_left_are_the_same(make: Callable[[], nn.Module], option: str) -> None:
    expected, found = train(make, None), train(make, option)
    for key, value in expected.items():
        assert same(value, found[key]), key


class Caches(nn.Module):
    """Extends a cache among its arguments, as decoders do, and a dict that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, *, cache: Any, shared: dict[str, int], pair: tuple[Tensor, None]) -> Tensor:
        cache.rows.append(torch.tanh(self.linear(x)))
        shared["calls"] = shared.get("calls", 0) + 1
        return torch.sin(torch.cat(cache.rows).sum(0) + pair[0])


class Cache:
    def __init__(self) -> None:
        self.rows: list[Tensor] = []


@pytest.mark.parametrize("option", ["products", "inputs"])
def test_objects_among_the_arguments_are_those_very_objects_as_they_were(option: str) -> None:
    found = []
    for choice in (None, option):
        torch.manual_seed(0)
        block = Caches()
        if choice is not None:
            choose_for([("0", block)], choice)
        gradients, cache, shared = [], Cache(), {}
        pair = torch.randn(6, requires_grad=True)
        for _ in range(2):
            out = block(torch.randn(3, 6), cache=cache, shared=shared, pair=(pair, None))
            out.square().sum().backward(retain_graph=True)
            gradients += [block.linear.weight.grad.clone(), pair.grad.clone()]  # type: ignore[union-attr]
        found.append((gradients, shared, len(cache.rows)))
    assert same(found[0], found[1]) and found[1][1:] == ({"calls": 2}, 2)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_forward_without_gradients_is_the_module_s_own(option: str) -> None:
    block = Remembers()
    choose_for([("0", block)], option)
    with torch.no_grad():
        block(torch.randn(2, 6))
    block.eval()
    block(torch.randn(2, 6)).sum().backward()
    assert block.calls == 2 and len(block.means) == 2


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["deepcopy", "pickle"]
)
def test_copies_are_blocks_of_their_own(copied: Callable[[Any], Any]) -> None:
    block = Remembers()
    choose_for([("0", block)], "inputs")
    block(torch.randn(2, 6)).sum().backward()
    twin = copied(block)
    stands = forward_of(twin)
    assert stands is not None and stands.block is twin and stands.option == "inputs"
    twin(torch.randn(2, 6)).sum().backward()
    assert (block.calls, twin.calls) == (1, 2)


def test_a_block_gets_its_own_forward_back() -> None:
    block = Plain()
    for option in ("inputs", "products"):
        (forward,) = choose_for([("0", block)], option)
        assert forward.option == option
    forward.remove()
    assert forward_of(block) is None and "forward" not in vars(block)
    patched = Plain()
    patched.forward = lambda x: x * 2  # type: ignore[method-assign]
    (forward,) = choose_for([("0", patched)], "inputs")
    assert float(patched(torch.ones(()))) == 2.0
    forward.remove()
    assert forward_of(patched) is None and float(patched(torch.ones(()))) == 2.0


@pytest.mark.parametrize("option", AGAIN)
@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_our_decoder(style: str, option: str) -> None:
    found = []
    for choice in (None, option):
        torch.manual_seed(0)
        sizes = {"vocab_size": 40, "num_layers": 2, "num_heads": 2, "hidden_size": 16, "max_sequence_length": 8}
        model = GPT(getattr(GPTConfig, style)(**sizes, dropout=0.2)).double()
        if choice is not None:
            choose_for([(str(number), block) for number, block in enumerate(model.blocks)], choice)
        tokens = torch.randint(0, 40, (3, 8))
        for _ in range(2):
            model(tokens, tokens).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert same(found[0], found[1])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("option", AGAIN)
def test_a_decoder_of_transformers_with_its_cache(attention: str, option: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation=attention, attention_dropout=0.2, use_cache=True,
    )  # fmt: skip
    found = []
    for choice in (None, option):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).double().train()
        if choice is not None:
            choose_for([(str(number), block) for number, block in enumerate(model.model.layers)], choice)
        tokens = torch.randint(0, 40, (3, 8))
        for _ in range(2):  # the first call shows whether torch's attention is called
            model(tokens, labels=tokens).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert same(found[0], found[1])


@pytest.mark.parametrize("option", ["inputs"])
def test_a_compiled_block_is_recomputed_around_the_compiled_call(option: str) -> None:
    found = []
    for choice in (None, option):
        torch.manual_seed(0)
        block = Plain()
        block.compile(backend="aot_eager")
        if choice is not None:
            (forward,) = choose_for([("0", block)], choice)
            assert forward.is_compiled and forward.options() == ("all", "inputs", "offload")
        for _ in range(2):  # the first call keeps everything, since what it makes may lead to other code
            block(torch.randn(4, 6)).square().sum().backward()
        found.append(block.linear.weight.grad)
    assert same(found[0], found[1])
    with pytest.raises(ConfigError, match="block '0' is compiled as a whole"):
        choose_for([("0", block)], "no_attention")


def test_a_block_that_recomputes_itself_is_refused() -> None:
    block = Plain()
    block.gradient_checkpointing = True  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="gradient_checkpointing"):
        choose_for([("layers.0", block)], "inputs")


@pytest.mark.parametrize("option", AGAIN)
@pytest.mark.parametrize("is_marked", [True, False])
def test_attention_takes_the_kernel_that_it_took(option: str, is_marked: bool) -> None:
    found = []
    for choice in (None, option):
        torch.manual_seed(0)
        config = GPTConfig.gpt2(vocab_size=40, num_layers=2, num_heads=2, hidden_size=16, max_sequence_length=8)
        model = GPT(config)
        if not is_marked:
            for block in model.blocks:
                block.attention.core.is_core_attention = False
        if choice is not None:
            choose_for([(str(number), block) for number, block in enumerate(model.blocks)], choice)
        tokens = torch.randint(0, 40, (3, 8))
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(tokens, tokens)
        loss.backward()
        assert torch.backends.cuda.flash_sdp_enabled()
        found.append([parameter.grad for parameter in model.parameters()])
    assert same(found[0], found[1])


class Sums(Plain):
    """Adds its result to an argument in place, where the caller sees it."""

    def forward(self, x: Tensor, total: Tensor) -> Tensor:  # type: ignore[override]
        y = torch.sin(self.linear(x))
        total += y
        return y


class Same(Plain):
    """Looks whether two arguments are one tensor."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        return torch.sin(self.linear(x)) * (2.0 if x is other else 1.0)


@pytest.mark.parametrize("option", ["products", "inputs"])
@pytest.mark.parametrize("make", [Sums, Same])
def test_arguments_are_the_caller_s_own(make: type[Plain], option: str) -> None:
    found = []
    for choice in (None, option):
        torch.manual_seed(0)
        blocks = [make(), make()]
        if choice is not None:
            choose_for([(str(number), block) for number, block in enumerate(blocks)], choice)
        x, total = torch.randn(3, 6, requires_grad=True), torch.zeros(3, 6)
        h = x * 1.0
        for block in blocks:
            h = block(h, total if make is Sums else h)
        (h.sum() + total.square().sum()).backward()
        found.append([x.grad, total, *(parameter.grad for block in blocks for parameter in block.parameters())])
    assert same(found[0], found[1])


class Listed(Plain):
    def forward(self, xs: list[Tensor]) -> Tensor:  # type: ignore[override]
        xs[0].mul_(0.9)
        return torch.sin(self.linear(xs[0]))


class Counts(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.number = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return torch.sin(self.linear(x)) * self.number


@pytest.mark.parametrize("make", [Listed, Counts])
def test_what_could_not_be_set_back_is_refused(make: type[Plain]) -> None:
    block = make()
    choose_for([("0", block)], "inputs")
    x = torch.randn(3, 6)
    with pytest.raises(ConfigError, match=f"the forward of a {make.__name__} changes .* in place"):
        block([x] if make is Listed else x)


def test_statistics_that_are_frozen_at_first() -> None:
    found = []
    for choice in (None, "inputs"):
        torch.manual_seed(0)
        block = Statistics()
        if choice is not None:
            choose_for([("0", block)], choice)
        for step in range(4):
            block.norm.train(step >= 2)
            block(torch.randn(5, 6)).square().sum().backward()
        found.append([*block.buffers(), *(parameter.grad for parameter in block.parameters())])
    assert same(found[0], found[1])


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_products_that_are_written_into_are_not_kept(kind: type[nn.RNNBase]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(6, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0]

    block = Recurrent()
    (forward,) = choose_for([("0", block)], "products")
    with pytest.raises(ProductsChangedError):
        block(torch.randn(2, 4, 6, requires_grad=True))
    x = torch.randn(2, 4, 6, requires_grad=True)
    assert "products" not in measure_block(forward, (x,), {}, torch.device("cpu")).costs.saved_bytes


class Reads(nn.Module):
    """Works in place at once, draws from a generator of its own, and reads what has a graph of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.tools = {"generator": torch.Generator().manual_seed(3)}
        self.bias: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(torch.relu_(x)) + self.bias
        return torch.sin(y * torch.rand(y.shape, generator=self.tools["generator"]))


def test_measuring_stays_within_the_block() -> None:
    block = Reads()
    (forward,) = choose_for([("0", block)], "inputs")
    base = torch.randn(6, requires_grad=True)
    block.bias = torch.sin(base)
    state = block.tools["generator"].get_state()
    measure_block(forward, (torch.randn(3, 6, requires_grad=True),), {}, torch.device("cpu"))
    assert torch.equal(block.tools["generator"].get_state(), state)
    block(torch.randn(3, 6)).sum().backward()  # through the graph that the bias has
    assert base.grad is not None


class Gathers(nn.Module):
    """Statistics without a counter, by a kernel that changes them unnoticed, and a large buffer."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean_of_all", torch.zeros(6))
        self.register_buffer("spread", torch.ones(6))
        self.register_buffer("table", torch.zeros(1 << 15))
        self.large, self.is_late = large, False

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.batch_norm(self.linear(x), self.mean_of_all, self.spread, training=self.is_late)
        if self.is_late and self.large:
            self.table += 1
        return torch.sin(y)


def test_statistics_of_one_s_own_that_are_frozen_at_first() -> None:
    found = []
    for choice in (None, "inputs"):
        torch.manual_seed(0)
        block = Gathers(large=False)
        if choice is not None:
            choose_for([("0", block)], choice)
        for step in range(4):
            block.is_late = step >= 2
            block(torch.randn(5, 6)).square().sum().backward()
        found.append([*block.buffers(), *(parameter.grad for parameter in block.parameters())])
    assert same(found[0], found[1])


def test_a_large_buffer_that_is_changed_later_is_told_of() -> None:
    block = Gathers(large=True)
    choose_for([("0", block)], "inputs")
    block(torch.randn(5, 6))
    block.is_late = True
    with pytest.raises(RuntimeError, match="the buffer 'table' of a Gathers is changed in place by this call"):
        block(torch.randn(5, 6))
