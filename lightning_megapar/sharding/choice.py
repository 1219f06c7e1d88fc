"""Where a module's sharding plan comes from, and the plan as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lightning_megapar.config import ConfigError
from lightning_megapar.layers.base import ParallelLayer
from lightning_megapar.sharding.plan import Assignment, ShardingPlan, resolve, starred
from lightning_megapar.sharding.transformers_plan import transformers_plan
from lightning_megapar.shards import own_shards


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
        return ShardingPlan.read(setting)
    raise ConfigError(
        f"sharding_plan={setting!r}: expected 'auto', 'off', a mapping of module-name patterns to styles, or the "
        "path of a YAML file with one"
    )


def choose_assignments(module: nn.Module, setting: Any, size: int) -> list[Assignment]:
    """What is sharded how; the same on every rank. First hit wins: the setting, the module's own, transformers'.

    Args:
        module: whole, real or meta.
        setting: the strategy's ``sharding_plan``.
        size: tensor ranks; with one nothing is sharded.

    Raises:
        ConfigError: from a plan that somebody wrote: patterns that match nothing, styles that do not fit.
    """
    if size == 1:
        return []
    plan = given_plan(setting)
    if plan is not None:
        return resolve(plan, module, strict=True)
    own = getattr(module, "sharding_plan", None)
    if callable(own):
        mapping = own()
        plan = ShardingPlan.from_mapping(mapping, f"{type(module).__name__}.sharding_plan()")
        return resolve(plan, module, strict=True)
    return resolve(transformers_plan(module), module, strict=False)


@dataclass(frozen=True)
class PlanRow:
    """A line of the table: modules that are alike in all blocks.

    Args:
        module: dotted name with ``*`` for numbers.
        count: how many of them this rank holds.
        style: what is done.
        why: where that comes from.
        share: of the parameters of the whole module, held in pieces here.
    """

    module: str
    count: int
    style: str
    why: str
    share: float


def plan_rows(module: nn.Module, assignments: list[Assignment]) -> list[PlanRow]:
    """The plan of what this rank holds, and a last row for what stays whole.

    Args:
        module: after it was sharded.
        assignments: what was asked for.
    """
    held = dict(module.named_modules())
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    total = cut = 0
    for path, child in held.items():
        shards = own_shards(child)
        for name, parameter in child._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if name in shards:
                numel = 1
                for length in shards[name].shape:
                    numel *= length
                cut += numel
                sizes[".".join(filter(None, (path, name)))] = numel
            else:
                numel = parameter.numel()
                if isinstance(child, ParallelLayer):
                    cut += numel
            total += numel
    rows: dict[tuple[str, str], list[Assignment]] = {}
    for one in assignments:
        if isinstance(held.get(one.path), one.kind):
            rows.setdefault((starred(one.name), str(one.style)), []).append(one)
    table = []
    for (name, style), same in rows.items():
        numel = sum(
            sizes.get(one.name, 0)
            if one.parameter
            else sum(sizes.get(f"{one.path}.{n}", 0) for n in held[one.path]._parameters)
            for one in same
        )
        table.append(PlanRow(name, len(same), style, same[0].why, numel / total if total else 0.0))
    table.append(PlanRow("(whole on every rank)", 0, "replicate", "nothing cuts it", 1 - cut / total if total else 0.0))
    return table


def print_plan(module: nn.Module, assignments: list[Assignment]) -> None:
    """The plan as a table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="sharding over the tensor ranks")
    for heading, justify in (("module", "left"), ("number", "right"), ("style", "left"), ("why", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("parameters", justify="right")
    for row in plan_rows(module, assignments):
        table.add_row(row.module, str(row.count or ""), row.style, row.why, f"{row.share:.1%}")
    Console().print(table)
