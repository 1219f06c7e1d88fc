"""Turn the user's module into this rank's share of it, in the one order that works.

Names are recorded, values taken from rank 0, the pipeline cut made, layers sharded, meta parameters materialised and
initialised by name, the device and dtype set, FSDP2 applied, hooks installed. The user's class stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from lightning_megapar.checkpoint.hugging_face.reading import fill_module, plan_reading
from lightning_megapar.config import ConfigError, Layout, ParallelConfig
from lightning_megapar.data_parallel.parameters import (
    LogicalParameter,
    ModuleNames,
    collect_parameters,
    partial_parameter_names,
    shards_by_name,
)
from lightning_megapar.data_parallel.zero import ZeroUnits
from lightning_megapar.layers.base import ParallelLayer
from lightning_megapar.layers.collectives import TensorRanks
from lightning_megapar.layers.deferral import Deferral
from lightning_megapar.memory.arena import Arena
from lightning_megapar.memory.compression_options import CompressionConfig
from lightning_megapar.memory.recomputation import Recomputation
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.pipeline.auto import choose_for, settled
from lightning_megapar.pipeline.cutting.chunks import RankCut
from lightning_megapar.pipeline.cutting.cut import StagePlan, plan_stages
from lightning_megapar.pipeline.cutting.stages import blocks_of, largest_stacks, outside_of
from lightning_megapar.pipeline.cutting.survey import Survey, survey_module
from lightning_megapar.pipeline.schedules import Schedule, placement_of
from lightning_megapar.precision.fp8 import Fp8Layers, Fp8Options
from lightning_megapar.precision.masters import HeldAs
from lightning_megapar.schedule_names import AUTO, splits_backward
from lightning_megapar.sharding.apply import shard_module
from lightning_megapar.sharding.blueprint import Blueprint, record_blueprints
from lightning_megapar.sharding.by_plan import apply_assignments
from lightning_megapar.sharding.choice import PlanChoice, check_written_plan, choose_plan
from lightning_megapar.sharding.chooser.alone import stand_alone
from lightning_megapar.sharding.chooser.pricing import Pricing, given_cluster
from lightning_megapar.sharding.chooser.trial import Run
from lightning_megapar.sharding.initialise import initialise_by_name
from lightning_megapar.shards import IndexedTensor
from lightning_megapar.step.random_streams import RandomStreams, uses_dropout
from lightning_megapar.strategy.balance.spares import Spares
from lightning_megapar.strategy.rank_zero import from_rank_zero, take_values_of_rank_zero
from lightning_megapar.strategy.recomputing import keep_activations, made_arena, refuse_blocks


@dataclass(frozen=True)
class PreparedModule:
    """This rank's share of a module and what is known about it.

    Args:
        layout: the layout it was prepared for.
        names: names of the whole module.
        parameters: what this rank holds.
        plan, cut: the pipeline's, ``None`` without one.
        zero: FSDP2 units, ``None`` for zero_stage 0.
        streams: layout-free random streams, ``None`` on a single rank.
        deferral: where weight gradients wait, ``None`` under schedules with whole backwards.
        stages: canonical parameter name -> stages that hold it.
        choice: how layers that are not ours are sharded over the tensor ranks.
        blueprints: the module's transformers models, whole and without memory.
        config: the options that it was prepared with, a schedule in place of ``"auto"``.
        is_cut: whether tensor ranks hold pieces of any parameter, on whatever stage.
        float8: layers that multiply in 8 bits.
        spares: from which stages are rebuilt when blocks are moved, ``None`` where they are not.
        recomputation: what the blocks recompute, ``None`` where nothing is.
        compression: of what they keep.
        arena: where buffers come from, ``None`` for torch's allocator.
    """

    layout: Layout
    names: ModuleNames
    parameters: list[LogicalParameter]
    plan: StagePlan | None
    cut: RankCut | None
    zero: ZeroUnits | None
    streams: RandomStreams | None
    stages: dict[str, tuple[int, ...]]
    choice: PlanChoice = field(default_factory=PlanChoice)
    blueprints: tuple[Blueprint, ...] = ()
    deferral: Deferral | None = None
    config: ParallelConfig = field(default_factory=ParallelConfig)
    is_cut: bool = False
    spares: Spares | None = None
    float8: Fp8Layers | None = None
    recomputation: Recomputation | None = None
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    arena: Arena | None = None

    def serves(self, schedule: str | Schedule, mesh: ParallelMesh) -> bool:
        """Whether a pipeline schedule can be run on it: the same chunks, and weight gradients that wait if need be."""
        if self.plan is None:
            return True
        return self.plan.placement == mesh.placement and (not splits_backward(schedule) or self.deferral is not None)


def prepare_module(
    module: nn.Module,
    mesh: ParallelMesh,
    config: ParallelConfig,
    *,
    device: torch.device,
    seed: int,
    keep: Mapping[str, str] | None = None,
    convert: Callable[[nn.Module], nn.Module] = lambda m: m,
    held_as: HeldAs | None = None,
    fp8: Fp8Options | None = None,
    runs: Callable[[nn.Module], Sequence[Run] | str] = lambda m: "there are no samples",
    load_from: Mapping[str | None, Path] | None = None,
    load_except: Sequence[str] = (),
    trial: Callable[[nn.Module], Any] | None = None,
    dtype: str = "fp32",
    patience: float = 120.0,
    movable: bool = False,
    compression: CompressionConfig | None = None,
) -> PreparedModule:
    """Cut, shard and place ``module`` in place. All ranks call it with the same (whole) module.

    Args:
        module: real values or the meta device, or a mixture.
        mesh, config: the ranks and the options; no schedule is ``"auto"`` any more.
        device: where this rank computes.
        seed: of the initialisation of meta parameters that have no seed of their own.
        keep: the pipeline cut's placements where registration order guesses wrong.
        convert: the precision plugin's ``convert_module``.
        held_as: what the module is between steps; by default what ``convert`` makes of it.
        fp8: which linear layers multiply in 8 bits.
        runs: of the module's own step on a few samples, for the chooser of a sharding plan, or why there are none.
        load_from, load_except: files that values come from; see
            :func:`~lightning_megapar.checkpoint.hugging_face.reading.plan_reading`.
        trial: runs one step of the user on a module, to see what it uses before the cut.
        dtype: of matrix products, for prices.
        patience: seconds that the choice of a sharding plan may take.
        movable: whether blocks may change their stage later on.
        compression: of what blocks keep for the backward.

    Raises:
        CheckpointError: a file that cannot be read to its end.
        ConfigError: what cannot be cut or sharded, naming the setting and the nearest valid values.
    """
    names = ModuleNames.record(module)
    choice = choose_plan(
        module,
        config.sharding_plan,
        mesh.size("tensor"),
        runs=runs,
        alone=lambda whole, shorten, planned: stand_alone(
            whole, _stack_of(whole) if shorten else None, {one.name: str(one.style) for one in planned}
        ),
        share=from_rank_zero,
        is_first=mesh.rank == 0,
        pricing=_pricing(config, mesh, dtype),
        patience=patience,
    )
    assignments = choice.assignments
    by_plan = any(one.style.name != "replicate" for one in assignments)
    is_cut = mesh.size("tensor") > 1 and (by_plan or any(isinstance(part, ParallelLayer) for part in module.modules()))
    if assignments and config.sequence_parallel:
        raise ConfigError(
            "sequence_parallel=True needs a model built from lightning_megapar.layers; "
            f"{assignments[0].path} is sharded by a plan ({assignments[0].why}). Valid value: false"
        )
    float8 = (
        None if fp8 is None else Fp8Layers.choose(module, fp8, stack_blocks(module, config.pipeline_blocks), device)
    )
    blueprints = record_blueprints(module)
    readings = plan_reading(module, names, blueprints, load_from or {}, load_except)
    loaded = frozenset().union(*(reading.names for reading in readings))
    pipeline = mesh.size("pipeline")
    plan = cut = None
    if pipeline > 1:
        named: dict[str, Any] = {"stack": config.pipeline_blocks, "split": config.pipeline_split}
        survey = None if trial is None else _survey(module, pipeline * config.chunks, trial, convert, named)
        by = config.pipeline_balance_by
        if by == "flops" and survey is None and config.pipeline_split is None:
            raise ConfigError(
                "pipeline_balance_by='flops' needs a run of the step on the first batch, which could not be made here; "
                "valid: 'parameters', or pipeline_split=[...]"
            )
        plan = plan_stages(module, mesh.placement, keep=keep, survey=survey, by=by, **named)
    if mesh.layout.world_size > 1:
        take_values_of_rank_zero(module, device, loaded)
    compression = compression or CompressionConfig()
    refuse_blocks(module, config, compression, plan)
    spares = Spares.record(module, plan) if movable and plan is not None else None
    if plan is not None:
        cut = RankCut(module, plan, mesh.placement[mesh.coordinate("pipeline")], device)
    deferral = None
    if cut is not None and config.splits_backward:
        deferral = Deferral()
        deferral.connect(module)
    if float8 is not None:
        float8.connect(module)
    tensor = mesh.submesh("tensor")
    shard_module(module, tensor, config.sequence_parallel and mesh.size("tensor") > 1)
    if assignments and tensor is not None:
        apply_assignments(module, assignments, TensorRanks(tensor))
    if float8 is not None:
        float8.settle(module)
    initialise_by_name(module, seed, device=device, aliases=names.tied, blueprints=blueprints, loaded=loaded)
    fill_module(readings, local_state(module, names))
    module.to(device)
    (convert if held_as is None else held_as.convert)(module)
    _refuse_meta(module)
    streams = None
    if mesh.layout.world_size > 1:
        streams = RandomStreams(seed, mesh.coordinate("data"), keyed_blocks(module, cut, plan))
    zero = None
    sharded: set[str] = set()
    data = mesh.sharding_mesh()
    group = mesh.group("data")
    if config.zero_stage > 0 and data is not None and group is not None:
        chunks = [list(chunk.local_modules.values()) for chunk in cut.chunks] if cut else ()
        zero = ZeroUnits(
            module,
            _blocks(module, plan),
            data,
            group,
            chunks,
            stage=config.zero_stage,
            offload=config.offload_optimizer,
            mixed_precision=None if held_as is None else held_as.gathered,
        )
        managed = zero.parameter_ids()
        sharded = {
            names.canonical[name]
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if id(parameter) in managed
        }
    if cut is not None:
        cut.working_dtype = None if held_as is None else held_as.working_dtype
        cut.install_hooks()
    parameters, stages = recorded_parameters(module, names, mesh, sharded)
    arena = made_arena(config, device)
    return PreparedModule(
        mesh.layout,
        names,
        parameters,
        plan,
        cut,
        zero,
        streams,
        stages,
        choice,
        blueprints,
        deferral,
        config,
        is_cut,
        spares,
        float8,
        keep_activations(module, config, compression, plan, cut, deferral, device, arena),
        compression,
        arena,
    )


def recorded_parameters(
    module: nn.Module,
    names: ModuleNames,
    mesh: ParallelMesh,
    data_sharded: Collection[str] = (),
    partial: Iterable[str] = (),
) -> tuple[list[LogicalParameter], dict[str, tuple[int, ...]]]:
    """The logical parameters of this rank, and which stages hold each of the model's; collective over the stages.

    Args:
        module: this rank's share.
        names: of the whole module.
        mesh: the ranks.
        data_sharded: names of those that FSDP2 manages.
        partial: names of those whose gradients are addends over the tensor ranks although no layer says so.
    """
    stages = _stages_of(module, names, mesh)
    addends = partial_parameter_names(module, names) | set(partial)
    return collect_parameters(module, names, stages, addends, set(data_sharded)), stages


def keyed_blocks(module: nn.Module, cut: RankCut | None, plan: StagePlan | None) -> list[list[nn.Module]]:
    """What each block is on this rank, for :class:`RandomStreams`; nothing where nothing is dropped."""
    if not uses_dropout(module):
        return []
    return [cut.places_of(name) for name in cut.plan.blocks] if cut else [[b] for b in _blocks(module, plan)]


def _pricing(config: ParallelConfig, mesh: ParallelMesh, dtype: str) -> Pricing | None:
    cluster = given_cluster(config.cluster)
    return None if cluster is None else Pricing(cluster, mesh.size("tensor"), dtype)


def _stack_of(module: nn.Module) -> str | None:
    stacks = largest_stacks(module)
    return stacks[0] if stacks else None


def check_module(
    module: nn.Module,
    layout: Layout,
    config: ParallelConfig,
    *,
    keep: Mapping[str, str] | None = None,
    load_from: Mapping[str | None, Path] | None = None,
    load_except: Sequence[str] = (),
) -> None:
    """Refuse what :func:`prepare_module` would refuse of names, stages and plans, before any rank exists.

    Args:
        module: whole, not changed; on the meta device it costs nothing.
        layout: resolved degrees.
        config, keep, load_from, load_except: as for :func:`prepare_module`.

    Raises:
        ConfigError: naming the setting and the nearest valid values.
    """
    names = ModuleNames.record(module)
    plan_reading(module, names, record_blueprints(module), load_from or {}, load_except)
    check_written_plan(module, config.sharding_plan, layout.tensor)
    if layout.pipeline > 1:
        if config.pipeline_schedule == AUTO:
            choice = choose_for(module, config, layout, keep=keep)
            config = settled(config, choice.name, choice.num_chunks)
        placement = placement_of(cast("str | Schedule", config.pipeline_schedule), layout.pipeline, config.chunks)
        plan_stages(module, placement, stack=config.pipeline_blocks, split=config.pipeline_split, keep=keep)


def _survey(
    module: nn.Module,
    num_stages: int,
    trial: Callable[[nn.Module], Any],
    convert: Callable[[nn.Module], nn.Module],
    named: Mapping[str, Any],
) -> Survey | None:
    """When a run of the step uses which module: the first rank's findings, on every rank."""
    path, blocks = blocks_of(module, num_stages, **named)
    box = [survey_module(module, trial, blocks, outside_of(module, path), convert)]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def stack_blocks(module: nn.Module, path: str | None) -> list[nn.Module]:
    """The blocks of a whole module's stack: of the one that is named, else of the largest; none without one."""
    stacks = [path] if path else largest_stacks(module)
    return list(module.get_submodule(stacks[0]).children()) if stacks else []


