"""At every file operation of a save: SIGKILL, a torn write, a full disk, an error. Never a mix, never nothing."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint.faults import NEEDS_ROOM, BrokenDisk, found, in_ranks, in_threads, memory_directory, save, state

from lightning_megapar.checkpoint import CheckpointError, save_sharded
from lightning_megapar.checkpoint.ranks import Ranks

RANKS = 2


def _save(path: Path, step: int, ranks: Ranks, disk: BrokenDisk) -> str:
    """``"saved"``, or the error's message."""
    try:
        save_sharded(path, state(step)[ranks.rank], {"step": step}, step=step, process_group=ranks, file_system=disk)
    except CheckpointError as error:
        return str(error)
    return "saved"


def _attempt(path: Path, at: int | None, mode: str, rank: int, exchange: bool, code: int = errno.ENOSPC) -> list[str]:
    """Save step 2 with ``rank``'s disk broken; what each rank says."""

    def run(ranks: Ranks) -> str:
        disk = BrokenDisk(at if ranks.rank == rank else None, mode, code, exchange)
        said = _save(path, 2, ranks, disk)
        return f"{said}|{' '.join(name for name, _ in disk.log)}"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (in_ranks if mode in ("kill", "torn") else in_threads)(run, RANKS)


def _prepare(path: Path, previous: Path | None) -> None:
    shutil.rmtree(path.parent, ignore_errors=True)
    path.parent.mkdir(parents=True)
    if previous is not None:
        shutil.copytree(previous, path)


def _operations(path: Path, previous: Path | None, exchange: bool) -> list[list[str]]:
    """Names of each rank's operations in a save without faults."""
    _prepare(path, previous)
    told = [answer.split("|") for answer in _attempt(path, None, "kill", 0, exchange)]
    assert [said for said, _ in told] == ["saved"] * RANKS
    assert found(path) == 2
    assert os.listdir(path.parent) == [path.name]
    return [names.split() for _, names in told]


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    yield from memory_directory()


@pytest.fixture(scope="module")
def old(room: Path) -> Path:
    """A checkpoint of step 1."""
    path = room / "old" / "last.ckpt"
    assert in_ranks(lambda ranks: _save(path, 1, ranks, BrokenDisk()), RANKS) == ["saved"] * RANKS
    return path


TARGETS = [
    pytest.param(False, True, id="fresh"),
    pytest.param(True, True, id="overwrite"),
    pytest.param(True, False, id="overwrite-without-exchange"),
]


@pytest.mark.parametrize(("previous", "exchange"), TARGETS)
@pytest.mark.parametrize("mode", ["kill", "torn"])
def test_killed_at_every_operation(room: Path, old: Path, mode: str, previous: bool, exchange: bool) -> None:
    path = room / "run" / "last.ckpt"
    source = old if previous else None
    seen = set()
    for rank, operations in enumerate(_operations(path, source, exchange)):
        assert operations.count("write") >= 2
        for at, operation in enumerate(operations):
            if mode == "torn" and operation != "write":
                continue
            _prepare(path, source)
            told = _attempt(path, at, mode, rank, exchange)
            assert told[rank] == "killed"
            # Whoever survives hears of it; what follows the publication is rank 0's alone.
            assert all("died" in t or t.startswith("saved") for r, t in enumerate(told) if r != rank)
            seen.add(found(path))
            # The next save must work, and clean up after the dead one.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                save(path, 3)
            assert found(path) == 3
            assert os.listdir(path.parent) == [path.name]
    assert seen == ({1, 2} if previous else {None, 2}) if mode == "kill" else seen == {1 if previous else None}


@pytest.mark.parametrize(("previous", "exchange"), TARGETS)
@pytest.mark.parametrize(("mode", "code"), [("once", errno.EIO), ("full", errno.ENOSPC)])
def test_failing_at_every_operation(
    room: Path, old: Path, mode: str, code: int, previous: bool, exchange: bool
) -> None:
    path = room / "run" / "last.ckpt"
    source = old if previous else None
    before = 1 if previous else None
    failures = 0
    for rank, operations in enumerate(_operations(path, source, exchange)):
        for at, operation in enumerate(operations):
            if mode == "full" and operation not in NEEDS_ROOM:
                continue
            _prepare(path, source)
            told = [answer.split("|")[0] for answer in _attempt(path, at, mode, rank, exchange, code)]
            assert len(set(told)) == 1, f"ranks heard different things: {told}"
            if told[0] == "saved":
                assert found(path) == 2
                continue
            failures += 1
            assert f"rank {rank}" in told[0] and errno.errorcode[code] in told[0] and str(room) in told[0]
            assert found(path) == before
            left = [e for e in os.listdir(path.parent) if e != path.name]
            assert not left, f"operation {at} of rank {rank}: {left} stayed"
    assert failures > 10


def test_processes_that_save_into_one_name_never_mix(room: Path) -> None:
    path = room / "shared" / "last.ckpt"
    for _ in range(5):
        shutil.rmtree(path.parent, ignore_errors=True)
        children = []
        for step in (1, 2, 3):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    warnings.simplefilter("ignore")
                    for _ in range(4):
                        save(path, step)
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
        assert found(path) in (1, 2, 3)
        assert os.listdir(path.parent) == [path.name]


def test_operations_come_in_the_safe_order(tmp_path: Path) -> None:
    """Contents are synced before the name appears; the old checkpoint goes only after the new name is synced."""
    path = tmp_path / "last.ckpt"
    for step in (1, 2):
        disk = BrokenDisk()
        save_sharded(path, state(step)[0], {"step": step}, step=step, file_system=disk)
    log = [(name, p.name) for name, p in disk.log]
    names = [name for name, _ in log]
    publication = names.index("exchange")
    created = [p for name, p in log if name == "create"]
    assert created[-1] == "manifest.json" and {"rest.pt", ".metadata", "__0_0.distcp"} <= set(created)
    for file in created:
        last_write = max(i for i, entry in enumerate(log) if entry == ("write", file))
        assert last_write < log.index(("sync", file)) < publication
    assert log[publication - 1][0] == "sync_directory" and ".tmp-" in log[publication - 1][1]
    assert log[publication + 1] == ("sync_directory", tmp_path.name)
    assert names.index("unlink") > publication + 1
    # Deleting happens under a name that nobody takes for a checkpoint.
    assert all(".trash-" in str(p) for name, p in disk.log if name in ("unlink", "remove_directory"))
