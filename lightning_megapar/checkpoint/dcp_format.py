"""The directory as plain ``torch.distributed.checkpoint`` (DCP) sees it.

``.metadata`` is DCP's pickle. We write it so that plain DCP can read our shards; our own loading never needs it. A
directory written by plain DCP (no manifest) is read through an unpickler that knows the names of DCP's records and
nothing else, because unpickling a foreign ``.metadata`` runs whatever code it holds.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.filesystem as dcp_filesystem
import torch.distributed.checkpoint.metadata as dcp

from lightning_megapar.checkpoint.errors import CheckpointError
from lightning_megapar.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    METADATA,
    FileEntry,
    Manifest,
    SavedPiece,
    SavedTensor,
    check_plain_name,
    check_tensor,
)
from lightning_megapar.checkpoint.pieces import Box

_RECORDS = {
    (dcp.__name__, "Metadata"),
    (dcp.__name__, "TensorStorageMetadata"),
    (dcp.__name__, "BytesStorageMetadata"),
    (dcp.__name__, "ChunkStorageMetadata"),
    (dcp.__name__, "TensorProperties"),
    (dcp.__name__, "MetadataIndex"),
    (dcp.__name__, "StorageMeta"),
    (dcp.__name__, "_MEM_FORMAT_ENCODING"),
    (dcp_filesystem.__name__, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("builtins", "getattr"),  # by which Python 3.11.0 to 3.11.3 name the members of an enum; a record like the others
}


class _RecordsOnly(pickle.Unpickler):
    """Builds inert records under DCP's names. Not even DCP's own classes are touched, so none can be altered."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.classes: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return self.classes.setdefault((module, name), type(name, (_Record,), {}))
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class _Record:
    """Fields by name, or the arguments and state that a pickle gave."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


def encode_metadata(manifest: Manifest) -> bytes:
    """DCP's ``.metadata`` for the tensors of a manifest."""
    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for name, tensor in manifest.tensors.items():
        described[name] = dcp.TensorStorageMetadata(
            properties=dcp.TensorProperties(dtype=tensor.dtype),
            size=torch.Size(tensor.shape),
            chunks=[
                dcp.ChunkStorageMetadata(torch.Size(p.box.offsets), torch.Size(p.box.sizes)) for p in tensor.pieces
            ],
        )
        for number, piece in enumerate(tensor.pieces):
            index = dcp.MetadataIndex(name, piece.box.offsets, number)
            storage[index] = dcp_filesystem._StorageInfo(piece.file, piece.offset, piece.length)
    return pickle.dumps(
        dcp.Metadata(
            state_dict_metadata=described,
            planner_data={name: (name,) for name in described},
            storage_data=storage,
            storage_meta=dcp.StorageMeta(save_id=manifest.uid),
            version=dcp_filesystem.CURRENT_DCP_VERSION,
        )
    )


def read_metadata(data: bytes, where: str) -> Any:
    """Unpickle a ``.metadata`` that may be hostile, into a record with the fields of DCP's ``Metadata``.

    Raises:
        CheckpointError: when it holds anything but DCP's records.
    """
    try:
        metadata = _RecordsOnly(data).load()
    except Exception as error:
        raise CheckpointError(f"{where} refused: not DCP metadata ({error})") from error
    if type(metadata).__name__ != "Metadata":
        raise CheckpointError(f"{where} refused: it holds a {type(metadata).__name__}, not DCP metadata")
    return metadata


def manifest_of_dcp(directory: Path) -> Manifest:
    """A manifest, without checksums, of a directory that plain DCP has written.

    Non-tensor entries are left out. Tensors keep the names that DCP gave them.

    Raises:
        CheckpointError: hostile or contradictory metadata, or files that are missing.
    """
    path = directory / METADATA
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes")
    metadata = read_metadata(path.read_bytes(), str(path))
    try:
        return _convert(metadata, directory)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} does not have the form of DCP metadata: {error!r}") from error


def _convert(metadata: Any, directory: Path) -> Manifest:
    files: dict[str, FileEntry] = {}
    tensors: dict[str, SavedTensor] = {}
    stored = {(i.fqn, tuple(getattr(i, "offset", None) or ())): s for i, s in metadata.storage_data.items()}
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry).__name__ != "TensorStorageMetadata":
            continue
        pieces = []
        for chunk in entry.chunks:
            where = stored[name, tuple(chunk.offsets)]
            check_plain_name(where.relative_path)
            if getattr(where, "transform_descriptors", None):
                raise CheckpointError(f"tensor {name!r} is stored through {where.transform_descriptors}")
            if where.relative_path not in files:
                file = directory / where.relative_path
                if file.is_symlink() or not file.is_file():
                    raise CheckpointError(f"file {where.relative_path} is missing or a link")
                files[where.relative_path] = FileEntry(where.relative_path, file.stat().st_size)
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            if box.volume:
                pieces.append(SavedPiece(where.relative_path, int(where.offset), int(where.length), None, box))
        dtype = entry.properties.state[0]
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"tensor {name!r} has dtype {dtype!r}")
        tensors[name] = SavedTensor(dtype, tuple(entry.size), tuple(pieces))
        check_tensor(name, tensors[name], files)
    return Manifest(step=0, uid="", info={}, tensors=tensors, files=files)
