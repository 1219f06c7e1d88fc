"""Nests of values: containers that PyTorch's pytrees know, and objects that hold tensors in their attributes.

Leaves that are neither tensors nor plain values cannot travel between processes with their meaning.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_megapar.pipeline.cutting.away import StageError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum, slice)


@dataclasses.dataclass(frozen=True)
class _Fields:
    """An object as a container: its type and its attributes' names and nests."""

    kind: type
    names: tuple[str, ...]
    spec: Any


class Shape:
    """Stands for a tensor that does not travel."""

    __slots__ = ("dtype", "size")

    def __init__(self, size: tuple[int, ...], dtype: torch.dtype) -> None:
        self.size = size
        self.dtype = dtype

    @staticmethod
    def of(tensor: Tensor) -> Shape:
        return Shape(tuple(tensor.shape), tensor.dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and (self.size, self.dtype) == (other.size, other.dtype)

    def __hash__(self) -> int:
        return hash((self.size, self.dtype))


class Unsent:
    """Stands for an object that cannot travel between stages; using it is an error that says so."""

    def __init__(self, unit: str, kind: str) -> None:
        self.__dict__.update(unit=unit, kind=kind)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unsent) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).items()))

    def _refuse(self, *_: Any) -> Any:
        raise StageError(
            f"{self.unit!r} returns an object of type {self.kind}, which cannot travel to another pipeline stage, and "
            "the step uses it there; return tensors, or tuples, lists, dicts or dataclasses of them"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    __bool__ = __len__ = __iter__ = __getitem__ = __call__ = _refuse


def flatten(nest: Any) -> tuple[list[Any], Any]:
    """Leaves in order, and what :func:`unflatten` needs."""
    leaves, spec = tree_flatten(nest)
    if not any(_holds_tensors(leaf) for leaf in leaves):
        return leaves, spec
    flat: list[Any] = []
    inner: list[tuple[int, _Fields | None]] = []
    for leaf in leaves:
        if not _holds_tensors(leaf):
            flat.append(leaf)
            inner.append((1, None))
            continue
        attributes = _attributes(leaf)
        names = tuple(attributes)
        values, within = flatten(attributes)
        flat += values
        inner.append((len(values), _Fields(type(leaf), names, within)))
    return flat, (spec, tuple(inner))


def unflatten(leaves: list[Any], spec: Any) -> Any:
    if not isinstance(spec, tuple):
        return tree_unflatten(leaves, spec)
    outer, inner = spec
    rebuilt, start = [], 0
    for length, fields in inner:
        values = leaves[start : start + length]
        start += length
        if fields is None:
            rebuilt.append(values[0])
            continue
        made = object.__new__(fields.kind)
        for name, value in unflatten(values, fields.spec).items():
            object.__setattr__(made, name, value)
        rebuilt.append(made)
    return tree_unflatten(rebuilt, outer)


def map_leaves(function: Callable[[Any], Any], nest: Any) -> Any:
    """The same nest with ``function`` applied to each leaf, in order."""
    leaves, spec = flatten(nest)
    return unflatten([function(leaf) for leaf in leaves], spec)


def tensors_of(nest: Any) -> list[Tensor]:
    """The nest's tensors, in order."""
    return [leaf for leaf in flatten(nest)[0] if isinstance(leaf, Tensor)]


def replace(kind: type, function: Callable[[Any], Any], nest: Any) -> Any:
    """``function`` on every leaf of a type. A container without one stays the very same object."""
    if not any(isinstance(leaf, kind) for leaf in tree_leaves(nest)):
        return nest
    if type(nest) is tuple or type(nest) is list:
        return type(nest)(replace(kind, function, item) for item in nest)
    if type(nest) is dict:
        return {key: replace(kind, function, value) for key, value in nest.items()}
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, nest)


def without_tensors(nest: Any) -> Any:
    """The nest with a :class:`Shape` for each tensor."""
    return map_leaves(lambda leaf: Shape.of(leaf) if isinstance(leaf, Tensor) else leaf, nest)


def same(one: Any, other: Any) -> bool:
    """Whether two nests have the same structure, shapes and plain leaves, and no tensor."""
    (ones, spec), (others, other_spec) = flatten(one), flatten(other)
    if len(ones) != len(others) or spec != other_spec:
        return False
    return all(type(a) is type(b) and not isinstance(a, Tensor) and a == b for a, b in zip(ones, others))


def is_plain(leaf: Any) -> bool:
    """Whether a leaf without a tensor means the same in another process."""
    return isinstance(leaf, (*_PLAIN, Shape, Unsent))


def _attributes(leaf: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(leaf):
        return {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if hasattr(leaf, f.name)}
    return dict(vars(leaf))


def _holds_tensors(leaf: Any, depth: int = 3) -> bool:
    """Whether a leaf is an object with tensors in its attributes, or in those of an attribute (a state, a cache)."""
    if isinstance(leaf, (*_PLAIN, Tensor, Shape, Unsent, nn.Module, type)) or callable(leaf) or depth == 0:
        return False
    if not dataclasses.is_dataclass(leaf) and not hasattr(leaf, "__dict__"):
        return False
    return any(
        isinstance(value, (Tensor, Shape)) or _holds_tensors(value, depth - 1)
        for value in tree_leaves(list(_attributes(leaf).values()))
    )
