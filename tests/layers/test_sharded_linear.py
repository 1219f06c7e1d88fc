"""The two sharding theorems: cut by columns or by rows, a linear layer is the same function with the same gradients.

Whole-number inputs make every sum exact, so equality is to the bit; random float64 inputs agree to 1e-12.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import strategies as st
from pool import RankPool
from sharded_cases import compare, for_examples, full_gradients, integers, perturb, same, tensor_mesh
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megapar.config import ConfigError
from lightning_megapar.layers import ColumnParallelLinear, GeluMLP, RowParallelLinear, SwiGLU, column_linears
from lightning_megapar.layers.collectives import TensorRanks, reduce_out
from lightning_megapar.sharding import shard_module


def shapes(size: int) -> st.SearchStrategy[dict[str, Any]]:
    """Batch, sequence (a multiple of the ranks), widths and switches; ``seed`` draws the values."""
    return st.fixed_dictionaries(
        {
            "batch": st.integers(1, 3),
            "sequence": st.integers(1, 3).map(lambda n: n * size),
            "narrow": st.integers(1, 9),
            "wide": st.integers(1, 4).map(lambda n: n * size),
            "bias": st.booleans(),
            "flag": st.booleans(),
            "sequence_parallel": st.booleans(),
            "exact": st.booleans(),
            "seed": st.integers(0, 10**6),
        }
    )


class Draw:
    """Values of one example: whole numbers in float32 when exact, else normal float64."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.exact = case["exact"]
        self.generator = torch.Generator().manual_seed(case["seed"])
        self.dtype = torch.float32 if self.exact else torch.float64

    def __call__(self, *shape: int) -> Tensor:
        if self.exact:
            return integers(shape, self.generator)
        return torch.randn(shape, generator=self.generator, dtype=self.dtype)

    def like(self, x: Tensor) -> Tensor:
        return self(*x.shape)

    def fill(self, module: nn.Module) -> nn.Module:
        return perturb(module, self.generator, self.exact)


def check_column(case: dict[str, Any]) -> None:
    draw = Draw(case)
    layer = ColumnParallelLinear(
        case["narrow"], case["wide"], case["bias"], gather_output=case["flag"], dtype=draw.dtype
    )
    dense = nn.Linear(case["narrow"], case["wide"], case["bias"], dtype=draw.dtype)
    draw.fill(layer)
    dense.load_state_dict(layer.state_dict())
    compare(
        layer,
        draw(case["batch"], case["sequence"], case["narrow"]),
        draw.like,
        sequence_parallel=case["sequence_parallel"],
        input_layout="sequence" if case["sequence_parallel"] else "whole",
        output_layout="whole" if case["flag"] else "columns",
        exact=draw.exact,
        reference=lambda module, x: _through(dense, module, x),
    )


def check_row(case: dict[str, Any]) -> None:
    draw = Draw(case)
    split = case["flag"] and not case["sequence_parallel"]
    layer = RowParallelLinear(case["wide"], case["narrow"], case["bias"], split_input=split, dtype=draw.dtype)
    dense = nn.Linear(case["wide"], case["narrow"], case["bias"], dtype=draw.dtype)
    draw.fill(layer)
    dense.load_state_dict(layer.state_dict())
    compare(
        layer,
        draw(case["batch"], case["sequence"], case["wide"]),
        draw.like,
        sequence_parallel=case["sequence_parallel"],
        input_layout="whole" if split else "columns",
        output_layout="sequence" if case["sequence_parallel"] else "whole",
        exact=draw.exact,
        reference=lambda module, x: _through(dense, module, x),
    )


def _through(dense: nn.Linear, layer: nn.Module, x: Tensor) -> Tensor:
    """Run ``nn.Linear`` itself, with the whole layer's parameters in it, so that their gradients are compared."""
    return torch.func.functional_call(dense, dict(layer.named_parameters()), (x,))


