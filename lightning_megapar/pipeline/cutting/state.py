"""A trial run of somebody's step must leave the module as it was."""

from __future__ import annotations

import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from lightning_megapar.packages import is_of_library

_CHILDREN = ("_parameters", "_modules")


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Leave a module's buffers, attributes (counters, the states of metrics) and hooks as they were.

    Kept are the attributes of the module and of all its parts, whatever containers and objects of the user's own
    classes they hold, and the tensors in them. Containers and objects keep their identity. Parameters and submodules
    are left alone: a step does not change them. What has no state that could be read (an iterator, a file) goes on.
    """
    memory = _Memory()
    for child in module.modules():
        memory.note_module(child)
    try:
        yield
    finally:
        memory.restore()


class _Memory:
    """What was found, and how each thing is set back."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._steps: list[Callable[[], None]] = []
        self._kept: list[Any] = []

    def restore(self) -> None:
        with torch.no_grad():
            for step in reversed(self._steps):
                step()

    def note_module(self, module: nn.Module) -> None:
        values = {name: value for name, value in vars(module).items() if name not in _CHILDREN}
        self._seen.add(id(module))
        for value in values.values():
            self._note(value)
        self._steps.append(lambda: _set_attributes(module, values))

    def _note(self, value: Any) -> None:
        if id(value) in self._seen or value is None or isinstance(value, (int, float, str, bytes, bool, type)):
            return
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                self._first(value)
                copy, version = value.detach().clone(), -1 if value.is_inference() else value._version
                self._steps.append(lambda: _write(value, copy, version))
        elif isinstance(value, dict):
            self._first(value)
            mapping: Any = OrderedDict if isinstance(value, OrderedDict) else dict  # it keeps an order of its own
            items = list(mapping.items(value))
            for _, one in items:
                self._note(one)
            self._steps.append(lambda: _refill(value, mapping.clear, mapping.update, items))
        elif isinstance(value, (list, deque, set)):
            self._first(value)
            kind: Any = next(kind for kind in (list, deque, set) if isinstance(value, kind))
            elements = list(value)
            for one in elements:
                self._note(one)
            fill = set.update if kind is set else kind.extend
            self._steps.append(lambda: _refill(value, kind.clear, fill, elements))
        elif isinstance(value, tuple):
            for one in value:
                self._note(one)
        elif isinstance(value, numpy.ndarray) and value.dtype != object:
            self._first(value)
            numbers = value.copy()
            self._steps.append(lambda: numpy.copyto(value, numbers))
        elif isinstance(value, random.Random):
            self._first(value)
            state = value.getstate()
            self._steps.append(lambda: value.setstate(state))
        elif _is_somebodys_object(value):
            self._first(value)
            attributes = dict(vars(value))
            for one in attributes.values():
                self._note(one)
            self._steps.append(lambda: _refill(vars(value), dict.clear, dict.update, attributes))

    def _first(self, value: Any) -> None:
        self._seen.add(id(value))
        self._kept.append(value)  # an identity is worth something only as long as its object lives


def _is_somebodys_object(value: Any) -> bool:
    """Whether a value is an object of a class outside of the libraries, with attributes of its own."""
    if isinstance(value, (nn.Module, types.FunctionType, types.MethodType, types.ModuleType)):
        return False
    if isinstance(value, types.SimpleNamespace):
        return True
    return not is_of_library(value) and isinstance(getattr(value, "__dict__", None), dict)


def _refill(container: Any, clear: Callable[[Any], None], fill: Callable[[Any, Any], None], content: Any) -> None:
    # The methods of the base class: those of a subclass may do more.
    clear(container)
    fill(container, content)


def _write(tensor: Tensor, copy: Tensor, version: int) -> None:
    if tensor.shape != copy.shape:
        tensor.set_(copy)  # type: ignore[call-overload]
    elif not _is_unchanged(tensor, copy, version):
        tensor.copy_(copy)


def _is_unchanged(tensor: Tensor, copy: Tensor, version: int) -> bool:
    """Whether nothing need be written; autograd refuses a backward of something that has been written since."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_inference():
        return False
    return tensor._version == version and torch.equal(tensor, copy)


def _set_attributes(module: nn.Module, values: dict[str, Any]) -> None:
    own = vars(module)
    for name in set(own) - set(values) - set(_CHILDREN):
        del own[name]
    own.update(values)
