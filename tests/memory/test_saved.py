"""Bytes that autograd keeps: each storage once, no parameters, released with the graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pool import RankPool
from sharded_cases import tensor_mesh
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megapar.layers import GeluMLP
from lightning_megapar.memory.saved import SavedBytes, Version, Weights, is_recomputed
from lightning_megapar.sharding import shard_module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).exp()) * self.scale


def test_each_storage_is_counted_once_with_its_module() -> None:
    net, x = Net(), torch.randn(4, 8)
    with SavedBytes(net) as saved:
        y = net(x)
    # The input, and the result of exp, which exp and the second layer keep. No weight, no buffer.
    shapes = {(one.module, one.kind, one.shape, one.bytes, one.tensors) for one in saved.storages()}
    assert shapes == {("first", "Linear", (4, 8), 4 * 8 * 4, 1), ("", "Net", (4, 16), 4 * 16 * 4, 2)}
    assert saved.by_module() == {"first": 128, "": 256} and saved.by_kind() == {"Linear": 128, "Net": 256}
    assert saved.bytes == saved.peak_bytes == 384
    assert "384 in all" in saved.describe() and "(outermost)" in saved.describe()
    y.sum().backward()
    assert saved.bytes == 0 and saved.storages() == () and saved.peak_bytes == 384


def test_views_of_one_storage_and_a_graph_that_is_dropped() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    with SavedBytes() as saved:
        y = (x * 2).sin()
        z = [part.cos() for part in y.chunk(3)]
    assert saved.bytes == 2 * 6 * 4 * 4  # the inputs of sin and of three cos
    assert sorted(one.tensors for one in saved.storages()) == [1, 3]
    del y, z
    assert saved.bytes == 0


def test_numbers_are_the_same_and_hooks_are_removed() -> None:
    net, x = Net(), torch.randn(4, 8)
    expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    with SavedBytes(net):
        y = net(x)
        with pytest.raises(RuntimeError, match="entered already"), SavedBytes(net) as again:
            again.__enter__()
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), list(net.parameters())), expected))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert not is_recomputed()


def test_a_change_in_place_is_found_as_without_hooks() -> None:
    x = torch.randn(3, requires_grad=True)
    messages = []
    for context in (torch.enable_grad(), SavedBytes()):
        with context:
            y = (x * 1).exp()
            y.view(3).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as told:
            y.sum().backward()
        messages.append(str(told.value))
    start = messages[1].partition(" instead")[0].replace("FloatTensor [3]]", "")
    assert messages[0].startswith(start.partition("[")[0]) and "is at version 1; expected version 0" in messages[0]
    assert "is at version 1; expected version 0 instead" in messages[1]


def test_version_keeps_no_memory() -> None:
    x = torch.randn(1000)
    storage = x.untyped_storage()
    version = Version(x)
    assert version._probe.untyped_storage().data_ptr() != storage.data_ptr()
    version.check()
    x[3:5].mul_(2)
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
        version.check()


def test_weights_are_told_from_activations() -> None:
    net = Net()
    net.second.requires_grad_(False)
    seen: list[tuple[Tensor, bool]] = []
    weights = Weights([net])

    def pack(tensor: Tensor) -> Tensor:
        seen.append((tensor, tensor in weights))
        return tensor

    x = torch.randn(16, 8, requires_grad=True)  # the layers' inputs have the shapes of the second layer's weight
    for dtype in (torch.float32, torch.bfloat16):
        seen.clear()
        enabled = dtype == torch.bfloat16
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                net(x)
        own = [tuple(tensor.shape) for tensor, is_weight in seen if is_weight]
        assert sorted(own) == [(8,), (8, 16), (16, 8)], dtype  # the buffer, and both weights, transposed
        assert all(tensor.requires_grad for tensor, is_weight in seen if not is_weight)


def test_copies_of_weights_are_named() -> None:
    net = Net()
    with SavedBytes(net) as saved, torch.autocast("cpu", torch.bfloat16):
        y = net(torch.randn(4, 8, requires_grad=True))
    copies = [one for one in saved.storages() if one.is_weight_copy]
    assert [(one.bytes, one.dtype, one.module) for one in copies] == [
        (256, torch.bfloat16, "first"),
        (256, torch.bfloat16, "second"),
    ]
    assert "(copy of a weight)" in saved.describe()
    del y


def test_a_checkpoint_keeps_its_input() -> None:
    net, x = Net(), torch.randn(4, 8, requires_grad=True)
    inside = []

    def run(x: Tensor) -> Tensor:
        inside.append(is_recomputed())
        return net(x * 1)

    with SavedBytes(net) as saved:
        y = checkpoint(run, x, use_reentrant=False).sin()
    assert {one.shape: one.bytes for one in saved.storages() if one.bytes} == {(4, 8): 128}
    assert sum(one.bytes for one in saved.storages()) == 2 * 128  # its input and that of sin
    y.sum().backward()
    assert inside == [True, True] and saved.bytes == 0


def local_pieces() -> list[tuple[int, ...]]:
    mesh = tensor_mesh()
    assert mesh is not None
    torch.manual_seed(0)
    mlp = GeluMLP(8, 16)
    shard_module(mlp, mesh, False)
    with SavedBytes(mlp) as saved:
        y = mlp(torch.randn(2, 4, 8))
    found = sorted((*one.shape, one.bytes) for one in saved.storages())
    y.sum().backward()
    assert saved.bytes == 0
    return found


def test_pieces_of_sharded_weights_are_left_out(pool: RankPool) -> None:
    for found in pool.run(local_pieces, 2):
        assert found == [(2, 4, 8, 256), (2, 4, 8, 256), (2, 4, 8, 256)]


def test_names_in_a_checkpoint_and_after_an_error() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Fails())
    with SavedBytes(net) as saved:
        with pytest.raises(ValueError):
            net(torch.randn(2, 8))
        assert saved.stack() == []
        y = F.silu(net[1](net[0](torch.randn(2, 8))))
    assert [one.module for one in saved.storages()] == ["0", "1"]  # tanh's result is kept by silu as well
    del y
