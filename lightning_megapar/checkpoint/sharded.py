"""Save and load a checkpoint that every rank writes its own part of, under any layout and into any other.

The directory that results (``last.ckpt/``):

* ``__<rank>_0.distcp``: that rank's pieces, in the format of ``torch.distributed.checkpoint``;
* ``rest.pt``: loops, callbacks, hyper-parameters, schedulers: plain values, saved by the first rank;
* ``.metadata``: so that plain DCP can read the tensors;
* ``manifest.json``: every piece with its checksum, written last.

How it becomes visible is told in :mod:`lightning_megapar.checkpoint.commit`.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megapar.checkpoint.commit import PendingCheckpoint, new_uid
from lightning_megapar.checkpoint.dcp_format import encode_metadata, manifest_of_dcp
from lightning_megapar.checkpoint.errors import CheckpointError, Failure, describe, human_bytes
from lightning_megapar.checkpoint.file_system import CheckedFile, FileSystem, write_file
from lightning_megapar.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    REST,
    FileEntry,
    Manifest,
    SavedPiece,
    SavedTensor,
    check_info,
    check_tensor,
)
from lightning_megapar.checkpoint.pieces import Box, LocalPiece, local_pieces, local_tensor
from lightning_megapar.checkpoint.plain_values import decode_plain, encode_plain
from lightning_megapar.checkpoint.planning import Offer, check_agreement, estimate_bytes, make_offer, share_out
from lightning_megapar.checkpoint.ranks import Ranks, ranks_of
from lightning_megapar.checkpoint.reader import (
    ShardedReader,
    is_sharded_checkpoint,
    locate,
    manifest_bytes,
    read_checked,
    read_manifest,
)
from lightning_megapar.shards import Value

__all__ = ["is_sharded_checkpoint", "load_sharded", "read_manifest", "save_sharded"]


@dataclass
class _Assignment:
    """Rank 0's answer to a rank: where to write, and which boxes of which tensors."""

    directory: str
    pieces: list[tuple[str, Box]]
    num_bytes: int


@dataclass(frozen=True)
class _Written:
    """What a rank has written."""

    files: tuple[FileEntry, ...]
    pieces: tuple[tuple[str, SavedPiece], ...]


def save_sharded(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Value],
    rest: Mapping[str, Any],
    *,
    step: int,
    info: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | Ranks | None = None,
    file_system: FileSystem | None = None,
) -> None:
    """Save a checkpoint; every rank of the group calls this with the same ``path`` and ``step``.

    Args:
        path: of the checkpoint, a directory afterwards. An existing checkpoint (directory, file or link) is replaced
            in one step once the new one is complete; any other non-empty directory is refused.
        tensors: global name -> tensor. Ranks may hold different names (pipeline stages), pieces of the same one
            (DTensors of any placements but ``Partial``) or replicas of it; a replica is written once, by the rank with
            the least to write. A rank may hold nothing.
        rest: everything else; the first rank's is stored. Values are made plain (see
            :func:`~lightning_megapar.checkpoint.plain_values.plain`), so that they load with ``weights_only=True``.
        step: global training step.
        info: JSON values for the manifest (layout, seed, consumed samples, ...).
        process_group: ``None`` for all ranks, or for this one process without torch.distributed. Object collectives:
            on NCCL they use the current CUDA device.
        file_system: the door to the disk, replaced in tests.

    Raises:
        CheckpointError: the same on every rank, naming rank and cause. The previous checkpoint is untouched and the
            temporary directory removed.
    """
    ranks, fs = ranks_of(process_group), file_system or FileSystem()
    final = Path(os.path.abspath(path))
    what = f"saving {final}"
    pending = PendingCheckpoint(final, new_uid(), fs)
    encoded: list[bytes] = []
    info = dict(info or {})

    def offer() -> tuple[str, int, list[Offer]]:
        if ranks.rank == 0:
            check_info(info)
            encoded.append(encode_plain(dict(rest)))
        return str(final), int(step), [make_offer(name, tensor) for name, tensor in tensors.items()]

    tables: dict[str, Offer] = {}

    def assign(offers: list[tuple[str, int, list[Offer]]]) -> list[_Assignment]:
        check_agreement(offers)
        merged, assigned = share_out([table for _, _, table in offers])
        tables.update(merged)
        needed = [sum(estimate_bytes(merged[name], box) for name, box in pieces) for pieces in assigned]
        needed[0] += len(encoded[0])
        pending.open(sum(needed))
        return [_Assignment(str(pending.directory), *share) for share in zip(assigned, needed)]

    def write(assignment: _Assignment) -> _Written:
        written = _write(Path(assignment.directory), assignment.pieces, tensors, ranks.rank, fs)
        if ranks.rank:
            return written
        crc = write_file(fs, pending.directory / REST, encoded[0])
        return _Written((*written.files, FileEntry(REST, len(encoded[0]), crc)), written.pieces)

    def commit(parts: list[_Written]) -> list[None]:
        manifest = _assemble(tables, parts, int(step), pending.uid, info)
        metadata = encode_metadata(manifest)
        crc = write_file(fs, pending.directory / METADATA, metadata)
        manifest.files[METADATA] = FileEntry(METADATA, len(metadata), crc)
        write_file(fs, pending.directory / MANIFEST, manifest.encode())
        pending.publish()
        return [None] * ranks.size

    try:
        assignment = ranks.step(what, offer, assign)
        ranks.step(what, lambda: _with_room(write, assignment, pending), commit)
    except BaseException:
        pending.discard()
        raise
    pending.finish()


