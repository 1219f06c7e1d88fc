"""``pipeline_schedule="auto"``: what a module's stages cost before anything has run, and the schedule by that.

**Time.** A layer takes as long as it has parameters; what is only looked up (embeddings) takes none. Forward, backward
of the inputs and backward of the weights take equally long, as the three matrix products of a linear layer do (Qi et
al., "Zero Bubble Pipeline Parallelism", 2023). Weight gradients that cannot wait (a convolution's) belong to the
backward of the inputs. Messages take none. With a description of the cluster times are seconds: a block's products are
one kernel of ``2 x parameters x tokens`` FLOPs on a device, and what the first block is given travels over the
pipeline's link. Attention's own products, recomputation and routing (experts count whole) are not seen.

**Memory.** In microbatches through a rank's whole share of the blocks; a chunk counts as its part. The limit is by
default what the first stage of 1F1B keeps alive: no rank then needs more than the default schedule's first one.

A pure function of the module's names and shapes and of the settings, so that every rank finds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_megapar.config import ConfigError, Layout, ParallelConfig
from lightning_megapar.layers.deferral import can_defer
from lightning_megapar.layers.embedding import VocabParallelEmbedding
from lightning_megapar.pipeline.cutting.stages import StagePlan, plan_stages
from lightning_megapar.pipeline.cutting.state import state_kept
from lightning_megapar.pipeline.cutting.survey import without_numbers
from lightning_megapar.pipeline.planning.choose import CANDIDATES, Choice, choose_schedule, per_rank, too_much
from lightning_megapar.pipeline.planning.simulate import StageCosts, simulate
from lightning_megapar.pipeline.schedules import Schedule, build_schedule, loop_placement
from lightning_megapar.planner.cluster import Cluster
from lightning_megapar.schedule_names import chunks_of, splits_backward

_LOOKED_UP = (nn.Embedding, nn.EmbeddingBag, VocabParallelEmbedding)


@dataclass(frozen=True)
class Work:
    """Parameters that a part of a module multiplies with.

    Args:
        parameters: all of them.
        deferrable: those whose gradients can be computed apart from the rest of the backward.
    """

    parameters: int = 0
    deferrable: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.parameters + other.parameters, self.deferrable + other.deferrable)


@dataclass(frozen=True)
class Given:
    """What a microbatch brings to the first block.

    Args:
        tokens: rows of its matrix products.
        nbytes: size of the tensor.
    """

    tokens: int
    nbytes: int


def choose_for(
    module: nn.Module,
    config: ParallelConfig,
    layout: Layout,
    *,
    keep: Mapping[str, str] | None = None,
    cluster: Cluster | None = None,
    given: Given | None = None,
    dtype: str = "fp32",
) -> Choice:
    """The schedule for a module's pipeline.

    Args:
        module: whole, real or on the meta device.
        config: its ``pipeline_schedule`` is ``"auto"``.
        layout: resolved degrees, several stages.
        keep: see :func:`~lightning_megapar.pipeline.cutting.stages.plan_stages`.
        cluster, given: both of them for times in seconds.
        dtype: of matrix products.

    Raises:
        ConfigError: when the module cannot be cut into that many stages, or nothing fits the memory.
    """
    plans: dict[tuple[tuple[int, ...], ...], StagePlan] = {}

    def plan_of(placement: tuple[tuple[int, ...], ...]) -> StagePlan:
        if placement not in plans:
            stack, split = config.pipeline_blocks, config.pipeline_split
            plans[placement] = plan_stages(module, placement, stack=stack, split=split, keep=keep)
        return plans[placement]

    def seconds(parameters: int) -> float:
        if cluster is None or given is None:
            return float(parameters)
        here = parameters / layout.tensor
        width = {"fp64": 8, "fp32": 4}.get(dtype, 2)
        return cluster.kernel_seconds(2 * here * given.tokens, here * width, dtype)

    least = plan_of(loop_placement(layout.pipeline, config.chunks))  # says what is wrong with the module by itself
    timed = cluster is not None and given is not None
    communication = cluster.axis_ring("pipeline", layout).send(given.nbytes) if cluster and given else 0.0
    works = [work for piece in _pieces(module, least) for work in piece]
    total = sum(seconds(work.parameters) for work in works)
    unit = 1.0 if timed else total / layout.pipeline

    def costs(schedule: Schedule) -> StageCosts:
        pieces = _pieces(module, plan_of(schedule.placement))
        forward, weight = [], []
        for piece in pieces:
            forward.append(sum(seconds(work.parameters) for work in piece) / unit if total else 1.0)
            weight.append(sum(seconds(work.deferrable) for work in piece) / unit if total else 1.0)
        inputs = [2 * whole - later for whole, later in zip(forward, weight)]

        def by_rank(values: Sequence[float]) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(values[k] for k in row) for row in schedule.placement)

        return StageCosts(by_rank(forward), by_rank(inputs), by_rank(weight), communication)

    return _choose(config, layout, costs)


def refuse_memory_limit(config: ParallelConfig, layout: Layout) -> None:
    """Refuse a limit under which no schedule can fit, whatever the module is.

    Raises:
        ConfigError: with the smallest need.
    """
    _choose(config, layout, lambda schedule: StageCosts())


def refuse_too_much(config: ParallelConfig, layout: Layout, schedule: str | Schedule, chunks: int) -> None:
    """Refuse a schedule that is given already and needs more memory than ``"auto"`` may take.

    Raises:
        ConfigError: with the need and the limit.
    """
    microbatches = config.microbatches(layout)
    if isinstance(schedule, str):
        schedule = build_schedule(schedule, layout.pipeline, microbatches, chunks)
    limit = per_rank(_limit(config, layout), layout.pipeline)
    if reason := too_much(simulate(schedule), limit):
        raise ConfigError(
            f"pipeline_memory_limit={config.pipeline_memory_limit}: the schedule {schedule.name!r}, for which the "
            f"module was already cut, {reason}; name a schedule, or build the module anew and load its checkpoint"
        )


def settled(config: ParallelConfig, schedule: Any, chunks: int | None = None) -> ParallelConfig:
    """The settings with a schedule in place of ``"auto"``.

    Args:
        config: the settings.
        schedule: a name, or a schedule.
        chunks: per rank; ``None`` for the least.
    """
    number = chunks_of(schedule)[0] if chunks is None else chunks
    return replace(config, pipeline_schedule=schedule, pipeline_chunks=number, pipeline_memory_limit=None)


def given_to(
    module: nn.Module, trial: Callable[[nn.Module], Any], block: str, convert: Callable[[nn.Module], nn.Module]
) -> Given | None:
    """What a block is given when a step runs on a copy without numbers; ``None`` when it does not get there.

    Args:
        module: the whole module; afterwards it is what it was.
        trial: runs one step on a module.
        block: dotted name.
        convert: what the precision does to a module.
    """
    found: list[Given] = []

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1:
                found.append(Given(leaf.numel() // max(1, leaf.shape[-1]), leaf.numel() * leaf.element_size()))
                return

    try:
        with state_kept(module), torch.no_grad():
            empty = without_numbers(module)
            convert(empty)
            empty.get_submodule(block).register_forward_pre_hook(look, with_kwargs=True)
            trial(empty)
    except Exception:  # whatever somebody's step raises without numbers, mostly after the first block
        pass
    return found[0] if found else None


def _choose(config: ParallelConfig, layout: Layout, costs: Callable[[Schedule], StageCosts]) -> Choice:
    limit = _limit(config, layout)
    try:
        return choose_schedule(layout.pipeline, config.microbatches(layout), costs, limit, _candidates(config))
    except ConfigError as error:
        raise ConfigError(str(error).replace("memory_limit=", "pipeline_memory_limit=", 1)) from None


def _limit(config: ParallelConfig, layout: Layout) -> float | Sequence[float]:
    """What 1F1B's first stage keeps, unless something else is said."""
    if config.pipeline_memory_limit is None:
        return float(min(layout.pipeline, config.microbatches(layout)))
    return config.pipeline_memory_limit


