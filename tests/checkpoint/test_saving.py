"""Saving and loading: replacement, refusals with their messages, plain values, the janitor."""

from __future__ import annotations

import dataclasses
import enum
import os
import pickle
import time
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checkpoint.faults import BrokenDisk, found, state
from checkpoint.layouts import emptied, equal
from omegaconf import OmegaConf
from torch import Tensor, nn

from lightning_megapar.checkpoint import (
    CheckpointError,
    clean_directory,
    is_sharded_checkpoint,
    load_full_into,
    load_sharded,
    read_manifest,
    remove_sharded,
    save_sharded,
)
from lightning_megapar.checkpoint.commit import STALE_SECONDS, new_uid, sibling
from lightning_megapar.checkpoint.file_system import FileSystem
from lightning_megapar.checkpoint.pieces import Box, coverage_fault
from lightning_megapar.checkpoint.plain_values import encode_plain, plain


def _tensors(step: int) -> dict[str, Tensor]:
    return {k: v for part in state(step) for k, v in part.items()}


def _save(path: Path, step: int, **more: Any) -> None:
    save_sharded(path, _tensors(step), {"step": step}, step=step, **more)


# -- replacing and removing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", [True, False])
def test_saves_into_one_name_replace_each_other(tmp_path: Path, exchange: bool) -> None:
    path = tmp_path / "runs" / "a" / "last.ckpt"  # parents are made
    for step in (1, 2, 3):
        _save(path, step, file_system=BrokenDisk(exchange=exchange), info={"seed": 5})
        assert found(path) == step
        manifest = read_manifest(path)
        assert (manifest.step, manifest.info, manifest.world_size) == (step, {"seed": 5}, 1)
        assert manifest.keys == list(_tensors(step)) and manifest.shape("model.shared") == (3, 5)
        assert manifest.dtype("model.shared") == torch.float32
        assert os.listdir(path.parent) == ["last.ckpt"]


def test_a_single_file_and_a_link_are_replaced_like_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"PK\x03\x04 an old single-file checkpoint")
    _save(path, 1)
    assert found(path) == 1
    os.rename(path, tmp_path / "step=1.ckpt")
    os.symlink("step=1.ckpt", path)  # as ModelCheckpoint(save_last="link") leaves it
    assert is_sharded_checkpoint(path) and found(path) == 1
    _save(path, 2)
    assert found(path) == 2 and not path.is_symlink()
    assert found(tmp_path / "step=1.ckpt") == 1
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=1.ckpt"]


def test_a_directory_that_is_no_checkpoint_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"is a directory but not a checkpoint \(it holds chapter\.tex\)"):
        _save(tmp_path / "thesis", 1)
    with pytest.raises(CheckpointError, match="not removed"):
        remove_sharded(tmp_path / "thesis")
    assert os.listdir(tmp_path) == ["thesis"] and (tmp_path / "thesis" / "chapter.tex").exists()


