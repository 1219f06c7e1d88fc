"""Where a module's sharding plan comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from lightning_megapar.config import ConfigError, nearest_name
from lightning_megapar.generators import generators_kept
from lightning_megapar.layers.base import ParallelLayer
from lightning_megapar.layers.foreign import is_linear
from lightning_megapar.sharding.blueprint import on_meta
from lightning_megapar.sharding.by_plan import apply_assignments
from lightning_megapar.sharding.chooser.alone import by_itself
from lightning_megapar.sharding.chooser.bench import LARGEST_TRIAL, bytes_of_trial, in_one_line
from lightning_megapar.sharding.chooser.choose import PATIENCE, choose
from lightning_megapar.sharding.chooser.judge import Judgement, judge
from lightning_megapar.sharding.chooser.pricing import Pricing
from lightning_megapar.sharding.chooser.trial import Run, TrialRanks
from lightning_megapar.sharding.names import BlockNames
from lightning_megapar.sharding.plan import Assignment, ShardingPlan, resolve
from lightning_megapar.sharding.transformers_plan import plans_are_proven, transformers_plan

Alone = Callable[[nn.Module, bool, Sequence[Assignment]], nn.Module]
"""(whole module, whether to shorten its stack, what a plan says of it) -> a copy that can be run by itself."""
Runs = Callable[[nn.Module], Sequence[Run] | str]
"""(whole module) -> its own step on a few samples, or why there are none."""
_T = TypeVar("_T")

WORTH_A_TRIAL = 0.02
"""Share of the parameters that a proven plan must leave for the chooser to be asked: a trial takes memory and time."""
JUDGED_WHOLE = 5_000_000
"""Parameters up to which a module is tried with all its blocks."""


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
        whole: starred name -> why this module stays whole.
        alike: name of each module or parameter that is assigned something -> the pattern of all that are like it,
            seen on the whole module.
    """

    assignments: list[Assignment] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    plan: ShardingPlan = field(default_factory=ShardingPlan)
    whole: Mapping[str, str] = field(default_factory=dict)
    alike: Mapping[str, str] = field(default_factory=dict)


def choose_plan(
    module: nn.Module,
    setting: Any,
    size: int,
    *,
    runs: Runs,
    alone: Alone,
    share: Callable[[Any], Any],
    is_first: bool,
    pricing: Pricing | None = None,
    patience: float = PATIENCE,
) -> PlanChoice:
    """First hit wins: the setting, the module's own plan, transformers' with the chooser for what it leaves.

    What somebody wrote is judged, unless it cannot be tried; published plans are, unless they are proven.

    Args:
        module: whole, real or meta.
        setting: the strategy's ``sharding_plan``.
        size: tensor ranks; with one nothing is sharded.
        runs: of the module's own step on a few samples, or why there are none; called on every rank.
        alone: a copy of the module that can be run by itself, with a shortened stack of blocks or the whole one; blocks
            to which the assignments give different styles are both kept.
        share: gives every rank the first rank's object.
        is_first: whether this is the rank that chooses.
        pricing: what layouts cost on the cluster at hand.
        patience: seconds for trials, during which the other ranks wait in a collective.

    Raises:
        ConfigError: from a plan that somebody wrote: patterns that match nothing, styles that do not fit, gradients
            that are not those of one process.
    """
    if size == 1:
        return PlanChoice()
    given = written_plan(module, setting)
    if given is not None:
        choice = _written(module, given, size, runs, alone, share, is_first, patience)
    else:
        choice = _automatic(module, size, runs, alone, share, is_first, pricing, patience)
    star = BlockNames(dict(module.named_modules())).star
    return replace(choice, alike={one.name: star(one.name) for one in choice.assignments})


def _written(
    module: nn.Module,
    plan: ShardingPlan,
    size: int,
    runs: Runs,
    alone: Alone,
    share: Callable[[Any], Any],
    is_first: bool,
    patience: float,
) -> PlanChoice:
    """A plan that somebody wrote, judged by the first rank."""
    assignments = resolve(plan, module, strict=True)
    if all(one.style.name == "replicate" for one in assignments):
        return PlanChoice(assignments, plan=plan)
    samples = runs(module)
    judgement = None
    if is_first:
        with generators_kept():
            judgement = _judge(module, plan, assignments, size, samples, alone, patience)
    judgement = share(judgement)
    if judgement.refusal:
        raise ConfigError(judgement.refusal)
    return PlanChoice(resolve(judgement.plan, module, strict=True), judgement.notes, judgement.plan)


