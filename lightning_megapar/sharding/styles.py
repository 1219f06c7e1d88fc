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
from torch import Tensor, nn

from lightning_megapar.config import ConfigError
from lightning_megapar.layers.collectives import TensorRanks
from lightning_megapar.layers.deferral import linear
from lightning_megapar.layers.foreign import is_conv1d, output_dim
from lightning_megapar.layers.local import replace_parameter
from lightning_megapar.layers.products import PLAIN
from lightning_megapar.sharding.primitives import enter, gather, reduce_out, split
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
        raise ConfigError(
            f"two styles for one module ({type(module).__name__}); a module takes one style that changes its forward"
        )
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
        raise ConfigError(
            f"parameter {name!r} is asked to be cut along dimension {earlier.dim} and along dimension {shard.dim} (or "
            "in other pieces of it); give the module or its parameter a rule, not both"
        )


# ---- linear layers ----


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
        return linear(x, weight, own_bias, None, bool(dim), getattr(self, "products", PLAIN))


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
            products = getattr(self, "products", PLAIN)
            y = reduce_out(linear(x, weight, None, None, is_conv1d(self), products), style.ranks)
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


def summed(module: nn.Module, names: Iterable[str]) -> None:
    """Mark own parameters of a module as whole inside the sharded region: their gradients are addends."""
    vars(module)[ADDENDS] = tuple(dict.fromkeys([*own_addends(module), *names]))