def test_removal(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    remove_sharded(path)
    _save(path, 1)
    os.symlink(path, tmp_path / "link.ckpt")
    remove_sharded(tmp_path / "link.ckpt")
    assert found(path) == 1
    disk = BrokenDisk()
    remove_sharded(path, file_system=disk)
    assert os.listdir(tmp_path) == []
    assert [name for name, _ in disk.log[:2]] == ["rename", "sync_directory"]
    _save(path, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        remove_sharded(path, file_system=BrokenDisk(at=3, mode="once", code=5))  # deleting fails half-way
    assert "could not remove" in str(caught[0].message)
    assert not is_sharded_checkpoint(path)
    clean_directory(tmp_path)
    assert os.listdir(tmp_path) == []


def test_the_janitor_spares_the_living(tmp_path: Path) -> None:
    path, fs = tmp_path / "last.ckpt", FileSystem()
    _save(path, 1)
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
    _save(tmp_path / "last.ckpt", 1, file_system=NoLocks())
    assert found(tmp_path / "last.ckpt") == 1


def test_an_interrupted_replacement_is_read_and_repaired(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    _save(path, 1)
    os.rename(path, sibling(path, "old", new_uid()))
    assert is_sharded_checkpoint(path) and found(path) == 1
    with pytest.warns(UserWarning, match="the previous one is back"):
        clean_directory(tmp_path)
    assert os.listdir(tmp_path) == ["last.ckpt"] and found(path) == 1


# -- refusals --------------------------------------------------------------------------------------------------------


def test_too_little_room_is_told_in_numbers_before_anything_is_written(tmp_path: Path) -> None:
    class Small(BrokenDisk):
        def free_bytes(self, path: Path) -> int:
            return 3000

    disk = Small()
    with pytest.raises(CheckpointError, match=r"needs [\d.]+ KiB \(\d+ bytes\), 2\.9 KiB \(3000 bytes\) are free"):
        _save(tmp_path / "a.ckpt", 1, file_system=disk)
    assert disk.log == []


def test_a_full_disk_is_told_as_such(tmp_path: Path) -> None:
    _save(tmp_path / "a.ckpt", 1)
    disk = BrokenDisk()
    _save(tmp_path / "b.ckpt", 1, file_system=disk)
    names = [name for name, _ in disk.log]
    message = r"\[ENOSPC\] No space left .*__0_0\.distcp.*to write by this rank"
    with pytest.raises(CheckpointError, match=message) as error:
        _save(tmp_path / "a.ckpt", 2, file_system=BrokenDisk(at=names.index("write") + 1, mode="full"))
    assert error.value.failures[0].code == 28
    assert found(tmp_path / "a.ckpt") == 1
    again = pickle.loads(pickle.dumps(error.value))
    assert str(again) == str(error.value) and again.failures == error.value.failures


def test_a_full_disk_is_told_as_such_wherever_torch_save_meets_it(tmp_path: Path) -> None:
    class Unbuffered(BrokenDisk):
        buffer_bytes = 1

    disk = Unbuffered()
    save_sharded(tmp_path / "a.ckpt", {"x": torch.ones(9)}, {}, step=0, file_system=disk)
    shard = [i for i, (name, p) in enumerate(disk.log) if name == "write" and p.name == "__0_0.distcp"]
    assert len(shard) > 20
    for at in shard:
        with pytest.raises(CheckpointError, match=r"\[ENOSPC\]"):
            save_sharded(
                tmp_path / "b.ckpt", {"x": torch.ones(9)}, {}, step=0, file_system=Unbuffered(at=at, mode="once")
            )
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_an_interrupt_stays_an_interrupt(tmp_path: Path) -> None:
    class Interrupted(BrokenDisk):
        def before(self, operation: str, path: Path) -> None:
            super().before(operation, path)
            if operation == "sync":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _save(tmp_path / "a.ckpt", 1, file_system=Interrupted())
    assert os.listdir(tmp_path) == []


def test_names_shapes_and_dtypes_must_fit_and_nothing_is_changed_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save_sharded(path, {"model.a": torch.ones(2, 3), "model.b": torch.ones(4)}, {}, step=0)
    held = {"model.a": torch.zeros(2, 3), "model.b": torch.zeros(5), "model.c": torch.zeros(1)}
    with pytest.raises(
        CheckpointError, match=r"'model\.b' has shape \(5,\), in the checkpoint \(4,\); 'model\.c' is not"
    ):
        load_sharded(path, held)
    assert not held["model.a"].any()
    with pytest.raises(CheckpointError, match=r"the checkpoint holds 'model\.b', which no rank has a place for"):
        load_sharded(path, {"model.a": torch.zeros(2, 3)})
    load_sharded(path, {"model.a": held["model.a"]}, strict=False)
    assert held["model.a"].all()
    half = {"model.a": torch.zeros(2, 3, dtype=torch.bfloat16), "model.b": torch.zeros(4)}
    with pytest.raises(CheckpointError, match=r"'model\.a' is torch\.bfloat16, in the checkpoint torch\.float32"):
        load_sharded(path, half)
    load_sharded(path, half, cast=True)
    assert half["model.a"].dtype == torch.bfloat16 and half["model.a"].all()
    with pytest.raises(CheckpointError, match="meta device"):
        load_sharded(path, {"model.a": torch.empty(2, 3, device="meta")}, strict=False)


def test_targets_are_filled_in_place(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save_sharded(path, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3)}, {}, step=0)
    parameter = nn.Parameter(torch.zeros(2, 3))
    storage = torch.zeros(3, 2)
    load_sharded(path, {"a": parameter, "b": (scalar := torch.tensor(0))})
    assert torch.equal(parameter, torch.arange(6.0).reshape(2, 3)) and scalar == 3
    assert parameter.grad_fn is None and parameter.requires_grad
    load_sharded(path, {"a": storage.T}, strict=False)
    assert torch.equal(storage, torch.arange(6.0).reshape(2, 3).T)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(10_000.0)[10:20],
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.tensor([[float("nan"), -0.0, float("inf")]]),
        torch.zeros(0, 3),
        torch.tensor(5, dtype=torch.uint8),
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.ones(2).expand(3, 2),
        nn.Parameter(torch.ones(2)),
    ],
)
def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path, value: Tensor) -> None:
    save_sharded(tmp_path / "a.ckpt", {"x": value}, {}, step=0)
    wanted = value.detach().resolve_conj().contiguous()
    held = {"x": torch.zeros_like(wanted)}
    load_sharded(tmp_path / "a.ckpt", held)
    assert not equal(held, {"x": wanted})
    size = (tmp_path / "a.ckpt" / "__0_0.distcp").stat().st_size if value.numel() else 0
    assert size <= value.nbytes + 2048, "a view must not drag its whole storage along"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.empty(2, device="meta"), "meta device"),
        (torch.ones(2).to_sparse(), "only dense ones"),
        (3, "expected a name and a tensor, got int"),
    ],
)
def test_tensors_that_cannot_be_saved_are_named(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"'model.bad'.*{message}"):
        save_sharded(tmp_path / "a.ckpt", {"model.bad": value}, {}, step=0)
    assert os.listdir(tmp_path) == []