def _automatic(
    module: nn.Module,
    size: int,
    runs: Runs,
    alone: Alone,
    share: Callable[[Any], Any],
    is_first: bool,
    pricing: Pricing | None,
    patience: float,
) -> PlanChoice:
    """The plan that transformers publishes, and what the first rank's chooser finds."""
    plan = transformers_plan(module)
    if not plan.rules and not has_foreign_layers(module):
        return PlanChoice()
    if plan.rules and plans_are_proven(module) and share_left(module, plan) < WORTH_A_TRIAL:
        return PlanChoice(resolve(plan, module, strict=False), plan=plan)
    trial = runs(module)
    answer: tuple[ShardingPlan, tuple[str, ...], Mapping[str, str]] | None = None
    if is_first:
        with generators_kept():  # the other ranks' generators have not moved
            answer = _choose(module, plan, size, trial, alone, pricing, patience)
    plan, notes, whole = share(answer)
    try:
        return PlanChoice(resolve(plan, module, strict=False), notes, plan, whole)
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


def written_plan(module: nn.Module, setting: Any) -> ShardingPlan | None:
    """The plan that somebody wrote: in the setting, else the module's own ``sharding_plan`` (a method or a mapping).

    ``None`` without one.

    Raises:
        ConfigError: one that is no plan.
    """
    plan = given_plan(setting)
    own = getattr(module, "sharding_plan", None)
    if plan is None and callable(own):
        return ShardingPlan.from_mapping(own(), f"{type(module).__name__}.sharding_plan()")
    if plan is None and own is not None and not isinstance(own, nn.Module):
        return ShardingPlan.from_mapping(own, f"{type(module).__name__}.sharding_plan")
    return plan


def check_written_plan(module: nn.Module, setting: Any, size: int) -> None:
    """Refuse a plan that cannot be applied to ``module``, without a run and before any rank exists.

    Args:
        module: whole, real or meta; it is not changed.
        setting: the strategy's ``sharding_plan``.
        size: tensor ranks.

    Raises:
        ConfigError: patterns that match nothing, styles that do not fit, widths that leave a rank with nothing.
    """
    plan = written_plan(module, setting) if size > 1 else None
    if plan is None or not plan.rules:
        return
    assignments = resolve(plan, module, strict=True)
    try:
        twin = on_meta(module)
    except Exception:  # somebody's module may not be copied; what is wrong is found when it is cut
        return
    apply_assignments(twin, assignments, TrialRanks.alone(size))


def _on_a_twin(
    module: nn.Module, size: int, make: Callable[[bool], nn.Module], task: Callable[[nn.Module], _T]
) -> tuple[_T | None, str]:
    """What ``task`` finds on a copy that is small enough, or why nothing could be tried."""
    refused = ""
    # A small module is judged as it is. The stack of a larger one is shortened, unless its step needs all of it.
    small = sum(p.numel() for p in module.parameters()) <= JUDGED_WHOLE
    for shorten in (False,) if small else (True, False):
        try:
            twin = make(shorten)
            needed = bytes_of_trial(twin, size)
            if needed > LARGEST_TRIAL:
                refused = refused or f"too large to try ({needed / 1e9:.0f} GB)"
                continue
            with by_itself():
                return task(twin), ""
        except ConfigError as error:
            refused = refused or str(error)
        except Exception as error:  # somebody's module may not be copied, or traced: that it is not tried harms nobody
            refused = refused or f"it cannot be tried ({in_one_line(error)})"
    return None, refused


def _judge(
    module: nn.Module,
    plan: ShardingPlan,
    assignments: Sequence[Assignment],
    size: int,
    runs: Sequence[Run] | str,
    alone: Alone,
    patience: float,
) -> Judgement:
    judgement, refused = None, str(runs)
    if not isinstance(runs, str):
        judgement, refused = _on_a_twin(
            module,
            size,
            lambda shorten: alone(module, shorten, assignments),
            lambda twin: judge(twin, plan, size, runs, patience),
        )
    if judgement is not None:
        return judgement
    note = f"the plan is used as it is written, not proven: {refused}. Prove it with recipes/verify.py"
    return Judgement(plan, notes=(note,))


def _choose(
    module: nn.Module,
    plan: ShardingPlan,
    size: int,
    runs: Sequence[Run] | str,
    alone: Alone,
    pricing: Pricing | None,
    patience: float,
) -> tuple[ShardingPlan, tuple[str, ...], Mapping[str, str]]:
    if isinstance(runs, str):
        return plan, (f"{runs}: what no plan names stays whole",), {}
    choice, refused = _on_a_twin(
        module,
        size,
        lambda shorten: alone(module, shorten, ()),
        lambda twin: choose(twin, size, runs, planned=plan, pricing=pricing, patience=patience),
    )
    if choice is None:
        return plan, (f"{refused}: what no plan names stays whole",), {}
    notes = [f"{one.kind}: {one.how} ({one.reason})" for one in choice.found if one.how in ("whole", "dropped")]
    return choice.plan, tuple(notes), choice.whole
