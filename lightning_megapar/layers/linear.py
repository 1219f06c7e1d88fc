"""Linear layers split by columns (output features) and by rows (input features), after Megatron-LM.

``Y = X A^T + b`` with ``A`` of shape (out, in). Split by columns, each rank computes some output features from the
whole input; split by rows, each rank computes an addend of all output features from its slice of the input. A column
layer, an elementwise function and a row layer in sequence need one sum at the end of the forward and one of the
input gradient at the end of the backward (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from lightning_megapar.config import ConfigError, divisors, nearest
from lightning_megapar.layers.base import ParallelLayer, refuse_uneven
from lightning_megapar.layers.casting import autocast_dtype, cast_for_each
from lightning_megapar.layers.collectives import (
    TensorRanks,
    gather_last,
    split_last,
    start_all_reduce,
    start_sequence_gather,
    start_sequence_scatter,
)
from lightning_megapar.layers.deferral import Deferral, linear, put_off
from lightning_megapar.layers.local import like_parameter, local_value
from lightning_megapar.layers.products import PLAIN, Products

Window = tuple[int, int] | None
"""First row and number of rows of a replicated weight that a rank uses; ``None`` for all that it holds."""


def _rows(parameter: Tensor, window: Window, dtype: torch.dtype) -> Tensor:
    value = local_value(parameter)
    if window is not None:
        value = value.narrow(0, *window)
    return value.to(dtype)


def _gradient(parameter: Tensor, window: Window, value: Tensor) -> Tensor:
    """The gradient of ``parameter`` from that of the rows inside the window."""
    whole = local_value(parameter)
    if window is None:
        return like_parameter(parameter, value.to(whole.dtype))
    result = torch.zeros_like(whole)
    result.narrow(0, *window).copy_(value)
    return like_parameter(parameter, result)


def _weight_gradient(weight: Tensor, window: Window, products: Products, gradient: Tensor, x: Tensor) -> Tensor:
    return _gradient(weight, window, products.weight_gradient(gradient, x))


def _bias_gradient(bias: Tensor, window: Window, gradient: Tensor) -> Tensor:
    return _gradient(bias, window, gradient.sum(0))


class _ColumnLinear(torch.autograd.Function):
    """Several column-split products of one input, with one collective for all of them in each direction.

    Under sequence parallelism the input is saved as the slice that this rank holds and gathered again in the
    backward, behind the product that gives the input gradient; the sum of the input gradient runs behind the
    products that give the weight gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ranks: TensorRanks,
        windows: tuple[Window, ...],
        dtype: torch.dtype | None,
        deferral: Deferral | None,
        products: tuple[Products, ...],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(windows)], parameters[len(windows) :]
        ctx.ranks, ctx.windows, ctx.input_dtype = ranks, windows, x.dtype
        ctx.biases, ctx.deferral, ctx.owns, ctx.products = biases, deferral, weights, products
        if dtype is not None:
            x = x.to(dtype)
        ctx.save_for_backward(x, *weights)
        if ranks.sequence_parallel:
            x = start_sequence_gather(x, ranks)()
        outputs = []
        for weight, bias, window, product in zip(weights, biases, windows, products):
            assert weight is not None
            row_bias = None if bias is None else _rows(bias, window, x.dtype)
            outputs.append(product.output(x, _rows(weight, window, x.dtype), row_bias))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        x = x.detach()  # gradients that wait must not keep the graph behind their input
        ranks, windows, biases = ctx.ranks, ctx.windows, ctx.biases
        count = len(windows)
        needs_weight = ctx.needs_input_grad[6 : 6 + count]
        needs_bias = ctx.needs_input_grad[6 + count :]
        gathering = start_sequence_gather(x, ranks) if ranks.sequence_parallel and any(needs_weight) else None
        flat = [g.reshape(-1, g.shape[-1]) for g in gradients]
        shape = (*gradients[0].shape[:-1], x.shape[-1])

        summing = None
        if ctx.needs_input_grad[0]:
            total = ctx.products[0].input_gradient(flat[0], _rows(weights[0], windows[0], x.dtype))
            for g, weight, window, product in zip(flat[1:], weights[1:], windows[1:], ctx.products[1:]):
                rows = _rows(weight, window, x.dtype)
                if product is PLAIN:
                    total.addmm_(g, rows)
                else:
                    total.add_(product.input_gradient(g, rows))
            start = start_sequence_scatter if ranks.sequence_parallel else start_all_reduce
            summing = start(total.view(shape), ranks)

        if gathering is not None:
            x = gathering()
        x = x.reshape(-1, x.shape[-1])
        grad_weights = [
            put_off(ctx.deferral, own, partial(_weight_gradient, own, window, product, g, x)) if needed else None
            for own, window, product, g, needed in zip(ctx.owns, windows, ctx.products, flat, needs_weight)
        ]
        grad_biases = [
            put_off(ctx.deferral, bias, partial(_bias_gradient, bias, window, g)) if needed else None
            for bias, window, g, needed in zip(biases, windows, flat, needs_bias)
        ]
        grad_x = None if summing is None else summing().to(ctx.input_dtype)
        return grad_x, None, None, None, None, None, *grad_weights, *grad_biases


