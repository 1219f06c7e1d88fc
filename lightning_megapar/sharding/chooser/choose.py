"""The automatic chooser: finds a sharding plan for a module that has none, and proves it.

A plan is used first, the chooser for what it leaves. Layouts are hypotheses
(:mod:`~lightning_megapar.sharding.chooser.hypotheses`), tried in one process that plays all tensor ranks at the actual
size, on a copy with perturbed weights, judged by every gradient; the plan as a whole is judged again on a batch of
another shape that chose nothing. What no hypothesis fits stays whole on every rank, which is always right.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_megapar.config import ConfigError
from lightning_megapar.layers.foreign import widths
from lightning_megapar.sharding.chooser.bench import Bench
from lightning_megapar.sharding.chooser.hypotheses import (
    Hypothesis,
    by_price,
    expert_modules,
    of_embeddings,
    of_experts,
    of_pair,
    owner_of,
    why_not_by_heads,
)
from lightning_megapar.sharding.chooser.judge import with_addends
from lightning_megapar.sharding.chooser.pricing import Price, Pricing
from lightning_megapar.sharding.chooser.reasons import compiled_parts, why_whole
from lightning_megapar.sharding.chooser.survey import Pair, Survey, survey
from lightning_megapar.sharding.chooser.trial import Run, Verdict
from lightning_megapar.sharding.names import BlockNames
from lightning_megapar.sharding.plan import ShardingPlan, resolve

SMALLEST_TABLE = 0.02
"""Share of all parameters below which an embedding stays whole: a look-up less is worth more than its rows."""
PATIENCE = 120.0
"""Seconds after which what was not tried yet stays whole, and a plan that another batch refutes is dropped."""
SMALLEST_LINEAR = 256
"""Elements below which a single linear layer stays whole."""


@dataclass(frozen=True)
class Found:
    """What was chosen for one kind of layers.

    Args:
        kind: starred name of its first layer.
        how: the hypothesis, or ``"whole"``.
        trials: how many were tried.
        reason: why nothing fitted, or nothing better than to gather.
        members: starred names of all its layers.
    """

    kind: str
    how: str
    trials: int
    reason: str = ""
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """A proven plan.

    Args:
        plan: rules of a plan that was given, and of what was found.
        found: per kind of layers what was chosen.
        verdict: of the plan as a whole, on the last batch.
        whole: starred name -> why the plan leaves this module whole.
    """

    plan: ShardingPlan
    found: tuple[Found, ...]
    verdict: Verdict
    whole: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Candidate:
    """Layers of one kind, how they might be cut, and why they cannot be cut inside where that is known."""

    members: tuple[str, ...]
    hypotheses: Iterable[Hypothesis]
    hint: str = ""


def choose(
    module: nn.Module,
    size: int,
    runs: Sequence[Run],
    *,
    planned: ShardingPlan | None = None,
    pricing: Pricing | None = None,
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
        patience: seconds; see :data:`PATIENCE`.

    Raises:
        ConfigError: when the module itself cannot be run on the batches.
    """
    end = time.monotonic() + patience
    bench = Bench.of(module, size, runs)
    plan = planned or ShardingPlan()
    found: list[Found] = []
    if plan.rules:
        verdict, reason = bench.judge(plan)
        plan = with_addends(plan, verdict.partial, bench.module) if verdict is not None else ShardingPlan()
        found.append(Found("(plan)", plan.rules[0].why if plan.rules else "dropped", 1, reason))
    skip = {a.path for a in resolve(plan, bench.module, strict=False)} if plan.rules else set()
    compiled = compiled_parts(bench.module)
    # A copy: some modules change in their first run (BigBird chooses its attention by the length of what it sees), and
    # trials must start from what the ranks will start from.
    traced = copy.deepcopy(bench.module)
    seen = survey(traced, bench.in_its_arithmetic(runs[0]), skip | compiled)
    held = dict(traced.named_modules())
    star = BlockNames(held).star
    candidates: list[_Candidate] = []
    for kind, pairs in seen.pairs.items():
        layouts = of_pair(pairs[0], held, seen.arguments)
        price = None if pricing is None else _price_of_pair(pricing, pairs[0], held, seen)
        if price is not None and not price.styles:
            found.append(Found(kind[0], "whole", 0, f"cheapest: {price.describe()}", kind))
            continue
        ordered = layouts if price is None else by_price(price, layouts, star)
        candidates.append(_Candidate(kind, ordered, why_not_by_heads(pairs[0], held, size)))
    for name, paths in expert_modules(bench.module, skip | compiled, star).items():
        candidates.append(_Candidate((name,), of_experts(paths[0], held[paths[0]], star)))
    tables = list(of_embeddings(bench.module, seen, skip | compiled, SMALLEST_TABLE))
    tied = {pattern for _, hypothesis in tables for pattern in hypothesis.rules}
    for name, paths in seen.singles.items():
        weight = held[paths[0]]._parameters["weight"]
        if name not in tied and weight is not None and weight.numel() >= SMALLEST_LINEAR:
            shape = next(iter(seen.arguments.get(paths[0], [])), ())
            price = None if pricing is None or not shape else pricing.single(paths[0], widths(held[paths[0]]), shape)
            if price is not None and not price.styles:
                found.append(Found(name, "whole", 0, f"cheapest: {price.describe()}", (name,)))
                continue
            gathered = [Hypothesis("gathered", {name: "colwise_gather_output"})]
            candidates.append(_Candidate((name,), gathered, "no layer follows that takes pieces"))
    candidates += [_Candidate(tuple(hypothesis.rules), [hypothesis]) for _, hypothesis in tables]
    for candidate in candidates:
        plan, one = _first_exact(bench, plan, candidate, end)
        found.append(one)
    plan, verdict = _proven(bench, plan, found, end)
    told = {name: one.reason for one in found if one.how in ("whole", "dropped") for name in one.members}
    return Choice(plan, tuple(found), verdict, why_whole(bench.module, plan, seen, told))


