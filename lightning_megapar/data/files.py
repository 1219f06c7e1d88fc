"""Which bytes of which files make a corpus, and which of them are held out for validation."""

from __future__ import annotations

import hashlib
import math
import os
import stat
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_megapar.config import ConfigError, nearest_name

STDLIB = "stdlib"
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
_SNIFFED_BYTES = 8192


@dataclass(frozen=True)
class CorpusOptions:
    """What to read and how to split it.

    Args:
        source: ``"stdlib"`` (the sources of the running Python's standard library, without tests and installed
            packages), or the path of a text file or of a folder that is read recursively (hidden files, and files with
            a NUL byte near their start, are left out).
        max_bytes: at most so many bytes are taken (``None``: all). Documents are taken in the order of a hash of
            their name, so that a small corpus is a sample of the large one; the last document is cut at the limit.
        validation_fraction: share of the bytes held out, in (0, 1).
        split_seed: salt of the hash that chooses the validation files. It is no training seed: runs that are to be
            compared share it.
        suffixes: file name endings to read from a folder, such as ``(".txt", ".md")``; ``None`` reads every text
            file.

    Raises:
        ConfigError: on a value outside its range.
    """

    source: str = STDLIB
    max_bytes: int | None = None
    validation_fraction: float = 0.05
    split_seed: int = 0
    suffixes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", os.fspath(self.source))
        if self.suffixes is not None:
            object.__setattr__(self, "suffixes", tuple(self.suffixes))
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ConfigError(f"max_bytes={self.max_bytes}: expected a positive number of bytes, or null for all")
        if not 0.0 < self.validation_fraction < 1.0:
            raise ConfigError(
                f"validation_fraction={self.validation_fraction}: expected a number between 0 and 1, such as 0.05"
            )


@dataclass(frozen=True)
class Document:
    """Bytes ``start:stop`` of a file; ``name`` is its path relative to the source, with ``/``."""

    name: str
    path: str
    size: int
    mtime_ns: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def list_documents(options: CorpusOptions) -> list[Document]:
    """The source's documents, limited to ``max_bytes``, in the order of a hash of their names.

    Raises:
        ConfigError: when the source does not exist, cannot be read, or holds no text.
    """
    root = _resolve(options.source)
    if root.is_file():
        candidates: Iterable[Path] = [root]
        base = root.parent
    else:
        suffixes = (".py",) if options.source == STDLIB else options.suffixes
        candidates = _walk(root, suffixes, _SKIPPED_FOLDERS if options.source == STDLIB else frozenset())
        base = root
    found = []
    for path in candidates:
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size == 0 or _is_binary(path):
                continue
        except OSError as error:
            raise ConfigError(
                f"data source {options.source!r}: {path} cannot be read ({error.strerror}); expected readable files"
            ) from error
        name = path.relative_to(base).as_posix()
        found.append(Document(name, str(path), status.st_size, status.st_mtime_ns, 0, status.st_size))
    if not found:
        wanted = f" ending in {', '.join(options.suffixes)}" if options.suffixes and root.is_dir() else ""
        kind = "a text file that is not empty" if root.is_file() else f"a folder with text files{wanted}"
        raise ConfigError(f"data source {options.source!r} ({root}) holds no text; expected {kind}")
    found.sort(key=lambda document: (_hash("order", document.name), document.name))
    return _limit(found, options.max_bytes)


def split_documents(documents: list[Document], options: CorpusOptions) -> tuple[list[Document], list[Document]]:
    """(train, validation) documents; no file is in both, except when there is but one.

    Several files: walked in the order of a hash of ``(split_seed, name)``; a file is held out when it still fits into
    ``validation_fraction`` of the bytes, and the smallest file is when none fits. One file: its end is held out, from
    the first line that begins at or after byte ``size * (1 - validation_fraction)`` (from that byte when none does).
    """
    if len(documents) == 1:
        return _split_by_position(documents[0], options.validation_fraction)
    budget = options.validation_fraction * sum(document.length for document in documents)
    held_out: set[str] = set()
    for document in sorted(documents, key=lambda d: (_hash(f"split {options.split_seed}", d.name), d.name)):
        if document.length <= budget:
            held_out.add(document.name)
            budget -= document.length
    if not held_out:
        held_out = {min(documents, key=lambda d: (d.length, d.name)).name}
    return [d for d in documents if d.name not in held_out], [d for d in documents if d.name in held_out]


def _resolve(source: str) -> Path:
    if source == STDLIB:
        return Path(sysconfig.get_paths()["stdlib"])
    path = Path(source).expanduser()
    if not path.exists():
        near = nearest_name(source, [STDLIB])
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(
            f"data source {source!r}: no such file or folder ({path.absolute()}); expected a text file, a folder of "
            f"text files, or {STDLIB!r}{hint}"
        )
    if not (path.is_file() or path.is_dir()):
        raise ConfigError(f"data source {source!r}: neither a regular file nor a folder; expected one of them")
    return path.resolve()


def _walk(root: Path, suffixes: tuple[str, ...] | None, skipped: frozenset[str]) -> Iterable[Path]:
    def refuse(error: OSError) -> None:
        raise ConfigError(
            f"data source {str(root)!r}: folder {error.filename} cannot be listed ({error.strerror}); "
            "expected readable folders"
        ) from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(s for s in subfolders if not s.startswith(".") and s not in skipped)
        for name in sorted(names):
            if not name.startswith(".") and (suffixes is None or name.endswith(suffixes)):
                yield Path(folder, name)


def _is_binary(path: Path) -> bool:
    with open(path, "rb") as file:
        return b"\0" in file.read(_SNIFFED_BYTES)


def _limit(documents: list[Document], max_bytes: int | None) -> list[Document]:
    left = math.inf if max_bytes is None else max_bytes
    taken = []
    for document in documents:
        if left <= 0:
            break
        taken.append(document if document.length <= left else replace(document, stop=document.start + int(left)))
        left -= taken[-1].length
    return taken


def _split_by_position(document: Document, fraction: float) -> tuple[list[Document], list[Document]]:
    cut = document.start + int(document.length * (1.0 - fraction))
    with open(document.path, "rb") as file:
        before = max(document.start, cut - 1)
        file.seek(before)
        moved = before + len(file.readline(document.stop - before))
    if moved < document.stop:
        cut = moved
    if not document.start < cut < document.stop:
        raise ConfigError(
            f"data source {document.path!r}: {document.length} bytes are too few to hold out "
            f"validation_fraction={fraction}; expected a longer text"
        )
    return [replace(document, stop=cut)], [replace(document, start=cut)]


def _hash(salt: str, name: str) -> bytes:
    return hashlib.blake2b(f"{salt}:{name}".encode(), digest_size=8).digest()
