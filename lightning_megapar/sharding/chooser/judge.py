"""Judge a plan that somebody wrote: does it compute what one process computes?

All tensor ranks are played in one process on a copy of the module with perturbed weights, as the chooser plays them. A
plan whose loss or gradients differ is refused, with the entries that are to blame; what cannot be tried is used as it
is, with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_megapar.config import ConfigError
from lightning_megapar.sharding.chooser.bench import Bench, in_one_line
from lightning_megapar.sharding.chooser.trial import Run, Verdict
from lightning_megapar.sharding.names import BlockNames
from lightning_megapar.sharding.plan import Assignment, Rule, ShardingPlan, resolve
from lightning_megapar.sharding.vocabulary import Style

BLAME_SECONDS = 5.0
"""Time for trials of a wrong plan without one of its entries each, which find the one to blame."""
_WITHOUT_A_CALL = {"replicate", "replicated_with_grad_allreduce", "local_params", "local_attributes"}


@dataclass(frozen=True)
class Judgement:
    """On a plan.

    Args:
        plan: with what turned out to be missing from it.
        refusal: why it cannot be used, or ``""``.
        notes: for the terminal.
    """

    plan: ShardingPlan
    refusal: str = ""
    notes: tuple[str, ...] = ()


def with_addends(plan: ShardingPlan, names: Sequence[str], module: nn.Module) -> ShardingPlan:
    """The plan with rules for whole parameters that are used inside the sharded region.

    Args:
        plan: without them.
        names: of parameters.
        module: that has them.
    """
    star = BlockNames(dict(module.named_modules())).star
    patterns = dict.fromkeys(map(star, names))
    style = Style("replicated_with_grad_allreduce")
    kept = tuple(r for r in plan.rules if r.pattern not in patterns or r.style.name != "replicate")
    known = {rule.pattern for rule in kept}
    return ShardingPlan(
        (*kept, *(Rule(name, style, "found by its gradient") for name in patterns if name not in known))
    )


def judge(module: nn.Module, plan: ShardingPlan, size: int, runs: Sequence[Run], patience: float) -> Judgement:
    """Try a plan.

    Args:
        module: whole and real (perhaps with a shortened stack); it is copied.
        plan: as somebody wrote it.
        size: tensor ranks.
        runs: each computes a loss of a module on one batch.
        patience: seconds after which a plan is used untried.

    Raises:
        ConfigError: when the whole module cannot be run, so that nothing can be said about the plan.
    """
    end = time.monotonic() + patience
    bench = Bench.of(module, size, runs)
    if time.monotonic() + size * bench.seconds > end:
        raise ConfigError(f"a trial on {size} ranks would take longer than {patience:.0f} s")
    missing: list[str] = []
    for batch in range(len(runs)):
        try:
            verdict = bench.verdict(plan, batch)
        except ConfigError as error:
            return Judgement(plan, str(error))
        except Exception as error:
            return _refused(bench, plan, batch, error, end)
        missing += verdict.partial
        if not verdict.exact(bench.tolerance):
            return _refused(bench, plan, batch, verdict, end)
    notes = _never_called(bench, plan)
    if missing:
        plan = with_addends(plan, missing, bench.module)
        for batch in range(len(runs)):
            verdict = bench.verdict(plan, batch, sum_partial=False)
            if not verdict.exact(bench.tolerance):
                return _refused(bench, plan, batch, verdict, end)
        star = BlockNames(dict(bench.module.named_modules())).star
        shown = ", ".join(dict.fromkeys(map(star, missing)))
        notes.append(
            f"the gradients of {shown} differ between tensor ranks: they are used inside a sharded region, and are "
            "summed over the ranks; say so in the plan: style replicated_with_grad_allreduce"
        )
    return Judgement(plan, notes=tuple(notes))


def _refused(bench: Bench, plan: ShardingPlan, batch: int, why: Verdict | Exception, end: float) -> Judgement:
    if not bench.repeats(batch):
        note = "the plan is not proven: the loss or the gradients of the step differ from run to run"
        return Judgement(plan, notes=(note,))
    assignments = resolve(plan, bench.module, strict=False)
    ranks = f"{bench.size} tensor ranks, played in one process"
    if isinstance(why, Exception):
        where = _module_of(why)
        told = f"it runs whole, but not on {ranks}: {in_one_line(why)}" + (f" in {where!r}" if where else "")
    else:
        where = why.worst_name
        subject = "the loss" if where == "loss" else f"the gradient of {where!r}"
        told = (
            f"it does not compute what one process does: on {ranks}, {subject} is off by {why.worst:.1e} of its "
            f"largest value (loss: {why.loss_error:.1e}; rounding explains {bench.tolerance:.0e})"
        )
        if why.needless:
            shown = ", ".join(map(repr, why.needless))
            told += (
                f". Declared addends are identical on all ranks: the gradient of {shown} is whole on each, and its sum "
                f"{bench.size} times too large; remove replicated_with_grad_allreduce there"
            )
    touching = _entries([a for a in assignments if _touches(a, where)]) if where and where != "loss" else []
    if touching:
        told += f". Entries that touch it: {', '.join(touching)}"
    own = _entries([a for a in assignments if a.parameter is None and _has_own_forward(bench.module, a)])
    if own:
        told += (
            f". Linear layers with a forward of their own, of which a piece may give something else: {', '.join(own)}"
        )
    untouched = _never_called(bench, plan)
    if untouched:
        told += f". Also, {untouched[0]}"
    cause = _cause(bench, plan, batch, min(end, time.monotonic() + BLAME_SECONDS))
    if cause:
        told += f". Without the entry {cause} the plan is exact"
    source = plan.rules[0].why
    source = source if source == "sharding_plan" or source.endswith("()") else f"sharding_plan={source!r}"
    return Judgement(
        plan,
        f"{source} is wrong for {type(bench.module).__name__}: {told}. Leave out "
        f"{cause or ('these entries' if touching else 'entries until it is exact')}, or let sharding_plan='auto' find "
        "a layout; recipes/verify.py compares every gradient with one process",
    )


def _entries(assignments: Sequence[Assignment]) -> list[str]:
    return list(dict.fromkeys(f"{one.pattern!r}: {str(one.style)!r}" for one in assignments))


def _touches(one: Assignment, where: str) -> bool:
    """Whether a rule is for a parameter or module, or for one above it."""
    return where == one.name or where.startswith(f"{one.name}.") or one.name.startswith(f"{where}.")


def _has_own_forward(module: nn.Module, one: Assignment) -> bool:
    child = module.get_submodule(one.path)
    return isinstance(child, nn.Linear) and type(child).forward is not nn.Linear.forward


def _never_called(bench: Bench, plan: ShardingPlan) -> list[str]:
    entries = _entries(
        [
            one
            for one in resolve(plan, bench.module, strict=False)
            if one.parameter is None and one.path not in bench.called and one.style.name not in _WITHOUT_A_CALL
        ]
    )
    if not entries:
        return []
    return [
        f"the modules of {', '.join(entries)} did not run on the first batch (their weights may be read by other "
        "code): what these entries do is not proven"
    ]


def _cause(bench: Bench, plan: ShardingPlan, batch: int, end: float) -> str:
    """The one entry without which the plan is exact, if there is one and time to find it."""
    for rule in plan.rules:
        if time.monotonic() > end:
            break
        verdict, _ = bench.judge(ShardingPlan(tuple(other for other in plan.rules if other is not rule)), batch)
        if verdict is not None and len(plan.rules) > 1:
            return f"{rule.pattern!r}: {str(rule.style)!r}"
    return ""


def _module_of(error: BaseException) -> str:
    """Dotted name of the innermost module that an exception passed, from the frames that it left."""
    seen: list[nn.Module] = []
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            seen.append(owner)
        trace = trace.tb_next
    if not seen:
        return ""
    return next((path for path, child in seen[0].named_modules() if child is seen[-1]), "")