class _RowLinear(torch.autograd.Function):
    """A row-split product, summed over the ranks (or summed and cut along the sequence), plus one bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ranks: TensorRanks,
        dtype: torch.dtype | None,
        deferral: Deferral | None,
        products: Products,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.ranks, ctx.bias, ctx.input_dtype, ctx.deferral, ctx.products = ranks, bias, x.dtype, deferral, products
        ctx.own = weight  # what recomputation saves in its place has no .grad that anybody reads
        if dtype is not None:
            x = x.to(dtype)
        ctx.save_for_backward(x, weight)
        start = start_sequence_scatter if ranks.sequence_parallel else start_all_reduce
        result = start(products.output(x, local_value(weight).to(x.dtype)), ranks)()
        # After the sum: before it, every rank would add the bias once.
        return result if bias is None else result.add_(local_value(bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x = x.detach()  # gradients that wait must not keep the graph behind their input
        needs_x, needs_weight, needs_bias = (ctx.needs_input_grad[i] for i in (0, 5, 6))
        gathering = None
        if ctx.ranks.sequence_parallel and (needs_x or needs_weight):
            gathering = start_sequence_gather(gradient, ctx.ranks)
        grad_bias = None
        if needs_bias:
            own = gradient.reshape(-1, gradient.shape[-1])
            grad_bias = put_off(ctx.deferral, ctx.bias, partial(_bias_gradient, ctx.bias, None, own))
        if gathering is not None:
            gradient = gathering()
        flat = gradient.reshape(-1, gradient.shape[-1])
        grad_x = grad_weight = None
        if needs_x:
            rows = local_value(weight).to(x.dtype)
            grad_x = ctx.products.input_gradient(flat, rows).view(x.shape).to(ctx.input_dtype)
        if needs_weight:
            inputs = x.reshape(-1, x.shape[-1])
            later = partial(_weight_gradient, ctx.own, None, ctx.products, flat, inputs)
            grad_weight = put_off(ctx.deferral, ctx.own, later)
        return grad_x, None, None, None, None, grad_weight, grad_bias


class _Linear(ParallelLayer):
    """Weight (out, in), bias (out) and their initial values."""

    deferral: Deferral | None = None
    """Where weight gradients wait under a schedule that splits the backward."""
    products: Products = PLAIN
    """What multiplies."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.init_std = in_features, out_features, init_std
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def initial_value(self, name: str, generator: torch.Generator) -> Tensor:
        shape = self.full_shape(name)
        if self.init_std is not None:
            if name == "bias":
                return torch.zeros(shape, dtype=torch.float32, device="cpu")
            return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(
                0.0, self.init_std, generator=generator
            )
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        return torch.empty(shape, dtype=torch.float32, device="cpu").uniform_(-bound, bound, generator=generator)

    def extra_repr(self) -> str:
        split = f", tensor_parallel_size={self.tensor_size}" if self.ranks is not None else ""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{split}"


