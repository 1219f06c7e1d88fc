"""What a sharding style does to one module: own parameters are cut, and the module's class gains a sharded forward.

The forward of the module's own class still runs, on this rank's parameters; the style enters the sharded region before
it and leaves it after. The new class is a subclass of the old one, so that ``isinstance``, copying and hooks go on as
before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megapar.config import ConfigError
from lightning_megapar.layers.collectives import TensorRanks
from lightning_megapar.layers.local import replace_parameter
from lightning_megapar.sharding.primitives import enter, enter_all, gather, reduce_all, reduce_out, split
from lightning_megapar.shards import ADDENDS, SHARDS, IndexRuns, ParameterShard, Runs, own_addends


@dataclass
class ModuleStyle:
    """What a sharded module knows about its sharding.

    Args:
        ranks: the tensor ranks.
        index: who holds which outputs (column styles), inputs (row styles), rows or columns (embeddings), experts.
        rows: outputs that this rank computes of a weight that it holds whole (key/value heads that ranks share).
        partial: own parameters whose gradients are addends over the tensor ranks.
        options: the style's own.
    """

    ranks: TensorRanks
    index: IndexRuns = field(default_factory=lambda: IndexRuns(0, ()))
    rows: Runs | None = None
    partial: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


class StyledModule(nn.Module):
    """Mixed into the class of a module that a plan shards."""

    _style: ModuleStyle

    def partial_gradients(self) -> tuple[str, ...]:
        """Own parameters whose gradient on each rank is only an addend of the true one."""
        return self._style.partial


_SUBCLASSES: dict[tuple[type, type], type] = {}


def _subclass(mixin: type[StyledModule], base: type[nn.Module]) -> type[nn.Module]:
    key = (mixin, base)
    if key not in _SUBCLASSES:
        _SUBCLASSES[key] = type(
            base.__name__, (mixin, base), {"__module__": base.__module__, "__qualname__": base.__qualname__}
        )
    return _SUBCLASSES[key]


def restyle(module: Any, mixin: type[StyledModule], style: ModuleStyle) -> None:
    """Give ``module`` the forward of ``mixin``.

    Raises:
        ConfigError: when another style was given to it before.
    """
    if isinstance(module, StyledModule):
        raise ConfigError(f"two styles for one module ({type(module).__name__})")
    module.__class__ = _subclass(mixin, type(module))
    module._style = style


def cut_parameter(module: nn.Module, name: str, dim: int, index: IndexRuns, rank: int) -> None:
    """Replace own parameter ``name`` by this rank's piece of it (meta stays meta); other owners keep the whole one.

    Raises:
        ConfigError: when it was cut before in another way.
    """
    whole = module._parameters[name]
    assert whole is not None
    if whole._backward_hooks or getattr(whole, "_post_accumulate_grad_hooks", None):
        raise ConfigError(
            f"parameter {name!r} of {type(module).__name__} has hooks on its gradient, which a rank's piece would "
            "lose; register them after set-up (in on_fit_start), or leave the layer whole"
        )
    shards = vars(module).setdefault(SHARDS, {})
    earlier = shards.get(name)
    shape = tuple(whole.shape) if earlier is None else earlier.shape
    shard = ParameterShard(shape, dim % len(shape), index, rank)
    if earlier is None:
        shards[name] = shard
        module._parameters[name] = replace_parameter(whole, shard.take(whole.detach()))
    elif not earlier.same_cut(shard):
        raise ConfigError(f"parameter {name!r} is asked to be cut in two ways")


# ---- linear layers ----


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' ``Conv1D``: a linear layer whose weight lies (in, out)."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def output_dim(module: nn.Module) -> int:
    """Dimension of a linear layer's weight that counts its outputs."""
    return 1 if is_conv1d(module) else 0


