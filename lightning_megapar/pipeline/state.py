"""A trial run of somebody's step must leave the module as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Leave a module's buffers and attributes (counters, the states of metrics) as they were."""
    before = []
    for child in module.modules():
        values = {
            name: value
            for name, value in vars(child).items()
            if name not in ("_parameters", "_buffers", "_modules", "_metrics_to_sync")
            and not name.startswith("_forward")
        }
        tensors = {id(v): (v, v.detach().clone()) for v in _state_tensors(child, values)}
        lists = [(v, v.copy()) for v in values.values() if type(v) in (list, dict, set)]
        before.append((child, values, dict(child._buffers), tensors, lists))
    try:
        yield
    finally:
        for child, values, buffers, tensors, lists in before:
            for name in set(vars(child)) - set(values) - {"_parameters", "_buffers", "_modules"}:
                if name not in ("_metrics_to_sync",) and not name.startswith("_forward"):
                    del vars(child)[name]
            vars(child).update(values)
            child._buffers.clear()
            child._buffers.update(buffers)
            for container, copy in lists:
                container.clear()
                container.extend(copy) if isinstance(container, list) else container.update(copy)
            with torch.no_grad():
                for tensor, copy in tensors.values():
                    tensor.copy_(copy)


def _state_tensors(child: nn.Module, values: dict[str, Any]) -> list[Tensor]:
    """Buffers and tensor attributes; parameters keep their values by themselves."""
    found = [b for b in child._buffers.values() if b is not None]
    return found + [v for v in values.values() if isinstance(v, Tensor) and not isinstance(v, nn.Parameter)]
