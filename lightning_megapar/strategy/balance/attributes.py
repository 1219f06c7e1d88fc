"""What modules keep in plain attributes: what of it goes along when a block changes its stage, and what is shared."""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

PLAIN = (type(None), bool, int, float, complex, str, bytes)
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_CONSTANT = (torch.dtype, torch.device, torch.Size, torch.layout, slice, range)
_MACHINERY = ("torch", "lightning_megapar", "lightning", "pytorch_lightning", "lightning_fabric")
_DEPTH = 4


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """A module's attributes without those that every module has (but whether it trains)."""
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


def held_in(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Objects with an identity that matters in an attribute: tensors, modules, containers and what is in them."""
    if isinstance(value, (*PLAIN, *_CONSTANT, type)):
        return
    yield value
    if depth and isinstance(value, Mapping):
        for one in (*value.keys(), *value.values()):
            yield from held_in(one, depth - 1)
    elif depth and isinstance(value, (list, tuple, set, frozenset, deque)):
        for one in value:
            yield from held_in(one, depth - 1)


class _Values(pickle.Pickler):
    """Refuses what means something in one process only."""

    def persistent_id(self, obj: Any) -> None:
        if isinstance(obj, (nn.Module, Tensor)):
            raise pickle.PicklingError("a tensor or a module inside of an object")


def packed(value: Any) -> Any:
    """An attribute as a nest of tensors and plain values that :func:`unpacked` understands; ``None`` for constants.

    Raises:
        pickle.PicklingError: for what can neither be sent nor taken for a constant.
    """
    leaves = tree_leaves(value)
    if any(isinstance(leaf, DTensor) for leaf in leaves):
        return None
    if all(isinstance(leaf, (*PLAIN, Tensor)) for leaf in leaves):
        return {"nest": value}
    kind = type(value)
    if callable(value) or isinstance(value, (*_CONSTANT, nn.Module)) or kind.__module__.split(".")[0] in _MACHINERY:
        return None
    buffer = io.BytesIO()
    try:
        _Values(buffer).dump(value)
    except Exception as error:
        if all(callable(leaf) or isinstance(leaf, (*PLAIN, *_CONSTANT)) for leaf in leaves):
            return None  # a table of functions
        raise pickle.PicklingError(f"{kind.__name__}: {error}") from error
    return {"bytes": buffer.getvalue()}


def unpacked(sent: dict[str, Any]) -> Any:
    """What :func:`packed` has made of an attribute, with memory of its own."""
    if "bytes" in sent:
        return pickle.loads(sent["bytes"])  # of a peer of this very job, over the job's own group
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, sent["nest"])