def load_sharded(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Value],
    *,
    process_group: dist.ProcessGroup | Ranks | None = None,
    strict: bool = True,
    cast: bool = False,
) -> dict[str, Any]:
    """Fill ``tensors`` in place from a checkpoint that any layout has saved, and return its ``rest``.

    Every rank of the group calls this; each reads and verifies the pieces that it needs. Nothing is changed unless
    all names, shapes and dtypes fit; a piece that turns out to be damaged is found while filling.

    Args:
        path: of the checkpoint. A directory that plain DCP has written is read too, without checksums (one warning);
            its ``rest`` is empty.
        tensors: global name -> tensor, parameter, DTensor or buffer to fill; not on the meta device.
        process_group: as for :func:`save_sharded`; need not have the size that saved.
        strict: a name in the checkpoint that no rank asks for is an error.
        cast: accept another dtype in the checkpoint and convert.

    Returns:
        the values given as ``rest`` when saving, the same on every rank (new objects).

    Raises:
        CheckpointError: the same on every rank: not a checkpoint (and what it is), missing or unexpected names, a
            shape or dtype that differs, a damaged file, code instead of values.
    """
    ranks = ranks_of(process_group)
    what = f"loading {os.path.abspath(path)}"

    where, encoded, rest_bytes = ranks.first(what, lambda: _open(path))
    directory = Path(where)
    targets: dict[str, tuple[Tensor, list[LocalPiece]]] = {}
    opened: list[Manifest] = []
    rest: list[dict[str, Any]] = []

    def check() -> tuple[list[str], list[str]]:
        manifest = encoded if isinstance(encoded, Manifest) else Manifest.decode(encoded, str(directory / MANIFEST))
        opened.append(manifest)
        rest.append(decode_plain(rest_bytes, str(directory / REST)) if rest_bytes else {})
        faults = []
        for name, tensor in tensors.items():
            fault = _target_fault(name, tensor, manifest, cast)
            if fault:
                faults.append(fault)
            else:
                targets[name] = (local_tensor(tensor), local_pieces(name, tensor))
        return list(tensors), faults

    def judge(answers: list[tuple[list[str], list[str]]]) -> list[None]:
        faults = list(dict.fromkeys(fault for _, found in answers for fault in found))
        if strict:
            asked = {name for names, _ in answers for name in names}
            extra = [name for name in opened[0].tensors if name not in asked]
            if extra:
                faults.append(f"the checkpoint holds {_some(extra)}, which no rank has a place for")
        if faults:
            shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
            raise CheckpointError(shown)
        return [None] * ranks.size

    ranks.step(what, check, judge)
    ranks.step(what, lambda: ShardedReader(directory, opened[0]).fill(targets), lambda done: done)
    return rest[0]