def _candidates(config: ParallelConfig) -> Sequence[tuple[str, int]]:
    candidates = [one for one in CANDIDATES if config.zero_stage < 3 or not splits_backward(one[0])]
    if not config.chunks_are_given:
        return candidates
    names = [name for name, _ in candidates]
    fits = {name: chunks_of(name) for name in names}
    chunks = config.chunks
    return [(name, chunks) for name in names if fits[name][0] <= chunks <= (fits[name][1] or chunks)]


def _pieces(module: nn.Module, plan: StagePlan) -> list[list[Work]]:
    """The work of each virtual stage, block by block; that of the ends with the first and the last."""
    pieces = []
    for start, stop in plan.ranges:
        groups = [(plan.blocks[index], *plan.beside[index]) for index in range(start, stop)]
        pieces.append([_work_of(module.get_submodule(name) for name in group) for group in groups])
    for name, place in plan.outside.items():
        for end, other in ((0, "last"), (-1, "first")):
            if place != other:
                pieces[end].append(_work_of([module.get_submodule(name)]))
    return pieces


def _work_of(parts: Iterable[nn.Module]) -> Work:
    seen: set[int] = set()
    work = Work()
    for part in parts:
        for layer in part.modules():
            if isinstance(layer, _LOOKED_UP):
                continue
            fresh = [p for p in layer.parameters(recurse=False) if id(p) not in seen]
            seen.update(map(id, fresh))
            number = sum(p.numel() for p in fresh)
            work += Work(number, number if can_defer(layer) else 0)
    return work
