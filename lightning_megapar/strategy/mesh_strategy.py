"""A Lightning strategy whose ranks form a mesh: processes, groups, signals, failures, Lightning's own collectives."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor

from lightning_megapar.config import ConfigError, Layout, ParallelConfig
from lightning_megapar.launch import (
    FailureReporter,
    PreemptionFlag,
    check_world,
    create_process_group,
    make_launcher,
    print_rank_table,
    resolve_environment,
)
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.pipeline.auto import refuse_memory_limit
from lightning_megapar.pipeline.schedules import Schedule, placement_of
from lightning_megapar.schedule_names import AUTO


class MeshStrategy(ParallelStrategy):
    """What a mesh of ranks needs from Lightning, whatever is trained on it.

    Args:
        config: validated options.
        timeout_seconds: of a collective.
        process_group_backend: ``None`` takes nccl on GPUs, gloo on CPUs.

    Raises:
        ConfigError: when ``timeout_seconds`` is not positive.
    """

    def __init__(self, config: ParallelConfig, timeout_seconds: float, process_group_backend: str | None) -> None:
        if not isinstance(timeout_seconds, (int, float)) or not timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds={timeout_seconds!r}: expected a positive number of seconds")
        super().__init__()
        self.config = config
        self._settled: ParallelConfig | None = None
        self.num_nodes = 1
        self._timeout = timedelta(seconds=timeout_seconds)
        self._backend = process_group_backend
        self._layout: Layout | None = None
        self._layout_reason = ""
        self._mesh: ParallelMesh | None = None
        self._world: dist.ProcessGroup | None = None
        self._failures: FailureReporter | None = None
        self._preemption = PreemptionFlag()
        self._where = "set-up"

    # -- who and where -----------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """The resolved degrees (known once the Trainer has chosen its devices)."""
        if self._layout is None:
            self._layout, self._layout_reason = self.config.resolve(self.num_nodes * self.num_processes)
        return self._layout

    @property
    def settled(self) -> ParallelConfig:
        """The options, with the schedule that was taken in place of ``"auto"`` (from ``setup`` on)."""
        return self._settled or self.config

    @property
    def schedule(self) -> str:
        """Name of the pipeline's schedule; without a pipeline one for microbatches in turn."""
        return self.settled.schedule_name if self.layout.pipeline > 1 else "1f1b"

    @property
    def order(self) -> str | Schedule:
        """The same, or the schedule itself where it is one of the user's own."""
        return cast("str | Schedule", self.settled.pipeline_schedule) if self.layout.pipeline > 1 else self.schedule

    def _settle(self, config: ParallelConfig) -> None:
        """Go on with options whose schedule is known; the mesh learns who holds which of its stages."""
        before, self._settled = self._settled, config
        if self.layout.pipeline > 1 and self.config.pipeline_schedule == AUTO:
            self.mesh.place_stages(placement_of(self.order, self.layout.pipeline, config.chunks))
            if before != config:
                self._tell_layout()

    def _tell_layout(self) -> None:
        line = f"layout: {self.layout.describe()} ({self._layout_reason})"
        if self.layout.pipeline > 1:
            line += f"; pipeline schedule {self.settled.schedule_name}"
            line += f", {self.settled.chunks} chunks on each stage" if self.settled.chunks > 1 else ""
        rank_zero_info(line)

    @property
    def mesh(self) -> ParallelMesh:
        if self._mesh is None:
            raise RuntimeError("the mesh exists from setup_environment on (inside fit, validate, test or predict)")
        return self._mesh

    @property
    def data_parallel_size(self) -> int:
        return self.layout.data

    @property
    def data_parallel_rank(self) -> int:
        return self.layout.coordinates(self.global_rank)["data"]

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 1

    @property
    def is_distributed(self) -> bool:
        return self.layout.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """For datasets that split themselves: the data ranks, not the world."""
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    # -- processes ---------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.parallel_devices and self.parallel_devices[0].type == "mps" and self.num_processes > 1:
            raise ConfigError("accelerator='mps' has no torch.distributed; use accelerator='cpu'")
        self.cluster_environment = resolve_environment(self.cluster_environment)
        check_world(self.cluster_environment, self.num_processes, self.num_nodes)
        self._layout = None
        layout = self.layout  # refuse impossible sizes now, before any process exists
        if layout.pipeline > 1 and self.config.pipeline_schedule == AUTO:
            refuse_memory_limit(self.config, layout)
        self._launcher = make_launcher(self)

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for decorator in (rank_zero_only, fabric_rank_zero_only):
            setattr(decorator, "rank", self.global_rank)  # noqa: B010 - an attribute on a function

    def setup_environment(self) -> None:
        self._where = "set-up"
        if self.lightning_module is not None:
            self.lightning_module._current_fx_name = None  # of a run that failed in a hook
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        if self.layout.world_size > 1:
            device_id = self.root_device if self.root_device.type == "cuda" else None
            backend = self._backend or ("nccl" if self.root_device.type == "cuda" else "gloo")
            create_process_group(self.cluster_environment, backend, self._timeout, device_id=device_id)
        world = dist.group.WORLD if dist.is_initialized() else None
        if self._mesh is None or self._mesh.layout != self.layout or self._world is not world:
            self._world = world
            placement = None  # of a schedule that is chosen when the module is there
            if self.order != AUTO:
                placement = placement_of(self.order, self.layout.pipeline, self.settled.chunks)
            replicas = self.config.data_parallel_replicas
            self._mesh = ParallelMesh(self.layout, self.global_rank, self.root_device.type, placement, replicas)
            if placement is not None:
                self._tell_layout()
            if self.layout.world_size > 1:
                print_rank_table(self.layout, self.num_processes)
        if self._failures is None:
            self._failures = FailureReporter.for_strategy(self)
        self._failures.start_watch()
        self._preemption.install()

    def teardown(self) -> None:
        self._preemption.restore()
        if self._failures is not None:
            self._failures.stop()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def rank_description(self) -> str:
        """This rank's place, for failure reports."""
        place = self.layout.coordinates(self.global_rank)
        return f"rank {self.global_rank} (data {place['data']}, pipeline {place['pipeline']}, tensor {place['tensor']})"

    def current_stage(self) -> str:
        """What this rank is doing, for failure reports."""
        return self._where

    def advice_on_lost_ranks(self) -> str:
        """What else than a rank that is gone may let ranks wait for one another, for failure reports."""
        stage = self.config.zero_stage
        if stage == 0:
            return ""
        if stage < 3:
            return (
                f"zero_stage={stage}: unless a rank has ended by itself, look for a module that one rank calls outside "
                "of steps (samples that rank 0 draws in a hook): its parameters are gathered from all data ranks. Let "
                "all of them call it, or use zero_stage=0"
            )
        return (
            "zero_stage=3: unless a rank has ended by itself, look for a step or a hook in which data ranks call "
            "different modules, or in another order. Each call gathers parameters from all of them: they wait for one "
            "another, or gloo aborts a process where sizes differ. Valid values: zero_stage=0, 1 or 2, or the same "
            "calls whatever the batch"
        )

    @contextmanager
    def doing(self, what: str) -> Generator[None, None, None]:
        """Name what this rank is doing while the body runs; a failure in it keeps the name."""
        before, self._where = self._where, what
        yield
        self._where = before

    # -- collectives of Lightning's own --------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        if name == "run-stage":
            self._preemption.install()  # Lightning has just installed its own handler, which runs a collective
        if self.layout.world_size > 1 and dist.is_initialized():
            device_ids = [self.root_device.index] if self.root_device.type == "cuda" else None
            dist.barrier(device_ids=device_ids)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.layout.world_size == 1 or not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src=src)
        return box[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data ranks (or ``group``): tensor and pipeline peers hold the same value already.

        Integer means become floating point; ``reduce_op`` is ``mean``, ``avg``, ``sum``, ``max`` or ``min``.
        """
        if not isinstance(tensor, Tensor) or self.layout.world_size == 1:
            return tensor
        group = self.mesh.group("data") if group is None else group
        name = (reduce_op if isinstance(reduce_op, str) else str(reduce_op).rsplit(".", 1)[-1]).lower()
        if group is None:
            return tensor
        ops = {"mean": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM}
        ops |= {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        if name not in ops:
            raise ValueError(f"reduce_op={reduce_op!r} is not one of mean, sum, max, min")
        reduced = tensor.detach().clone().contiguous()
        dist.all_reduce(reduced, op=ops[name], group=group)
        return reduced / dist.get_world_size(group) if name in ("mean", "avg") else reduced

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self.layout.world_size == 1 or not dist.is_initialized():
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack a tensor over the data ranks (or ``group``): shape ``(data_parallel_size, *tensor.shape)``.

        ``LightningModule.all_gather`` asks for the whole world when it was not given a group: that is the data ranks
        too, since the others hold the same value, or do not get that far in a pipelined step.
        """
        if self.layout.world_size > 1 and (group is None or group is dist.group.WORLD):
            group = self.mesh.group("data")
        return tensor if group is None else super().all_gather(tensor, group=group, sync_grads=sync_grads)
