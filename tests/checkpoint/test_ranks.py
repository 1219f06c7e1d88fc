"""A failure on one rank is the same error on all, at once: over gloo, and with a rank that is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.faults import BrokenDisk, everything, save, state
from pool import RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from lightning_megapar.checkpoint import (
    CheckpointError,
    gather_full_state_dict,
    is_sharded_checkpoint,
    load_sharded,
    read_manifest,
    save_sharded,
)
from lightning_megapar.checkpoint.file_system import FileSystem


def _outcome(function: Any) -> str:
    try:
        function()
    except CheckpointError as error:
        return str(error)
    return "fine"


def _each_failure(directory: str, bad: int) -> list[str]:
    """Every way in which rank ``bad`` may fail; what this rank hears of each."""
    rank = dist.get_rank()
    path = f"{directory}/last.ckpt"
    held = dict(state(1, dist.get_world_size())[rank])
    odd = {**held, "model.shared": torch.ones(4)} if rank == bad else held
    double = {**held, "model.shared": held["model.shared"].double()} if rank == bad else held
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    overlapping = (
        {"x": torch.ones(2 * mesh.size())}
        if rank == bad
        else {"x": DTensor.from_local(torch.ones(2), mesh, [Shard(0)])}
    )
    lonely = {"x": DTensor.from_local(torch.ones(2), mesh, [Shard(0)])} if rank == bad else {}

    def save(tensors: Any, **more: Any) -> str:
        settings = {"step": 1, **more}
        return _outcome(lambda: save_sharded(settings.pop("path", path), tensors, {"step": 1}, **settings))

    def load(tensors: Any) -> str:
        return _outcome(lambda: load_sharded(path, tensors))

    heard = [save(held)]
    broken = BrokenDisk(at=2, mode="once") if rank == bad else FileSystem()
    heard.append(save(held, step=2, file_system=broken))
    heard.append(save(held, step=3 if rank == bad else 2))
    heard.append(save(held, path=f"{directory}/{'b' if rank == bad else 'a'}.ckpt"))
    heard.append(save({**held, "model.partial": partial} if rank == bad else held))
    heard.append(save(odd))
    heard.append(save(double))
    heard.append(save(overlapping))
    heard.append(save(lonely))
    heard.append(load({**held, "model.unknown": torch.ones(1)} if rank == bad else held))
    heard.append(load(odd))
    heard.append(load({} if rank == bad else held))
    heard.append(_outcome(lambda: gather_full_state_dict(["model.shared"] if rank == bad else ["x"], held)))
    heard.append(_outcome(lambda: gather_full_state_dict(["model.shared", "nobody"], held)))
    heard.append(_outcome(lambda: gather_full_state_dict(["model.shared"], odd)))
    if rank == bad:
        (piece,) = read_manifest(path).tensors[f"model.blocks.{bad}.weight"].pieces
        with open(f"{path}/{piece.file}", "r+b") as file:
            file.seek(piece.offset + piece.length // 2)
            file.write(b"damage")
    dist.barrier()
    heard.append(load(held))
    return heard


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_hear_the_same(pool: RankPool, tmp_path: Path, world: int) -> None:
    bad = world - 1
    heard = pool.run(_each_failure, world, str(tmp_path), bad)
    for other in heard[1:-1]:
        assert other == heard[0]
    assert heard[bad] == heard[0]
    expected = [
        "fine",
        f"failed on rank {bad}: [ENOSPC]",
        f"rank 0 has step 2 to {tmp_path}/last.ckpt, rank {bad} has step 3",
        f"rank {bad} has step 1 to {tmp_path}/b.ckpt",
        f"rank {bad}: model.partial: placement",
        f"'model.shared' is torch.float32 (3, 5) on rank 0 but torch.float32 (4,) on rank {bad}",
        f"'model.shared' is torch.float32 (3, 5) on rank 0 but torch.float64 (3, 5) on rank {bad}",
        "the ranks' pieces of 'x' do not make up the tensor: pieces at",
        "elements are in no piece",
        "'model.unknown' is not in the checkpoint",
        "'model.shared' has shape (4,), in the checkpoint (3, 5)",
        f"the checkpoint holds 'model.blocks.{bad}.weight'",
        f"rank 0 gathers 'x' where rank {bad} gathers 'model.shared'",
        "no rank holds 'nobody'",
        f"'model.shared' is torch.float32 (3, 5) on rank 0 but torch.float32 (4,) on rank {bad}",
        f"failed on rank {bad}: {tmp_path}/last.ckpt/__{bad}_0.distcp: tensor 'model.blocks.{bad}.weight'",
    ]
    for said, words in zip(heard[0], expected, strict=True):
        assert words in said
    assert os.listdir(tmp_path) == ["last.ckpt"]


class _Dying(FileSystem):
    def write(self, descriptor: int, data: Any, path: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_survivors_of_a_killed_rank_hear_of_it_within_two_seconds(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1)
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 9
            try:
                os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
                store = dist.FileStore(str(tmp_path / "store"), 2)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
                start = time.monotonic()
                try:
                    disk = _Dying() if rank else FileSystem()
                    save_sharded(path, state(2)[rank], {"step": 2}, step=2, file_system=disk)
                except CheckpointError as error:
                    died = "another rank has died" in str(error) and time.monotonic() - start < 2
                    code = 0 if died else 1
            finally:
                os._exit(code)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert os.waitstatus_to_exitcode(statuses[1]) == -signal.SIGKILL
    assert os.waitstatus_to_exitcode(statuses[0]) == 0
    assert is_sharded_checkpoint(path)
    held = everything(0)
    assert load_sharded(path, held)["step"] == 1
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "store"]