def _open(path: str | os.PathLike[str]) -> tuple[str, Manifest | bytes, bytes]:
    """Rank 0: find the checkpoint, verify its manifest, small files and all sizes; return what the others need."""
    directory = locate(path)
    foreign = not (directory / MANIFEST).exists() and (directory / METADATA).is_file()
    if foreign and not (directory / REST).exists():
        manifest = manifest_of_dcp(directory)
        warnings.warn(f"{directory} was written by plain DCP: it has no checksums, damage goes unseen", stacklevel=2)
        return str(directory), manifest, b""
    encoded = manifest_bytes(directory)
    manifest = Manifest.decode(encoded, str(directory / MANIFEST))
    ShardedReader(directory, manifest).check_files(manifest.files)
    small = {f.name: read_checked(directory, f) for f in manifest.files.values() if f.crc is not None}
    return str(directory), encoded, small.get(REST, b"")


def _target_fault(name: str, tensor: Value, manifest: Manifest, cast: bool) -> str | None:
    saved = manifest.tensors.get(name)
    if saved is None:
        return f"{name!r} is not in the checkpoint"
    if tuple(tensor.shape) != saved.shape:
        return f"{name!r} has shape {tuple(tensor.shape)}, in the checkpoint {saved.shape}"
    if tensor.dtype != saved.dtype and not cast:
        return f"{name!r} is {tensor.dtype}, in the checkpoint {saved.dtype}"
    if tensor.device.type == "meta":
        return f"{name!r} is on the meta device; give it memory first"
    return None


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _write(
    directory: Path, pieces: list[tuple[str, Box]], tensors: Mapping[str, Value], rank: int, fs: FileSystem
) -> _Written:
    """Stream this rank's pieces into its file, one on the CPU at a time."""
    if not pieces:
        return _Written((), ())
    name_of_file = f"__{rank}_0.distcp"
    file = CheckedFile(fs, directory / name_of_file)
    written = []
    try:
        for name, box in pieces:
            start, file.section_crc = file.position, 0
            file.save(_values(name, tensors[name], box))
            saved = SavedPiece(name_of_file, start, file.position - start, file.section_crc, box)
            written.append((name, saved))
        file.finish()
    finally:
        file.abandon()
    fs.sync_directory(directory)
    return _Written((FileEntry(name_of_file, file.position),), tuple(written))


def _values(name: str, tensor: Value, box: Box) -> Tensor:
    """The values of a box as a dense CPU tensor whose storage holds nothing else."""
    piece = next(p for p in local_pieces(name, tensor) if p.box == box)
    value = piece.view(local_tensor(tensor)).resolve_conj().resolve_neg().cpu().contiguous()
    if value.untyped_storage().nbytes() != value.nbytes:
        value = value.clone(memory_format=torch.contiguous_format)
    return value


def _with_room(write: Any, assignment: _Assignment, pending: PendingCheckpoint) -> _Written:
    """Say how much was wanted and how much is free when the disk fills up all the same."""
    try:
        return write(assignment)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        text, code = describe(error)
        directory = Path(assignment.directory)
        free = pending.fs.free_bytes(directory) if directory.exists() else 0
        message = f"{text} ({human_bytes(assignment.num_bytes)} to write by this rank, {human_bytes(free)} free)"
        raise CheckpointError(message, (Failure(0, message, code),)) from error


def _assemble(tables: dict[str, Offer], parts: list[_Written], step: int, uid: str, info: dict[str, Any]) -> Manifest:
    """The manifest of what was written; what was planned must be exactly that."""
    files = {f.name: f for part in parts for f in part.files}
    pieces: dict[str, list[SavedPiece]] = {name: [] for name in tables}
    for part in parts:
        for name, piece in part.pieces:
            pieces[name].append(piece)
    saved = {}
    for name, offer in tables.items():
        ordered = tuple(sorted(pieces[name], key=lambda p: p.box))
        if [p.box for p in ordered] != list(offer.boxes):
            raise CheckpointError(f"{name!r}: the pieces written are not the pieces planned")
        saved[name] = SavedTensor(offer.dtype, offer.shape, ordered)
        check_tensor(name, saved[name], files)
    return Manifest(step=step, uid=uid, info=info, tensors=saved, files=files, world_size=len(parts))
