"""One name, many saves: replacement, removal, links, and the janitor."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import pytest
import torch
from checkpoint.faults import BrokenDisk, everything, found, save

from lightning_megapar.checkpoint import (
    CheckpointError,
    clean_directory,
    is_sharded_checkpoint,
    read_manifest,
    remove_sharded,
)
from lightning_megapar.checkpoint.commit import STALE_SECONDS, new_uid, sibling
from lightning_megapar.checkpoint.file_system import FileSystem


@pytest.mark.parametrize("exchange", [True, False])
def test_saves_into_one_name_replace_each_other(tmp_path: Path, exchange: bool) -> None:
    path = tmp_path / "runs" / "a" / "last.ckpt"  # parents are made
    for step in (1, 2, 3):
        save(path, step, file_system=BrokenDisk(exchange=exchange), info={"seed": 5})
        assert found(path) == step
        manifest = read_manifest(path)
        assert (manifest.step, manifest.info, manifest.world_size) == (step, {"seed": 5}, 1)
        assert manifest.keys == list(everything(step)) and manifest.shape("model.shared") == (3, 5)
        assert manifest.dtype("model.shared") == torch.float32
        assert os.listdir(path.parent) == ["last.ckpt"]


def test_a_single_file_and_a_link_are_replaced_like_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"PK\x03\x04 an old single-file checkpoint")
    save(path, 1)
    assert found(path) == 1
    os.rename(path, tmp_path / "step=1.ckpt")
    os.symlink("step=1.ckpt", path)  # as ModelCheckpoint(save_last="link") leaves it
    assert is_sharded_checkpoint(path) and found(path) == 1
    save(path, 2)
    assert found(path) == 2 and not path.is_symlink()
    assert found(tmp_path / "step=1.ckpt") == 1
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=1.ckpt"]


def test_a_directory_that_is_no_checkpoint_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"is a directory but not a checkpoint \(it holds chapter\.tex\)"):
        save(tmp_path / "thesis", 1)
    with pytest.raises(CheckpointError, match="not removed"):
        remove_sharded(tmp_path / "thesis")
    assert os.listdir(tmp_path) == ["thesis"] and (tmp_path / "thesis" / "chapter.tex").exists()


def test_removal(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    remove_sharded(path)
    save(path, 1)
    os.symlink(path, tmp_path / "link.ckpt")
    remove_sharded(tmp_path / "link.ckpt")
    assert found(path) == 1
    disk = BrokenDisk()
    remove_sharded(path, file_system=disk)
    assert os.listdir(tmp_path) == []
    assert [name for name, _ in disk.log[:2]] == ["rename", "sync_directory"]
    save(path, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        remove_sharded(path, file_system=BrokenDisk(at=3, mode="once", code=5))  # deleting fails half-way
    assert "could not remove" in str(caught[0].message)
    assert not is_sharded_checkpoint(path)
    clean_directory(tmp_path)
    assert os.listdir(tmp_path) == []


def test_the_janitor_spares_the_living(tmp_path: Path) -> None:
    path, fs = tmp_path / "last.ckpt", FileSystem()
    save(path, 1)
    living, dead, trash = (sibling(path, kind, new_uid()) for kind in ("tmp", "tmp", "trash"))
    other = tmp_path / ".last.ckpt.tmp-notes"  # a user's own name
    for directory in (living, dead, trash, other):
        directory.mkdir()
        (directory / "x").write_text("x")
    old = tmp_path / f".last.ckpt.old-{living.name[-32:]}"  # belongs to the living save
    old.mkdir()
    lock = fs.lock(living)
    assert lock is not None and fs.lock(living) is None
    assert set(clean_directory(tmp_path)) == {dead, trash}
    assert sorted(os.listdir(tmp_path)) == sorted([p.name for p in (living, old, other, path)])
    os.close(lock)
    assert set(clean_directory(tmp_path)) == {living, old}
    assert clean_directory(tmp_path / "missing") == []


def test_the_janitor_keeps_what_it_removes_locked(tmp_path: Path) -> None:
    """Else a save could lock its new directory just before it is taken away."""
    left = sibling(tmp_path / "last.ckpt", "tmp", new_uid())
    left.mkdir()
    seen = []

    class Watching(FileSystem):
        def before(self, operation: str, path: Path) -> None:
            if operation == "rename":
                seen.append(FileSystem().lock(left))

    assert clean_directory(tmp_path, Watching()) == [left]
    assert seen == [None]


def test_the_janitor_waits_where_directories_cannot_be_locked(tmp_path: Path) -> None:
    class NoLocks(FileSystem):
        def lock(self, path: Path) -> int | None:
            raise OSError(95, "no locks here", str(path))

    left = sibling(tmp_path / "last.ckpt", "tmp", new_uid())
    left.mkdir()
    assert clean_directory(tmp_path, NoLocks()) == []
    past = time.time() - STALE_SECONDS - 60
    os.utime(left, (past, past))
    assert clean_directory(tmp_path, NoLocks()) == [left]
    save(tmp_path / "last.ckpt", 1, file_system=NoLocks())
    assert found(tmp_path / "last.ckpt") == 1


def test_an_interrupted_replacement_is_read_and_repaired(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1)
    os.rename(path, sibling(path, "old", new_uid()))
    assert is_sharded_checkpoint(path) and found(path) == 1
    with pytest.warns(UserWarning, match="the previous one is back"):
        clean_directory(tmp_path)
    assert os.listdir(tmp_path) == ["last.ckpt"] and found(path) == 1
