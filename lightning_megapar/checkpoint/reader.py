"""Reading a sharded checkpoint: find it, say what it is, verify and copy the pieces that are wanted.

Nothing here unpickles anything but plain tensors and values, and nothing is written to the disk.
"""

from __future__ import annotations

import io
import os
import pickle
import stat
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from lightning_megapar.checkpoint.commit import LEFTOVER
from lightning_megapar.checkpoint.errors import CheckpointError
from lightning_megapar.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    METADATA,
    REST,
    FileEntry,
    Manifest,
    SavedPiece,
)
from lightning_megapar.checkpoint.pieces import LocalPiece, full_box
from lightning_megapar.checkpoint.plain_values import decode_plain, what_was_refused

_BLOCK = 1 << 20


def locate(path: str | os.PathLike[str]) -> Path:
    """The directory to read for a checkpoint's path.

    That is ``path`` itself, or its ``.old-`` sibling when a replacement was interrupted between its two renames.
    """
    target = Path(os.path.abspath(path))
    if target.exists() or not target.parent.is_dir():
        return target
    found = []
    for entry in sorted(os.listdir(target.parent)):
        match = LEFTOVER.fullmatch(entry)
        if match and match["name"] == target.name and match["kind"] == "old":
            candidate = target.parent / entry
            try:
                found.append((_read_manifest(candidate).step, candidate))
            except CheckpointError:
                continue
    return max(found)[1] if found else target