class ColumnParallelLinear(_Linear):
    """``nn.Linear`` whose output features are split over the tensor ranks.

    Input (..., in), replicated; under sequence parallelism (..., s / ranks, in), gathered along the sequence first.
    Output (..., out / ranks), or (..., out) with ``gather_output``. Without a mesh: ``nn.Linear``.

    Args:
        in_features, out_features, bias: as in ``nn.Linear``.
        gather_output: all-gather the output features.
        units: indivisible groups of output features (attention heads). Fewer units than ranks leave the weight
            replicated: each rank uses the rows of one unit, several ranks share a unit, and the weight's gradient
            is a sum over the ranks.
        setting: name of the size in error messages.
        init_std: normal weights and zero bias; ``None`` draws both uniformly in +-1/sqrt(in_features).
        device, dtype: of the parameters.

    Raises:
        ConfigError: from :meth:`shard`, when neither of ``units`` and the number of ranks divides the other.
    """

    keeping: AbstractContextManager[Any] | None = None
    """Entered while products are computed: hooks on what they save. The first of layers that share an input decides."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        units: int | None = None,
        setting: str = "out_features",
        init_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if units is not None and out_features % units:
            raise ConfigError(f"{setting}={units} does not divide out_features={out_features}")
        super().__init__(in_features, out_features, bias, init_std=init_std, device=device, dtype=dtype)
        self.gather_output, self.units, self.setting = gather_output, units, setting

    def placement(self, name: str, mesh: DeviceMesh) -> Placement:
        size = mesh.size()
        units = self.out_features if self.units is None else self.units
        if self.units is not None and units % size and size % units == 0:
            if self.gather_output:
                raise ConfigError(f"{self.setting}={units} < tensor_parallel_size={size} excludes gather_output=True")
            return Replicate()
        if self.units is not None and units % size:
            valid = [d for d in {*divisors(units), *(units * k for k in range(1, size // units + 2))} if d > 1]
            raise ConfigError(
                f"{self.setting}={units} and tensor_parallel_size={size}: one must divide the other; nearest valid "
                f"tensor_parallel_size: {', '.join(map(str, nearest(size, valid or [1])))}"
            )
        refuse_uneven(self.setting, units, size)
        return Shard(0)

    @property
    def window(self) -> Window:
        """Rows of a replicated weight that this rank uses; ``None`` when the weight is whole or split."""
        if self.ranks is None or self.units is None or self.units % self.ranks.size == 0:
            return None
        rows = self.out_features // self.units
        return self.ranks.rank * self.units // self.ranks.size * rows, rows

    def partial_gradients(self) -> tuple[str, ...]:
        if self.window is None:
            return ()
        return ("weight",) if self.bias is None else ("weight", "bias")

    def forward(self, x: Tensor) -> Tensor:
        return column_linears(x, self)[0]


def column_linears(x: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
    """Apply column layers that read the same input, with the collectives of one (query, key, value; gate, up).

    Args:
        x: (..., in), or its slice along the sequence under sequence parallelism.
        layers: all whole, or all sharded over the same ranks.

    Returns:
        one output per layer, as from calling it.
    """
    if layers[0].keeping is not None:
        with layers[0].keeping:
            return _column_linears(x, layers)
    return _column_linears(x, layers)


def _column_linears(x: Tensor, layers: tuple[ColumnParallelLinear, ...]) -> tuple[Tensor, ...]:
    ranks = layers[0].ranks
    if ranks is None:
        inputs = (x,) * len(layers)
        dtype = autocast_dtype(x)
        if dtype and len(layers) > 1 and x.dtype == torch.float32 and all(each.products is PLAIN for each in layers):
            inputs = cast_for_each(x, dtype, len(layers))
        return tuple(
            linear(each, layer.weight, layer.bias, layer.deferral, products=layer.products)
            for each, layer in zip(inputs, layers)
        )
    outputs = _ColumnLinear.apply(
        x,
        ranks,
        tuple(layer.window for layer in layers),
        autocast_dtype(x),
        layers[0].deferral,
        tuple(layer.products for layer in layers),
        *(layer.weight for layer in layers),
        *(layer.bias for layer in layers),
    )
    return tuple(gather_last(y, ranks) if layer.gather_output else y for y, layer in zip(outputs, layers))


class RowParallelLinear(_Linear):
    """``nn.Linear`` whose input features are split over the tensor ranks.

    Input (..., in / ranks), as a column layer leaves it; (..., in) with ``split_input``. Output (..., out), summed
    over the ranks and replicated; under sequence parallelism this rank's (..., s / ranks, out) of the sum. The bias
    is added once, after the sum. Without a mesh: ``nn.Linear``.

    Args:
        in_features, out_features, bias: as in ``nn.Linear``.
        split_input: take each rank's slice of a replicated input.
        setting: name of the size in error messages.
        init_std: normal weights and zero bias; ``None`` draws both uniformly in +-1/sqrt(in_features).
        device, dtype: of the parameters.

    Raises:
        ConfigError: from :meth:`shard`, when the ranks do not divide ``in_features``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        split_input: bool = False,
        setting: str = "in_features",
        init_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, init_std=init_std, device=device, dtype=dtype)
        self.split_input, self.setting = split_input, setting

    def shard(self, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        if self.split_input and sequence_parallel:
            raise ConfigError(
                "split_input=True needs the whole sequence on every rank, which sequence_parallel=True cuts; use a "
                "column layer's output, or sequence_parallel=False"
            )
        super().shard(mesh, sequence_parallel)

    def placement(self, name: str, mesh: DeviceMesh) -> Placement:
        refuse_uneven(self.setting, self.in_features, mesh.size())
        return Shard(1) if name == "weight" else Replicate()

    def partial_gradients(self) -> tuple[str, ...]:
        return ("bias",) if self.bias is not None and self.sequence_ranks is not None else ()

    def forward(self, x: Tensor) -> Tensor:
        ranks = self.ranks
        if ranks is None:
            return linear(x, self.weight, self.bias, self.deferral, products=self.products)
        if self.split_input:
            x = split_last(x, ranks)
        return _RowLinear.apply(x, ranks, autocast_dtype(x), self.deferral, self.products, self.weight, self.bias)
