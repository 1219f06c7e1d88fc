"""Modules as sharded regions: arguments enter, outputs are summed; experts, rotary tails, per-head values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megapar.config import ConfigError, nearest_name
from lightning_megapar.layers.collectives import TensorRanks
from lightning_megapar.sharding.primitives import enter, enter_all, reduce_all
from lightning_megapar.sharding.styles import ModuleStyle, StyledModule, restyle
from lightning_megapar.shards import IndexRuns, not_divisible


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
    own = [name for name, parameter in module._parameters.items() if parameter is not None]
    for name in names:
        if name not in own:
            near = nearest_name(name, own)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(
                f"once={name!r} is no own parameter of {type(module).__name__} (own: {', '.join(own) or 'none'}){hint}"
            )
    restyle(module, RegionStyle, ModuleStyle(ranks, partial=names, options={"once": names}))


def identity_expert(module: nn.Module, ranks: TensorRanks) -> None:
    restyle(module, IdentityExpertStyle, ModuleStyle(ranks))


def rotary_tail(module: nn.Module, features: int, ranks: TensorRanks) -> None:
    restyle(module, RotaryTailStyle, ModuleStyle(ranks, options={"features": features}))


def experts(module: Any, count: int, ranks: TensorRanks) -> None:
    """Deal out whole experts; the parameters are cut by their own rules (``grouped_gemm``)."""
    if count % ranks.size:
        raise ConfigError(not_divisible("num_experts", count, ranks.size))
    index = IndexRuns.contiguous(count, ranks.size)
    start = index.ranks[ranks.rank][0][0]
    restyle(module, ExpertStyle, ModuleStyle(ranks, index, options={"start": start}))
    if hasattr(module, "num_experts"):
        module.num_experts = count // ranks.size


def entered_output(module: nn.Module, ranks: TensorRanks) -> None:
    restyle(module, EnteredOutputStyle, ModuleStyle(ranks))


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
        raise ConfigError(not_divisible("heads", heads, ranks.size))
    restyle(module, LocalArgumentsStyle, ModuleStyle(ranks, IndexRuns.contiguous(heads, ranks.size)))
