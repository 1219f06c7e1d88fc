"""Byte-level text: tokenised once into memory-mapped files, packed into sequences.

A token is a byte (0-255) or the document separator (256): vocabulary 257, no tokenizer to download. The cache of a
corpus is a folder ``text-<fingerprint>`` with ``train.bin``, ``validation.bin`` (little-endian uint16) and
``meta.json``. It is built under a file lock in a temporary sibling folder and renamed into place when complete, so any
number of ranks and jobs may start at once, and a build that is killed leaves nothing that is ever read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megapar.config import ConfigError
from lightning_megapar.data.files import STDLIB, CorpusOptions, Document, list_documents, split_documents

SEPARATOR = 256
"""The token before each document and after the last one."""
VOCAB_SIZE = 257
"""256 bytes and the document separator."""
Split = Literal["train", "validation"]
_SPLITS: tuple[Split, Split] = ("train", "validation")
_FORMAT = 1
"""Part of every fingerprint: raise it when the meaning of the cached files changes."""
_TOKEN = np.dtype("<u2")
_CHUNK = 1 << 24
"""Bytes read at a time: a large file never stands in memory as a whole."""


@dataclass(frozen=True)
class CorpusStatistics:
    """Counts and the losses that knowing nothing but byte frequencies gives.

    Attributes:
        train_documents, validation_documents: files per split.
        train_tokens, validation_tokens: separators included.
        unigram_entropy: entropy of the token frequencies of both splits together, in nats per token.
        validation_unigram_loss: mean ``-log q(token)`` over the validation split in nats per token, where ``q`` are the
            token frequencies of the train split with one added to every count.
    """

    train_documents: int
    validation_documents: int
    train_tokens: int
    validation_tokens: int
    unigram_entropy: float
    validation_unigram_loss: float


@dataclass(frozen=True)
class Corpus:
    """A complete cache folder.

    Attributes:
        directory: the folder.
        source: as given in the options.
        digest: SHA-256 of the tokens of both splits; equal digests mean equal data.
        statistics: counts and entropies.
    """

    directory: Path
    source: str
    digest: str
    statistics: CorpusStatistics

    def dataset(self, split: Split, sequence_length: int) -> PackedSequences:
        """The packed sequences of a split.

        Raises:
            ConfigError: when the split is shorter than one sequence.
        """
        tokens = self.statistics.train_tokens if split == "train" else self.statistics.validation_tokens
        if sequence_length < 1 or tokens < sequence_length + 1:
            raise ConfigError(
                f"sequence_length={sequence_length}: the {split} split of {self.source!r} has {tokens} tokens; "
                f"expected 1 <= sequence_length <= {tokens - 1}"
            )
        return PackedSequences(self.directory / f"{split}.bin", tokens, sequence_length)

    def describe(self) -> str:
        """One line for the terminal."""
        s = self.statistics
        return (
            f"text {self.source!r}: {s.train_documents} documents, {s.train_tokens:,} tokens to train on; "
            f"{s.validation_documents} documents, {s.validation_tokens:,} tokens to validate; byte-level vocabulary "
            f"{VOCAB_SIZE}, unigram entropy {s.unigram_entropy:.4f} nats"
        )


class PackedSequences(Dataset[dict[str, Tensor]]):
    """Windows of ``sequence_length + 1`` tokens, one every ``sequence_length`` tokens; documents run on.

    Item ``i`` is ``{"tokens": (s,) int64, "labels": (s,) int64}`` with ``labels[t]`` the token after ``tokens[t]``, so
    that every token but the first is predicted exactly once. A last window that would be short is dropped. Tokens may
    attend to an earlier document in their window.

    Args:
        path: file of little-endian uint16 tokens; opened memory-mapped in each process on first use.
        num_tokens: tokens in the file.
        sequence_length: ``s``.
        limit: at most so many sequences (``None``: all).
    """

    def __init__(
        self, path: str | os.PathLike[str], num_tokens: int, sequence_length: int, limit: int | None = None
    ) -> None:
        self.path = os.fspath(path)
        self.num_tokens = num_tokens
        self.sequence_length = sequence_length
        count = (num_tokens - 1) // sequence_length
        self._count = count if limit is None else min(count, limit)
        self._tokens: np.memmap[Any, Any] | None = None

    def limited(self, limit: int) -> PackedSequences:
        """The first ``limit`` sequences."""
        return PackedSequences(self.path, self.num_tokens, self.sequence_length, min(limit, self._count))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -self._count <= index < self._count:
            raise IndexError(f"sequence {index} of {self._count}")
        if self._tokens is None:
            self._tokens = np.memmap(self.path, dtype=_TOKEN, mode="r", shape=(self.num_tokens,))
        start = index % self._count * self.sequence_length
        window = torch.from_numpy(self._tokens[start : start + self.sequence_length + 1].astype(np.int64))
        return {"tokens": window[:-1], "labels": window[1:]}

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memory map is a copy of the whole file: worker processes open their own.
        return {**self.__dict__, "_tokens": None}


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/lightning_megapar``, by default ``~/.cache/lightning_megapar``."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "lightning_megapar"
    except RuntimeError as error:
        raise ConfigError("cache_dir=null: this user has no home folder; expected a writable folder") from error


def load_corpus(options: CorpusOptions, cache_dir: str | os.PathLike[str] | None = None) -> Corpus:
    """The tokenised corpus: opened when the cache holds it, built otherwise.

    Safe to call from any number of processes at once: one builds, the others wait for it. A change of the options, or
    of any file's name, size or modification time, gives another fingerprint and hence another build.

    Raises:
        ConfigError: when the source cannot be read or holds no text, or the cache folder cannot be written.
    """
    documents = list_documents(options)
    train, validation = split_documents(documents, options)
    splits: dict[Split, list[Document]] = {"train": train, "validation": validation}
    fingerprint = _fingerprint(options, splits)
    root = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    target = root / f"text-{fingerprint}"
    corpus = _open(target, options.source)
    if corpus is not None:
        return corpus
    from filelock import FileLock

    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".text-{fingerprint}.lock"):
            corpus = _open(target, options.source)
            if corpus is None:
                _build(target, splits, fingerprint)
                corpus = _open(target, options.source)
    except OSError as error:
        raise ConfigError(
            f"cache_dir={str(root)!r}: the tokenised text cannot be written there ({error}); expected a writable "
            "folder with free space"
        ) from error
    if corpus is None:
        raise RuntimeError(f"{target} was built but does not open")
    return corpus


def _fingerprint(options: CorpusOptions, splits: dict[Split, list[Document]]) -> str:
    description = {
        "format": _FORMAT,
        "options": asdict(options),
        "splits": {split: [list(asdict(document).values()) for document in splits[split]] for split in _SPLITS},
    }
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:20]


def _open(directory: Path, source: str) -> Corpus | None:
    """The corpus in a folder, or ``None`` when it is missing or any file is not as long as it must be."""
    try:
        meta = json.loads((directory / "meta.json").read_text())
        statistics = CorpusStatistics(**meta["statistics"])
        for split in _SPLITS:
            tokens = getattr(statistics, f"{split}_tokens")
            if (directory / f"{split}.bin").stat().st_size != tokens * _TOKEN.itemsize:
                return None
        return Corpus(directory, source, meta["digest"], statistics)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _build(target: Path, splits: dict[Split, list[Document]], fingerprint: str) -> None:
    """Tokenise into a temporary folder, then rename it to ``target``. The caller holds the lock."""
    prefix = f".text-{fingerprint}.tmp-"
    for left_over in target.parent.glob(prefix + "*"):  # of a build that was killed: we hold its lock
        shutil.rmtree(left_over, ignore_errors=True)
    if target.exists():  # someone cut a file short
        shutil.rmtree(target)
    temporary = target.parent / f"{prefix}{uuid.uuid4().hex}"
    temporary.mkdir()  # not mkdtemp: colleagues who share the folder may read the result
    try:
        digest = hashlib.sha256()
        counts = {}
        with _progress(sum(d.length for documents in splits.values() for d in documents)) as advance:
            for split in _SPLITS:
                counts[split] = _write_tokens(temporary / f"{split}.bin", splits[split], digest, advance)
        meta = {
            "fingerprint": fingerprint,
            "digest": digest.hexdigest(),
            "statistics": asdict(_statistics(splits, counts["train"], counts["validation"])),
        }
        with open(temporary / "meta.json", "w") as file:
            json.dump(meta, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _fsync_folder(temporary)
        try:
            os.rename(temporary, target)
        except OSError:
            # A file system without working locks let somebody else finish first: theirs is as good.
            if not target.exists():
                raise
        _fsync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_tokens(path: Path, documents: list[Document], digest: Any, advance: Callable[[int], None]) -> np.ndarray:
    """Write a split; returns how often each token occurs: int64, shape ``(VOCAB_SIZE,)``."""
    counts = np.zeros(VOCAB_SIZE, dtype=np.int64)
    separator = np.array([SEPARATOR], dtype=_TOKEN).tobytes()
    with open(path, "wb") as out:

        def write(piece: bytes) -> None:
            out.write(piece)
            digest.update(piece)

        for document in documents:
            write(separator)
            for raw in _read(document):
                counts[:256] += np.bincount(np.frombuffer(raw, dtype=np.uint8), minlength=256)
                write(np.frombuffer(raw, dtype=np.uint8).astype(_TOKEN).tobytes())
                advance(len(raw))
        write(separator)
        counts[SEPARATOR] = len(documents) + 1
        out.flush()
        os.fsync(out.fileno())
    return counts


def _read(document: Document) -> Iterator[bytes]:
    left = document.length
    try:
        with open(document.path, "rb") as file:
            file.seek(document.start)
            while left:
                raw = file.read(min(left, _CHUNK))
                if not raw:
                    raise ConfigError(f"data source {document.path!r} became shorter while it was read; start again")
                left -= len(raw)
                yield raw
    except OSError as error:
        raise ConfigError(
            f"data source {document.path!r} cannot be read ({error.strerror}); expected a readable text file"
        ) from error


def _statistics(splits: dict[Split, list[Document]], train: np.ndarray, validation: np.ndarray) -> CorpusStatistics:
    both = (train + validation).astype(np.float64)
    share = both[both > 0] / both.sum()
    smoothed = (train + 1.0) / (train + 1.0).sum()
    return CorpusStatistics(
        train_documents=len(splits["train"]),
        validation_documents=len(splits["validation"]),
        train_tokens=int(train.sum()),
        validation_tokens=int(validation.sum()),
        unigram_entropy=float(-(share * np.log(share)).sum()),
        validation_unigram_loss=float(-(validation / validation.sum() * np.log(smoothed)).sum()),
    )


def _fsync_folder(path: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while bytes are tokenised; nothing when that is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("tokenising text"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)


__all__ = [
    "SEPARATOR",
    "STDLIB",
    "VOCAB_SIZE",
    "Corpus",
    "CorpusOptions",
    "CorpusStatistics",
    "PackedSequences",
    "default_cache_dir",
    "load_corpus",
]
