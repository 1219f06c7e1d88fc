"""Which stage holds what: the stack of blocks to cut, its ranges, and a place for everything beside it. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import nn

from lightning_megapar.config import ConfigError, nearest_name
from lightning_megapar.pipeline.cutting.survey import Survey
from lightning_megapar.pipeline.planning.partition import given_split, partition
from lightning_megapar.pipeline.schedules.data import loop_placement

PLACES = ("first", "last", "all")


@dataclass(frozen=True)
class StagePlan:
    """Where everything lives. The same on every rank.

    Args:
        stack: dotted name of the stack of blocks.
        ranges: block range ``(start, stop)`` per (virtual) stage.
        costs: parameters per block.
        outside: dotted name of each outside module with parameters -> ``"first"``, ``"last"`` or ``"all"``.
        before, after: parameters that run before and after the stack.
        blocks: dotted name of each block, in order.
        beside: for each block, dotted names of the modules of equally long lists that run along with it.
        placement: for each rank of the pipeline the (virtual) stage of each of its chunks.
    """

    stack: str
    ranges: tuple[tuple[int, int], ...]
    costs: tuple[int, ...]
    outside: Mapping[str, str]
    before: int
    after: int
    blocks: tuple[str, ...] = ()
    beside: tuple[tuple[str, ...], ...] = ()
    placement: tuple[tuple[int, ...], ...] = ()

    def rows(self) -> list[tuple[str, str, str]]:
        """(stage, blocks, parameters) for a table."""
        rows = []
        for rank, chunks in enumerate(self.placement):
            held, total = [], 0
            for stage in chunks:
                start, stop = self.ranges[stage]
                held.append(f"{self.stack}[{start}:{stop}]")
                total += sum(self.costs[start:stop])
                total += self.before if stage == 0 else 0
                total += self.after if stage == len(self.ranges) - 1 else 0
            rows.append((str(rank), ", ".join(held), f"{total:,}"))
        return rows

    def moves_to(self, ranges: tuple[tuple[int, int], ...]) -> list[tuple[str, int, int]]:
        """``(name, from, to)`` of modules whose pipeline rank is another one under other ranges, in order."""
        rank_of = {k: rank for rank, row in enumerate(self.placement) for k in row}
        old, new = self.stage_of(), replace(self, ranges=ranges).stage_of()
        places = ((name, rank_of[old[name]], rank_of[new[name]]) for name in old)
        return [(name, source, target) for name, source, target in places if source != target]

    def stage_of(self) -> dict[str, int]:
        """Stage of every module that lives on one stage only: blocks, what runs along with them, and the outside."""
        found = {}
        for stage, (start, stop) in enumerate(self.ranges):
            for index in range(start, stop):
                found[self.blocks[index]] = stage
                found.update(dict.fromkeys(self.beside[index], stage))
        ends = {"first": 0, "last": len(self.ranges) - 1}
        return found | {name: ends[place] for name, place in self.outside.items() if place != "all"}


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def largest_stacks(module: nn.Module) -> list[str]:
    """Dotted names of the ``ModuleList``/``Sequential`` with the most parameters: mostly one, none without a stack."""
    sizes = {path: count(child) for path, child in _containers(module, (nn.ModuleList, nn.Sequential)).items()}
    best = [path for path, size in sizes.items() if size == max(sizes.values())]
    # Of nested stacks with the same parameters the inner one is the stack of blocks.
    return [path for path in best if not any(o.startswith(f"{path}." if path else "") for o in best if o != path)]


def stacks_of(module: nn.Module) -> dict[str, nn.Module]:
    """Every ``ModuleList``, ``Sequential`` and ``ModuleDict`` of at least two modules, by dotted name."""
    return _containers(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))


def find_stack(module: nn.Module, name: str | None = None) -> tuple[str, nn.Module]:
    """The stack to cut: the named one (a ``ModuleDict`` as well), else the ``ModuleList``/``Sequential`` with the most
    parameters.

    Raises:
        ConfigError: when there is none, when two are equally large, or the name is not one (candidates are listed).
    """
    if name is not None:
        # A ModuleDict is rarely a stack (more often it names a model's parts): only when the user says so.
        candidates = _containers(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        if name not in candidates:
            near = nearest_name(name, candidates)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"pipeline_blocks={name!r} is not a stack of blocks{hint} (stacks: {sorted(candidates)})")
        return name, candidates[name]
    best = largest_stacks(module)
    if not best:
        seen = ", ".join(
            f"{path!r} ({len(child)})"
            for path, child in module.named_modules()
            if isinstance(child, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        )
        raise ConfigError(
            "pipeline_parallel_size > 1 needs a stack of blocks (an nn.ModuleList or nn.Sequential of at least two "
            f"modules with parameters, or an nn.ModuleDict named by pipeline_blocks); {type(module).__name__} has none "
            f"(containers and their lengths: {seen or 'none'})"
        )
    stacks: list[Any] = [module.get_submodule(path) for path in best]
    owners = {path.rpartition(".")[0] for path in best}
    # Lists side by side in one module may run together, item by item.
    if len(best) > 1 and (len(owners) > 1 or len({len(stack) for stack in stacks}) > 1):
        number = "two" if len(best) == 2 else str(len(best))
        raise ConfigError(
            f"{number} stacks of blocks are equally large ({count(stacks[0]):,} parameters): "
            f"{' and '.join(map(repr, best))}. Say which one to cut: "
            f"{' or '.join(f'pipeline_blocks={path!r}' for path in best)}"
        )
    return best[0], stacks[0]


def _containers(module: nn.Module, kinds: tuple[type, ...]) -> dict[str, nn.Module]:
    """Containers of at least two modules, with parameters, by dotted name."""
    found: dict[str, Any] = {path: child for path, child in module.named_modules() if isinstance(child, kinds)}
    return {path: child for path, child in found.items() if len(child) >= 2 and count(child) > 0}


def _expand(module: nn.Module, names: Sequence[str], num_stages: int) -> list[str]:
    """Open Sequentials among the blocks (which only call their children in turn) until the stages can be balanced."""
    names = list(names)
    while True:
        costs = [count(module.get_submodule(name)) for name in names]
        share = sum(costs) / num_stages
        order = sorted(range(len(names)), key=lambda i: -costs[i])
        if len(names) >= num_stages:
            order = [i for i in order if costs[i] > 1.25 * share]
        for index in order:
            block = module.get_submodule(names[index])
            if type(block) is nn.Sequential and sum(count(child) > 0 for child in block) >= 2:
                names[index : index + 1] = [f"{names[index]}.{child}" for child, _ in block.named_children()]
                break
        else:
            return names


def blocks_of(
    module: nn.Module, num_stages: int, *, stack: str | None = None, split: tuple[int, ...] | None = None
) -> tuple[str, list[str]]:
    """Dotted names of the stack to cut and of its blocks.

    Raises:
        ConfigError: see :func:`find_stack`; also for a stack whose items are not called as a whole.
    """
    path, blocks = find_stack(module, stack)
    for name, block in blocks._modules.items():  # a block that is there twice counts twice
        if isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            raise ConfigError(
                f"pipeline_blocks={path!r} cannot be cut: its block {name!r} is an nn.{type(block).__name__}, which is "
                "not called as a whole; make the block a module with a forward, or name another stack"
            )
    names = [f"{path}.{name}" if path else name for name in blocks._modules]
    if type(blocks) is nn.Sequential and split is None:
        names = _expand(module, names, num_stages)
    return path, names


def outside_of(module: nn.Module, path: str, survey: Survey | None = None) -> dict[str, str]:
    """Modules with parameters beside the path to the stack -> ``"first"`` or ``"last"`` by registration order.

    What is not called as a whole (lists of modules; with a survey, whatever was not) is listed by its parts.
    """
    outside: dict[str, str] = {}

    def add(full: str, child: nn.Module, place: str) -> None:
        if next(child.parameters(), None) is None:
            return
        apart = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if survey is not None and full not in survey.called:
            apart = apart or any(name.startswith(f"{full}.") for name in survey.called)
        if not apart:
            outside[full] = place
            return
        for key, part in child.named_children():
            add(f"{full}.{key}", part, place)

    parts = path.split(".") if path else []
    for depth in range(len(parts)):
        owner_path = ".".join(parts[:depth])
        passed = False
        for child_name, child in module.get_submodule(owner_path).named_children():
            if child_name == parts[depth]:
                passed = True
            else:
                add(f"{owner_path}.{child_name}" if owner_path else child_name, child, "last" if passed else "first")
    return outside


def _refuse_calls(path: str, names: Sequence[str], survey: Survey) -> None:
    """A stack that the step was seen to walk in a way that has no stages."""
    calls = survey.calls
    if not calls:
        raise ConfigError(
            f"the step never called the pipelined stack {path!r}; name the one that it calls (pipeline_blocks=...)"
        )
    passes = calls.count(calls[0])
    if passes > 1:
        raise ConfigError(
            f"the pipelined stack {path!r} was called {passes} times in one step; under pipeline_parallel_size > 1 a "
            "step may call it once (use pipeline_parallel_size=1 for this module, or name another stack by "
            "pipeline_blocks)"
        )
    late = next((b for a, b in pairwise(calls) if b <= a), None)
    if late is not None:
        raise ConfigError(
            f"block {names[late]!r} of the pipelined stack {path!r} is called after its successors, or twice; under "
            "pipeline_parallel_size > 1 a step must call the blocks in order (name another stack by pipeline_blocks, "
            "or use pipeline_parallel_size=1 for this module)"
        )


def _seen_place(survey: Survey, name: str) -> str | None:
    """Where a run of the step showed a module to be needed.

    Every stage runs the whole step, and a stand-in answers for the module, not for its parts. What the step calls both
    as a whole and by a part of it is therefore kept everywhere, unless no stage but the last gets there.
    """
    place = survey.place(name)
    by_parts = any(other.startswith(f"{name}.") for other in survey.called)
    return "all" if by_parts and place == "first" else place


def plan_stages(
    module: nn.Module,
    pipeline: int | Sequence[Sequence[int]],
    *,
    stack: str | None = None,
    split: tuple[int, ...] | None = None,
    keep: Mapping[str, str] | None = None,
    survey: Survey | None = None,
    by: str = "parameters",
) -> StagePlan:
    """Decide which stage holds what.

    Args:
        module: the whole module, real or on the meta device.
        pipeline: its size, or for each rank the virtual stage of each of its chunks.
        stack: dotted name of the stack, ``None`` to find it.
        split: blocks per (virtual) stage, ``None`` to balance costs.
        keep: outside module name -> ``"first"``, ``"last"`` or ``"all"``; goes before everything else.
        survey: where a run of the step was seen to use each outside module; without one, registration order decides.
        by: what a block costs: its ``"parameters"``, or the ``"flops"`` that the survey counted (without a survey
            parameters as well, so that a module can be checked before any run).

    Raises:
        ConfigError: fewer blocks than stages, a split that does not add up, unknown names or places, a stack that the
            step was seen to use in a way that cannot be cut.
    """
    placement = loop_placement(pipeline, 1) if isinstance(pipeline, int) else tuple(map(tuple, pipeline))
    num_stages = sum(map(len, placement))
    path, names = blocks_of(module, num_stages, stack=stack, split=split)
    _refuse_layer_drop(module, path)
    if survey is not None:
        _refuse_calls(path, names, survey)
    beside = _beside(module, path, len(names), keep or {}, survey)
    taken = {name for group in beside for name in group}
    outside = {}
    for name, place in outside_of(module, path, survey).items():
        if name not in taken:
            outside[name] = (_seen_place(survey, name) if survey is not None else None) or place
    for name, place in (keep or {}).items():
        if place not in PLACES:
            raise ConfigError(f"pipeline_keep[{name!r}]={place!r} is not one of {', '.join(PLACES)}")
        under = [full for full in outside if full == name or full.startswith(f"{name}.")]
        if not under:
            near = nearest_name(name, outside)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"pipeline_keep names {name!r}, not a module beside the stack{hint}: {sorted(outside)}")
        outside.update(dict.fromkeys(under, place))
    costs = [sum(count(module.get_submodule(n)) for n in (name, *group)) for name, group in zip(names, beside)]
    cost_of = {name: count(module.get_submodule(name)) for name in outside}
    before = sum(cost for name, cost in cost_of.items() if outside[name] != "last")
    after = sum(cost for name, cost in cost_of.items() if outside[name] != "first")
    if split is None:
        if len(costs) < num_stages:
            chunks = f" x pipeline_chunks={len(placement[0])}" if len(placement[0]) > 1 else ""
            raise ConfigError(
                f"pipeline_parallel_size={len(placement)}{chunks} but the stack has only {len(costs)} blocks; "
                f"valid values: 1 to {max(1, len(costs) // len(placement[0]))}"
            )
        loads, ends = [float(cost) for cost in costs], (float(before), float(after))
        if by == "flops" and survey is not None:
            loads, ends = _flops_of(survey, path)
        ranges = partition(loads, placement, *ends).ranges
    else:
        if len(split) != num_stages:
            raise ConfigError(f"pipeline_split={split} names {len(split)} stages, pipeline_parallel_size={num_stages}")
        ranges = given_split(split, len(costs))
    return StagePlan(path, ranges, tuple(costs), outside, before, after, tuple(names), beside, placement)


def _flops_of(survey: Survey, path: str) -> tuple[list[float], tuple[float, float]]:
    """Of each block, and of what runs before and after them."""
    if not survey.complete or not sum(survey.block_flops):
        why = "did not get to its end" if not survey.complete else "has no operation in its blocks that torch counts"
        raise ConfigError(
            f"pipeline_balance_by='flops': a trial run of the step {why}, so that the blocks of {path!r} have no "
            "costs; valid: pipeline_balance_by='parameters', or pipeline_split=[...]"
        )
    return list(survey.block_flops), (survey.flops_before, survey.flops_after)


def _refuse_layer_drop(module: nn.Module, path: str) -> None:
    """Blocks that are left out at random would be so on one stage and not on another."""
    parts = path.split(".") if path else []
    owners = [".".join(parts[:depth]) for depth in range(len(parts))]
    for owner in owners:
        for name, value in vars(module.get_submodule(owner)).items():
            if name.replace("_", "").endswith("layerdrop") and isinstance(value, float) and value > 0:
                full = f"{owner}.{name}" if owner else name
                raise ConfigError(
                    f"{full}={value} leaves out blocks of the pipelined stack {path!r} at random, differently on every "
                    "stage; set it to 0.0, or use pipeline_parallel_size=1"
                )


def _beside(
    module: nn.Module, path: str, length: int, placed: Mapping[str, str], survey: Survey | None
) -> tuple[tuple[str, ...], ...]:
    """Equally long lists of modules next to the stack: item ``i`` of each is taken to run with block ``i``."""
    owner_path, _, own = path.rpartition(".")
    groups: list[list[str]] = [[] for _ in range(length)]
    for name, child in module.get_submodule(owner_path).named_children():
        if name == own or not isinstance(child, nn.ModuleList) or len(child) != length or count(child) == 0:
            continue
        full = f"{owner_path}.{name}" if owner_path else name
        if full in placed or (survey is not None and survey.place(full) in ("first", "last")):
            continue  # runs before or after all blocks, whatever its length
        for index, (key, _) in enumerate(child.named_children()):
            groups[index].append(f"{full}.{key}")
    return tuple(map(tuple, groups))
