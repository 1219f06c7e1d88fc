"""LOSSY compression of saved tensors: bytes, what it leaves alone, and the error of the gradients."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pool import RankPool
from sharded_cases import tensor_mesh
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_megapar.config import ConfigError
from lightning_megapar.layers.deferral import Deferral
from lightning_megapar.memory.codecs import CODECS
from lightning_megapar.memory.compression import Compressor, CompressSaved, compress_saved, remove_compression
from lightning_megapar.memory.compression_options import GRADIENT_COSINES, CompressionConfig
from lightning_megapar.memory.saved import SavedBytes
from lightning_megapar.models.gpt import GPT, GPTConfig
from lightning_megapar.sharding import shard_module

FUSED, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH


def block_of(style: str, **settings: Any) -> nn.Module:
    config = getattr(GPTConfig, style)(
        vocab_size=64, num_layers=1, num_heads=4, hidden_size=128, max_sequence_length=64, **settings
    )
    return GPT(config).blocks[0]


def batch() -> Tensor:
    return torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(2))


def gradients(module: nn.Module, amp: bool = False, kernel: Any = FUSED) -> tuple[dict[str, Tensor], int]:
    """Of the input and the parameters, and the bytes of activations that were saved (copies of weights left out)."""
    x = batch().requires_grad_()
    torch.manual_seed(5)
    with SavedBytes(module) as saved, sdpa_kernel([kernel, MATH]):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            y = module(x)
    kept = sum(one.bytes for one in saved.storages() if not one.is_weight_copy)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    names, values = zip(("input", x), *module.named_parameters())
    found = torch.autograd.grad((y.float() * weights).sum(), values)
    assert saved.bytes == 0
    return dict(zip(names, found)), kept


def cosines(got: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float]:
    """Of everything together, and the least of one; a key's bias has no gradient but for rounding."""

    def cosine(a: Tensor, b: Tensor) -> float:
        return float(a @ b / (a.norm() * b.norm()))

    pairs = [(got[n].double().flatten(), e.double().flatten()) for n, e in expected.items() if "key.bias" not in n]
    a, b = (torch.cat([pair[i] for pair in pairs]) for i in (0, 1))
    return cosine(a, b), min(cosine(*pair) for pair in pairs)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_codecs(name: str, dtype: torch.dtype) -> None:
    codec = CODECS[name]
    rows = torch.randn(33, 47, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    rows[3] = 0
    rows[4] *= 1e-4
    encoded = codec.encode(rows)
    back = codec.decode(encoded)
    assert back.dtype == dtype and back.shape == rows.shape
    assert encoded.bytes == -(-33 * 47 * codec.bits // 8) + 33 * rows.element_size()
    tops = rows.double().abs().amax(-1, keepdim=True)
    error = (back.double() - rows.double()).abs()
    rounding = 2 * torch.finfo(dtype).eps * tops
    bound = rows.double().abs() / 16 + tops * 2**-9 / 448 if name == "fp8" else tops / (254 if name == "int8" else 14)
    assert bool((error <= bound + rounding + torch.finfo(dtype).tiny * 1.01).all())
    # Zero and the largest magnitude of a row come back exactly.
    assert torch.equal(back.abs().amax(-1), rows.abs().amax(-1)) and not back[3].any()
    rows[5, 7], rows[6, 8] = torch.inf, torch.nan
    back = codec.decode(codec.encode(rows))
    assert not back[5].isfinite().all() and not back[6].isfinite().all() and back[7].isfinite().all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dropout_mask_is_exact(name: str, dtype: torch.dtype) -> None:
    for p in (0.1, 0.3, 0.37):
        mask = torch.empty(64, 96, dtype=dtype).bernoulli_(1 - p).div_(1 - p)
        assert torch.equal(CODECS[name].decode(CODECS[name].encode(mask)), mask)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_gradients_and_bytes_of_a_block(codec: str, style: str) -> None:
    module = block_of(style, **({"dropout": 0.1} if style == "gpt2" else {"num_kv_heads": 2}))
    for kernel in (FUSED, MATH):
        for amp in (False, True):
            gradients(module, amp, kernel)  # makes tables of positions
            expected, full = gradients(module, amp, kernel)
            compressor = compress_saved(module, CompressionConfig(codec, minimum_elements=1024))
            assert compressor is not None
            got, kept = gradients(module, amp, kernel)
            remove_compression(module)
            for found, least in zip(cosines(got, expected), GRADIENT_COSINES[codec]):
                assert least <= found < 1, (kernel, amp)
            total = compressor.total
            assert kept == full - total.before + total.after  # what is measured is what was predicted
            if not amp:  # 4 or 2 bytes a row on top of the quarter
                assert total.after / total.before < {4: 0.15, 8: 0.27}[CODECS[codec].bits]
                assert kept / full < {4: 0.19, 8: 0.30}[CODECS[codec].bits]
            again, kept = gradients(module, amp, kernel)
            assert kept == full and all(torch.equal(again[name], expected[name]) for name in expected)


def test_of_wide_rows_a_quarter_and_a_half_are_left() -> None:
    for dtype, part in ((torch.float32, 4), (torch.bfloat16, 2)):
        compressor = Compressor(CompressionConfig("int8"))
        with CompressSaved(compressor):
            y = torch.randn(64, 1024, dtype=dtype, requires_grad=True).sin()
        assert compressor.total.before == 64 * 1024 * dtype.itemsize
        assert compressor.total.after == 64 * (1024 + dtype.itemsize)
        assert compressor.total.after < 1.01 * compressor.total.before / part
        del y


@pytest.mark.parametrize(
    ("kinds", "tensors", "least"),
    [
        (("Linear",), 4, (0.9999, 0.9998)),  # queries, keys and values share an input
        (("ColumnParallelLinear",), 2, (0.9999, 0.9998)),
        (("LayerNorm",), 2, (0.999995, 0.9999)),
        (("GeluMLP",), 3, (0.9999, 0.9998)),
        (("CoreAttention",), 4, (0.9999, 0.998)),  # not the log-sum-exp
        (("SequenceDropout",), 0, (1 - 1e-12, 1 - 1e-12)),
    ],
)
def test_selection(kinds: tuple[str, ...], tensors: int, least: tuple[float, float]) -> None:
    module = block_of("gpt2", dropout=0.1)
    expected, full = gradients(module)
    compressor = compress_saved(module, CompressionConfig("int8", kinds=kinds, minimum_elements=1024))
    got, kept = gradients(module)
    assert compressor is not None
    total = compressor.total
    assert total.tensors == tensors or kinds == ("SequenceDropout",)
    # What attention gives the output layer is kept by both: in full by the one that is not chosen.
    shared = 4 * 64 * 128 * 4 if kinds[0] in ("CoreAttention", "Linear") else 0
    assert kept == full - total.before + total.after + shared
    assert all(found >= bound for found, bound in zip(cosines(got, expected), least))


def test_a_transformer_of_torch() -> None:
    for activation, bounds in (
        ("gelu", {"int8": (0.9999, 0.9998), "fp8": (0.9995, 0.999), "int4": (0.988, 0.98)}),
        # int8 rounds small results of a ReLU to zero, and its backward asks which are above.
        ("relu", {"int8": (0.9985, 0.99), "fp8": (0.9995, 0.999), "int4": (0.98, 0.91)}),
    ):
        torch.manual_seed(0)
        module = nn.TransformerEncoderLayer(128, 4, 512, 0.1, activation=activation, batch_first=True)
        expected, full = gradients(module)
        for codec, least in bounds.items():
            compress_saved(module, CompressionConfig(codec, minimum_elements=1024))
            got, kept = gradients(module)
            remove_compression(module)
            assert all(found >= bound for found, bound in zip(cosines(got, expected), least)), (activation, codec)
            assert kept < 0.3 * full


def test_what_is_left_alone() -> None:
    compressor = Compressor(CompressionConfig("int8", minimum_elements=16))
    net = nn.Linear(32, 32)
    net.register_buffer("table", torch.randn(64, 32))
    frozen = nn.Linear(32, 32).requires_grad_(False)
    both = nn.ModuleList([net, frozen])
    x = torch.randn(64, 32, requires_grad=True)
    for amp in (False, True):
        with CompressSaved(compressor, both), torch.autocast("cpu", torch.bfloat16, enabled=amp):
            y = x * net.table
            y = net.weight.t() * 1 + frozen(y)[:32] + x[:32] * frozen.weight
            y = y.index_select(1, torch.zeros(32, dtype=torch.int64)).where(y > 0, 0.0)  # indices and a mask
            y = y * torch.ones(1, 32).expand(32, 32)  # fewer elements of memory than it shows
        assert compressor.total.tensors == 0
        y.sum().backward()
    with CompressSaved(compressor, net):
        y = net(x * 1).sin()
    assert compressor.total.tensors == 2 and net.weight.grad is not None


def test_one_memory_is_compressed_once_and_never_taken_for_another() -> None:
    compressor = Compressor(CompressionConfig("int8", minimum_elements=16))
    context = CompressSaved(compressor)
    x = torch.randn(8, 4, 32, requires_grad=True)
    with context:
        y = x * 1
        parts = [y.sin(), y.view(32, 32).cos(), y.transpose(0, 1).exp(), y[2:4].tanh()]
    # y as it is, flat and transposed is the same memory; exp and tanh keep their own results, and y's part is not kept.
    assert compressor.total.tensors == 3 and len(compressor._known) == 3
    del parts
    gc.collect()
    assert len(compressor._known) == 0
    # Each result is dropped and its address given to the next one while the first graph lives.
    graphs, inputs = [], [torch.full((64, 64), float(value), requires_grad=True) for value in range(1, 40)]
    with context:
        for one in inputs:
            graphs.append((one * 1).square())
    for number, (one, graph) in enumerate(zip(inputs, graphs), start=1):
        graph.sum().backward()
        assert one.grad is not None and torch.equal(one.grad, torch.full((64, 64), 2.0 * number))
    with context:  # another version of the same memory is another tensor
        y = x * 1
        a = y.sin()
        with torch.no_grad():
            y.add_(1)
        b = y.cos()
    assert len(compressor._known) == 2
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version 1; expected version 0"):
        a.sum().backward()
    b.sum().backward()


def test_dtypes_shapes_and_strides_come_back() -> None:
    seen: list[tuple[Any, ...]] = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            ctx.save_for_backward(*tensors)
            return tensors[0].sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            seen.extend((t.dtype, t.shape, t.stride()) for t in ctx.saved_tensors)
            return (None,) * len(ctx.saved_tensors)

    base = torch.randn(4, 8, 48, requires_grad=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        with CompressSaved(Compressor(CompressionConfig("int4", group_size=16, minimum_elements=16))):
            y = base.to(dtype).clone()
            tensors = y, y.transpose(0, 2), y.view(4, 8, 3, 16).transpose(1, 2), y[..., 16:32], y[1]
            Keep.apply(*tensors).backward()
        expected = [(t.dtype, t.shape, t.stride()) for t in tensors]
        expected[3] = (dtype, y[..., 16:32].shape, (128, 16, 1))  # gaps are not filled again
        assert seen == expected
        seen.clear()


@pytest.fixture(params=["Linear", "all"])
def compressed(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, Compressor]]:
    module = block_of("gpt2", dropout=0.1)
    kinds = request.param if request.param == "all" else (request.param,)
    compressor = compress_saved(module, CompressionConfig("int8", kinds=kinds, minimum_elements=1024))
    assert compressor is not None
    yield module, compressor


def test_copies_and_pickles_are_compressed_by_themselves(compressed: tuple[nn.Module, Compressor]) -> None:
    module, compressor = compressed
    expected, kept = gradients(module)
    tensors = compressor.total.tensors
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1)
        got, same = gradients(other)
        assert same == kept and all(torch.equal(got[name], expected[name]) for name in expected)
        assert compressor.total.tensors == tensors  # it counts for itself
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not torch.equal(gradients(other)[0]["input"], expected["input"])
        remove_compression(other)
        assert gradients(other)[1] > kept
    assert gradients(module)[1] == kept
    with pytest.raises(RuntimeError, match="compressed already"):
        compress_saved(module, CompressionConfig("int8"))


def test_under_a_checkpoint_nothing_is_lost(compressed: tuple[nn.Module, Compressor]) -> None:
    module, compressor = compressed
    exact = copy.deepcopy(module)
    remove_compression(exact)
    expected, _ = gradients(exact)

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = module

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    got, kept = gradients(Recomputed())
    assert kept == 4 * 64 * 128 * 4 and compressor.total.tensors == 0
    assert all(torch.equal(got[name if name == "input" else f"block.{name}"], expected[name]) for name in expected)


def test_a_checkpoint_inside_has_a_compressed_input() -> None:
    compressor = Compressor(CompressionConfig("int8", minimum_elements=1024))
    x = batch().requires_grad_()
    with SavedBytes() as saved, CompressSaved(compressor):
        y = checkpoint(torch.sin, x * 1, use_reentrant=False)
    assert saved.bytes == compressor.total.after == 4 * 64 * (128 + 4)
    y.sum().backward()
    assert x.grad is not None and float((x.grad - x.cos()).abs().max()) < 0.03


def test_with_weight_gradients_that_wait(compressed: tuple[nn.Module, Compressor]) -> None:
    module, _ = compressed
    expected, _ = gradients(module)
    waiting, deferral = copy.deepcopy(module), Deferral()
    deferral.connect(waiting)
    x = batch().requires_grad_()
    torch.manual_seed(5)
    with sdpa_kernel([FUSED, MATH]):
        y = waiting(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    with deferral.collecting((0, 0)):
        (y * weights).sum().backward()
    deferral.compute((0, 0))
    for name, parameter in waiting.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[name]), name


def on_ranks(sequence_parallel: bool) -> tuple[float, float]:
    mesh = tensor_mesh()
    assert mesh is not None
    module = block_of("gpt2")
    shard_module(module, mesh, sequence_parallel)
    x = batch()
    if sequence_parallel:
        x = x.chunk(2, dim=1)[mesh.get_local_rank()].contiguous()
    kept, found = [], []
    for codec in ("none", "int8"):
        compress_saved(module, CompressionConfig(codec, kinds=("Linear",), minimum_elements=1024))
        with SavedBytes(module) as saved, sdpa_kernel([FUSED, MATH]):
            y = module(x)
        kept.append(saved.bytes)
        module.zero_grad()
        y.square().sum().backward()
        found.append({n: p.grad.to_local().clone() for n, p in module.named_parameters()})  # type: ignore[union-attr]
    return kept[1] / kept[0], cosines(found[1], found[0])[0]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks(pool: RankPool, sequence_parallel: bool) -> None:
    for part, cosine in pool.run(on_ranks, 2, sequence_parallel):
        assert part < 0.85 and cosine > 0.9999


def test_refusals() -> None:
    for settings, message in (
        ({"codec": "int9"}, "codec='int9' is not one of int8, fp8, int4 .*lossy.*did you mean 'int8'"),
        ({"kinds": "Linear"}, r"kinds='Linear': expected 'all' or a list of class names, \['Linear'\]"),
        ({"kinds": ()}, "expected 'all' or class names"),
        ({"group_size": 0}, "group_size=0: expected 'row' or a positive integer"),
        ({"minimum_elements": 0}, "minimum_elements=0"),
        ({"minimum_row": True}, "minimum_row=True"),
        ({"minimum_share": 2.0}, "minimum_share=2.0: expected 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            CompressionConfig(**settings)
    module = block_of("gpt2")
    with pytest.raises(ConfigError, match="no layer is a 'LayerNrm'; did you mean 'LayerNorm'"):
        compress_saved(module, CompressionConfig("int8", kinds=("LayerNrm",)))
    with pytest.raises(ConfigError, match="codec='none' compresses nothing"):
        CompressSaved(CompressionConfig())
    assert compress_saved(module, CompressionConfig()) is None and "forward" not in vars(module)
    signature = inspect.signature(module.forward)
    compress_saved(module, CompressionConfig("int8"))
    assert inspect.signature(module.forward) == signature and list(signature.parameters) == ["hidden"]
