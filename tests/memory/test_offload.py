"""Saved activations on the host: bit-equal, bytes as predicted, in the right order, released whatever happens."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from lightning_megapar.config import ConfigError
from lightning_megapar.memory import Trace
from lightning_megapar.memory.compression import CompressSaved
from lightning_megapar.memory.compression_options import CompressionConfig
from lightning_megapar.memory.copiers import CudaCopier, HostBuffer, HostCopier, HostStore
from lightning_megapar.memory.offload import OffloadSaved
from lightning_megapar.memory.saved import SavedBytes
from lightning_megapar.models.gpt import GPT, GPTConfig


class Spy(HostCopier):
    """Tells the order of what is asked for; tensors are told apart by their sizes."""

    def __init__(self) -> None:
        super().__init__(HostStore(1 << 20))
        self.log: list[tuple[str, int]] = []

    def store(self, values: Tensor) -> HostBuffer:
        self.log.append(("store", values.numel()))
        return super().store(values)

    def fetch(self, stored: HostBuffer) -> Tensor:
        self.log.append(("fetch", stored.size))
        return super().fetch(stored)

    def wait(self, arriving: Tensor) -> Tensor:
        self.log.append(("wait", arriving.numel()))
        return super().wait(arriving)

    def release(self, stored: HostBuffer) -> None:
        self.log.append(("release", stored.size))
        super().release(stored)


def model_of(style: str, layers: int = 3, **settings: Any) -> GPT:
    return GPT(
        getattr(GPTConfig, style)(
            vocab_size=64, num_layers=layers, num_heads=4, hidden_size=64, max_sequence_length=32, **settings
        )
    )


def run(model: GPT, tokens: Tensor, offload: OffloadSaved | None, recompute: bool = False, amp: bool = False) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        hidden = model.embedding(tokens)
        for index, block in enumerate(model.blocks):
            if offload is None:
                hidden = block(hidden)
                continue
            with offload.block(index, module=block):
                hidden = checkpoint(block, hidden, use_reentrant=False) if recompute else block(hidden)
        return model.head(model.final_norm(hidden), tokens.roll(-1, 1))


def tokens_of(seed: int = 0) -> Tensor:
    return torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(seed))


def gradients(model: GPT, loss: Tensor, retain: bool = False) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=retain))


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, got, expected))


@pytest.mark.parametrize("style", ["gpt2", "llama"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("amp", [False, True])
def test_bit_equal_and_bytes(style: str, recompute: bool, amp: bool) -> None:
    model = model_of(style, **({"dropout": 0.1} if style == "gpt2" else {"num_kv_heads": 2}))
    run(model, tokens_of(), None, amp=amp)  # makes tables of positions
    found = []
    for prefetch in (None, 0, 1, 2):
        copier, offload = Spy(), None
        if prefetch is not None:
            offload = OffloadSaved(model, prefetch=prefetch, minimum_bytes=1024, copier=copier)
        torch.manual_seed(1)
        with SavedBytes(model) as saved:
            loss = run(model, tokens_of(), offload, recompute and offload is not None, amp)
        stays, copies = saved.bytes, sum(one.bytes for one in saved.storages() if one.is_weight_copy)
        if offload is not None:
            assert offload.moved_bytes == sum(size for what, size in copier.log if what == "store")
            assert 0 < offload.moved_bytes <= copier.host.held_bytes
        moved = 0 if offload is None else offload.moved_bytes
        found.append((gradients(model, loss, True), stays, moved))
        assert same(gradients(model, loss), found[-1][0])  # a graph that is kept can be walked again
        del loss
        assert saved.bytes == 0 and copier.host.held_bytes == 0 and (offload is None or offload.moved_bytes == 0)
    exact = found[0]
    for grads, stays, moved in found[1:]:
        assert same(grads, exact[0])
        if not recompute:
            assert stays + moved == exact[1]  # nothing is lost, nothing moved twice
            assert stays - copies < 0.35 * (exact[1] - copies)  # what the embedding and the head save is not in a block
        else:
            assert moved == 3 * 2 * 32 * 64 * 4


def live_after_forward(model: GPT, offload: OffloadSaved | None) -> tuple[int, int]:
    """Bytes that torch's allocator holds when the forward is done, and of them what was moved."""
    tokens = tokens_of()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        loss = run(model, tokens, offload)
    live = sum(event.size for event in Trace.of_profile(recorded).events)
    moved = 0 if offload is None else offload.moved_bytes
    loss.backward()
    return live, moved