class Pair(nn.Module):
    """Column, ReLU (keeps whole numbers whole), row."""

    def __init__(self, narrow: int, wide: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.column = ColumnParallelLinear(narrow, wide, bias, dtype=dtype)
        self.row = RowParallelLinear(wide, narrow, bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.row(F.relu(self.column(x)))


class Several(nn.Module):
    """Projections with different numbers of indivisible units of one input, concatenated with weights."""

    def __init__(
        self, narrow: int, size: int, units: tuple[int, ...], rows: int, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            ColumnParallelLinear(narrow, n * rows, bias, units=n, setting="num_kv_heads", dtype=dtype) for n in units
        )
        self.size, self.rows = size, rows

    def forward(self, x: Tensor) -> Tensor:
        # Each of `size` consumers reads the unit that it shares, as a query head does.
        outputs = []
        for y, layer in zip(column_linears(x, *self.layers), self.layers):
            y = y.unflatten(-1, (-1, self.rows))
            if layer.ranks is None and y.shape[-2] < self.size:
                y = y.repeat_interleave(self.size // y.shape[-2], dim=-2)
            elif layer.ranks is None:
                y = y.unflatten(-2, (self.size, -1)).sum(-2)
            else:
                y = y.sum(-2, keepdim=True)
            outputs.append(y)
        return sum(outputs[1:], outputs[0]).flatten(-2)


def check_pair(case: dict[str, Any]) -> None:
    draw = Draw(case)
    layout = "sequence" if case["sequence_parallel"] else "whole"
    compare(
        draw.fill(Pair(case["narrow"], case["wide"], case["bias"], draw.dtype)),
        draw(case["batch"], case["sequence"], case["narrow"]),
        draw.like,
        sequence_parallel=case["sequence_parallel"],
        input_layout=layout,
        output_layout=layout,
        exact=draw.exact,
    )


def check_several(case: dict[str, Any]) -> None:
    draw = Draw(case)
    size = dist.get_world_size() if dist.is_initialized() else 1
    smaller = [n for n in range(1, size + 1) if size % n == 0]
    units = (size * (1 + case["flag"]), smaller[case["seed"] % len(smaller)], smaller[0])
    compare(
        draw.fill(Several(case["narrow"], size, units, 2, case["bias"], draw.dtype)),
        draw(case["batch"], case["sequence"], case["narrow"]),
        draw.like,
        sequence_parallel=case["sequence_parallel"],
        input_layout="sequence" if case["sequence_parallel"] else "whole",
        output_layout="columns",
        exact=draw.exact,
    )


def check_mlp(case: dict[str, Any]) -> None:
    draw = Draw({**case, "exact": False})
    make = SwiGLU if case["flag"] else GeluMLP
    layout = "sequence" if case["sequence_parallel"] else "whole"
    compare(
        draw.fill(make(case["narrow"], case["wide"], bias=case["bias"], dtype=draw.dtype)),
        draw(case["batch"], case["sequence"], case["narrow"]),
        draw.like,
        sequence_parallel=case["sequence_parallel"],
        input_layout=layout,
        output_layout=layout,
        exact=False,
    )


def on_ranks_theorems() -> None:
    size = dist.get_world_size() if dist.is_initialized() else 1
    for check in (check_column, check_row, check_pair, check_several, check_mlp):
        for_examples(shapes(size), check, max_examples=20)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_theorems(pool: RankPool, size: int) -> None:
    pool.run(on_ranks_theorems, size)


def on_ranks_wrong_order() -> tuple[float, float]:
    """Errors of GELU after the sum and before it, against the whole layer."""
    torch.manual_seed(0)
    mesh = tensor_mesh()
    assert mesh is not None
    generator = torch.Generator().manual_seed(0)
    dense = RowParallelLinear(16, 8, dtype=torch.float64)
    perturb(dense, generator)
    x = torch.randn(4, 16, generator=generator, dtype=torch.float64)
    expected = F.gelu(dense(x))
    ranks = TensorRanks(mesh)
    x_own = x.chunk(ranks.size, dim=-1)[ranks.rank]
    weight = dense.weight.chunk(ranks.size, dim=1)[ranks.rank]
    addend = F.linear(x_own, weight, dense.bias / ranks.size)
    scale = expected.abs().max()
    right = F.gelu(reduce_out(addend, ranks))
    wrong = reduce_out(F.gelu(addend), ranks)
    layer = copy.deepcopy(dense)
    shard_module(layer, mesh, False)
    same(F.gelu(layer(x_own)), expected, False, "gelu after the layer")
    return float((right - expected).abs().max() / scale), float((wrong - expected).abs().max() / scale)


def test_row_layer_sums_before_a_nonlinearity(pool: RankPool) -> None:
    for right, wrong in pool.run(on_ranks_wrong_order, 2):
        assert right < 1e-12
        assert wrong > 0.05


def on_ranks_attributes() -> None:
    torch.manual_seed(0)
    mesh = tensor_mesh()
    assert mesh is not None
    layer = ColumnParallelLinear(4, 6)
    layer.bias.requires_grad_(False)
    layer.weight.no_weight_decay = True
    weight = layer.weight.detach().clone()
    layer.shard(mesh, False)
    assert isinstance(layer.weight, nn.Parameter) and isinstance(layer.weight, DTensor)
    assert layer.weight.placements == (Shard(0),) and layer.weight.shape == (6, 4)
    assert layer.weight.no_weight_decay and layer.weight.requires_grad and not layer.bias.requires_grad
    assert torch.equal(layer.weight.full_tensor(), weight)
    # The whole table's memory is free: the local piece has a storage of its own.
    assert layer.weight.to_local().untyped_storage().nbytes() == 3 * 4 * 4
    layer(torch.ones(2, 4)).sum().backward()
    assert layer.bias.grad is None and layer.weight.grad is not None
    layer.assign_full("weight", torch.arange(24.0).view(6, 4))
    assert torch.equal(layer.weight.to_local(), torch.arange(24.0).view(6, 4).chunk(2)[mesh.get_local_rank()])
    with pytest.raises(ValueError, match=r"shape \(6, 4\), got \(3, 4\)"):
        layer.assign_full("weight", torch.zeros(3, 4))
    with pytest.raises(RuntimeError, match="sharded already, over 2 ranks"):
        layer.shard(mesh, False)

    meta = RowParallelLinear(4, 6, device="meta")
    meta.shard(mesh, False)
    assert meta.weight.is_meta and meta.weight.to_local().shape == (6, 2) and meta.bias.placements == (Replicate(),)


def test_sharding_keeps_values_flags_and_attributes(pool: RankPool) -> None:
    pool.run(on_ranks_attributes, 2)


def on_ranks_accumulate() -> None:
    """Gradients add up over microbatches, and a frozen weight still passes the input gradient on."""
    torch.manual_seed(0)
    mesh = tensor_mesh()
    generator = torch.Generator().manual_seed(1)
    dense = perturb(Pair(4, 6, True, torch.float32), generator, exact=True)
    sharded = copy.deepcopy(dense)
    shard_module(sharded, mesh, False)
    for _ in range(3):
        x = integers((2, 4, 4), generator)
        for module in (dense, sharded):
            module(x).sum().backward()
    gradients = full_gradients(sharded)
    for name, parameter in dense.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name
    for module in (dense, sharded):
        module.requires_grad_(False)
        module.zero_grad()
    grads = []
    for module in (dense, sharded):
        x = integers((2, 4, 4), torch.Generator().manual_seed(2)).requires_grad_()
        module(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    assert all(p.grad is None for p in sharded.parameters())


def test_accumulation_and_frozen_weights(pool: RankPool) -> None:
    pool.run(on_ranks_accumulate, 2)


class Order(TorchDispatchMode):
    """Names of matrix products and collectives, as they start."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1].strip("_")
        if func.namespace == "c10d":
            # asyncOp, whose default (true) is not among the arguments
            assert not any(a is False for a in args), f"{name} is waited for on the spot"
        if func.namespace == "c10d" or name in ("mm", "addmm"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def on_ranks_overlap() -> None:
    """The input gradient travels while the weights' are computed; the input comes back while it is computed."""
    mesh = tensor_mesh()
    gather, scatter = "allgather_base", "reduce_scatter_base"
    for sequence_parallel, expected in (
        (False, ["mm", "addmm", "allreduce", "mm", "mm"]),
        (True, [gather, "mm", "addmm", scatter, "mm", "mm"]),
    ):
        torch.manual_seed(0)
        module = nn.ModuleList(ColumnParallelLinear(4, 6) for _ in range(2))
        shard_module(module, mesh, sequence_parallel)
        first, second = column_linears(torch.randn(1, 4, 4, requires_grad=True), *module)
        with Order() as order:
            (first + second).sum().backward()
        assert order.names == expected


def test_collectives_start_before_the_weight_gradients(pool: RankPool) -> None:
    pool.run(on_ranks_overlap, 2)


def on_ranks_autocast() -> list[float]:
    """bf16 under autocast: dtypes as torch's own linear has them; errors of the order of bf16's rounding."""
    torch.manual_seed(0)
    mesh = tensor_mesh()
    generator = torch.Generator().manual_seed(3)
    dense = perturb(Pair(64, 128, True, torch.float32), generator)
    errors = []
    for sequence_parallel in (False, True):
        sharded = copy.deepcopy(dense)
        shard_module(sharded, mesh, sequence_parallel)
        x = torch.randn(2, 8, 64, generator=generator)
        x_own = x.chunk(2, dim=1)[dist.get_rank()] if sequence_parallel else x
        x, x_own = x.clone().requires_grad_(), x_own.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected, got = dense(x), sharded(x_own)
        assert got.dtype == expected.dtype == torch.bfloat16
        dense.zero_grad()
        expected.float().pow(2).sum().backward()
        got.float().pow(2).sum().backward()
        assert x_own.grad is not None and x_own.grad.dtype == torch.float32
        gradients = full_gradients(sharded)
        for name, parameter in dense.named_parameters():
            assert gradients[name].dtype == torch.float32
            errors.append(float((gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()))
    return errors


def test_autocast(pool: RankPool) -> None:
    for errors in pool.run(on_ranks_autocast, 2):
        assert max(errors) < 2e-2


def on_ranks_refusals() -> None:
    mesh = tensor_mesh()
    assert mesh is not None
    for layer, message in (
        (ColumnParallelLinear(4, 6), r"out_features=6 is not divisible by tensor_parallel_size=4; .*: 2, 3; .*: 4, 8"),
        (RowParallelLinear(6, 4), r"in_features=6 is not divisible by tensor_parallel_size=4"),
        (GeluMLP(4, 10), r"up: ffn_hidden_size=10 is not divisible by .*tensor_parallel_size: 2, 5; .*: 8, 12"),
        (ColumnParallelLinear(4, 12, units=3, setting="num_kv_heads"), r"num_kv_heads=3 and .*=4: one must divide"),
        (ColumnParallelLinear(4, 4, units=2, gather_output=True), r"excludes gather_output=True"),
    ):
        with pytest.raises(ConfigError, match=message):
            shard_module(layer, mesh, False)
    with pytest.raises(ConfigError, match=r"split_input=True needs the whole sequence"):
        RowParallelLinear(4, 4, split_input=True).shard(mesh, True)
    row = RowParallelLinear(4, 4)
    row.shard(mesh, True)
    with pytest.raises(ConfigError, match=r"sequence length 6 is not divisible by .*=4.*nearest valid lengths: 4, 8"):
        row(torch.zeros(1, 6, 1))


def test_refusals(pool: RankPool) -> None:
    pool.run(on_ranks_refusals, 4)


def test_units_must_divide_the_features() -> None:
    with pytest.raises(ConfigError, match="num_heads=3 does not divide out_features=8"):
        ColumnParallelLinear(4, 8, units=3, setting="num_heads")


def test_whole_layers_need_no_process_group() -> None:
    assert not dist.is_initialized()
    pair = Pair(4, 6, True, torch.float32)
    dense = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    dense.load_state_dict(
        {f"{i}.{k}": v for i, layer in ((0, pair.column), (2, pair.row)) for k, v in layer.state_dict().items()}
    )
    x = torch.randn(3, 4)
    assert torch.equal(pair(x), dense(x))
    assert pair.row.partial_gradients() == () and pair.column.full_shape("weight") == (6, 4)
    bound = 1 / 2
    assert pair.column.weight.abs().max() <= bound and pair.column.weight.std() > 0.1