def test_paths_that_are_no_checkpoint_say_what_they_are(tmp_path: Path) -> None:
    good = tmp_path / "runs" / "step=5.ckpt"
    _save(good, 5)
    single, empty, text, tensors = (tmp_path / n for n in ("single.ckpt", "empty", "readme.txt", "model.safetensors"))
    torch.save({"state_dict": {}}, single)
    empty.mkdir()
    text.write_text("hello, this is no checkpoint")
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    tensors.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    lightning = tmp_path / "lightning.ckpt"
    lightning.mkdir()
    for name in ("meta.pt", ".metadata"):
        (lightning / name).write_bytes(b"x")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    torn = tmp_path / "torn.ckpt"
    _save(torn, 1)
    os.remove(torn / "manifest.json")
    for path, words in {
        single: "a single file (torch.save)",
        empty: "an empty directory",
        text: "a file of another kind",
        tensors: "a safetensors file",
        lightning: "of Lightning's own strategies",
        tmp_path / "hf": "a Hugging Face model directory",
        torn: "its manifest.json is missing",
        good.parent: "give one of them, such as",
        good / "rest.pt": "give the directory",
        tmp_path / "runs" / "step=6.ckpt": "does not exist; beside it are step=5.ckpt",
    }.items():
        assert not is_sharded_checkpoint(path)
        with pytest.raises(CheckpointError) as error:
            read_manifest(path)
        assert words in str(error.value)


def test_info_must_be_json(tmp_path: Path) -> None:
    for bad in ({"x": torch.ones(1)}, {"x": {1: 2}}, {"x": float("nan")}):
        with pytest.raises(CheckpointError, match=r"info\['x'\]"):
            _save(tmp_path / "a.ckpt", 1, info=bad)


def test_pieces_must_cover_a_tensor_exactly_once() -> None:
    halves = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    assert coverage_fault((4, 3), halves) is None
    assert coverage_fault((), [Box((), ())]) is None
    assert "are in no piece" in str(coverage_fault((4, 3), halves[:1]))
    assert "are in no piece" in str(coverage_fault((), []))
    assert "overlap" in str(coverage_fault((4, 3), [halves[0], Box((1, 0), (2, 3))]))
    assert "overlap" in str(coverage_fault((4, 3), [*halves, Box((0, 1), (1, 1))]))
    assert "outside" in str(coverage_fault((3, 3), halves))
    assert "scalar" in str(coverage_fault((), [Box((), ())] * 2))


