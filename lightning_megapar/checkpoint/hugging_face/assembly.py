"""Tensors as put together from boxes of other tensors: run a conversion on names to learn where values come from.

transformers describes how a checkpoint's tensors become a model's as operations on tensors (stack the experts, put two
halves together, cut one in three). :class:`Assembly` passes through such an operation in place of a tensor and tells
afterwards, for any box of the result, which boxes of which sources it holds. Ranks can then read just those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from lightning_megapar.checkpoint.pieces import Box


class NotMovedInBoxes(NotImplementedError):
    """The operation does more than move boxes (it reshapes, computes, interleaves)."""


@dataclass(frozen=True)
class Part:
    """A box of the assembly and where its values stand.

    Args:
        box: in the assembly.
        source: name of the tensor that holds the values.
        start: the first element in the source, per dimension of the source.
        dims: per dimension of the assembly the source's dimension, ``None`` for one of size 1 that the source lacks.
            Dimensions of the source that are not named have size 1 here.
    """

    box: Box
    source: str
    start: tuple[int, ...]
    dims: tuple[int | None, ...]

    def source_box(self, box: Box) -> Box:
        """The source's box for a box of the assembly inside this part."""
        offsets, sizes = list(self.start), [1] * len(self.start)
        for dim, source_dim in enumerate(self.dims):
            if source_dim is not None:
                offsets[source_dim] += box.offsets[dim] - self.box.offsets[dim]
                sizes[source_dim] = box.sizes[dim]
        return Box(tuple(offsets), tuple(sizes))

    def narrowed(self, box: Box) -> Part:
        """The part of this part inside ``box`` (which lies within it)."""
        return Part(box, self.source, self.source_box(box).offsets, self.dims)

    def moved(self, dim: int, by: int) -> Part:
        offsets = _with(self.box.offsets, dim, self.box.offsets[dim] + by)
        return Part(Box(offsets, self.box.sizes), self.source, self.start, self.dims)


@dataclass(frozen=True)
class Assembly:
    """A tensor that is named but not there.

    Args:
        shape: of the tensor.
        parts: boxes that make it up.
        dtype: that the values have.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: torch.dtype) -> Assembly:
        """The whole tensor ``name``."""
        shape = tuple(shape)
        box = Box((0,) * len(shape), shape)
        return cls(shape, (Part(box, name, (0,) * len(shape), tuple(range(len(shape)))),), dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(part.source for part in self.parts))

    def overlaps(self, box: Box) -> list[tuple[Part, Box]]:
        """The parts that a box of the assembly touches, with the box that they have in common with it."""
        found = []
        for part in self.parts:
            common = part.box.overlap(box) if box.sizes else box
            if common is not None:
                found.append((part, common))
        return found

    # -- what transformers' operations do with tensors ---------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", str(function))
        if name not in _FUNCTIONS:
            raise NotMovedInBoxes(f"torch.{name}")
        return _FUNCTIONS[name](*args, **(kwargs or {}))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return prod(self.shape)

    def contiguous(self) -> Assembly:
        return self

    def narrow(self, dim: int, start: int, length: int) -> Assembly:
        dim = dim % self.ndim
        taken = Box(_with((0,) * self.ndim, dim, start), _with(self.shape, dim, length))
        parts = [part.narrowed(common).moved(dim, -start) for part, common in self.overlaps(taken)]
        return Assembly(taken.sizes, tuple(parts), self.dtype)

    def transpose(self, dim0: int, dim1: int) -> Assembly:
        dim0, dim1 = dim0 % self.ndim, dim1 % self.ndim

        def swapped(values: tuple[Any, ...]) -> tuple[Any, ...]:
            changed = list(values)
            changed[dim0], changed[dim1] = changed[dim1], changed[dim0]
            return tuple(changed)

        parts = tuple(
            Part(Box(swapped(p.box.offsets), swapped(p.box.sizes)), p.source, p.start, swapped(p.dims))
            for p in self.parts
        )
        return Assembly(swapped(self.shape), parts, self.dtype)

    def unsqueeze(self, dim: int) -> Assembly:
        dim = dim % (self.ndim + 1)
        parts = tuple(
            Part(
                Box((*p.box.offsets[:dim], 0, *p.box.offsets[dim:]), (*p.box.sizes[:dim], 1, *p.box.sizes[dim:])),
                p.source,
                p.start,
                (*p.dims[:dim], None, *p.dims[dim:]),
            )
            for p in self.parts
        )
        return Assembly((*self.shape[:dim], 1, *self.shape[dim:]), parts, self.dtype)

    def squeeze(self, dim: int) -> Assembly:
        dim = dim % self.ndim
        if self.shape[dim] != 1:
            return self
        parts = tuple(
            Part(
                Box(_without(p.box.offsets, dim), _without(p.box.sizes, dim)), p.source, p.start, _without(p.dims, dim)
            )
            for p in self.parts
        )
        return Assembly(_without(self.shape, dim), parts, self.dtype)

    def split(self, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Assembly, ...]:
        size = self.shape[dim]
        if isinstance(split_size_or_sections, int):
            step = split_size_or_sections
            sections: Sequence[int] = [min(step, size - start) for start in range(0, size, step)]
        else:
            sections = split_size_or_sections
        if sum(sections) != size:
            raise ValueError(f"cannot split {size} into {list(sections)}")
        starts = [sum(sections[:i]) for i in range(len(sections))]
        return tuple(self.narrow(dim, start, length) for start, length in zip(starts, sections))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Assembly, ...]:
        return self.split(max(1, -(-self.shape[dim] // chunks)), dim)

    def unbind(self, dim: int = 0) -> tuple[Assembly, ...]:
        return tuple(self.narrow(dim, i, 1).squeeze(dim) for i in range(self.shape[dim]))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotMovedInBoxes(name)

    def __getitem__(self, index: Any) -> Assembly:
        if index is Ellipsis:
            return self
        raise NotMovedInBoxes("indexing")


def _cat(tensors: Sequence[Assembly], dim: int = 0) -> Assembly:
    first = tensors[0]
    dim = dim % first.ndim
    if any(_without(t.shape, dim) != _without(first.shape, dim) for t in tensors):
        raise ValueError(f"cannot concatenate {[t.shape for t in tensors]} along {dim}")
    parts: list[Part] = []
    length = 0
    for tensor in tensors:
        parts += [part.moved(dim, length) for part in tensor.parts]
        length += tensor.shape[dim]
    return Assembly(_with(first.shape, dim, length), tuple(parts), first.dtype)


def _stack(tensors: Sequence[Assembly], dim: int = 0) -> Assembly:
    if any(t.shape != tensors[0].shape for t in tensors):
        raise ValueError(f"cannot stack {[t.shape for t in tensors]}")
    return _cat([t.unsqueeze(dim) for t in tensors], dim)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "stack": _stack,
    "chunk": lambda tensor, chunks, dim=0: tensor.chunk(chunks, dim),
    "split": lambda tensor, split_size_or_sections, dim=0: tensor.split(split_size_or_sections, dim),
    "unbind": lambda tensor, dim=0: tensor.unbind(dim),
    "transpose": lambda tensor, dim0, dim1: tensor.transpose(dim0, dim1),
    "squeeze": lambda tensor, dim: tensor.squeeze(dim),
    "unsqueeze": lambda tensor, dim: tensor.unsqueeze(dim),
    "narrow": lambda tensor, dim, start, length: tensor.narrow(dim, start, length),
}


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _without(values: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return (*values[:dim], *values[dim + 1 :])


__all__ = ["Assembly", "NotMovedInBoxes", "Part"]
