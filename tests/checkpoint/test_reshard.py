"""A checkpoint of any layout loads into any other, bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint.layouts import LAYOUTS, emptied, equal, reference
from pool import RankPool

from lightning_megapar.checkpoint import gather_full_state_dict, load_sharded, read_manifest, save_sharded
from lightning_megapar.checkpoint.pieces import local_tensor

REST = {"epoch": 3, "loops": {"fit": {"done": [1, 2]}}, "callbacks": {"best": torch.tensor(0.5)}}
CASES = [(1, ["plain"]), (2, ["plain", "tensor_parallel", "stages", "scattered_rows", "fully_sharded"])]
CASES += [(4, ["tensor_parallel", "stages_and_tensor", "data_and_tensor", "fully_sharded", "nothing_on_the_first"])]
ALL = [f"{world}-{layout}" for world, layouts in CASES for layout in layouts]


def _save(directory: str, layouts: list[str]) -> None:
    for layout in layouts:
        held = LAYOUTS[layout](reference())
        world = dist.get_world_size() if dist.is_initialized() else 1
        save_sharded(f"{directory}/{world}-{layout}", held, REST, step=3, info={"layout": layout}, process_group=None)


def _load(directory: str, layouts: list[str], saved: list[str]) -> list[str]:
    wrong = []
    for layout in layouts:
        wanted, held = LAYOUTS[layout](reference()), LAYOUTS[layout](reference())
        for name in saved:
            emptied(held)
            filled = [key for key, tensor in held.items() if local_tensor(tensor).numel()]
            assert equal(held, wanted) == filled, "the test must start from other values"
            rest = load_sharded(f"{directory}/{name}", held, process_group=None)
            wrong += [f"{name} -> {layout}: {key}" for key in equal(held, wanted)]
            if rest["loops"] != REST["loops"] or rest["callbacks"]["best"] != 0.5:
                wrong.append(f"{name} -> {layout}: rest")
    return wrong


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reshard")
    for world, layouts in CASES:
        pool.run(_save, world, str(directory), layouts)
    return directory


@pytest.mark.parametrize(("world", "layouts"), CASES)
def test_every_layout_loads_every_checkpoint(pool: RankPool, saved: Path, world: int, layouts: list[str]) -> None:
    for rank, wrong in enumerate(pool.run(_load, world, str(saved), layouts, ALL)):
        assert not wrong, f"rank {rank}: {wrong}"


def test_one_process_without_a_group_loads_without_warnings(saved: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _load(str(saved), ["plain"], ALL)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_dcp_reads_the_shards(saved: Path) -> None:
    for name in ALL:
        wanted = reference()
        held = emptied({key: value.clone() for key, value in wanted.items()})
        dcp.load(held, checkpoint_id=saved / name, no_dist=True)
        assert not equal(held, wanted)


def test_replicas_are_written_once_and_shared_out(saved: Path) -> None:
    manifest = read_manifest(saved / "2-plain")
    for tensor in manifest.tensors.values():
        assert len(tensor.pieces) == 1
    sizes = sorted(f.size for f in manifest.files.values() if f.name.endswith(".distcp"))
    assert len(sizes) == 2 and sizes[1] < 1.5 * sizes[0]


def _gather(layouts: list[str]) -> list[list[str]]:
    wrong = []
    rank, group = 0, None
    if dist.is_initialized():
        # The strictest group: it raises when ranks differ in what they have sent, so no transfer may go through it.
        level = dist.get_debug_level()
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        rank, group = dist.get_rank(), dist.new_group(backend="gloo")
        dist.set_debug_level(level)
    for seed, layout in enumerate(layouts):
        wanted = reference(seed)
        names = list(reversed(wanted))
        full = gather_full_state_dict(names, LAYOUTS[layout](wanted), process_group=group)
        expected = names if rank == 0 else []
        wrong.append([] if list(full) == expected and not equal(full, wanted) else [layout])
    return wrong


@pytest.mark.parametrize(("world", "layouts"), CASES)
def test_gathers_the_full_state(pool: RankPool, world: int, layouts: list[str]) -> None:
    for wrong in pool.run(_gather, world, layouts):
        assert not any(wrong), wrong
