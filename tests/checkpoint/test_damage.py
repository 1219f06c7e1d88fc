"""Damaged and hostile checkpoints: every one refused, with file and tensor named, and no code of theirs run."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint.faults import everything, found, memory_directory, save, state
from checkpoint.layouts import emptied, equal

from lightning_megapar.checkpoint import CheckpointError, load_sharded, read_manifest
from lightning_megapar.checkpoint.dcp_format import _Record, _RecordsOnly
from lightning_megapar.checkpoint.manifest import MANIFEST, METADATA, REST
from lightning_megapar.checkpoint.ranks import Ranks

SHARD = "__0_0.distcp"


@pytest.fixture
def room() -> Any:
    yield from memory_directory()


@pytest.fixture
def checkpoint(room: Path) -> Path:
    path = room / "last.ckpt"
    save(path, 1)
    return path


def _refusal(path: Path) -> str:
    held = everything(0)
    with pytest.raises(CheckpointError) as error:
        load_sharded(path, held)
    return str(error.value)


@pytest.mark.parametrize("name", [SHARD, REST, METADATA, MANIFEST])
def test_every_flipped_bit_is_found(checkpoint: Path, name: str) -> None:
    good = (checkpoint / name).read_bytes()
    chance = random.Random(name)
    pieces = read_manifest(checkpoint).tensors
    for _ in range(150):
        place, bit = chance.randrange(len(good)), chance.randrange(8)
        bad = bytearray(good)
        bad[place] ^= 1 << bit
        (checkpoint / name).write_bytes(bad)
        message = _refusal(checkpoint)
        assert str(checkpoint / name) in message
        if name == SHARD:
            (tensor,) = (k for k, t in pieces.items() for p in t.pieces if p.offset <= place < p.offset + p.length)
            assert repr(tensor) in message
    (checkpoint / name).write_bytes(good)
    assert found(checkpoint) == 1


@pytest.mark.parametrize("name", [SHARD, REST, METADATA, MANIFEST])
def test_truncated_padded_zeroed_and_missing_files(checkpoint: Path, name: str) -> None:
    good = (checkpoint / name).read_bytes()
    half = len(good) // 2
    for bad in (good[:-1], good[:half], b"", good + b"\0", good[:half] + bytes(len(good) - half), bytes(len(good))):
        (checkpoint / name).write_bytes(bad)
        assert str(checkpoint / name) in _refusal(checkpoint)
    os.remove(checkpoint / name)
    assert name in _refusal(checkpoint)


def test_files_of_another_checkpoint_are_refused(room: Path, checkpoint: Path) -> None:
    save(room / "other.ckpt", step=2)
    for name in (SHARD, REST, METADATA):
        good = (checkpoint / name).read_bytes()
        assert len(good) == (room / "other.ckpt" / name).stat().st_size or name == METADATA
        shutil.copy(room / "other.ckpt" / name, checkpoint / name)
        assert name in _refusal(checkpoint)
        (checkpoint / name).write_bytes(good)
    (checkpoint / "notes.txt").write_text("an extra file does no harm")
    assert found(checkpoint) == 1


class _Rank0AndNothing(Ranks):
    """Rank 0 of two; the other holds nothing and agrees to everything."""

    size = 2

    def gather(self, value: Any) -> list[Any]:
        failure, result = value
        return [value, (failure, ([], []) if isinstance(result, tuple) else result)]

    def scatter(self, values: Any) -> Any:
        return values[0]


def test_a_rank_checks_only_what_it_reads(checkpoint: Path) -> None:
    wanted = state(1)[0]
    held = emptied(state(1)[0])
    manifest = read_manifest(checkpoint)
    other = next(t for name, t in manifest.tensors.items() if name not in held).pieces[0]
    bad = bytearray((checkpoint / SHARD).read_bytes())
    bad[other.offset + other.length // 2] ^= 1
    (checkpoint / SHARD).write_bytes(bad)
    load_sharded(checkpoint, held, strict=False, process_group=_Rank0AndNothing())  # type: ignore[arg-type]
    assert not equal(held, wanted)


# -- hostile checkpoints ---------------------------------------------------------------------------------------------


class _Runs:
    """Unpickling an instance creates a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.canary}",)


