from __future__ import annotations

import json
import math
import multiprocessing
import os
import pickle
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megapar.config import ConfigError
from lightning_megapar.data import text
from lightning_megapar.data.files import CorpusOptions, list_documents, split_documents
from lightning_megapar.data.text import SEPARATOR, VOCAB_SIZE, load_corpus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "deep" / "er").mkdir(parents=True)
    (root / ".hidden").mkdir()
    for number in range(24):
        place = root if number % 3 else root / "deep" / "er"
        (place / f"file{number:02d}.txt").write_text(f"document {number}\n" * (5 + number))
    (root / ".hidden" / "secret.txt").write_text("secret")
    (root / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    (root / "empty.txt").write_text("")
    (root / "umlaut.txt").write_bytes("grüße\n".encode())
    return root


def read(corpus: text.Corpus, split: str) -> list[int]:
    return np.fromfile(corpus.directory / f"{split}.bin", dtype="<u2").tolist()


def documents_of(tokens: list[int]) -> list[bytes]:
    assert tokens[0] == tokens[-1] == SEPARATOR
    pieces: list[bytes] = []
    current: list[int] = []
    for token in tokens[1:]:
        if token == SEPARATOR:
            pieces.append(bytes(current))
            current = []
        else:
            current.append(token)
    return pieces


def test_every_byte_of_every_text_file_stands_in_exactly_one_split(folder: Path, tmp_path: Path) -> None:
    corpus = load_corpus(CorpusOptions(source=str(folder), validation_fraction=0.2), tmp_path / "cache")
    train, validation = documents_of(read(corpus, "train")), documents_of(read(corpus, "validation"))
    expected = sorted(p.read_bytes() for p in folder.rglob("*.txt") if ".hidden" not in str(p) and p.stat().st_size)
    assert sorted(train + validation) == expected
    assert len(expected) == 25
    statistics = corpus.statistics
    assert (statistics.train_documents, statistics.validation_documents) == (len(train), len(validation))
    held_out, everything = sum(map(len, validation)), sum(map(len, expected))
    assert 0.1 * everything < held_out <= 0.2 * everything


def test_split_follows_names_and_seed_only(folder: Path, tmp_path: Path) -> None:
    def names(source: Path, seed: int = 0) -> list[list[str]]:
        options = CorpusOptions(source=str(source), split_seed=seed, validation_fraction=0.2)
        return [[d.name for d in split] for split in split_documents(list_documents(options), options)]

    copy = tmp_path / "elsewhere"
    for path in sorted(folder.rglob("*.txt"), reverse=True):
        target = copy / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    assert names(folder) == names(copy)
    assert names(folder)[1] != names(folder, seed=1)[1]
    assert not set(names(folder)[0]) & set(names(folder)[1])


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 400), min_size=2, max_size=12), fraction=st.floats(0.01, 0.99))
def test_split_never_leaves_a_side_empty_nor_exceeds_its_share(sizes: list[int], fraction: float) -> None:
    documents = [text.Document(f"f{i}", f"f{i}", size, 0, 0, size) for i, size in enumerate(sizes)]
    train, validation = split_documents(documents, CorpusOptions(validation_fraction=fraction))
    assert train and validation
    assert sorted(d.name for d in train + validation) == sorted(d.name for d in documents)
    held_out = sum(d.length for d in validation)
    assert held_out <= fraction * sum(sizes) or (len(validation) == 1 and held_out == min(sizes))


