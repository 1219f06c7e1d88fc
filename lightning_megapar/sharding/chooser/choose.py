"""The automatic chooser: finds a sharding plan for a module that has none, and proves it.

A plan is used first, the chooser for what it leaves. Layouts are hypotheses
(:mod:`~lightning_megapar.sharding.chooser.hypotheses`), tried in one process that plays all tensor ranks at the actual
size, on a copy with perturbed weights, judged by every gradient; the plan as a whole is judged again on a batch of
another shape that chose nothing. What no hypothesis fits stays whole on every rank, which is always right.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_megapar.config import ConfigError
from lightning_megapar.data_parallel.parameters import ModuleNames
from lightning_megapar.sharding.chooser.hypotheses import (
    Hypothesis,
    by_price,
    expert_modules,
    of_embeddings,
    of_experts,
    of_pair,
    owner_of,
)
from lightning_megapar.sharding.chooser.pricing import Price, Pricing
from lightning_megapar.sharding.chooser.survey import Pair, Survey, survey
from lightning_megapar.sharding.chooser.trial import Run, Verdict, gradients_of, perturb, try_assignments
from lightning_megapar.sharding.names import BlockNames
from lightning_megapar.sharding.plan import Rule, ShardingPlan, Style, resolve
from lightning_megapar.sharding.styles import is_linear, widths

TOLERANCE = 1e-4
"""Largest difference of a gradient over its largest magnitude, in float32; a wrong layout is off by 1e-2 to 1."""
SMALLEST_TABLE = 0.02
"""Share of all parameters below which an embedding stays whole: a look-up less is worth more than its rows."""
LARGEST_DOUBLE = 5_000_000
"""Parameters up to which trials are made in float64."""
PATIENCE = 120.0
"""Seconds after which what was not tried yet stays whole."""
SMALLEST_LINEAR = 256
"""Elements below which a single linear layer stays whole."""


@dataclass(frozen=True)
class Found:
    """What was chosen for one kind of layers.

    Args:
        kind: starred name of its first layer.
        how: the hypothesis, or ``"whole"``.
        trials: how many were tried.
        reason: of the last one that failed, when nothing fitted.
    """

    kind: str
    how: str
    trials: int
    reason: str = ""


@dataclass(frozen=True)
class Choice:
    """A proven plan.

    Args:
        plan: rules of a plan that was given, and of what was found.
        found: per kind of layers what was chosen.
        verdict: of the plan as a whole, on the last batch.
    """

    plan: ShardingPlan
    found: tuple[Found, ...]
    verdict: Verdict


@dataclass
class _Bench:
    """A copy of the module with perturbed weights, and what the whole one computes on each batch."""

    module: nn.Module
    size: int
    runs: Sequence[Run]
    tolerance: float
    references: list[tuple[Tensor, dict[str, Tensor]]] = field(default_factory=list)

    def judge(self, plan: ShardingPlan, batch: int = 0) -> tuple[Verdict | None, str]:
        """The verdict on a plan, and why it is none."""
        try:
            assignments = resolve(plan, self.module, strict=False)
            reference = self.references[batch]
            verdict = try_assignments(self.module, assignments, self.size, self.runs[batch], reference=reference)
        except Exception as error:  # somebody's forward may raise anything when a layout is wrong
            return None, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        if verdict.exact(self.tolerance):
            return verdict, ""
        name = max(verdict.errors, key=lambda n: verdict.errors[n], default="loss")
        return None, f"off by {verdict.worst:.1e} ({name})"


def choose(
    module: nn.Module,
    size: int,
    runs: Sequence[Run],
    *,
    planned: ShardingPlan | None = None,
    pricing: Pricing | None = None,
    tolerance: float = TOLERANCE,
    patience: float = PATIENCE,
) -> Choice:
    """Find and prove a plan.

    Args:
        module: whole and real, in float32 or float64; it is copied, and the copy's weights are perturbed.
        size: tensor ranks.
        runs: each computes a scalar loss of a module on one batch; two or more of different shapes. They must draw no
            random numbers beyond torch's global generator.
        planned: rules that are used first. One that is not exact is dropped as a whole, and the chooser does its work.
        pricing: of layouts in seconds: of those that are exact the cheapest is taken, which may be to cut nothing. By
            default what can be cut is cut, the usual reason being memory.
        tolerance: see :data:`TOLERANCE`.
        patience: seconds; see :data:`PATIENCE`.

    Raises:
        ConfigError: when the module itself cannot be run on the batches.
    """
    end = time.monotonic() + patience
    bench = _bench(module, size, runs, tolerance)
    plan = planned or ShardingPlan()
    found: list[Found] = []
    if plan.rules:
        verdict, reason = bench.judge(plan)
        plan = _with_addends(plan, verdict, bench.module) if verdict is not None else ShardingPlan()
        found.append(Found("(plan)", plan.rules[0].why if plan.rules else "dropped", 1, reason))
    skip = {a.path for a in resolve(plan, bench.module, strict=False)} if plan.rules else set()
    # A copy: some modules change in their first run (BigBird chooses its attention by the length of what it sees), and
    # trials must start from what the ranks will start from.
    traced = copy.deepcopy(bench.module)
    seen = survey(traced, runs[0], skip)
    held = dict(traced.named_modules())
    star = BlockNames(held).star
    candidates: list[tuple[str, Iterable[Hypothesis]]] = []
    for kind, pairs in seen.pairs.items():
        layouts = of_pair(pairs[0], held, seen.arguments)
        price = None if pricing is None else _price_of_pair(pricing, pairs[0], held, seen)
        if price is not None and not price.styles:
            found.append(Found(kind[0], "whole", 0, f"cheapest: {price.describe()}"))
            continue
        candidates.append((kind[0], layouts if price is None else by_price(price, layouts, star)))
    for name, paths in expert_modules(bench.module, skip, star).items():
        candidates.append((name, of_experts(paths[0], held[paths[0]], star)))
    tables = list(of_embeddings(bench.module, seen, skip, SMALLEST_TABLE))
    tied = {pattern for _, hypothesis in tables for pattern in hypothesis.rules}
    for name, paths in seen.singles.items():
        weight = held[paths[0]]._parameters["weight"]
        if name not in tied and is_linear(held[paths[0]]) and weight is not None and weight.numel() >= SMALLEST_LINEAR:
            shape = next(iter(seen.arguments.get(paths[0], [])), ())
            price = None if pricing is None or not shape else pricing.single(paths[0], widths(held[paths[0]]), shape)
            if price is not None and not price.styles:
                found.append(Found(name, "whole", 0, f"cheapest: {price.describe()}"))
                continue
            candidates.append((name, [Hypothesis("gathered", {name: "colwise_gather_output"})]))
    candidates += [(name, [hypothesis]) for name, hypothesis in tables]
    for kind_name, hypotheses in candidates:
        plan, one = _first_exact(bench, plan, kind_name, hypotheses, end)
        found.append(one)
    plan, verdict = _proven(bench, plan, found)
    return Choice(plan, tuple(found), verdict)


def _price_of_pair(pricing: Pricing, pair: Pair, held: dict[str, nn.Module], seen: Survey) -> Price | None:
    shape = next(iter(seen.arguments.get(pair.columns[0], [])), ())
    if not shape or pair.feeders:
        return None
    columns = {name: widths(held[name]) for name in pair.columns}
    owner = owner_of(pair, held)
    # Modules that know no heads lie between a way in and a way out by a plain function.
    heads = owner.heads(pair.inner_width) if owner.counts or owner.unit else 0
    return pricing.pair(columns, pair.row, widths(held[pair.row]), shape, heads)


def _bench(module: nn.Module, size: int, runs: Sequence[Run], tolerance: float) -> _Bench:
    twin = copy.deepcopy(module)
    perturb(twin)
    small = sum(p.numel() for p in twin.parameters()) <= LARGEST_DOUBLE
    bench = None
    try:
        # Rounding must not decide on which side of a kink a value falls.
        if small:
            bench = _references(copy.deepcopy(twin).double(), size, runs, tolerance / 10)
    except Exception:  # a forward that computes in float32 whatever it is given
        pass
    try:
        bench = bench or _references(twin, size, runs, tolerance)
    except Exception as error:
        raise ConfigError(
            f"{type(module).__name__} cannot be run by itself, which the choice of a sharding needs "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); give sharding_plan={{...}}, or 'off'"
        ) from error
    for loss, _ in bench.references:
        if not torch.isfinite(loss):
            raise ConfigError(f"{type(module).__name__} has a loss of {float(loss)} with perturbed weights")
    return bench


def _references(twin: nn.Module, size: int, runs: Sequence[Run], tolerance: float) -> _Bench:
    names = ModuleNames.record(twin)
    return _Bench(twin, size, runs, tolerance, [gradients_of(copy.deepcopy(twin), run, names) for run in runs])


def _first_exact(
    bench: _Bench, plan: ShardingPlan, kind: str, hypotheses: Iterable[Hypothesis], end: float
) -> tuple[ShardingPlan, Found]:
    """The plan with the first hypothesis that is exact together with what it holds already."""
    trials, reason = 0, ""
    for hypothesis in hypotheses:
        if time.monotonic() > end:
            reason = f"time was over after {trials} trials"
            break
        trials += 1
        try:
            more = ShardingPlan.from_mapping(hypothesis.rules, f"chooser: {hypothesis.name}")
            candidate = plan + more
        except ConfigError as error:  # a module that has a rule already
            reason = str(error)
            continue
        verdict, reason = bench.judge(candidate)
        if verdict is not None:
            return _with_addends(candidate, verdict, bench.module), Found(kind, hypothesis.name, trials)
    return plan, Found(kind, "whole", trials, reason)


def _with_addends(plan: ShardingPlan, verdict: Verdict, module: nn.Module) -> ShardingPlan:
    """Name what turned out to be used inside the sharded region."""
    star = BlockNames(dict(module.named_modules())).star
    rules = dict.fromkeys(map(star, verdict.partial))
    known = {rule.pattern for rule in plan.rules}
    style = Style("replicated_with_grad_allreduce")
    return plan + ShardingPlan(tuple(Rule(n, style, "found by its gradient") for n in rules if n not in known))


def _proven(bench: _Bench, plan: ShardingPlan, found: list[Found]) -> tuple[ShardingPlan, Verdict]:
    """Judge on batches that chose nothing; what fails there leaves, last choice first."""
    sources = list(dict.fromkeys(rule.why for rule in plan.rules))
    while True:
        verdicts = [bench.judge(plan, batch) for batch in range(len(bench.runs))]
        failed = next((reason for verdict, reason in verdicts if verdict is None), None)
        if failed is None:
            verdict = verdicts[-1][0]
            assert verdict is not None
            return plan, verdict
        if not sources:
            raise ConfigError(f"its own gradients differ from run to run ({failed}), so that no layout can be judged")
        why = sources.pop()
        plan = ShardingPlan(tuple(rule for rule in plan.rules if rule.why != why))
        found.append(Found(why, "dropped", 1, f"on another batch: {failed}"))