def _forge(path: Path, change: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Rewrite the manifest, with all checksums and sizes true again, as an attacker would."""
    body = json.loads((path / MANIFEST).read_bytes())["manifest"]
    names = [entry[0] for entry in body["files"]]
    for entry in body["files"]:
        data = (path / entry[0]).read_bytes()
        entry[1], entry[2] = len(data), None if entry[2] is None else zlib.crc32(data)
    for _, _, pieces in body["tensors"].values():
        for piece in pieces:
            data = (path / names[piece[0]]).read_bytes()
            piece[3] = zlib.crc32(data[piece[1] : piece[1] + piece[2]])
    if change is not None:
        change(body)
    inner = json.dumps(body).encode()
    (path / MANIFEST).write_bytes(b'{"crc32": "%08x", "manifest": ' % zlib.crc32(inner) + inner + b"}\n")


def _torch_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_the_forgery_alone_is_accepted(checkpoint: Path) -> None:
    _forge(checkpoint)
    assert found(checkpoint) == 1


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
@pytest.mark.parametrize("forced", [False, True])
def test_code_in_rest_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, forced: bool) -> None:
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    canary = checkpoint.parent / "canary"
    (checkpoint / REST).write_bytes(_torch_bytes({"step": 1, "hook": _Runs(canary)}))
    _forge(checkpoint)
    assert "posix.system" in _refusal(checkpoint) and not canary.exists()
    # A bare pickle, not the zip that torch.save writes.
    (checkpoint / REST).write_bytes(pickle.dumps(_Runs(canary)))
    _forge(checkpoint)
    assert str(checkpoint / REST) in _refusal(checkpoint) and not canary.exists()


def test_code_in_a_piece_is_refused(checkpoint: Path) -> None:
    canary = checkpoint.parent / "canary"
    name, tensor = next(iter(read_manifest(checkpoint).tensors.items()))
    bad = _torch_bytes(_Runs(canary))
    data = (checkpoint / SHARD).read_bytes()

    def point_at_it(body: dict[str, Any]) -> None:
        piece = body["tensors"][name][2][0]
        piece[1], piece[2], piece[3] = len(data), len(bad), zlib.crc32(bad)

    (checkpoint / SHARD).write_bytes(data + bad)
    _forge(checkpoint, point_at_it)
    message = _refusal(checkpoint)
    assert repr(name) in message and SHARD in message and not canary.exists()
    # Neither is another tensor than the manifest announces.
    bad = _torch_bytes(torch.zeros(tensor.shape, dtype=torch.float64))
    (checkpoint / SHARD).write_bytes(data + bad)
    _forge(checkpoint, point_at_it)
    assert "holds torch.float64" in _refusal(checkpoint)


def test_code_in_metadata_is_never_run(checkpoint: Path) -> None:
    canary = checkpoint.parent / "canary"
    (checkpoint / METADATA).write_bytes(pickle.dumps(_Runs(canary)))
    _forge(checkpoint)
    assert found(checkpoint) == 1 and not canary.exists()  # ours loads without it
    os.remove(checkpoint / MANIFEST)
    os.remove(checkpoint / REST)  # now it looks like plain DCP's
    with pytest.raises(CheckpointError, match=r"refused: not DCP metadata \(it names posix.system\)"):
        load_sharded(checkpoint, {})
    assert not canary.exists()


@pytest.mark.parametrize(
    "payload",
    [
        b"\x80\x04cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)R}(X\x05\x00\x00\x00hellocos\nsystem\nub.",
        b"\x80\x04ctorch\nload\n.",
        b"\x80\x04ctorch.distributed.checkpoint.filesystem\npickle\n.",
        b"\x80\x04X\x04\x00\x00\x00text.",
        b"",
        b"\x80\x04" + b"(" * 1000,
    ],
)
def test_other_pickles_in_foreign_metadata_are_refused(room: Path, payload: bytes) -> None:
    (room / "foreign").mkdir()
    (room / "foreign" / METADATA).write_bytes(payload)
    with pytest.raises(CheckpointError, match="refused"):
        load_sharded(room / "foreign", {})


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "..", "a/b", "a\\b", "", ".", "x" * 300, 3, None])
def test_names_that_lead_outside_are_refused(checkpoint: Path, name: Any) -> None:
    def rename(body: dict[str, Any]) -> None:
        body["files"][0][0] = name

    _forge(checkpoint, rename)
    assert "not a plain name" in _refusal(checkpoint)


def test_links_and_pipes_are_not_followed(checkpoint: Path) -> None:
    outside = checkpoint.parent / "outside"
    for name in (SHARD, REST):
        shutil.move(checkpoint / name, outside)
        os.symlink(outside, checkpoint / name)
        assert str(checkpoint / name) in _refusal(checkpoint)
        os.remove(checkpoint / name)
        os.mkfifo(checkpoint / name)
        assert "not a regular file" in _refusal(checkpoint)
        os.remove(checkpoint / name)
        shutil.move(outside, checkpoint / name)
    assert found(checkpoint) == 1


def _first_piece(body: dict[str, Any]) -> list[Any]:
    return next(iter(body["tensors"].values()))[2][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: _first_piece(b).__setitem__(1, 1 << 40), "lie outside"),
        (lambda b: _first_piece(b).__setitem__(2, -1), "not a count"),
        (lambda b: _first_piece(b).__setitem__(0, 99), "form of a manifest"),
        (lambda b: _first_piece(b)[4].__setitem__(0, 1), "outside the shape"),
        (lambda b: _first_piece(b)[5].__setitem__(0, 1), "are in no piece"),
        (lambda b: next(iter(b["tensors"].values()))[1].__setitem__(0, 1 << 62), "are in no piece"),
        (lambda b: next(iter(b["tensors"].values())).__setitem__(0, "save"), "unknown dtype"),
        (lambda b: next(iter(b["tensors"].values()))[2].append(_first_piece(b)), "overlap"),
        (lambda b: b["files"].append(b["files"][0]), "listed twice"),
        (lambda b: b.__setitem__("version", 9), "format version 9"),
        (lambda b: b.__setitem__("format", "x"), "unknown format"),
        (lambda b: b.__setitem__("tensors", 3), "form of a manifest"),
    ],
)
def test_contradictory_manifests_are_refused(checkpoint: Path, change: Any, message: str) -> None:
    _forge(checkpoint, change)
    assert message in _refusal(checkpoint)


def test_deeply_nested_manifest_is_refused(checkpoint: Path) -> None:
    inner = b"[" * 200_000 + b"]" * 200_000
    (checkpoint / MANIFEST).write_bytes(b'{"crc32": "%08x", "manifest": ' % zlib.crc32(inner) + inner + b"}\n")
    assert "form of a manifest" in _refusal(checkpoint)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_dcp_directories_load_with_a_warning(room: Path) -> None:
    wanted = everything(4)
    dcp.save({**wanted, "epoch": 3}, checkpoint_id=room / "dcp", no_dist=True)
    held = emptied({k: v.clone() for k, v in wanted.items()})
    with pytest.warns(UserWarning, match="no checksums"):
        assert load_sharded(room / "dcp", held) == {}
    assert not equal(held, wanted)
    (room / "dcp" / "__0_0.distcp").rename(room / "moved")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        load_sharded(room / "dcp", held)


class _ByName:
    """A member of an enum as the first Pythons 3.11 pickle it."""

    def __reduce__(self) -> Any:
        from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

        return getattr, (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")


def test_metadata_may_name_members_of_an_enum() -> None:
    found = _RecordsOnly(pickle.dumps(_ByName(), protocol=4)).load()
    assert isinstance(found, _Record) and found.arguments[1] == "TORCH_CONTIGUOUS_FORMAT"  # nothing was looked up
