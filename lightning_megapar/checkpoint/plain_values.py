"""Everything of a checkpoint that is not a tensor by name: stored so that it loads without running code.

``torch.load(weights_only=True)`` accepts plain values only. What can be turned into one is (paths into strings,
dataclasses and configuration nodes into dictionaries, numpy arrays into tensors, ...); anything else is refused when
saving, by the name of its key, and not discovered when loading.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import os
import pickle
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_megapar.checkpoint.errors import CheckpointError

_LEAVES = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device)
_MAX_DEPTH = 100


def plain(value: Any, where: str) -> Any:
    """A copy of ``value`` built of plain values only, tensors detached and on CPU.

    Converted: ``Path`` -> str, dataclass and ``Mapping`` -> dict, named tuple -> tuple, ``frozenset`` -> set, enum
    member -> its value, numpy scalar/array -> number/tensor, OmegaConf node -> dict/list, subclasses of int, float
    and str -> the base class.

    Args:
        where: name of the value, for messages, such as ``"hyper_parameters"``.

    Raises:
        CheckpointError: naming the key of a value that is neither plain nor convertible.
    """
    return _plain(value, where, 0)


def _plain(value: Any, where: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{where} is nested deeper than {_MAX_DEPTH} levels (does it contain itself?)")
    kind = type(value)
    if kind in _LEAVES:
        return value
    if isinstance(value, Tensor):
        return _plain_tensor(value, where)
    if kind.__module__.partition(".")[0] == "omegaconf":
        value = _from_omegaconf(value, where)
        return value if type(value) in _LEAVES else _plain(value, where, depth + 1)
    if isinstance(value, enum.Enum):
        return _plain(value.value, where, depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _plain(fields, where, depth + 1)
    if isinstance(value, (list, tuple, collections.deque)):
        items = [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    # An abstract class asks all its subclasses before it says no: known types come first.
    if isinstance(value, (dict, Mapping)):
        copy: dict[Any, Any] = collections.OrderedDict() if isinstance(value, collections.OrderedDict) else {}
        for key, item in value.items():
            name = f"{where}[{key!r}]"
            copy[_plain_key(key, name)] = _plain(item, name, depth + 1)
        return copy
    if isinstance(value, (set, frozenset)):
        return {_plain_key(item, where) for item in value}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    for base in (int, float, str):
        if isinstance(value, base):
            return base(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return _plain(value.item(), where, depth + 1)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    raise CheckpointError(
        f"{where} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint that loads without running "
        "code cannot hold; store plain values, or leave it out (self.save_hyperparameters(ignore=[...]))"
    )


def _plain_key(key: Any, where: str) -> Any:
    if isinstance(key, tuple):
        return tuple(_plain_key(k, where) for k in key)
    key = _plain(key, where, 0)
    try:
        hash(key)
    except TypeError:
        raise CheckpointError(f"{where}: a key of type {type(key).__name__} cannot be stored") from None
    return key


def _plain_tensor(value: Tensor, where: str) -> Tensor:
    if isinstance(value, DTensor):
        raise CheckpointError(f"{where} is a DTensor; sharded tensors are saved by name, not among the plain values")
    value = value.detach()
    if type(value) is not Tensor:
        raise CheckpointError(f"{where} is a tensor subclass ({type(value).__name__}), which cannot be stored")
    if value.device.type == "meta":
        raise CheckpointError(f"{where} is on the meta device and has no values")
    return value.cpu().clone(memory_format=torch.contiguous_format)


def _from_omegaconf(value: Any, where: str) -> Any:
    from omegaconf import OmegaConf

    if not OmegaConf.is_config(value):
        raise CheckpointError(f"{where} is of type {type(value).__qualname__}, which cannot be stored")
    return OmegaConf.to_container(value, resolve=True)


def encode_plain(values: dict[str, Any], where: str = "checkpoint") -> bytes:
    """``torch.save`` of :func:`plain` values, checked by loading them again with ``weights_only=True``.

    Raises:
        CheckpointError: naming the key that cannot be stored.
    """
    converted = {key: plain(_lightnings_type(key, value), f"{where}[{key!r}]") for key, value in values.items()}
    data = _dump(converted)
    try:
        _load(data)
    except Exception as error:
        for key, value in converted.items():
            try:
                _load(_dump(value))
            except Exception as cause:
                raise CheckpointError(f"{where}[{key!r}] cannot be loaded again: {_first_line(cause)}") from cause
        raise CheckpointError(f"{where} cannot be loaded again: {_first_line(error)}") from error
    return data


def _lightnings_type(key: str, value: Any) -> Any:
    """Lightning stores the class of OmegaConf hyper-parameters; it takes a name for it as well, and gives a dict."""
    return f"{value.__module__}.{value.__qualname__}" if key == "hparams_type" and isinstance(value, type) else value


def decode_plain(data: bytes, where: str) -> dict[str, Any]:
    """The values of :func:`encode_plain`; never runs code from ``data``.

    Raises:
        CheckpointError: damaged bytes, or anything in them but plain values.
    """
    try:
        values = _load(data)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{where} refused: it holds more than plain values ({what_was_refused(error)})"
        ) from error
    except Exception as error:
        raise CheckpointError(f"{where} cannot be read: {_first_line(error)}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} holds a {type(values).__name__}, not a dictionary")
    return values


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def what_was_refused(error: BaseException) -> str:
    """What ``torch.load(weights_only=True)`` found, without its advice to load the file unsafely."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named:
        return f"it names {named[1]}"
    line = next((x.strip() for x in str(error).splitlines() if x.strip().startswith("Unsupported")), None)
    return line or "it is no pickle of plain values"
