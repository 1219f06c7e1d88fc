"""The ranks as a :class:`~torch.distributed.device_mesh.DeviceMesh`, looked up by purpose."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_megapar.config import AXES, Layout

# torch 2.13 renamed both and warns of the old names, which torch 2.11 knows alone.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def forget_cached_meshes() -> None:
    """Empty DTensor's dispatch caches; to be called before a process that has used DTensors forks ranks.

    The caches hold meshes, and a mesh compares equal on all ranks although it knows its own coordinate: a forked rank
    would find rank 0's mesh, and coordinates, in the results of its own operators.
    """
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
    propagator = DTensor._op_dispatcher.sharding_propagator
    for name in ("propagate_op_sharding", "_propagate_tensor_meta_cached"):
        clear = getattr(getattr(propagator, name, None), "cache_clear", None)
        if clear is not None:
            clear()


def _backends(group: Any) -> list[Any]:
    """What a process group runs on, without the wrapper of ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""
    found = [group._get_backend(device) for device in group._device_types]
    return [getattr(backend, "wrapped_pg", backend) for backend in found]


def _default_timeout() -> timedelta | None:
    """Of the default group; ``None`` for a backend that does not tell."""
    found = [getattr(getattr(one, "options", None), "_timeout", None) for one in _backends(dist.group.WORLD)]
    return next((one for one in found if one is not None), None)


def new_group(ranks: Sequence[int]) -> Any:
    """:func:`torch.distributed.new_group` with the timeout of the default group, for which torch takes half an hour.

    Collective over all ranks.
    """
    return dist.new_group(list(ranks), timeout=_default_timeout())


_HYBRID = ("data_replica", "data_shard")