def is_sharded_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` names a directory that :func:`~lightning_megapar.checkpoint.save_sharded` has written."""
    return (locate(path) / MANIFEST).is_file()


def newest_checkpoint(directory: str | os.PathLike[str]) -> tuple[Path, int] | None:
    """The checkpoint of the highest step among a directory's entries (``last.ckpt`` of several), and its step.

    Damaged ones are passed over: an older one is better than none. ``None`` when there is none.
    """
    folder, found = Path(directory), []
    for candidate in sorted(folder.iterdir()) if folder.is_dir() else []:
        if is_sharded_checkpoint(candidate):
            try:
                found.append((read_manifest(candidate).step, candidate.name == "last.ckpt", candidate))
            except CheckpointError:
                continue
    if not found:
        return None
    step, _, newest = max(found)
    return newest, step


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Keys, shapes, dtypes, step and info of a sharded checkpoint. Its checksum is verified, tensors are not read.

    Raises:
        CheckpointError: not a checkpoint (the message says what it is), or a damaged manifest.
    """
    return _read_manifest(locate(path))


def _read_manifest(directory: Path) -> Manifest:
    return Manifest.decode(manifest_bytes(directory), str(directory / MANIFEST))


def manifest_bytes(directory: Path) -> bytes:
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{directory} is not a sharded checkpoint: {what_is(directory)}")
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes")
    return path.read_bytes()


def what_is(path: str | os.PathLike[str]) -> str:
    """A few words that say what ``path`` is when it is not a sharded checkpoint of this package."""
    path = Path(path)
    if path.is_symlink() and not path.exists():
        return f"it is a link to {os.readlink(path)}, which does not exist"
    if not path.exists():
        near = path.parent if path.parent.is_dir() else None
        names = sorted(p.name for p in near.iterdir() if (p / MANIFEST).is_file()) if near else []
        return "it does not exist" + (f"; beside it are {', '.join(names[:4])}" if names else "")
    if path.is_dir():
        return _what_directory(path)
    if path.name in (MANIFEST, METADATA, REST) or path.suffix == ".distcp":
        return f"it is a file of one; give the directory, {path.parent}"
    with open(path, "rb") as file:
        start = file.read(16)
    if start.startswith(b"PK\x03\x04"):
        return "it is a single file (torch.save), such as plain Lightning writes"
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size:
        return "it is a safetensors file"
    return "it is a file of another kind" if start else "it is an empty file"


def _what_directory(path: Path) -> str:
    entries = sorted(os.listdir(path))
    match = LEFTOVER.fullmatch(path.name)
    if match:
        return f"it is the leftover of an interrupted save of {match['name']}"
    if not entries:
        return "it is an empty directory"
    if REST in entries and METADATA in entries:
        return f"its {MANIFEST} is missing, so it cannot be verified"
    if "meta.pt" in entries and METADATA in entries:
        return "it is a sharded checkpoint of Lightning's own strategies (torch DCP with meta.pt)"
    if METADATA in entries:
        return "it is a plain torch DCP checkpoint"
    if "latest" in entries or any(e.startswith("zero_pp_rank") for e in entries):
        return "it looks like a DeepSpeed checkpoint"
    if "config.json" in entries:
        return "it looks like a Hugging Face model directory"
    inside = [e for e in entries if (path / e / MANIFEST).is_file()]
    if inside:
        return f"it is a directory that holds checkpoints; give one of them, such as {path / inside[0]}"
    return f"it is a directory that holds {', '.join(entries[:3])}" + (" ..." if len(entries) > 3 else "")


def read_checked(directory: Path, entry: FileEntry) -> bytes:
    """All bytes of a file that the manifest lists with a checksum.

    Raises:
        CheckpointError: missing, of another size, or damaged.
    """
    with open_plain(directory, entry) as file:
        data = file.read()
    if zlib.crc32(data) != entry.crc:
        raise CheckpointError(f"{directory / entry.name} is damaged: its checksum does not match the manifest's")
    return data


def open_plain(directory: Path, entry: FileEntry) -> IO[bytes]:
    """Open a file of the checkpoint; refuses links, other kinds of files and another size than the manifest's."""
    path = directory / entry.name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
        os.close(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        raise CheckpointError(f"{path} has {status.st_size} bytes, the manifest says {entry.size}")
    return os.fdopen(descriptor, "rb")


@dataclass
class ShardedReader:
    """Reads tensors of one checkpoint piece by piece; at most one piece is in memory at a time.

    Args:
        directory: as :func:`locate` found it.
        manifest: of that directory.
    """

    directory: Path
    manifest: Manifest
    _open: dict[str, IO[bytes]] = field(default_factory=dict, init=False, repr=False)

    def fill(self, targets: Mapping[str, tuple[Tensor, list[LocalPiece]]]) -> None:
        """Copy saved values into this rank's tensors, in place and without gradients.

        Args:
            targets: name -> (local tensor, the boxes of the global tensor that it holds).

        Raises:
            CheckpointError: naming the file and tensor that is damaged. Tensors read before it are filled.
        """
        wanted = [
            (saved, name)
            for name, (_, pieces) in targets.items()
            for saved in self.manifest.tensors[name].pieces
            if any(saved.box.overlap(piece.box) for piece in pieces)
        ]
        wanted.sort(key=lambda item: (item[0].file, item[0].offset))
        try:
            for saved, name in wanted:
                self._copy(name, saved, *targets[name])
        finally:
            self.close()

    def read(self, name: str) -> Tensor:
        """One whole tensor on CPU, every checksum of it verified."""
        tensor = self.manifest.tensors[name]
        value = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.fill({name: (value, [LocalPiece(full_box(tensor.shape), (0,) * len(tensor.shape))])})
        return value

    def rest(self) -> dict[str, Any]:
        """The plain values of the checkpoint."""
        entry = self.manifest.files.get(REST)
        return {} if entry is None else decode_plain(read_checked(self.directory, entry), str(self.directory / REST))

    def check_files(self, names: Iterable[str]) -> None:
        """Sizes and kinds of the named files, without reading them."""
        for name in names:
            open_plain(self.directory, self.manifest.files[name]).close()

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _copy(self, name: str, saved: SavedPiece, local: Tensor, pieces: list[LocalPiece]) -> None:
        value = self._load(name, saved)
        with torch.no_grad():
            for piece in pieces:
                common = saved.box.overlap(piece.box)
                if common is not None:
                    start = tuple(o - b for o, b in zip(piece.box.offsets, piece.start))
                    local[common.slices(start)].copy_(value[common.slices(saved.box.offsets)])

    def _load(self, name: str, saved: SavedPiece) -> Tensor:
        where = f"{self.directory / saved.file}: tensor {name!r} at {saved.box.offsets}"
        if saved.file not in self._open:
            self.close()  # pieces come file by file
            self._open[saved.file] = open_plain(self.directory, self.manifest.files[saved.file])
        section = _Section(self._open[saved.file], saved.offset, saved.length)
        if saved.crc is not None and section.crc32() != saved.crc:
            raise CheckpointError(f"{where} is damaged: its checksum does not match the manifest's")
        try:
            value = torch.load(cast(IO[bytes], section), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{where} refused: it holds more than a tensor ({what_was_refused(error)})"
            ) from error
        except Exception as error:
            raise CheckpointError(f"{where} cannot be read: {str(error).splitlines()[0]}") from error
        expected = self.manifest.tensors[name].dtype
        if not isinstance(value, Tensor) or value.dtype != expected or tuple(value.shape) != saved.box.sizes:
            held = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(f"{where} holds {held}, the manifest says {expected} {saved.box.sizes}")
        return value


class _Section(io.RawIOBase):
    """A byte range of an open file as a file of its own."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self.file, self.offset, self.length, self.position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        self.position = max(0, base + offset)
        return self.position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.length - self.position))
        self.file.seek(self.offset + self.position)
        count = self.file.readinto(view[:count])  # type: ignore[attr-defined]
        self.position += count
        return count

    def crc32(self) -> int:
        """Checksum of the whole range; leaves the position at its start."""
        crc, block = 0, bytearray(min(_BLOCK, max(1, self.length)))
        self.seek(0)
        while count := self.readinto(block):
            crc = zlib.crc32(memoryview(block)[:count], crc)
        self.seek(0)
        return crc