def _price_of_pair(pricing: Pricing, pair: Pair, held: dict[str, nn.Module], seen: Survey) -> Price | None:
    shape = next(iter(seen.arguments.get(pair.columns[0], [])), ())
    if not shape or pair.feeders:
        return None
    columns = {name: widths(held[name]) for name in pair.columns}
    owner = owner_of(pair, held)
    # Modules that know no heads lie between a way in and a way out by a plain function.
    heads = owner.heads(pair.inner_width) if owner.counts or owner.unit else 0
    return pricing.pair(columns, pair.row, widths(held[pair.row]), shape, heads)


def _first_exact(bench: Bench, plan: ShardingPlan, candidate: _Candidate, end: float) -> tuple[ShardingPlan, Found]:
    """The plan with the first hypothesis that is exact together with what it holds already."""
    kind, members = candidate.members[0], candidate.members
    trials, reasons = 0, []
    for hypothesis in candidate.hypotheses:
        if time.monotonic() > end:
            reasons = [f"time was over after {trials} trials"]
            break
        trials += 1
        why, reason = f"chooser: {hypothesis.name}", ""
        if hypothesis.name == "gathered":
            reason = candidate.hint or (f"cut inside: {reasons[0]}" if reasons else "")
            why += f" ({reason})" if reason else ""
        try:
            more = ShardingPlan.from_mapping(hypothesis.rules, why)
            tried = plan + more
        except ConfigError as error:  # a module that has a rule already
            reasons.append(str(error))
            continue
        verdict, failed = bench.judge(tried)
        if verdict is not None:
            exact = with_addends(tried, verdict.partial, bench.module)
            return exact, Found(kind, hypothesis.name, trials, reason, members)
        reasons.append(failed)
    # The first layout is the likeliest one; the last collects its outputs.
    known = [candidate.hint, *dict.fromkeys([*reasons[:1], *reasons[-1:]])]
    return plan, Found(kind, "whole", trials, "; ".join(filter(None, known)), members)


def _proven(bench: Bench, plan: ShardingPlan, found: list[Found], end: float) -> tuple[ShardingPlan, Verdict]:
    """Judge on batches that chose nothing; what fails there leaves, last choice first, or all at once after ``end``."""
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
        if time.monotonic() > end:
            found.append(Found(", ".join(sources), "dropped", 1, f"on another batch: {failed}; time was over"))
            sources, plan = [], ShardingPlan()
            continue
        why = sources.pop()
        dropped = tuple(rule.pattern for rule in plan.rules if rule.why == why)
        plan = ShardingPlan(tuple(rule for rule in plan.rules if rule.why != why))
        found.append(Found(why, "dropped", 1, f"on another batch: {failed}", dropped))