def test_single_file_is_cut_at_a_line_break(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(b"a line of text\n" * 100)
    corpus = load_corpus(CorpusOptions(source=str(path), validation_fraction=0.1), tmp_path / "cache")
    (train,), (validation,) = documents_of(read(corpus, "train")), documents_of(read(corpus, "validation"))
    assert train + validation == path.read_bytes()
    assert train.endswith(b"\n")
    assert 0 <= len(train) - 1350 < 15
    path.write_bytes(b"x" * 1000)
    corpus = load_corpus(CorpusOptions(source=str(path), validation_fraction=0.1), tmp_path / "cache")
    assert [len(d) for s in ("train", "validation") for d in documents_of(read(corpus, s))] == [900, 100]


def test_limit_counts_bytes(folder: Path, tmp_path: Path) -> None:
    small = CorpusOptions(source=str(folder), max_bytes=700)
    corpus = load_corpus(small, tmp_path / "cache")
    assert sum(len(d) for s in ("train", "validation") for d in documents_of(read(corpus, s))) == 700
    whole = [d.name for d in list_documents(CorpusOptions(source=str(folder)))]
    assert [d.name for d in list_documents(small)] == whole[: len(list_documents(small))]


def test_suffixes_choose_files(folder: Path) -> None:
    (folder / "notes.md").write_text("# notes\n")
    (only,) = list_documents(CorpusOptions(source=str(folder), suffixes=(".md",)))
    assert only.name == "notes.md"


@pytest.mark.parametrize("sequence_length", [1, 7, 64])
def test_every_token_but_the_first_is_predicted_once(folder: Path, tmp_path: Path, sequence_length: int) -> None:
    corpus = load_corpus(CorpusOptions(source=str(folder)), tmp_path / "cache")
    tokens = read(corpus, "train")
    data = corpus.dataset("train", sequence_length)
    labels = [label for i in range(len(data)) for label in data[i]["labels"].tolist()]
    assert labels == tokens[1 : 1 + len(labels)]
    assert len(tokens) - 1 - len(labels) < sequence_length
    item = data[len(data) - 1]
    assert item["tokens"].tolist()[1:] == item["labels"].tolist()[:-1]
    assert item["tokens"].shape == (sequence_length,)
    assert str(item["tokens"].dtype) == "torch.int64"
    assert data[-1]["tokens"].tolist() == item["tokens"].tolist()
    with pytest.raises(IndexError):
        data[len(data)]


def test_dataset_travels_to_a_worker_without_its_contents(folder: Path, tmp_path: Path) -> None:
    data = load_corpus(CorpusOptions(source=str(folder)), tmp_path / "cache").dataset("train", 16)
    first = data[0]["tokens"].tolist()
    sent = pickle.dumps(data)
    assert len(sent) < 1000
    assert pickle.loads(sent)[0]["tokens"].tolist() == first
    assert len(data.limited(3)) == 3


def test_entropies_equal_counting_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "abc.txt"
    path.write_bytes(b"aaab" * 100)
    corpus = load_corpus(CorpusOptions(source=str(path), validation_fraction=0.25), tmp_path / "cache")
    train, validation = read(corpus, "train"), read(corpus, "validation")
    both = Counter(train + validation)
    n = sum(both.values())
    entropy = -sum(c / n * math.log(c / n) for c in both.values())
    seen = Counter(train)
    loss = -sum(math.log((seen[t] + 1) / (len(train) + VOCAB_SIZE)) for t in validation) / len(validation)
    assert corpus.statistics.unigram_entropy == pytest.approx(entropy, rel=1e-12)
    assert corpus.statistics.validation_unigram_loss == pytest.approx(loss, rel=1e-12)
    assert corpus.statistics.train_tokens == len(train)


def test_cache_is_reused_until_anything_changes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []
    real = text._build
    monkeypatch.setattr(text, "_build", lambda *args: (builds.append(1), real(*args)))
    options = CorpusOptions(source=str(folder))
    first = load_corpus(options, tmp_path / "cache")
    assert load_corpus(options, tmp_path / "cache") == first
    assert len(builds) == 1
    load_corpus(CorpusOptions(source=str(folder), validation_fraction=0.3), tmp_path / "cache")
    assert len(builds) == 2
    changed = next(folder.glob("*.txt"))
    content = changed.read_bytes()
    changed.write_bytes(bytes(reversed(content)))  # same size
    assert load_corpus(options, tmp_path / "cache").digest != first.digest
    assert len(builds) == 3
    (folder / "new.txt").write_text("new\n")
    load_corpus(options, tmp_path / "cache")
    monkeypatch.setattr(text, "_FORMAT", 999)
    load_corpus(options, tmp_path / "cache")
    assert len(builds) == 5


@pytest.mark.parametrize("harm", ["truncate", "no meta", "bad meta"])
def test_damaged_cache_is_rebuilt(folder: Path, tmp_path: Path, harm: str) -> None:
    options = CorpusOptions(source=str(folder))
    corpus = load_corpus(options, tmp_path / "cache")
    before = read(corpus, "train")
    if harm == "truncate":
        os.truncate(corpus.directory / "train.bin", 10)
    elif harm == "no meta":
        (corpus.directory / "meta.json").unlink()
    else:
        (corpus.directory / "meta.json").write_text("{")
    again = load_corpus(options, tmp_path / "cache")
    assert again == corpus
    assert read(again, "train") == before


def _build_slowly(options: CorpusOptions, cache: Path, log: Path, barrier: object) -> None:
    real = text._build

    def build(*args: object) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.3)
        real(*args)

    text._build = build  # in this process only
    barrier.wait()  # type: ignore[attr-defined]
    load_corpus(options, cache)


