"""Which indices of a parameter each tensor rank holds, for layers that are not ours.

One rule covers every layout: a parameter is cut along one dimension, and each rank holds a list of *runs* ``(start,
length)`` of it. Contiguous halves are one run per rank, a fused ``[q | k | v]`` or ``[gate | up]`` weight is one run
per part, and the runs of two ranks may differ in length. The module keeps an ordinary parameter with the rank's rows;
:class:`IndexedTensor` gives it its global place back where values move between layouts (checkpoints, gathering).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

import torch
from torch import Tensor

from lightning_megapar.config import ConfigError, divisors, nearest

Run = tuple[int, int]
"""Start and length of a stretch of indices."""
Runs = tuple[Run, ...]


@dataclass(frozen=True)
class IndexRuns:
    """A dimension of ``width`` indices dealt out to ranks.

    Args:
        width: number of indices.
        ranks: per rank its runs, in the order in which it holds them.

    Raises:
        ConfigError: when the runs leave the dimension, or do not hold each index exactly once.
    """

    width: int
    ranks: tuple[Runs, ...]

    def __post_init__(self) -> None:
        position = 0
        for start, length in sorted(run for runs in self.ranks for run in runs if run[1]):
            if start != position or length < 0:
                raise ConfigError(f"runs {self.ranks} do not hold each of {self.width} indices exactly once")
            position += length
        if position != self.width:
            raise ConfigError(f"runs {self.ranks} hold {position} of {self.width} indices")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def length(self, rank: int) -> int:
        """Indices that a rank holds."""
        return sum(length for _, length in self.ranks[rank])

    @property
    def is_contiguous(self) -> bool:
        """Whether the ranks' pieces, one after the other, are the dimension itself."""
        return [run for runs in self.ranks for run in runs if run[1]] == sorted(
            run for runs in self.ranks for run in runs if run[1]
        )

    @property
    def is_even(self) -> bool:
        return len({self.length(rank) for rank in range(self.size)}) == 1

    def take(self, full: Tensor, dim: int, rank: int) -> Tensor:
        """A rank's piece of ``full`` along ``dim``, as a new contiguous tensor (meta stays meta)."""
        pieces = [full.narrow(dim, start, length) for start, length in self.ranks[rank]]
        if len(pieces) == 1:
            return pieces[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(pieces, dim).contiguous() if pieces else full.narrow(dim, 0, 0).clone()

    def place(self, full: Tensor, piece: Tensor, dim: int, rank: int) -> None:
        """Write a rank's piece into its place in ``full``."""
        position = 0
        for start, length in self.ranks[rank]:
            full.narrow(dim, start, length).copy_(piece.narrow(dim, position, length))
            position += length

    @classmethod
    def contiguous(cls, width: int, size: int, unit: int = 1) -> IndexRuns:
        """``size`` neighbouring pieces of whole units, as even as they can be (the last ones may be shorter).

        Args:
            width: indices.
            size: ranks.
            unit: indices that stay together (a head).
        """
        return cls.packed([width], size, unit)

    @classmethod
    def packed(cls, parts: Sequence[int], size: int, unit: int = 1) -> IndexRuns:
        """Each of several parts that lie one after the other is cut in ``size`` neighbouring pieces.

        Args:
            parts: indices of each part, such as ``(h, h, h)`` for a fused query, key and value.
            size: ranks.
            unit: indices that stay together; it must divide every part.
        """
        starts = [0, *accumulate(parts)]
        ranks: list[Runs] = []
        for rank in range(size):
            runs = []
            for start, width in zip(starts, parts):
                step = -(-(width // unit) // size) * unit
                low, high = min(rank * step, width), min((rank + 1) * step, width)
                runs.append((start + low, high - low))
            ranks.append(_merged(runs))
        return cls(sum(parts), tuple(ranks))


def deal_out(parts: Sequence[int], size: int, unit: int = 1, what: str = "indices") -> IndexRuns:
    """:meth:`IndexRuns.packed`, of which every rank holds something.

    Args:
        parts, size, unit: as there.
        what: is dealt out, for the message.

    Raises:
        ConfigError: a unit that does not divide the parts, or ranks that would hold nothing, with the nearest valid
            numbers.
    """
    if any(part % unit for part in parts):
        units = nearest(unit, divisors(gcd(*parts)))
        raise ConfigError(
            f"unit={unit} does not divide {_widths(parts)} {what}; nearest valid units: {', '.join(map(str, units))}"
        )
    index = IndexRuns.packed(parts, size, unit)
    empty = [rank for rank in range(size) if not index.length(rank)]
    if empty:
        most = max(part // unit for part in parts)
        valid = [n for n in range(1, most + 1) if (-(-most // n)) * (n - 1) < most]
        of_units = f" in units of {unit}" if unit > 1 else ""
        raise ConfigError(
            f"{_widths(parts)} {what}{of_units} over tensor_parallel_size={size} leave tensor rank {empty[0]} without "
            f"any; nearest valid tensor_parallel_size: {', '.join(map(str, nearest(size, valid)))}, or leave it whole"
        )
    return index


def not_divisible(what: str, count: int, size: int) -> str:
    """A message about a number that the tensor ranks do not divide, with the nearest sizes that do."""
    valid = nearest(size, divisors(count)) if count > 0 else [1]
    return (
        f"{what}={count} is not divisible by tensor_parallel_size={size}; nearest valid tensor_parallel_size: "
        f"{', '.join(map(str, valid))}"
    )


def _widths(parts: Sequence[int]) -> str:
    return "+".join(map(str, parts))


def _merged(runs: Iterable[Run]) -> Runs:
    merged: list[Run] = []
    for start, length in runs:
        if not length:
            continue
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return tuple(merged)


@dataclass(frozen=True)
class ParameterShard:
    """How a parameter is cut over the tensor ranks.

    Args:
        shape: of the whole parameter.
        dim: dimension that is cut, 0 or positive.
        index: who holds which indices of it.
        rank: this process's tensor rank.

    Raises:
        ConfigError: when ``index`` is not of the dimension's width.
    """

    shape: tuple[int, ...]
    dim: int
    index: IndexRuns
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.shape) or self.shape[self.dim] != self.index.width:
            raise ConfigError(f"dimension {self.dim} of {self.shape} cannot be cut by {self.index.width} indices")

    @property
    def local_shape(self) -> tuple[int, ...]:
        lengths = list(self.shape)
        lengths[self.dim] = self.index.length(self.rank)
        return tuple(lengths)

    @property
    def runs(self) -> Runs:
        """This rank's."""
        return self.index.ranks[self.rank]

    def take(self, full: Tensor) -> Tensor:
        """This rank's piece of the whole tensor, copied."""
        return self.index.take(full, self.dim, self.rank)

    def copy_into(self, piece: Tensor, full: Tensor) -> None:
        """Fill this rank's piece (any dtype and device) from the whole tensor, without a copy in between."""
        position = 0
        for start, length in self.runs:
            piece.narrow(self.dim, position, length).copy_(full.narrow(self.dim, start, length))
            position += length

    def same_cut(self, other: ParameterShard) -> bool:
        return (self.shape, self.dim, self.index) == (other.shape, other.dim, other.index)


@dataclass(frozen=True, eq=False)
class IndexedTensor:
    """A rank's piece of a tensor that is cut by indices, with its global place. It shares the piece's memory.

    It stands where checkpoints and gathering expect a tensor of the global shape; it computes nothing.

    Args:
        local: the piece: a plain tensor, or FSDP2's DTensor over the data ranks of it.
        shard: how the whole is cut.
    """

    local: Tensor
    shard: ParameterShard

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size(self.shard.shape)

    @property
    def ndim(self) -> int:
        return len(self.shard.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device

    def detach(self) -> IndexedTensor:
        return IndexedTensor(self.local.detach(), self.shard)


Value = Tensor | IndexedTensor
"""What holds the values of a named tensor on this rank."""


def is_value(value: object) -> bool:
    """Whether ``value`` is a tensor, or a rank's piece of one."""
    return isinstance(value, (Tensor, IndexedTensor))


SHARDS = "_megapar_shards"
"""Attribute of a module: name of an own parameter -> how it is cut."""


def own_shards(module: torch.nn.Module) -> dict[str, ParameterShard]:
    """How own parameters of ``module`` are cut; those that it does not name are whole (or DTensors)."""
    return vars(module).get(SHARDS, {})


ADDENDS = "_megapar_addends"
"""Attribute of a module: names of own parameters that are whole and whose gradients are addends over tensor ranks."""


def own_addends(module: torch.nn.Module) -> tuple[str, ...]:
    """Own parameters of ``module`` that a plan leaves whole inside a sharded region."""
    return tuple(vars(module).get(ADDENDS, ()))
