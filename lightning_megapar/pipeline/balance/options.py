"""What a run may do when a rank is slow, as one frozen dataclass, and what it cannot do, by name. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from lightning_megapar.config import ConfigError, Layout, ParallelConfig, nearest_name, refuse_unknown

LEVERS = ("layers", "replicas", "microbatches")


@dataclass(frozen=True)
class Rebalance:
    """Which levers may be pulled, and how sure one has to be.

    Every microbatch passes every stage, so that stages cannot have microbatches of different sizes (as some accounts of
    "dynamic micro-batches" have it); what can be moved is layers between stages, whole microbatches between replicas of
    the model, and the number of microbatches of everybody.

    Args:
        layers: move layers between pipeline stages, with their gradients and optimizer state.
        replicas: give slow data-parallel replicas fewer of the step's microbatches; gradients stay the mean over all
            samples. A rank's own batch is unchanged: its surplus is worked on by another rank.
        microbatches: choose the number of microbatches per batch, among those that need no more memory. Off by
            default: dropout masks and batch statistics depend on the microbatch a sample falls into.
        window: steps over which medians are taken.
        patience: decisions in a row that must agree.
        slow_factor: a rank is called slow when it takes this many times as long as the median rank for the same work.
        min_gain: share of the step's time that a move must be predicted to save.
        pays_within: training batches within which the time that is saved must exceed what the move costs.
        every: steps from one measurement to the next.

    Raises:
        ConfigError: on a value outside its range.
    """

    layers: bool = True
    replicas: bool = True
    microbatches: bool = False
    window: int = 5
    patience: int = 2
    slow_factor: float = 1.25
    min_gain: float = 0.1
    pays_within: int = 200
    every: int = 1

    def __post_init__(self) -> None:
        for name in LEVERS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"rebalance.{name}={getattr(self, name)!r}: expected true or false")
        for name in ("window", "patience", "pays_within", "every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"rebalance.{name}={value!r}: expected a number of steps, 1 or more")
        for name, least in (("slow_factor", 1.0), ("min_gain", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least < value < math.inf:
                raise ConfigError(f"rebalance.{name}={value!r}: expected a number above {least:g}")
        if self.min_gain >= 1:
            raise ConfigError(f"rebalance.min_gain={self.min_gain!r}: expected a share of the step's time, below 1")
        if not any(getattr(self, name) for name in LEVERS):
            raise ConfigError(
                f"rebalance: {', '.join(LEVERS)} are all false; set one of them, or rebalance=null to turn it off"
            )


def given_rebalance(value: Any) -> Rebalance | None:
    """The options from what a user gives: nothing, ``True``, names of levers, or a mapping.

    Args:
        value: ``None`` or ``False`` (or ``"off"``): nothing is measured. ``True`` or ``"auto"``: the defaults. One of
            ``"layers"``, ``"replicas"``, ``"microbatches"``, or a list of them: only these. A mapping of the arguments
            of :class:`Rebalance`.

    Raises:
        ConfigError: on anything else, with the nearest valid values.
    """
    if value is None or value is False or value == "off":
        return None
    if isinstance(value, Rebalance):
        return value
    if value is True or value == "auto":
        return Rebalance()
    if isinstance(value, Mapping):
        refuse_unknown("rebalance", map(str, value), [field.name for field in fields(Rebalance)])
        return Rebalance(**value)
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else None
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"rebalance={value!r}: expected null, true, one or several of {', '.join(LEVERS)}, or a mapping of options"
        )
    for name in names:
        if name not in LEVERS:
            words = (*LEVERS, "auto", "off") if isinstance(value, str) else LEVERS
            near = nearest_name(name, words)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"rebalance={value!r}: {name!r} is not one of {', '.join(words)}{hint}")
    return Rebalance(**{lever: lever in names for lever in LEVERS})


def usable(config: ParallelConfig, layout: Layout) -> Rebalance | None:
    """The settings' options with the levers that a layout has; ``None`` when there is nothing to balance.

    Levers that a layout has not are left out, as long as there is one. A single device has nothing to balance.

    Raises:
        ConfigError: when the layout has none of those that are asked for, and for levers that cannot be right with the
            other settings, with what to change.
    """
    options = given_rebalance(config.rebalance)
    if options is None or layout.world_size == 1:
        return None
    microbatches = config.microbatches(layout)
    has = {
        "layers": layout.pipeline > 1,
        "replicas": layout.data > 1 and microbatches > 1,
        "microbatches": layout.pipeline > 1,
    }
    asked = [lever for lever in LEVERS if getattr(options, lever)]
    left = [lever for lever in asked if has[lever]]
    if not left:
        needs = {
            "layers": f"pipeline_parallel_size of 2 or more (it is {layout.pipeline})",
            "replicas": f"data_parallel_size and num_microbatches of 2 or more (they are {layout.data} and "
            f"{microbatches})",
            "microbatches": f"pipeline_parallel_size of 2 or more (it is {layout.pipeline})",
        }
        raise ConfigError("; ".join(f"rebalance: {lever} needs {needs[lever]}" for lever in asked))
    if config.zero_stage > 0 and "layers" in left:
        raise ConfigError(
            f"rebalance: layers cannot be moved under zero_stage={config.zero_stage}, whose shards FSDP2 lays out "
            "once; valid: zero_stage=0" + (", or rebalance=replicas" if config.zero_stage == 1 else "")
        )
    if config.zero_stage > 1 and "replicas" in left:
        raise ConfigError(
            f"rebalance: replicas run different numbers of microbatches, but under zero_stage={config.zero_stage} all "
            "gather or reduce with each of them; valid: zero_stage=0 or 1"
        )
    own = None if isinstance(config.pipeline_schedule, str) else config.pipeline_schedule
    for lever in ("replicas", "microbatches"):
        if own is not None and lever in left and layout.pipeline > 1:
            raise ConfigError(
                f"rebalance: {lever} changes the number of microbatches, which pipeline_schedule={own.name!r} fixes; "
                "name a schedule, or use rebalance=layers"
            )
    return Rebalance(**{**_values(options), **{lever: lever in left for lever in LEVERS}})


def _values(options: Rebalance) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(options)}