def _blocks(module: nn.Module, plan: StagePlan | None) -> list[nn.Module]:
    """The units that FSDP2 shards one by one: the stack's blocks when there is a stack at all."""
    if plan is not None:
        return list(dict.fromkeys(module.get_submodule(name) for name in plan.blocks))
    return stack_blocks(module, None)


def _refuse_meta(module: nn.Module) -> None:
    left = [name for name, p in module.named_parameters() if p.is_meta]
    if left:
        raise ConfigError(f"parameters are still on the meta device after initialisation: {left[:5]}")


def _stages_of(module: nn.Module, names: ModuleNames, mesh: ParallelMesh) -> dict[str, tuple[int, ...]]:
    """Stages holding each parameter; the union of the stages must be the whole module."""
    held = {names.canonical[name] for name, _ in module.named_parameters(remove_duplicate=False)}
    if mesh.size("pipeline") == 1:
        everyone: list[Any] = [sorted(held)]
    else:
        everyone = [None] * mesh.size("pipeline")
        dist.all_gather_object(everyone, sorted(held), group=mesh.group("pipeline"))
    stages: dict[str, list[int]] = {}
    for stage, found in enumerate(everyone):
        for name in found:
            stages.setdefault(name, []).append(stage)
    lost = [name for name in names.parameters if name not in stages]
    if lost:
        raise ConfigError(f"no pipeline stage holds {lost[:5]}: the cut would drop them")
    return {name: tuple(found) for name, found in stages.items()}


def local_state(module: nn.Module, names: ModuleNames) -> dict[str, Any]:
    """This rank's part of the whole module's ``state_dict``, tied values once under their canonical name."""
    return {names.canonical.get(key, key): value for key, value in placed_state(module, names).items()}


def placed_state(module: nn.Module, names: ModuleNames) -> dict[str, Any]:
    """``module.state_dict()``, in which pieces of parameters that a plan has cut know their global place."""
    shards = shards_by_name(module, names)
    return {
        key: IndexedTensor(value, shard) if (shard := shards.get(names.canonical.get(key, key))) is not None else value
        for key, value in module.state_dict().items()
    }
