"""A trial run of somebody's step must leave the module as it was."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CHILDREN = ("_parameters", "_modules")
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict)


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Leave a module's buffers, attributes (counters, the states of metrics) and hooks as they were.

    Containers keep their identity. Parameters and submodules are left alone: a step does not change them.
    """
    before = []
    for child in module.modules():
        values = {name: value for name, value in vars(child).items() if name not in _CHILDREN}
        found = [b for b in child._buffers.values() if b is not None]
        found += [v for v in values.values() if isinstance(v, Tensor) and not isinstance(v, nn.Parameter)]
        tensors = [(tensor, tensor.detach().clone()) for tensor in found]
        containers = [(value, value.copy()) for value in values.values() if type(value) in _CONTAINERS]
        before.append((child, values, tensors, containers))
    try:
        yield
    finally:
        for child, values, tensors, containers in before:
            _restore(child, values, containers)
            with torch.no_grad():
                for tensor, copy in tensors:
                    tensor.copy_(copy)


def _restore(child: nn.Module, values: dict[str, Any], containers: list[tuple[Any, Any]]) -> None:
    own = vars(child)
    for name in set(own) - set(values) - set(_CHILDREN):
        del own[name]
    own.update(values)
    for container, copy in containers:
        container.clear()
        if isinstance(container, list):
            container.extend(copy)
        else:
            container.update(copy)
