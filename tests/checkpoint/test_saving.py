"""Saving and loading in one process: every kind of tensor, and each refusal with its message."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.faults import BrokenDisk, found, save
from checkpoint.layouts import emptied, equal
from torch import Tensor, nn

from lightning_megapar.checkpoint import (
    CheckpointError,
    is_sharded_checkpoint,
    load_full_into,
    load_sharded,
    read_manifest,
    save_sharded,
)
from lightning_megapar.checkpoint.pieces import Box, coverage_fault


def test_too_little_room_is_told_in_numbers_before_anything_is_written(tmp_path: Path) -> None:
    class Small(BrokenDisk):
        def free_bytes(self, path: Path) -> int:
            return 3000

    disk = Small()
    with pytest.raises(CheckpointError, match=r"needs [\d.]+ KiB \(\d+ bytes\), 2\.9 KiB \(3000 bytes\) are free"):
        save(tmp_path / "a.ckpt", 1, file_system=disk)
    assert disk.log == []


def test_a_full_disk_is_told_as_such(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 1)
    disk = BrokenDisk()
    save(tmp_path / "b.ckpt", 1, file_system=disk)
    names = [name for name, _ in disk.log]
    message = r"\[ENOSPC\] No space left .*__0_0\.distcp.*to write by this rank"
    with pytest.raises(CheckpointError, match=message) as error:
        save(tmp_path / "a.ckpt", 2, file_system=BrokenDisk(at=names.index("write") + 1, mode="full"))
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
        save(tmp_path / "a.ckpt", 1, file_system=Interrupted())
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
    save(good, 5)
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
    save(torn, 1)
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
            save(tmp_path / "a.ckpt", 1, info=bad)


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
