"""The sharding plan as a table: what is cut how and why on which stage, and what stays whole and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from lightning_megapar.layers.base import ParallelLayer
from lightning_megapar.sharding.choice import PlanChoice
from lightning_megapar.sharding.names import BlockNames
from lightning_megapar.sharding.plan import Assignment
from lightning_megapar.shards import own_shards


@dataclass(frozen=True)
class StagePart:
    """What one pipeline stage holds of a plan; small and plain, so that it travels to the rank that prints.

    Args:
        sizes: canonical name of each parameter -> elements of the whole of it.
        cut: canonical names of those that the tensor ranks hold in pieces.
        rows: number of an assignment whose module is here -> canonical names of the parameters that it cuts.
        whole: starred name of modules that stay whole for a reason -> for each of them its parameters' names.
    """

    sizes: Mapping[str, int]
    cut: frozenset[str]
    rows: Mapping[int, tuple[str, ...]]
    whole: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)


def stage_part(
    module: nn.Module,
    assignments: Sequence[Assignment],
    canonical: Mapping[str, str] | None = None,
    whole: Collection[str] = (),
) -> StagePart:
    """What this rank's stage holds.

    Args:
        module: after it was sharded.
        assignments: what was asked for, of the whole module.
        canonical: name -> canonical name (tied parameters may lie on different stages); ``None``: each its own.
        whole: starred names of modules that stay whole for a reason.
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
        here = one.among(held)
        if here is not None:
            own = [here.name] if one.parameter else [f"{here.path}.{name}" for name in held[here.path]._parameters]
            rows[number] = tuple(cut[name] for name in own if name in cut)
    star = BlockNames(held).star
    named = {one.path for one in assignments}
    left: dict[str, list[tuple[str, ...]]] = {}
    for path, child in held.items():
        # What stands here for a module of another stage has no parameters.
        if path not in named and star(path) in whole and next(child.parameters(), None) is not None:
            own = [f"{path}.{n}" for n, p in child._parameters.items() if p is not None]
            if parametrize.is_parametrized(child):  # from which its weight is computed
                below: Any = child.parametrizations
                own += [f"{path}.parametrizations.{n}" for n, _ in below.named_parameters()]
            ids = [first.get(id(child.get_parameter(n[len(path) + 1 :])), n) for n in own]
            keys = ((canonical or {}).get(n, n) for n in ids)
            left.setdefault(star(path), []).append(tuple(k for k in keys if k in sizes))
    told = {name: tuple(found) for name, found in left.items()}
    return StagePart(sizes, frozenset(cut.values()) | loose, rows, told)


ITSELF = "(the module itself)"
"""How the outermost module, which has no dotted name, is called in the table."""


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
        table.append(PlanRow(name or ITSELF, len(same), style, choice.assignments[same[0]].why, share, stages))
    counted |= frozenset().union(*(part.cut for part in parts))
    rest = total - in_pieces
    for name in dict.fromkeys(name for part in parts for name in part.whole):
        stages = tuple(stage for stage, part in enumerate(parts) if name in part.whole)
        modules = [keys for part in parts for keys in part.whole.get(name, ())]
        own = {key for keys in modules for key in keys} - counted
        counted |= own
        size = sum(sizes[key] for key in own)
        rest -= size
        table.append(PlanRow(name or ITSELF, len(modules), "whole", choice.whole[name], size / total, stages))
    why = "norms, biases and what is small" if any(part.whole for part in parts) else "nothing cuts it"
    table.append(PlanRow("(whole on every rank)", 0, "replicate", why, rest / total))
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
    rows = plan_rows(choice, parts)
    in_pieces = 1.0 - sum(row.share for row in rows if row.style in ("whole", "replicate"))
    table.caption = f"{in_pieces:.1%} of the parameters are in pieces"
    for row in rows:
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
