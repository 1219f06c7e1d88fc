"""Tensors of one reference state under many layouts, for the checkpoint tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embedding.weight": (18, 6),
    "model.blocks.0.up.weight": (8, 6),
    "model.blocks.0.up.bias": (8,),
    "model.blocks.1.down.weight": (7, 9),
    "model.norm.weight": (6,),
    "model.steps": (),
    "model.mask": (5,),
}
SPLIT_DIM = {
    "model.embedding.weight": 0,
    "model.blocks.0.up.weight": 0,
    "model.blocks.0.up.bias": 0,
    "model.blocks.1.down.weight": 1,
}


def reference(seed: int = 0) -> dict[str, Tensor]:
    """The full state: model tensors of several dtypes and the moments of an optimizer."""
    generator = torch.Generator().manual_seed(seed)
    full: dict[str, Tensor] = {}
    for name, shape in SHAPES.items():
        if name == "model.steps":
            full[name] = torch.tensor(7 + seed)
        elif name == "model.mask":
            full[name] = torch.rand(shape, generator=generator) > 0.5
        else:
            full[name] = torch.randn(shape, generator=generator)
            inner = name.removeprefix("model.")
            full[f"optimizer.0.{inner}.exp_avg"] = torch.randn(shape, generator=generator).to(torch.bfloat16)
            full[f"optimizer.0.{inner}.step"] = torch.tensor(float(seed))
    return full


def split_dim(name: str) -> int | None:
    if name.endswith(".exp_avg"):
        name = "model." + name.removeprefix("optimizer.0.").removesuffix(".exp_avg")
    return SPLIT_DIM.get(name)


def _distribute(value: Tensor, mesh: DeviceMesh, placements: list) -> DTensor:
    return distribute_tensor(value.clone(), mesh, placements)


def plain(full: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in full.items()}


def tensor_parallel(full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every rank a shard (uneven where 9 does not divide), the rest plain replicas."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    return {
        name: value.clone() if split_dim(name) is None else _distribute(value, mesh, [Shard(split_dim(name))])
        for name, value in full.items()
    }


def stages(full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names dealt to the ranks like pipeline stages; the embedding is tied, so first and last stage hold it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    held = {}
    for name, value in full.items():
        home = 0 if "embedding" in name else 1 % world if "blocks.0" in name else world - 1
        if home == rank or ("embedding" in name and rank == world - 1):
            held[name] = value.clone()
    return held


def stages_and_tensor(full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two stages of two tensor ranks each."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pipeline", "tensor"))
    stage, line = dist.get_rank() // mesh.size(1), mesh["tensor"]
    held: dict[str, Tensor] = {}
    for name, value in full.items():
        dim = split_dim(name)
        if "embedding" in name or (("blocks.0" in name) == (stage == 0)):
            held[name] = value.clone() if dim is None else _distribute(value, line, [Shard(dim)])
    return held


def _chunk(value: Tensor, parts: int, index: int, dim: int) -> Tensor:
    pieces = value.chunk(parts, dim) if value.shape[dim] else (value,) * parts
    return pieces[index] if index < len(pieces) else value.narrow(dim, 0, 0)


def _from_local(local: Tensor, full: Tensor, mesh: DeviceMesh, placements: list) -> DTensor:
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def data_and_tensor(full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows cut by tensor rank first and then by data rank, which FSDP2 calls a strided shard; 18 rows are uneven."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh.get_coordinate()
    held: dict[str, Tensor] = {}
    for name, value in full.items():
        dim = split_dim(name)
        if dim == 0:
            local = _chunk(_chunk(value, mesh.size(1), tensor, 0), 2, data, 0)
            held[name] = _from_local(local, value, mesh, [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)])
        elif dim == 1:
            held[name] = _distribute(value, mesh, [Shard(0), Shard(1)])
        elif value.dim():
            held[name] = _distribute(value, mesh, [Shard(0), Replicate()])
        else:
            held[name] = value.clone()
    return held


def scattered_rows(full: dict[str, Tensor]) -> dict[str, Tensor]:
    """A strided shard alone: each rank's rows do not lie next to each other."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    held = {}
    for name, value in full.items():
        if value.dim():
            local = torch.cat([_chunk(block, world, rank, 0) for block in value.chunk(3)])
            held[name] = _from_local(local, value, mesh, [_StridedShard(0, split_factor=3)])
        else:
            held[name] = value.clone()
    return held


def fully_sharded(full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters under FSDP2 itself, uneven over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    held: dict[str, Tensor] = {}
    for name, value in full.items():
        if value.dtype == torch.float32 and value.dim():
            module = nn.Module()
            module.value = nn.Parameter(value.clone())
            fully_shard(module, mesh=mesh)
            held[name] = module.value
        else:
            held[name] = value.clone()
    return held


def nothing_on_the_first(full: dict[str, Tensor]) -> dict[str, Tensor]:
    return {} if dist.get_rank() == 0 else plain(full)


LAYOUTS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    f.__name__: f
    for f in (
        plain,
        tensor_parallel,
        stages,
        stages_and_tensor,
        data_and_tensor,
        scattered_rows,
        fully_sharded,
        nothing_on_the_first,
    )
}


def emptied(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fill with values that no reference holds."""
    with torch.no_grad():
        for tensor in held.values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.copy_(~local if local.dtype == torch.bool else torch.full_like(local, -77))
    return held


def equal(held: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Names whose local values or dtype differ between two states of one layout, bit for bit."""
    different = []
    for name, tensor in held.items():
        mine, other = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, wanted[name]))
        same = mine.dtype == other.dtype and mine.shape == other.shape
        if (
            not same
            or mine.detach()
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .ne(other.detach().contiguous().reshape(-1).view(torch.uint8))
            .any()
        ):
            different.append(name)
    return different