def test_ranks_that_start_at_once_build_once(folder: Path, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    barrier, log = fork.Barrier(4), tmp_path / "builds"
    arguments = (CorpusOptions(source=str(folder)), tmp_path / "cache", log, barrier)
    ranks = [fork.Process(target=_build_slowly, args=arguments) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(20)
        assert rank.exitcode == 0
    assert log.read_text().splitlines() == ["built"]
    names = [p.name for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")]
    assert len(names) == 1 and names[0].startswith("text-")


def _hang_while_writing(options: CorpusOptions, cache: Path, where: str) -> None:
    if where == "second split":
        real = text._write_tokens

        def write(path: Path, *rest: object) -> object:
            return time.sleep(60) if path.name.startswith("validation") else real(path, *rest)  # type: ignore[arg-type]

        text._write_tokens = write  # type: ignore[assignment]
    else:
        text._fsync_folder = lambda path: time.sleep(60)
    load_corpus(options, cache)


@pytest.mark.parametrize("where", ["second split", "before the rename"])
def test_killed_build_leaves_nothing_that_is_read(folder: Path, tmp_path: Path, where: str) -> None:
    options, cache = CorpusOptions(source=str(folder)), tmp_path / "cache"
    child = multiprocessing.get_context("fork").Process(target=_hang_while_writing, args=(options, cache, where))
    child.start()
    last = "train.bin" if where == "second split" else "meta.json"
    deadline = time.monotonic() + 20
    while not list(cache.glob(f".text-*.tmp-*/{last}")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)  # type: ignore[arg-type]
    child.join()
    assert list(cache.glob(".text-*.tmp-*")) and not list(cache.glob("text-*"))
    corpus = load_corpus(options, cache)
    assert sorted(p.name for p in corpus.directory.iterdir()) == ["meta.json", "train.bin", "validation.bin"]
    assert not list(cache.glob(".text-*.tmp-*"))
    assert json.loads((corpus.directory / "meta.json").read_text())["digest"] == corpus.digest


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: p / "nowhere", "no such file or folder"),
        (lambda p: (p / "empty.txt").touch() or p / "empty.txt", "expected a text file that is not empty"),
        (lambda p: (p / "nul.bin").write_bytes(b"\0\1") and p / "nul.bin", "expected a text file"),
        (lambda p: (p / "folder").mkdir() or p / "folder", "expected a folder with text files"),
        (lambda p: os.mkfifo(p / "pipe") or p / "pipe", "neither a regular file nor a folder"),
    ],
)
def test_refusals_name_the_path_and_what_was_expected(tmp_path: Path, make, expected: str) -> None:
    path = make(tmp_path)
    with pytest.raises(ConfigError, match=expected) as refusal:
        load_corpus(CorpusOptions(source=str(path)), tmp_path / "cache")
    assert str(path) in str(refusal.value)


def test_misspelt_default_names_the_default() -> None:
    with pytest.raises(ConfigError, match="did you mean 'stdlib'"):
        list_documents(CorpusOptions(source="stdlb"))


def test_cache_folder_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cache_dir=.*file"):
        load_corpus(CorpusOptions(source=str(folder)), tmp_path / "file" / "cache")


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"validation_fraction": 0.0}, {"validation_fraction": 1.0}])
def test_options_are_checked(options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        CorpusOptions(**options)


def test_too_long_sequences_are_refused_with_the_longest(folder: Path, tmp_path: Path) -> None:
    corpus = load_corpus(CorpusOptions(source=str(folder)), tmp_path / "cache")
    most = corpus.statistics.validation_tokens - 1
    assert len(corpus.dataset("validation", most)) == 1
    with pytest.raises(ConfigError, match=f"sequence_length={most + 1}.*<= {most}"):
        corpus.dataset("validation", most + 1)


def test_standard_library_is_read_without_its_tests() -> None:
    options = CorpusOptions(max_bytes=2_000_000)
    documents = list_documents(options)
    assert documents == list_documents(options)
    assert sum(d.length for d in documents) == 2_000_000
    parts = {part for d in documents for part in d.name.split("/")[:-1]}
    assert not parts & {"test", "tests", "site-packages", "__pycache__"}
    assert all(d.name.endswith(".py") for d in documents)
    train, validation = split_documents(documents, options)
    assert 0.03 * 2e6 < sum(d.length for d in validation) <= 0.05 * 2e6
    assert len(train) > 20


def test_progress_shows_on_a_terminal_only(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    load_corpus(CorpusOptions(source=str(folder)), tmp_path / "quiet")
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    load_corpus(CorpusOptions(source=str(folder)), tmp_path / "shown")
    assert "tokenising text" in capfd.readouterr().err