def widths(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer that is whole."""
    weight: Any = module.weight
    out = output_dim(module)
    return int(weight.shape[1 - out]), int(weight.shape[out])


class ColumnStyle(StyledModule):
    """Outputs are cut; the input enters the region."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        style = self._style
        if not style.options.get("inner"):
            input = enter(input, style.ranks, cast=True)
        y = super().forward(input, *args, **kwargs)
        return gather(y, style.index, style.ranks) if style.options.get("gather") else y


class RowsStyle(StyledModule):
    """A weight that every rank holds whole, of which it computes some outputs (heads that ranks share)."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        style = self._style
        assert style.rows is not None
        x = input if style.options.get("inner") else enter(input, style.ranks, cast=True)
        dim = output_dim(self)
        whole, bias = self._parameters["weight"], self._parameters.get("bias")
        assert whole is not None
        weight = torch.cat([whole.narrow(dim, *run) for run in style.rows], dim)
        own_bias = None if bias is None else torch.cat([bias.narrow(0, *run) for run in style.rows])
        return F.linear(x, weight.t() if dim else weight, own_bias)


class RowStyle(StyledModule):
    """Inputs are cut; the ranks' products are summed, and the bias is added once."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = input
        style = self._style
        if style.options.get("split"):
            x = split(x, style.index, style.ranks)
        bias, weight = self._parameters.get("bias"), self._parameters["weight"]
        assert weight is not None
        if style.options["own_forward"]:
            # Whatever it does with its product and bias, alike and linearly: each rank adds its share of the bias.
            self._parameters["bias"] = None if bias is None else bias / style.ranks.size  # type: ignore[assignment]
            try:
                y = reduce_out(super().forward(x, *args, **kwargs), style.ranks)
            finally:
                self._parameters["bias"] = bias
        else:
            y = reduce_out(F.linear(x, weight.t() if is_conv1d(self) else weight), style.ranks)
            if bias is not None:  # once, after the sum
                y = y + bias.to(y.dtype)
        if style.options.get("scatter"):
            y = split(y, IndexRuns.contiguous(y.shape[-1], style.ranks.size), style.ranks)
        return y


def column(
    module: Any, index: IndexRuns, ranks: TensorRanks, *, gather_output: bool = False, inner: bool = False
) -> None:
    """Cut a linear layer by outputs.

    Args:
        module: ``nn.Linear`` (or a subclass) or transformers' ``Conv1D``, whole.
        index: who computes which outputs.
        ranks: the tensor ranks.
        gather_output: collect all outputs on every rank.
        inner: the input is inside the sharded region already.
    """
    style = ModuleStyle(ranks, index, options={"gather": gather_output, "inner": inner})
    width = index.width
    vectors = [
        n for n, p in module._parameters.items() if p is not None and n != "weight" and tuple(p.shape) == (width,)
    ]
    cut_parameter(module, "weight", output_dim(module), index, ranks.rank)
    for name in vectors:
        cut_parameter(module, name, 0, index, ranks.rank)
    restyle(module, ColumnStyle, style)
    if is_conv1d(module):
        module.nf = index.length(ranks.rank)
    elif not gather_output:  # else outer code may read the width of what it gets
        module.out_features = index.length(ranks.rank)


def shared_rows(module: Any, rows: Runs, ranks: TensorRanks, *, inner: bool = False) -> None:
    """Keep a linear layer whole and compute ``rows`` of its outputs; gradients of weight and bias become addends."""
    partial = tuple(name for name in ("weight", "bias") if module._parameters.get(name) is not None)
    restyle(module, RowsStyle, ModuleStyle(ranks, rows=rows, partial=partial, options={"inner": inner}))
    length = sum(n for _, n in rows)
    if is_conv1d(module):
        module.nf = length
    else:
        module.out_features = length


def row(module: Any, index: IndexRuns, ranks: TensorRanks, *, split_input: bool = False, scatter: bool = False) -> None:
    """Cut a linear layer by inputs.

    Args:
        module: ``nn.Linear`` (or a subclass) or transformers' ``Conv1D``, whole.
        index: who multiplies which inputs.
        ranks: the tensor ranks.
        split_input: the input is replicated; take the own indices of it.
        scatter: give each rank its contiguous share of the output (per-head values made by a row product).
    """
    own_forward = type(module).forward is not nn.Linear.forward and not is_conv1d(module)
    partial = ("bias",) if own_forward and module._parameters.get("bias") is not None else ()
    options = {"split": split_input, "scatter": scatter, "own_forward": own_forward}
    cut_parameter(module, "weight", 1 - output_dim(module), index, ranks.rank)
    restyle(module, RowStyle, ModuleStyle(ranks, index, partial=partial, options=options))
    if hasattr(module, "in_features"):
        module.in_features = index.length(ranks.rank)
    if hasattr(module, "nx"):
        module.nx = index.length(ranks.rank)


# ---- embeddings ----


class VocabularyStyle(StyledModule):
    """Rows of the table are cut: each rank looks up what it holds, the rest is zero, and the results are summed."""

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        style = self._style
        low = style.options["start"]
        length = style.index.length(style.ranks.rank)
        inside = (ids >= low) & (ids < low + length)
        found = super().forward((ids - low).clamp(0, max(length - 1, 0)), *args, **kwargs)
        return reduce_out(found * inside.unsqueeze(-1).to(found.dtype), style.ranks)


class FeatureStyle(StyledModule):
    """Columns of the table are cut and gathered after the look-up."""

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        style = self._style
        return gather(super().forward(ids, *args, **kwargs), style.index, style.ranks)


def embedding_rows(module: nn.Embedding, ranks: TensorRanks) -> None:
    """Cut an embedding by vocabulary (each rank a stretch of it, the last one perhaps shorter)."""
    index = IndexRuns.contiguous(module.num_embeddings, ranks.size)
    start = index.ranks[ranks.rank][0][0] if index.length(ranks.rank) else module.num_embeddings
    length = index.length(ranks.rank)
    if not length:
        raise ConfigError(f"num_embeddings={module.num_embeddings} leaves tensor rank {ranks.rank} without a row")
    padding = module.padding_idx
    if padding is not None:
        module.padding_idx = padding - start if start <= padding < start + length else None
    cut_parameter(module, "weight", 0, index, ranks.rank)
    restyle(module, VocabularyStyle, ModuleStyle(ranks, index, options={"start": start}))


def embedding_columns(module: nn.Embedding, ranks: TensorRanks) -> None:
    """Cut an embedding by features."""
    index = IndexRuns.contiguous(module.embedding_dim, ranks.size)
    cut_parameter(module, "weight", 1, index, ranks.rank)
    restyle(module, FeatureStyle, ModuleStyle(ranks, index))


# ---- regions ----


class RegionStyle(StyledModule):
    """A module whose parameters are cut: its arguments enter, its output is a sum over the ranks.

    Parameters that are added to the output (a last bias) are divided by the number of ranks: they count once.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ranks = self._style.ranks
        once = {name: self._parameters[name] for name in self._style.options["once"]}
        try:
            for name, parameter in once.items():
                self._parameters[name] = parameter / ranks.size  # type: ignore[assignment, operator]
            value = super().forward(*enter_all(args, ranks), **enter_all(kwargs, ranks))
        finally:
            self._parameters.update(once)
        return reduce_all(value, ranks)


class IdentityExpertStyle(StyledModule):
    """An expert that is the identity inside an all-reduced region: each rank gives its share of it."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x / self._style.ranks.size, *args, **kwargs)


class RotaryTailStyle(StyledModule):
    """The last features of the output go past the column product into the region (multi-head latent attention)."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        y = super().forward(*args, **kwargs)
        rest, tail = y.tensor_split([-self._style.options["features"]], -1)
        return torch.cat([rest, enter(tail, self._style.ranks)], -1)


class ExpertStyle(StyledModule):
    """Whole experts are dealt out: tokens of other ranks' experts count zero here, and the ranks' outputs are summed.

    The forward is ``(hidden states, expert of each choice, weight of each choice)``, transformers' convention.
    """

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Any:
        style = self._style
        start, count = style.options["start"], style.index.length(style.ranks.rank)
        own = (index >= start) & (index < start + count)
        local = (index - start).clamp(0, count - 1)
        weights = enter(weights, style.ranks) * own.to(weights.dtype)
        return reduce_all(super().forward(enter(hidden, style.ranks), local, weights, *args, **kwargs), style.ranks)


class EnteredOutputStyle(StyledModule):
    """A replicated module whose output enters the region (a low-rank product before column products)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return enter_all(super().forward(*args, **kwargs), self._style.ranks)


def region(module: nn.Module, ranks: TensorRanks, once: Iterable[str] = ()) -> None:
    """Make ``module`` a region; ``once`` are own parameters that are whole and added to its output."""
    names = tuple(once)
    restyle(module, RegionStyle, ModuleStyle(ranks, partial=names, options={"once": names}))


def identity_expert(module: nn.Module, ranks: TensorRanks) -> None:
    restyle(module, IdentityExpertStyle, ModuleStyle(ranks))


def rotary_tail(module: nn.Module, features: int, ranks: TensorRanks) -> None:
    restyle(module, RotaryTailStyle, ModuleStyle(ranks, options={"features": features}))


def experts(module: Any, count: int, ranks: TensorRanks) -> None:
    """Deal out whole experts; the parameters are cut by their own rules (``grouped_gemm``)."""
    if count % ranks.size:
        raise ConfigError(f"num_experts={count} is not divisible by tensor_parallel_size={ranks.size}")
    index = IndexRuns.contiguous(count, ranks.size)
    start = index.ranks[ranks.rank][0][0]
    restyle(module, ExpertStyle, ModuleStyle(ranks, index, options={"start": start}))
    if hasattr(module, "num_experts"):
        module.num_experts = count // ranks.size


def entered_output(module: nn.Module, ranks: TensorRanks) -> None:
    restyle(module, EnteredOutputStyle, ModuleStyle(ranks))


def summed(module: nn.Module, names: Iterable[str]) -> None:
    """Mark own parameters of a module as whole inside the sharded region: their gradients are addends."""
    vars(module)[ADDENDS] = tuple(dict.fromkeys([*own_addends(module), *names]))


class LocalArgumentsStyle(StyledModule):
    """Per-head arguments (position biases, ALiBi slopes) of a module that holds some of the heads: own heads of each.

    Recognised by shape: (heads, ...) with three dimensions or more, (batch, heads, ...) with four, (batch x heads, ...)
    with three or more, the batch being that of the first tensor.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        style = self._style
        first = next((t for t in [*args, *kwargs.values()] if isinstance(t, Tensor)), None)
        batch = 0 if first is None or not first.ndim else first.shape[0]

        def own(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.ndim < 3:
                return value
            index, rank, heads = style.index, style.ranks.rank, style.index.width
            if value.shape[0] == heads and batch != heads:
                return index.take(value, 0, rank)
            if value.ndim == 4 and value.shape[1] == heads:
                return index.take(value, 1, rank)
            if value.shape[0] == batch * heads:
                return index.take(value.view(batch, heads, *value.shape[1:]), 1, rank).flatten(0, 1)
            return value

        return super().forward(*(own(a) for a in args), **{key: own(a) for key, a in kwargs.items()})


def local_arguments(module: nn.Module, heads: int, ranks: TensorRanks) -> None:
    """Cut per-head arguments of ``module``.

    Raises:
        ConfigError: when the ranks do not divide the heads.
    """
    if not heads or heads % ranks.size:
        raise ConfigError(f"heads={heads} is not divisible by tensor_parallel_size={ranks.size}")
    restyle(module, LocalArgumentsStyle, ModuleStyle(ranks, IndexRuns.contiguous(heads, ranks.size)))
