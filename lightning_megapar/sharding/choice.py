"""Where a module's sharding plan comes from, and the plan as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from lightning_megapar.config import ConfigError, nearest_name
from lightning_megapar.generators import generators_kept
from lightning_megapar.layers.base import ParallelLayer
from lightning_megapar.sharding.chooser.alone import no_collectives
from lightning_megapar.sharding.chooser.choose import PATIENCE, choose
from lightning_megapar.sharding.chooser.pricing import Pricing
from lightning_megapar.sharding.chooser.trial import Run
from lightning_megapar.sharding.names import BlockNames
from lightning_megapar.sharding.plan import Assignment, ShardingPlan, resolve
from lightning_megapar.sharding.styles import is_linear
from lightning_megapar.sharding.transformers_plan import plans_are_proven, transformers_plan
from lightning_megapar.shards import own_shards

WORTH_A_TRIAL = 0.02
"""Share of the parameters that a proven plan must leave for the chooser to be asked: a trial takes memory and time."""
JUDGED_WHOLE = 5_000_000
"""Parameters up to which a module is tried with all its blocks."""
LARGEST_TRIAL = 16e9
"""Bytes of host memory that the copies of a trial may take, all ranks together."""


def given_plan(setting: Any) -> ShardingPlan | None:
    """The plan that the strategy's ``sharding_plan`` gives: ``None`` for ``"auto"``, an empty one for ``"off"``.

    Raises:
        ConfigError: neither a word, nor a mapping, nor a readable YAML file of one.
    """
    if setting is None or setting == "auto":
        return None
    if setting == "off":
        return ShardingPlan()
    if isinstance(setting, Mapping):
        return ShardingPlan.from_mapping(setting)
    if isinstance(setting, (str, Path)):
        near = nearest_name(str(setting), ("auto", "off"))
        if near is not None and not Path(setting).exists():
            raise ConfigError(f"sharding_plan={str(setting)!r} is neither a word nor a file; did you mean {near!r}?")
        return ShardingPlan.read(setting)
    raise ConfigError(
        f"sharding_plan={setting!r}: expected 'auto', 'off', a mapping of module-name patterns to styles, or the "
        "path of a YAML file with one"
    )


@dataclass(frozen=True)
class PlanChoice:
    """What is sharded how, the same on every rank.

    Args:
        assignments: of the whole module.
        notes: what was tried and stays whole, and why, for the terminal.
        plan: the rules that they follow from.
        alike: name of each module or parameter that is assigned something -> the pattern of all that are like it,
            seen on the whole module.
    """

    assignments: list[Assignment] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    plan: ShardingPlan = field(default_factory=ShardingPlan)
    alike: Mapping[str, str] = field(default_factory=dict)


def choose_plan(
    module: nn.Module,
    setting: Any,
    size: int,
    *,
    runs: Callable[[nn.Module], Sequence[Run] | str],
    alone: Callable[[nn.Module, bool], nn.Module],
    share: Callable[[Any], Any],
    is_first: bool,
    pricing: Pricing | None = None,
    patience: float = PATIENCE,
) -> PlanChoice:
    """First hit wins: the setting, the module's own plan, transformers' with the chooser for what it leaves.

    Args:
        module: whole, real or meta.
        setting: the strategy's ``sharding_plan``.
        size: tensor ranks; with one nothing is sharded.
        runs: of the module's own step on a few samples, or why there are none; called on every rank.
        alone: a copy of the module that can be run by itself, with a shortened stack of blocks or the whole one.
        share: gives every rank the first rank's object.
        is_first: whether this is the rank that chooses.
        pricing: what layouts cost on the cluster at hand.
        patience: seconds for trials, during which the other ranks wait in a collective.

    Raises:
        ConfigError: from a plan that somebody wrote: patterns that match nothing, styles that do not fit.
    """
    if size == 1:
        return PlanChoice()
    choice = _first_hit(module, setting, size, runs, alone, share, is_first, pricing, patience)
    star = BlockNames(dict(module.named_modules())).star
    return replace(choice, alike={one.name: star(one.name) for one in choice.assignments})


def _first_hit(
    module: nn.Module,
    setting: Any,
    size: int,
    runs: Callable[[nn.Module], Sequence[Run] | str],
    alone: Callable[[nn.Module, bool], nn.Module],
    share: Callable[[Any], Any],
    is_first: bool,
    pricing: Pricing | None,
    patience: float,
) -> PlanChoice:
    plan = given_plan(setting)
    own = getattr(module, "sharding_plan", None)
    if plan is None and callable(own):
        plan = ShardingPlan.from_mapping(own(), f"{type(module).__name__}.sharding_plan()")
    if plan is not None:
        return PlanChoice(resolve(plan, module, strict=True), plan=plan)
    plan = transformers_plan(module)
    if not plan.rules and not has_foreign_layers(module):
        return PlanChoice()
    if plan.rules and plans_are_proven(module) and share_left(module, plan) < WORTH_A_TRIAL:
        return PlanChoice(resolve(plan, module, strict=False), plan=plan)
    trial = runs(module)
    answer: tuple[ShardingPlan, tuple[str, ...]] | None = None
    if is_first:
        with generators_kept():  # the other ranks' generators have not moved
            answer = _choose(module, plan, size, trial, alone, pricing, patience)
    plan, notes = share(answer)
    try:
        return PlanChoice(resolve(plan, module, strict=False), notes, plan)
    except ConfigError as error:  # a shortened stack was unlike the whole one
        return PlanChoice(notes=(*notes, f"{error}: what no plan names stays whole"))


def share_left(module: nn.Module, plan: ShardingPlan) -> float:
    """Share of the parameters in layers that could be cut and that no rule of the plan speaks of."""
    spoken = {one.path for one in resolve(plan, module, strict=False)}
    seen: set[int] = set()
    total = left = 0
    for path, child in module.named_modules():
        around = {path[:i] for i, letter in enumerate(path) if letter == "."} | {path}
        # A low-rank product, an expert: what is below a module that has a rule is dealt with by its author.
        dealt_with = bool(around & spoken)
        cuttable = is_linear(child) or isinstance(child, nn.Embedding)
        for parameter in child._parameters.values():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            total += parameter.numel()
            if not dealt_with and (cuttable or parameter.ndim == 3):
                left += parameter.numel()
    return left / total if total else 0.0


def has_foreign_layers(module: nn.Module) -> bool:
    """Whether there is something for the chooser: linear layers or embeddings, and no parallel layer among them."""
    children = list(module.modules())
    if any(isinstance(child, ParallelLayer) for child in children):
        return False
    return any(is_linear(child) or isinstance(child, nn.Embedding) for child in children)


def _choose(
    module: nn.Module,
    plan: ShardingPlan,
    size: int,
    runs: Sequence[Run] | str,
    alone: Callable[[nn.Module, bool], nn.Module],
    pricing: Pricing | None,
    patience: float,
) -> tuple[ShardingPlan, tuple[str, ...]]:
    if isinstance(runs, str):
        return plan, (f"{runs}: what no plan names stays whole",)
    refused = ""
    # A small module is judged as it is. The stack of a larger one is shortened, unless its step needs all of it.
    small = sum(p.numel() for p in module.parameters()) <= JUDGED_WHOLE
    for shorten in (False,) if small else (True, False):
        try:
            twin = alone(module, shorten)
            needed = sum(p.numel() for p in twin.parameters()) * 4 * (size + 2)
            if needed > LARGEST_TRIAL:
                refused = refused or f"too large to try ({needed / 1e9:.0f} GB)"
                continue
            with no_collectives():
                choice = choose(twin, size, runs, planned=plan, pricing=pricing, patience=patience)
            break
        except ConfigError as error:
            refused = refused or str(error)
        except Exception as error:  # somebody's module may not be copied, or traced: that it is not tried harms nobody
            refused = refused or f"it cannot be tried ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    else:
        return plan, (f"{refused}: what no plan names stays whole",)
    notes = [f"{one.kind}: {one.how} ({one.reason})" for one in choice.found if one.how in ("whole", "dropped")]
    return choice.plan, tuple(notes)


@dataclass(frozen=True)
class StagePart:
    """What one pipeline stage holds of a plan; small and plain, so that it travels to the rank that prints.

    Args:
        sizes: canonical name of each parameter -> elements of the whole of it.
        cut: canonical names of those that the tensor ranks hold in pieces.
        rows: number of an assignment whose module is here -> canonical names of the parameters that it cuts.
    """

    sizes: Mapping[str, int]
    cut: frozenset[str]
    rows: Mapping[int, tuple[str, ...]]


def stage_part(
    module: nn.Module, assignments: Sequence[Assignment], canonical: Mapping[str, str] | None = None
) -> StagePart:
    """What this rank's stage holds.

    Args:
        module: after it was sharded.
        assignments: what was asked for, of the whole module.
        canonical: name -> canonical name (tied parameters may lie on different stages); ``None``: each its own.
    """
    held = dict(module.named_modules())
    first: dict[int, str] = {}
    sizes: dict[str, int] = {}
    cut: dict[str, str] = {}
    loose: set[str] = set()
    for path, child in held.items():
        shards = own_shards(child)
        for name, parameter in child._parameters.items():
            if parameter is None:
                continue
            full = ".".join(filter(None, (path, name)))
            key = (canonical or {}).get(full) or first.setdefault(id(parameter), full)
            if key in sizes:
                continue
            sizes[key] = prod(shards[name].shape) if name in shards else parameter.numel()
            if name in shards:
                cut[full] = key
            elif isinstance(child, ParallelLayer):
                loose.add(key)
    rows = {}
    for number, one in enumerate(assignments):
        child = held.get(one.path)
        if child is not None and isinstance(child, one.kind):
            own = [one.name] if one.parameter else [f"{one.path}.{name}" for name in child._parameters]
            rows[number] = tuple(cut[name] for name in own if name in cut)
    return StagePart(sizes, frozenset(cut.values()) | loose, rows)


@dataclass(frozen=True)
class PlanRow:
    """A line of the table: modules that are alike in all blocks.

    Args:
        module: dotted name with ``*`` for numbers.
        count: how many of them there are, over all stages.
        style: what is done.
        why: where that comes from.
        share: of the parameters of the whole module, that is in pieces here.
        stages: pipeline stages that hold them.
    """

    module: str
    count: int
    style: str
    why: str
    share: float
    stages: tuple[int, ...] = ()


def plan_rows(choice: PlanChoice, parts: Sequence[StagePart]) -> list[PlanRow]:
    """The plan of the whole module, and a last row for what stays whole.

    Args:
        choice: what was asked for.
        parts: of every pipeline stage, in order.
    """
    sizes = {name: size for part in parts for name, size in part.sizes.items()}
    total = sum(sizes.values()) or 1
    in_pieces = sum(sizes[name] for name in frozenset().union(*(part.cut for part in parts)))
    rows: dict[tuple[str, str], list[int]] = {}
    for number, one in enumerate(choice.assignments):
        if any(number in part.rows for part in parts):
            rows.setdefault((choice.alike.get(one.name, one.name), str(one.style)), []).append(number)
    table = []
    counted: set[str] = set()
    for (name, style), same in rows.items():
        cut = {key for part in parts for number in same for key in part.rows.get(number, ())} - counted
        counted |= cut
        stages = tuple(stage for stage, part in enumerate(parts) if any(number in part.rows for number in same))
        share = sum(sizes[key] for key in cut) / total
        table.append(PlanRow(name, len(same), style, choice.assignments[same[0]].why, share, stages))
    table.append(PlanRow("(whole on every rank)", 0, "replicate", "nothing cuts it", 1 - in_pieces / total))
    return table


def print_plan(choice: PlanChoice, parts: Sequence[StagePart]) -> None:
    """The plan of all stages as a table on the terminal, and what stays whole with the reason."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="sharding over the tensor ranks")
    for heading, justify in (("module", "left"), ("number", "right"), ("style", "left"), ("why", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    if len(parts) > 1:
        table.add_column("stage")
    table.add_column("parameters", justify="right")
    for row in plan_rows(choice, parts):
        stages = [_ranges(row.stages)] if len(parts) > 1 else []
        table.add_row(row.module, str(row.count or ""), row.style, row.why, *stages, f"{row.share:.1%}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # names must not be cut in a log
    console.print(table)
    for note in choice.notes:
        console.print(f"sharding: {note}", markup=False, highlight=False)


def _ranges(numbers: Sequence[int]) -> str:
    """``(0, 1, 2, 5)`` as ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