def test_what_the_allocator_holds_drops_by_what_is_moved() -> None:
    model = model_of("gpt2")
    offload = OffloadSaved(model, minimum_bytes=1024)
    for each in (None, offload):  # what is made once is made
        live_after_forward(model, each)
    full, _ = live_after_forward(model, None)
    less, moved = live_after_forward(model, offload)
    # Of each tensor that is left on the device or is moved, what tells changes in place: no bytes.
    assert moved > 0.6 * full and full - less == moved


def stack(widths: list[int]) -> nn.ModuleList:
    """Blocks whose sizes tell them apart: each keeps its sine's input alone."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width

        def forward(self, x: Tensor) -> Tensor:
            return x.sum() + (torch.zeros(self.width) + x.mean()).sin()

    return nn.ModuleList(Block(width) for width in widths)


def forward(blocks: nn.ModuleList, offload: OffloadSaved, key: Any = None) -> tuple[Tensor, Tensor]:
    x = torch.ones(8, requires_grad=True)
    y = x
    for index, block in enumerate(blocks):
        with offload.block(index, key):
            y = block(y)
    return x, y.sum()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_order(prefetch: int) -> None:
    widths = [1000, 2000, 3000, 4000]
    copier = Spy()
    offload = OffloadSaved(prefetch=prefetch, minimum_bytes=1024, copier=copier)
    x, y = forward(stack(widths), offload)
    sizes = [4 * width for width in widths]
    assert copier.log == [("store", size) for size in sizes]
    copier.log.clear()
    y.backward()
    expected, started = [], 0
    for reached, size in enumerate(reversed(sizes), start=1):
        while started < min(reached + prefetch, len(sizes)):
            expected.append(("fetch", sizes[-1 - started]))
            started += 1
        expected += [("wait", size), ("release", size)]
    assert copier.log == expected and copier.host.held_bytes == 0
    assert x.grad is not None


def test_the_device_lets_go_when_the_block_is_left() -> None:
    offload = OffloadSaved(minimum_bytes=1024)
    storages = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            storages.append(StorageWeakRef(y.untyped_storage()))
            return y.sin()

    x = torch.ones(1000, requires_grad=True)
    with offload.block(0):
        y = Watch()(x)
        assert storages[0].expired()
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * (x * 2).cos())


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_microbatches_in_flight_in_any_order(order: tuple[int, ...]) -> None:
    model, copier = model_of("llama"), Spy()
    expected = [gradients(model, run(model, tokens_of(seed), None)) for seed in range(3)]  # makes tables of positions
    offload = OffloadSaved(model, minimum_bytes=1024, copier=copier)
    losses = {seed: run(model, tokens_of(seed), offload) for seed in range(3)}
    one = offload.moved_bytes // 3
    for done, seed in enumerate(order, start=1):
        assert same(gradients(model, losses.pop(seed)), expected[seed])
        assert offload.moved_bytes == (3 - done) * one
    assert copier.host.held_bytes == 0


def test_alternating_microbatches_have_keys() -> None:
    blocks, copier = stack([1000, 2000, 3000]), Spy()
    offload = OffloadSaved(minimum_bytes=1024, copier=copier)
    inputs = [torch.ones(8, requires_grad=True) for _ in range(2)]
    values: list[Tensor] = list(inputs)
    for index, block in enumerate(blocks):
        for microbatch in range(2):
            with offload.block(index, microbatch):
                values[microbatch] = block(values[microbatch])
    copier.log.clear()
    values[0].sum().backward()
    sizes = [size for what, size in copier.log if what == "fetch"]
    assert sizes == [12000, 8000, 4000] and copier.log.index(("fetch", 8000)) < copier.log.index(("wait", 12000))
    values[1].sum().backward()
    assert inputs[0].grad is not None and inputs[1].grad is not None
    assert torch.equal(inputs[0].grad, inputs[1].grad) and copier.host.held_bytes == 0


def test_graphs_that_are_dropped_or_break() -> None:
    copier = Spy()
    offload = OffloadSaved(minimum_bytes=1024, copier=copier)
    x, y = forward(stack([1000, 2000]), offload)
    del x, y
    assert copier.host.held_bytes == 0 and offload.moved_bytes == 0

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ValueError("no")

    x = torch.ones(8, requires_grad=True)
    with offload.block(0):
        y = stack([1000])[0](x)
    y = Breaks.apply(y)
    with offload.block(1):
        y = stack([2000])[0](y)
    with pytest.raises(ValueError, match="no"):
        y.sum().backward()
    assert ("fetch", 4000) in copier.log
    del y
    gc.collect()
    assert copier.host.held_bytes == 0
    with pytest.raises(ValueError), offload.block(0):
        raise ValueError
    assert offload._group is None


def test_one_storage_is_moved_once_and_comes_back_as_one() -> None:
    copier = Spy()
    offload = OffloadSaved(minimum_bytes=1024, copier=copier)
    x = torch.randn(6, 4, 64, requires_grad=True)
    results = []
    for moves in (False, True):
        y = x * 1
        with offload.block(0) if moves else torch.enable_grad():
            parts = [y.sin(), y[2:4].cos(), y.transpose(0, 2).square(), y.view(24, 64)[:, ::2].log1p()]
        with offload.block(1) if moves else torch.enable_grad():
            parts.append(y.square())
        del y
        (grad,) = torch.autograd.grad(sum(part.nan_to_num().sum() for part in parts), x)
        results.append(grad)
    assert torch.equal(*results)
    assert [what for what in copier.log if what[0] in ("store", "fetch")] == [("store", 6144), ("fetch", 6144)]


def test_what_stays() -> None:
    copier = Spy()
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False))
    net.register_buffer("table", torch.randn(64, 64))
    offload = OffloadSaved(net, minimum_bytes=1024, copier=copier)
    large = torch.randn(1000, 64)
    x = torch.randn(3, 64, requires_grad=True)
    for amp in (False, True):
        with offload.block(0), torch.autocast("cpu", torch.bfloat16, enabled=amp):
            y = (net[1](net[0](x)) @ net.table) * large[5]
        y.sum().backward()
    assert copier.log == []


def test_a_change_in_place_is_refused() -> None:
    offload = OffloadSaved(minimum_bytes=1024)
    x = torch.randn(1000, requires_grad=True)
    for target in ("moved", "weight"):
        weight = nn.Parameter(torch.randn(1000))
        with offload.block(0):
            y = x * 1
            z = y.sin() if target == "moved" else y * weight
        with torch.no_grad():
            (y if target == "moved" else weight).add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version 1; expected"):
            z.sum().backward()


def test_compressed_tensors_are_moved() -> None:
    model = model_of("gpt2")
    expected, found, moved = [], [], []
    for target, offloads in ((expected, False), (found, True)):
        copier = Spy()
        offload = OffloadSaved(model, minimum_bytes=1024, copier=copier)
        hidden = model.embedding(tokens_of())
        for index, block in enumerate(model.blocks):
            compress = CompressSaved(CompressionConfig("int8", minimum_elements=1024), block)
            with offload.block(index) if offloads else torch.enable_grad(), compress:
                hidden = block(hidden)
        moved.append((offload.moved_bytes, compress.compressor.total.after))
        target += torch.autograd.grad(hidden.square().sum(), list(model.blocks.parameters()))
        del hidden
        assert copier.host.held_bytes == 0
    assert same(found, expected) and moved[0][0] == 0 < moved[1][0] <= 3 * moved[1][1]


def test_around_a_block_that_is_recomputed() -> None:
    model, copier = model_of("gpt2"), Spy()
    offload = OffloadSaved(model, minimum_bytes=1024, copier=copier)
    expected = gradients(model, run(model, tokens_of(), None))

    class Inside(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.block, self.index = model.blocks[index], index

        def forward(self, x: Tensor) -> Tensor:
            with offload.block(self.index):
                return self.block(x)

    hidden = model.embedding(tokens_of())
    for index in range(3):
        hidden = checkpoint(Inside(index), hidden, use_reentrant=False)
    loss = model.head(model.final_norm(hidden), tokens_of().roll(-1, 1))
    assert same(gradients(model, loss), expected) and copier.log == []


def test_refusals() -> None:
    for settings, message in (
        ({"prefetch": -1}, "prefetch=-1: expected a whole number"),
        ({"prefetch": True}, "prefetch=True"),
        ({"minimum_bytes": 0.5}, "minimum_bytes=0.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            OffloadSaved(**settings)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_cuda_device() -> None:
    model = model_of("gpt2", dropout=0.1).cuda()
    found = []
    for offload in (None, OffloadSaved(model, minimum_bytes=1024)):
        torch.manual_seed(1)
        before = torch.cuda.memory_allocated()
        loss = run(model, tokens_of().cuda(), offload)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        found.append((gradients(model, loss), held))
        del loss
    assert same(found[0][0], found[1][0]) and found[1][1] < 0.5 * found[0][1]
    copier = offload._copiers["cuda"]  # type: ignore[union-attr]
    assert isinstance(copier, CudaCopier)
    torch.cuda.synchronize()
    copier._collect()
    assert copier.host.held_bytes == 0
