"""``manifest.json``: what a sharded checkpoint holds, and the checksum of every piece of it.

The file is one JSON object ``{"crc32": "xxxxxxxx", "manifest": {...}}``; the checksum is that of the exact bytes of
the inner object. It is the last file written: a directory without a valid one is not a checkpoint.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from lightning_megapar.checkpoint.errors import CheckpointError
from lightning_megapar.checkpoint.pieces import Box, coverage_fault

MANIFEST = "manifest.json"
METADATA = ".metadata"
REST = "rest.pt"
FORMAT = "lightning_megapar sharded checkpoint"
VERSION = 1

MAX_MANIFEST_BYTES = 1 << 30
MAX_FILES = 1 << 20
MAX_DIMENSIONS = 64
MAX_NAME = 255

_PREFIX = b'{"crc32": "%s", "manifest": '
_SUFFIX = b"}\n"
_PREFIX_LENGTH = len(_PREFIX % b"00000000")


@dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint: a plain name, its size in bytes, and its crc32 when it is checked as a whole."""

    name: str
    size: int
    crc: int | None = None


@dataclass(frozen=True)
class SavedPiece:
    """A box of a tensor as a byte range of a file: ``torch.save`` of the box's values."""

    file: str
    offset: int
    length: int
    crc: int | None
    box: Box


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor: ``dtype``, ``shape`` and the pieces that cover it exactly once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[SavedPiece, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's contents.

    Attributes:
        step: global training step at which it was taken.
        uid: identifies the save; equal for all files of one checkpoint.
        info: the caller's JSON values (layout, versions, consumed samples, ...).
        tensors: global name -> :class:`SavedTensor`, in the order in which rank 0 and then the others named them.
        files: file name -> :class:`FileEntry`.
        world_size: number of ranks that saved it.
    """

    step: int
    uid: str
    info: dict[str, Any]
    tensors: dict[str, SavedTensor]
    files: dict[str, FileEntry]
    world_size: int = 1
    torch_version: str = field(default_factory=lambda: str(torch.__version__))

    @property
    def keys(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def encode(self) -> bytes:
        """The bytes of ``manifest.json``."""
        names = list(self.files)
        number = {name: i for i, name in enumerate(names)}
        body = {
            "format": FORMAT,
            "version": VERSION,
            "uid": self.uid,
            "step": self.step,
            "world_size": self.world_size,
            "torch": self.torch_version,
            "info": self.info,
            "files": [[f.name, f.size, f.crc] for f in self.files.values()],
            "tensors": {
                name: [
                    str(t.dtype).removeprefix("torch."),
                    list(t.shape),
                    [[number[p.file], p.offset, p.length, p.crc, p.box.offsets, p.box.sizes] for p in t.pieces],
                ]
                for name, t in self.tensors.items()
            },
        }
        inner = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        return _PREFIX % b"%08x" % zlib.crc32(inner) + inner + _SUFFIX

    @classmethod
    def decode(cls, data: bytes, where: str) -> Manifest:
        """Parse and validate the bytes of a manifest.

        Args:
            where: the file's path, for messages.

        Raises:
            CheckpointError: wrong checksum, another format or version, or contents that contradict themselves
                (names that are not plain, byte ranges outside a file, pieces that do not cover a tensor).
        """
        prefix, inner, suffix = data[:_PREFIX_LENGTH], data[_PREFIX_LENGTH : -len(_SUFFIX)], data[-len(_SUFFIX) :]
        if prefix != _PREFIX % b"%08x" % zlib.crc32(inner) or suffix != _SUFFIX:
            raise CheckpointError(f"{where} is damaged: its checksum does not match its contents")
        try:
            return cls._from_body(json.loads(inner))
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{where} does not have the form of a manifest: {error!r}") from error

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Manifest:
        if body.get("format") != FORMAT:
            raise CheckpointError(f"unknown format {body.get('format')!r}")
        if body["version"] != VERSION:
            raise CheckpointError(f"format version {body['version']}; this release reads version {VERSION}")
        if len(body["files"]) > MAX_FILES:
            raise CheckpointError(f"{len(body['files'])} files; at most {MAX_FILES}")
        files: dict[str, FileEntry] = {}
        for name, size, crc in body["files"]:
            check_plain_name(name)
            if name in files or name == MANIFEST:
                raise CheckpointError(f"file {name!r} is listed twice")
            files[name] = FileEntry(name, _count(size), None if crc is None else _count(crc))
        names = list(files)
        tensors = {
            str(name): _decode_tensor(str(name), dtype, shape, pieces, names, files)
            for name, (dtype, shape, pieces) in body["tensors"].items()
        }
        if not isinstance(body["info"], dict):
            raise CheckpointError("info is not an object")
        return cls(
            step=int(body["step"]),
            uid=str(body["uid"]),
            info=body["info"],
            tensors=tensors,
            files=files,
            world_size=_count(body["world_size"]),
            torch_version=str(body["torch"]),
        )


def check_plain_name(name: object) -> None:
    """Refuse a file name that could lead out of the checkpoint's directory."""
    if (
        not isinstance(name, str)
        or not name
        or len(name) > MAX_NAME
        or name in (".", "..")
        or any(c in name for c in "/\\\0")
    ):
        raise CheckpointError(f"file name {name!r} is not a plain name inside the checkpoint")


def check_tensor(name: str, tensor: SavedTensor, files: dict[str, FileEntry]) -> None:
    """Refuse pieces that lie outside their file or do not cover the tensor exactly once."""
    for piece in tensor.pieces:
        if piece.offset + piece.length > files[piece.file].size:
            raise CheckpointError(f"tensor {name!r}: bytes {piece.offset}+{piece.length} lie outside {piece.file}")
    fault = coverage_fault(tensor.shape, [p.box for p in tensor.pieces])
    if fault is not None:
        raise CheckpointError(f"tensor {name!r}: {fault}")


def _decode_tensor(
    name: str, dtype: str, shape: list[int], pieces: list[Any], names: list[str], files: dict[str, FileEntry]
) -> SavedTensor:
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(kind, torch.dtype):
        raise CheckpointError(f"tensor {name!r} has unknown dtype {dtype!r}")
    if len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"tensor {name!r} has {len(shape)} dimensions")
    decoded = tuple(
        SavedPiece(
            names[_count(file)],
            _count(offset),
            _count(length),
            None if crc is None else _count(crc),
            Box(tuple(_count(o) for o in offsets), tuple(_count(s) for s in sizes)),
        )
        for file, offset, length, crc, offsets, sizes in pieces
    )
    tensor = SavedTensor(kind, tuple(_count(s) for s in shape), decoded)
    check_tensor(name, tensor, files)
    return tensor


def _count(value: object) -> int:
    """A non-negative integer below 2**63."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise CheckpointError(f"{value!r} is not a count")
    return value


def check_info(info: dict[str, Any]) -> None:
    """Refuse ``info`` that JSON cannot hold and give back unchanged.

    Raises:
        CheckpointError: naming the key.
    """
    for key, value in info.items():
        try:
            back = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"info[{key!r}] cannot be stored as JSON: {error}") from None
        if back != value and not isinstance(value, tuple):
            raise CheckpointError(f"info[{key!r}] = {value!r} would come back as {back!r}; use lists and string keys")