# -- plain values ----------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Config:
    width: int
    where: Path


Point = namedtuple("Point", "x y")


def test_plain_values_come_back(tmp_path: Path) -> None:
    given = {
        "hyper_parameters": {
            "model": Config(4, Path("/data")),
            "colour": Colour.RED,
            "conf": OmegaConf.create({"a": [1]}),
        },
        "counts": defaultdict(int, a=1),
        "point": Point(1, 2.5),
        "frozen": frozenset([1]),
        "numpy": {"scalar": numpy.float64(2.5), "flag": numpy.bool_(True), "array": numpy.arange(3)},
        "ordered": OrderedDict(b=1, a=2),
        "keys": {(0, 1): None, 5: b"bytes", True: 2**70},
        "best": nn.Parameter(torch.tensor(0.5)),
        "dtype": torch.bfloat16,
    }
    save_sharded(tmp_path / "a.ckpt", {}, given, step=0)
    back = load_sharded(tmp_path / "a.ckpt", {})
    assert back["hyper_parameters"] == {"model": {"width": 4, "where": "/data"}, "colour": "red", "conf": {"a": [1]}}
    assert (back["counts"], back["point"], back["frozen"]) == ({"a": 1}, (1, 2.5), {1})
    assert type(back["counts"]) is dict and type(back["point"]) is tuple
    assert back["numpy"]["scalar"] == 2.5 and back["numpy"]["flag"] is True
    assert torch.equal(back["numpy"]["array"], torch.arange(3))
    assert list(back["ordered"]) == ["b", "a"] and back["keys"] == given["keys"]
    assert type(back["best"]) is Tensor and back["dtype"] is torch.bfloat16
    torch.load(tmp_path / "a.ckpt" / "rest.pt", weights_only=True)


def test_the_class_of_omegaconf_hyper_parameters_is_kept_by_name(tmp_path: Path) -> None:
    conf = OmegaConf.create({"width": 3})
    save_sharded(tmp_path / "a.ckpt", {}, {"hyper_parameters": conf, "hparams_type": type(conf)}, step=0)
    back = load_sharded(tmp_path / "a.ckpt", {})
    assert back == {"hyper_parameters": {"width": 3}, "hparams_type": "omegaconf.dictconfig.DictConfig"}


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Custom(), r"rest\['callbacks'\]\['mine'\]\[1\] is of type .*Custom"),
        (lambda: 0, "is of type builtins.function"),
        (Custom, "is of type builtins.type"),
        (torch.empty(1, device="meta"), "meta device"),
        (numpy.array([object()]), "numpy.ndarray"),
    ],
)
def test_other_values_are_refused_by_name(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encode_plain({"callbacks": {"mine": [0, value]}}, "rest")
    with pytest.raises(CheckpointError, match="mine"):
        save_sharded(tmp_path / "a.ckpt", {}, {"callbacks": {"mine": [0, value]}}, step=0)
    assert os.listdir(tmp_path) == []


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="does it contain itself"):
        plain(loop, "rest")


# -- full state dicts ------------------------------------------------------------------------------------------------


def test_full_state_from_a_file_or_dictionary(tmp_path: Path) -> None:
    full = {"a": torch.arange(6.0), "b": torch.tensor(2), "elsewhere": torch.ones(3)}
    torch.save({"state_dict": full, "epoch": 1}, tmp_path / "plain.ckpt")
    for source in (full, {"state_dict": full}, tmp_path / "plain.ckpt"):
        held = emptied({"a": torch.arange(6.0), "b": torch.tensor(2)})
        assert load_full_into(held, source) == ["elsewhere"]
        assert not equal(held, full)
    held = {"a": torch.zeros(6, dtype=torch.float64), "b": torch.zeros(2), "c": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"'a' is torch\.float64.*'b' has shape \(2,\).*'c' is not in the state"):
        load_full_into(held, full)
    load_full_into({"a": held["a"], "c": held["c"]}, full, strict=False, cast=True)
    assert held["a"].sum() == 15
    with pytest.raises(CheckpointError, match="it does not exist"):
        load_full_into({}, tmp_path / "missing")
