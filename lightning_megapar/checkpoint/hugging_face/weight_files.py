"""Reading safetensors files box by box, straight into a rank's tensors.

The format is an 8-byte length, a JSON header and the tensors' bytes. Files are read with ``pread`` and not mapped: a
mapped page counts as the process's memory, and a rank would seem to hold the whole file. Beside the target, at most
:data:`STAGING_BYTES` are held.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megapar.checkpoint.errors import CheckpointError
from lightning_megapar.checkpoint.pieces import Box, full_box
from lightning_megapar.config import nearest_name

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
STAGING_BYTES = 16 << 20
_MAX_HEADER_BYTES = 100_000_000
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class FileTensor:
    """Where a tensor stands in a file.

    Args:
        path: of the file.
        dtype: as stored.
        shape: of the whole tensor.
        offset: of its first byte from the beginning of the file.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, FileTensor]:
    """The tensors of one safetensors file, by name; their bytes are not read.

    Raises:
        CheckpointError: missing, unreadable, truncated, or no safetensors file.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                what = "it is truncated, or" if size else "it is empty, so"
                raise CheckpointError(f"{path} cannot be read: {what} it is no safetensors file")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: its safetensors header is not JSON") from error
    try:
        return _entries(path, header, 8 + length, size)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: its safetensors header has another form") from error


def _entries(path: Path, header: dict[str, Any], start: int, size: int) -> dict[str, FileTensor]:
    found = {}
    end_of_all = start
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise CheckpointError(f"{path}: tensor {name!r} has the dtype {entry['dtype']}, which is not supported")
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        if not all(isinstance(number, int) for number in (*shape, begin, end)):
            raise TypeError(name)
        if end - begin != prod(shape) * dtype.itemsize or begin < 0 or any(n < 0 for n in shape):
            raise CheckpointError(f"{path} is damaged: {name!r} of shape {shape} cannot have {end - begin} bytes")
        end_of_all = max(end_of_all, start + end)
        found[name] = FileTensor(path, dtype, shape, start + begin)
    if end_of_all > size:
        raise CheckpointError(f"{path} is truncated: it has {size} bytes, its header speaks of {end_of_all}")
    return found


@dataclass
class WeightFiles:
    """The tensors of a directory of safetensors files (or of one file).

    Args:
        path: as the user named it.
        tensors: by the names in the files.
    """

    path: Path
    tensors: Mapping[str, FileTensor]
    _open: dict[Path, int] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> WeightFiles:
        """Read the headers of all files.

        Args:
            path: a directory that holds ``model.safetensors`` or ``model.safetensors.index.json`` with its files, or
                one ``.safetensors`` file.

        Raises:
            CheckpointError: nothing there that can be read (what it is instead is named), a missing or truncated
                file, an index that does not agree with its files.
        """
        path = Path(os.path.abspath(path))
        if path.is_file():
            if path.suffix != ".safetensors":
                raise CheckpointError(f"{path} is not a .safetensors file" + _remedy(path.name))
            return cls(path, read_header(path))
        if not path.is_dir():
            raise CheckpointError(f"{path} does not exist")
        if (path / INDEX).is_file():
            return cls(path, _indexed(path))
        if (path / SINGLE).is_file():
            return cls(path, read_header(path / SINGLE))
        raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}{_what_instead(path)}")

    def read(self, name: str) -> Tensor:
        """A whole tensor on the CPU, in its own dtype."""
        entry = self.tensors[name]
        value = torch.empty(entry.shape, dtype=entry.dtype)
        if value.numel():
            self.read_box(name, full_box(entry.shape), value)
        return value

    @torch.no_grad()
    def read_box(self, name: str, box: Box, out: Tensor) -> None:
        """Copy a box of a tensor into ``out`` (of the box's sizes; any dtype, device and strides).

        Raises:
            CheckpointError: the file ends before the box does, or cannot be read.
        """
        entry = self.tensors[name]
        if not entry.shape:
            box, out = Box((0,), (1,)), out.unsqueeze(0)
        shape = entry.shape or (1,)
        direct = out.dtype == entry.dtype and out.device.type == "cpu" and out.is_contiguous()
        # Everything behind the first dimension that is cut lies together in the file.
        whole_from = next((d + 1 for d in range(len(shape) - 1, -1, -1) if box.sizes[d] != shape[d]), 0)
        if direct and prod(box.sizes[: max(whole_from - 1, 0)]) == 1:
            self._pread(name, entry, _position(entry, shape, box.offsets), _bytes_of(out))
            return
        row = prod(shape[1:])
        width = prod(box.sizes[1:])
        if len(shape) > 1 and row * entry.dtype.itemsize > STAGING_BYTES:
            # One index of the first dimension alone is larger than the staging buffer: go into it.
            for index in range(box.sizes[0]):
                self._read_inner(name, entry, shape, box, index, out)
            return
        step = max(1, STAGING_BYTES // max(1, row * entry.dtype.itemsize))
        for first in range(0, box.sizes[0], step):
            count = min(step, box.sizes[0] - first)
            staging = torch.empty((count, *shape[1:]), dtype=entry.dtype)
            where = entry.offset + (box.offsets[0] + first) * row * entry.dtype.itemsize
            self._pread(name, entry, where, _bytes_of(staging))
            inner = tuple(slice(o, o + n) for o, n in zip(box.offsets[1:], box.sizes[1:]))
            out[first : first + count].copy_(staging[(slice(None), *inner)] if width != row else staging)

    def _read_inner(
        self, name: str, entry: FileTensor, shape: tuple[int, ...], box: Box, index: int, out: Tensor
    ) -> None:
        itemsize = entry.dtype.itemsize
        offset = entry.offset + (box.offsets[0] + index) * prod(shape[1:]) * itemsize
        inner = WeightFiles(self.path, {name: FileTensor(entry.path, entry.dtype, shape[1:], offset)})
        inner._open = self._open
        inner.read_box(name, Box(box.offsets[1:], box.sizes[1:]), out[index])

    def _pread(self, name: str, entry: FileTensor, offset: int, into: memoryview) -> None:
        if entry.path not in self._open:
            self.close()  # tensors are read file by file
            try:
                self._open[entry.path] = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{entry.path} cannot be read: {error.strerror}") from error
        while into:
            try:
                count = os.preadv(self._open[entry.path], [into], offset)
            except OSError as error:
                raise CheckpointError(f"{entry.path}, tensor {name!r}: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{entry.path} is truncated: it ends within tensor {name!r}")
            into, offset = into[count:], offset + count

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def _position(entry: FileTensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    position = 0
    for start, size in zip(offsets, shape):
        position = position * size + start
    return entry.offset + position * entry.dtype.itemsize


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    import ctypes

    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _indexed(path: Path) -> dict[str, FileTensor]:
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        weight_map = {str(name): str(file) for name, file in index["weight_map"].items()}
    except OSError as error:
        raise CheckpointError(f"{path / INDEX} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / INDEX} is damaged: it has no weight_map") from error
    files = sorted(set(weight_map.values()))
    outside = [file for file in files if os.path.basename(file) != file or not file]
    if outside:
        raise CheckpointError(f"{path / INDEX} names files outside of the directory: {', '.join(outside[:4])}")
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{path} lacks {', '.join(missing[:4])} ({len(missing)} of the index's {len(files)} files)"
        )
    held = {file: read_header(path / file) for file in files}
    absent = [name for name, file in weight_map.items() if name not in held[file]]
    if absent:
        raise CheckpointError(
            f"{path / weight_map[absent[0]]} has no tensor {absent[0]!r}, which the index says it holds"
            + (f" (and {len(absent) - 1} more)" if len(absent) > 1 else "")
        )
    return {name: held[file][name] for name, file in weight_map.items()}


def _remedy(name: str) -> str:
    if name.endswith((".bin", ".pt", ".pth", ".ckpt")):
        return (
            "; pickled weights are not read. Convert them once: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )
    return ""


def _what_instead(path: Path) -> str:
    entries = sorted(os.listdir(path))
    pickled = [e for e in entries if e.startswith("pytorch_model") and e.endswith((".bin", ".json"))]
    if pickled:
        return f" but {pickled[0]}" + _remedy("pytorch_model.bin")
    if "adapter_model.safetensors" in entries:
        return ": it is an adapter (PEFT), not a model"
    near = nearest_name(SINGLE, [e for e in entries if e.endswith(".safetensors")])
    if near:
        return f"; to read one file, name it: {path / near}"
    return f" (it holds {', '.join(entries[:3])}{' ...' if len(entries) > 3 else ''})" if entries else "; it is empty"


__all__ = ["INDEX", "SINGLE", "FileTensor", "WeightFiles", "read_header"]
