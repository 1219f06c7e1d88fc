"""The schedule of a run's pipeline: chosen for a module, kept with one that is cut already, alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from lightning_megapar.config import ConfigError, ParallelConfig
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.pipeline.auto import choose_for, given_to, refuse_too_much, settled
from lightning_megapar.pipeline.cutting.stages import blocks_of
from lightning_megapar.pipeline.planning.choose import Choice
from lightning_megapar.pipeline.schedules import Schedule, to_csv
from lightning_megapar.schedule_names import AUTO
from lightning_megapar.sharding.chooser.pricing import given_cluster
from lightning_megapar.strategy.prepare import PreparedModule


def take_schedule(
    module: nn.Module,
    mesh: ParallelMesh,
    config: ParallelConfig,
    *,
    keep: Mapping[str, str],
    trial: Callable[[nn.Module], Any] | None,
    convert: Callable[[nn.Module], nn.Module],
    dtype: str,
) -> ParallelConfig:
    """The options with a schedule in place of ``"auto"``; collective over all ranks, printed on the first.

    Args:
        module: whole; not changed.
        mesh, config: the ranks and the options.
        keep, trial, convert, dtype: as for :func:`~lightning_megapar.strategy.prepare.prepare_module`.

    Raises:
        ConfigError: what cannot be cut, nothing fits the memory, or ranks have different schedules.
    """
    if mesh.size("pipeline") == 1 or (isinstance(config.pipeline_schedule, str) and config.pipeline_schedule != AUTO):
        return config
    choice = None
    if config.pipeline_schedule == AUTO:
        cluster, given = given_cluster(config.cluster), None
        if cluster is not None and trial is not None:
            least = mesh.size("pipeline") * config.chunks
            _, names = blocks_of(module, least, stack=config.pipeline_blocks, split=config.pipeline_split)
            box = [given_to(module, trial, names[0], convert)]
            dist.broadcast_object_list(box, src=0)
            given = box[0]
        choice = choose_for(module, config, mesh.layout, keep=keep, cluster=cluster, given=given, dtype=dtype)
        config = settled(config, choice.name, choice.num_chunks)
        timed = cluster is not None and given is not None
        if mesh.rank == 0:
            _print(choice, "seconds" if timed else "mean forward of a microbatch on a stage")
    refuse_unlike_schedules(config)
    return config


def keep_schedule(config: ParallelConfig, earlier: PreparedModule) -> ParallelConfig:
    """The options for a module that is cut already: ``"auto"`` is the schedule that it was cut for.

    Raises:
        ConfigError: when that has another number of microbatches, or needs more memory than allowed.
    """
    if config.pipeline_schedule != AUTO or earlier.plan is None:
        return config
    own, microbatches = earlier.config.pipeline_schedule, config.microbatches(earlier.layout)
    if not isinstance(own, str) and own.num_microbatches != microbatches:
        raise ConfigError(
            f"num_microbatches={microbatches}, but the module was already cut for pipeline_schedule={own.name!r} with "
            f"{own.num_microbatches}; name a schedule, or build the module anew and load its checkpoint"
        )
    refuse_too_much(config, earlier.layout, cast("str | Schedule", own), earlier.config.chunks)
    return settled(config, own, earlier.config.chunks)


def refuse_unlike_schedules(config: ParallelConfig) -> None:
    """All ranks must follow one schedule, or they wait for each other for ever. Collective.

    Raises:
        ConfigError: the same on every rank.
    """
    own = config.pipeline_schedule
    mark = (config.schedule_name, config.chunks, "" if isinstance(own, str) else to_csv(cast("Schedule", own)))
    marks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(marks, mark)
    other = next((rank for rank, found in enumerate(marks) if found != marks[0]), None)
    if other is not None:
        raise ConfigError(
            f"pipeline_schedule: rank 0 has {marks[0][0]!r} and rank {other} has another one ({marks[other][0]!r}); a "
            "schedule file and a cluster file must be the same on every node"
        )


def _print(choice: Choice, unit: str) -> None:
    from rich.console import Console

    table = choice.table()
    table.caption = f"makespan: {unit}; activations: microbatches through a stage's whole share"
    Console().print(table)
