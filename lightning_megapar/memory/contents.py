"""What containers and objects hold now, to be put back later; tensors are held by reference, not copied."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lightning_megapar.packages import is_of_library

_ATOMS: tuple[Any, ...] = (type(None), bool, int, float, complex, str, bytes, type, Tensor, nn.Module, types.ModuleType)
_ATOMS += (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_KINDS = (dict, list, set, deque)


class Contents:
    """The contents of containers and objects, and of what they hold.

    Dicts, lists, sets, deques and the attributes of objects, whatever their class; modules and tensors are left alone,
    and what has no attributes that could be read (an iterator, a file).

    Args:
        values: to begin with.
        libraries: whether objects of libraries count as well.
        depth: how far down to look.
    """

    def __init__(self, values: Iterable[Any], libraries: bool = True, depth: int = 6) -> None:
        self._libraries = libraries
        self._kept: dict[int, tuple[Any, Any]] = {}
        for value in values:
            self._note(value, depth)

    def _note(self, value: Any, depth: int) -> None:
        if isinstance(value, _ATOMS) or id(value) in self._kept or depth == 0:
            return
        if isinstance(value, tuple | frozenset):
            for one in value:
                self._note(one, depth - 1)
            return
        container = value
        if not isinstance(value, _KINDS):
            own = self._libraries or isinstance(value, types.SimpleNamespace) or not is_of_library(value)
            container = getattr(value, "__dict__", None) if own else None
        if not isinstance(container, _KINDS) or id(container) in self._kept:
            return
        kind = _kind(container)
        copy: Any = deque(container, container.maxlen) if isinstance(container, deque) else kind(_items(container))
        self._kept[id(container)] = container, copy
        for one in copy.values() if kind is dict else copy:
            self._note(one, depth - 1)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that could change."""
        return not self._kept

    def have_changed(self) -> bool:
        """Whether any of them holds something else now, or in another order."""
        return any(not _same(container, copy) for container, copy in self._kept.values())

    def now(self) -> Contents:
        """What the same containers hold now."""
        return Contents((container for container, _ in self._kept.values()), self._libraries)

    def put_back(self) -> None:
        """Let each of them hold what it held. The containers stay the same objects."""
        for container, copy in self._kept.values():
            if not _same(container, copy):
                kind = _kind(container)  # its methods: those of a subclass may do more
                kind.clear(container)
                (kind.update if kind in (dict, set) else kind.extend)(container, copy)


def _kind(container: Any) -> Any:
    return next(kind for kind in _KINDS if isinstance(container, kind))


def _items(container: Any) -> Any:
    return dict.items(container) if isinstance(container, dict) else container


def _same(container: Any, copy: Any) -> bool:
    if len(container) != len(copy):
        return False
    if isinstance(copy, dict):
        pairs = zip(dict.items(container), copy.items())
        return all(key is other or key == other for (key, _), (other, _) in pairs) and all(
            one is other for one, other in zip(dict.values(container), copy.values())
        )
    return all(one is other for one, other in zip(container, copy))