def _meshes(layout: Layout, device_type: str, replicas: int) -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh of the data ranks, and that of all of them, whose data axis is two for hybrid sharding."""
    if replicas == 1:
        mesh = init_device_mesh(device_type, layout.sizes, mesh_dim_names=AXES)
        return mesh["data"], mesh
    sizes: list[int] = []
    names: list[str] = []
    for axis, size in zip(AXES, layout.sizes):
        sizes += [replicas, size // replicas] if axis == "data" else [size]
        names += _HYBRID if axis == "data" else [axis]
    mesh = init_device_mesh(device_type, tuple(sizes), mesh_dim_names=tuple(names))
    return mesh[_HYBRID]._flatten("data"), mesh


class ParallelMesh:
    """A layout on a live process group.

    The axes are those of :data:`lightning_megapar.config.AXES`. ``size(axis)`` and ``coordinate(axis)`` work without
    a process group as well (world size 1), so that code need not ask whether it runs distributed.

    Args:
        layout: resolved degrees.
        rank: this process's global rank.
        device_type: ``"cpu"`` or ``"cuda"``.
        placement: for each pipeline coordinate the virtual stages that its ranks hold; by default one each, in order.
        replicas: groups of data ranks that each hold all shards (hybrid sharding); it divides the data size.

    Raises:
        ValueError: when the process group's size is not the layout's.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int = 0,
        device_type: str = "cpu",
        placement: Sequence[Sequence[int]] | None = None,
        replicas: int = 1,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.replicas = replicas
        self.place = layout.coordinates(rank)
        self.place_stages(placement or [(stage,) for stage in range(layout.pipeline)])
        self.device_mesh: DeviceMesh | None = None
        if layout.world_size > 1:
            if not dist.is_initialized() or dist.get_world_size() != layout.world_size:
                have = dist.get_world_size() if dist.is_initialized() else "no process group"
                raise ValueError(f"layout {layout.describe()} needs {layout.world_size} ranks, have {have}")
            self._data, self.device_mesh = _meshes(layout, device_type, replicas)
            timeout = _default_timeout()
            groups = [*self.device_mesh.get_all_groups(), self._data.get_group()]
            for backend in (one for group in groups for one in _backends(group)):
                if timeout is not None and hasattr(backend, "_set_default_timeout"):
                    backend._set_default_timeout(timeout)  # torch has no other way to say it for a mesh
        self._stage_groups: dict[str, dist.ProcessGroup] = {}
        self._made: dict[tuple[int, ...], Any] = {}
        if layout.pipeline > 1:
            self._make_pipeline_groups()

    def place_stages(self, placement: Sequence[Sequence[int]]) -> None:
        """Say which virtual stages the ranks of each pipeline coordinate hold; no group depends on it.

        For schedules that are chosen when the module is known, before anything is made from the mesh.
        """
        self.placement = tuple(map(tuple, placement))

    def _make_pipeline_groups(self) -> None:
        # One communicator per direction: a backward receive must never queue behind a forward send on NCCL. The third
        # sums parameters that live on more than one stage; its members differ per model, so it spans all stages.
        for name in ("forward", "backward"):
            for line in self.lines("pipeline"):
                group = new_group(line)
                if self.rank in line:
                    self._stage_groups[name] = group

    def group_of(self, ranks: Sequence[int]) -> Any:
        """A group of any global ranks, made once. Collective over all ranks, which ask in the same order."""
        members = tuple(ranks)
        if members not in self._made:
            self._made[members] = new_group(members)
        return self._made[members]

    def lines(self, *axes: str) -> list[list[int]]:
        """Groups of global ranks that differ only in ``axes``, in one fixed order on every rank."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.layout.world_size):
            place = self.layout.coordinates(rank)
            groups.setdefault(tuple(place[a] for a in AXES if a not in axes), []).append(rank)
        return list(groups.values())

    def size(self, axis: str) -> int:
        return int(getattr(self.layout, axis))

    def coordinate(self, axis: str) -> int:
        return self.place[axis]

    def submesh(self, axis: str) -> DeviceMesh | None:
        """The one-dimensional mesh of an axis, or ``None`` when the axis has size 1."""
        if self.device_mesh is None or self.size(axis) == 1:
            return None
        return self._data if axis == "data" else self.device_mesh[axis]

    def sharding_mesh(self) -> DeviceMesh | None:
        """The data ranks as FSDP2 wants them: one axis, or (replicas, shards) for hybrid sharding."""
        if self.device_mesh is None or self.replicas == 1:
            return self.submesh("data")
        return self.device_mesh[_HYBRID]

    @property
    def shards(self) -> int:
        """Data ranks that hold all shards together: all of them, unless replicas do."""
        return self.size("data") // self.replicas

    @property
    def shard(self) -> int:
        """Which of the shards this rank holds."""
        return self.coordinate("data") % self.shards

    @property
    def holds_first_shards(self) -> bool:
        """Whether this rank is of the first group of data ranks that holds all shards."""
        return self.coordinate("data") < self.shards

    def shard_group(self) -> dist.ProcessGroup | None:
        """The data ranks that hold all shards together with this one; ``None`` where one does."""
        mesh = self.sharding_mesh()
        if mesh is None or self.shards == 1:
            return None
        return mesh.get_group(mesh.ndim - 1)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group of an axis, or ``None`` when the axis has size 1."""
        submesh = self.submesh(axis)
        return None if submesh is None else submesh.get_group()

    def direction_group(self, direction: str) -> dist.ProcessGroup:
        """``"forward"`` or ``"backward"``: the pipeline communicator of one direction."""
        return self._stage_groups[direction]

    def stage_rank(self, stage: int) -> int:
        """Global rank of the peer that holds ``stage`` and shares this rank's other coordinates."""
        return next(
            rank
            for rank in range(self.layout.world_size)
            if self.layout.coordinates(rank) == {**self.place, "pipeline": stage}
        )

    @property
    def loss_stage(self) -> int:
        """Pipeline coordinate of the ranks that hold the end of the module.

        The last, except under a schedule whose chunks go down the ranks and back up.
        """
        return max(range(len(self.placement)), key=lambda stage: max(self.placement[stage]))

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes the loss: it holds the end of the module."""
        return self.coordinate("pipeline") == self.loss_stage

    def describe_rank(self, rank: int | None = None) -> str:
        """For messages: ``rank 3 (data 0, pipeline 1, tensor 1)``."""
        rank = self.rank if rank is None else rank
        place = self.layout.coordinates(rank)
        return f"rank {rank} (data {place['data']}, pipeline {place['pipeline']}, tensor {place['tensor']})"
