"""The scale of fp16's losses as a value and a rule. No torch.

Float16 has no number between 0 and 6e-8 and none above 65504. Losses are multiplied by a scale before the backward, so
that small gradients are numbers at all, and the gradients divided by it in float32 afterwards. The scale is a power of
two: neither multiplication rounds. When a gradient has overflowed, the step is skipped and the scale goes down; after a
window of good steps it goes up.

The rule is Megatron-LM's (``megatron/core/optimizer/grad_scaler.py``, ``DynamicGradScaler``), which torch's
``GradScaler`` lacks in two points: with a *hysteresis* of 2 the first overflow of a window skips its step and leaves
the scale, so that one odd batch does not halve it; and the scale has a *floor*, at which endless overflow is an error
instead of a run that silently learns nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_megapar.config import ConfigError, refuse_unknown

LARGEST = 65504.0
"""Largest finite float16."""


@dataclass(frozen=True)
class LossScaleOptions:
    """How the scale begins and moves.

    Args:
        initial: scale of the first step, a positive power of two.
        window: good steps after which it is doubled.
        factor: by which it is multiplied and divided, a power of two above 1.
        hysteresis: overflows within a window of which the last one lowers the scale; 1 lowers it at each.
        floor: the least scale, a power of two.
        patience: overflows in a row at the floor (with ``fixed`` at the scale) after which the run stops.
        fixed: the scale stays ``initial``; overflowing steps are still skipped.

    Raises:
        ConfigError: on a value outside its range, with the nearest valid ones.
    """

    initial: float = 65536.0
    window: int = 1000
    factor: float = 2.0
    hysteresis: int = 2
    floor: float = 1.0
    patience: int = 20
    fixed: bool = False

    def __post_init__(self) -> None:
        for name in ("window", "hysteresis", "patience"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"loss_scale.{name}={value!r}: expected a number of steps, 1 or more")
        for name in ("initial", "factor", "floor"):
            _check_power_of_two(f"loss_scale.{name}", getattr(self, name))
        if not isinstance(self.fixed, bool):
            raise ConfigError(f"loss_scale.fixed={self.fixed!r}: expected true or false")
        if self.factor <= 1:
            raise ConfigError(f"loss_scale.factor={self.factor:g}: expected a power of two above 1; nearest valid: 2")
        if self.floor > self.initial:
            raise ConfigError(
                f"loss_scale.floor={self.floor:g} is above loss_scale.initial={self.initial:g}; "
                f"nearest valid floor: {self.initial:g}"
            )


@dataclass(frozen=True)
class LossScale:
    """The scale between two steps; the same on every rank.

    Args:
        scale: by which losses are multiplied.
        good_steps: steps without overflow since the scale last changed or a step was skipped.
        hysteresis_left: overflows until the scale is lowered; back at the options' value when the scale is raised.
        skipped_steps: of the whole run.
        stuck_steps: overflows in a row at a scale that cannot be lowered.
    """

    scale: float
    good_steps: int = 0
    hysteresis_left: int = 1
    skipped_steps: int = 0
    stuck_steps: int = 0

    @classmethod
    def start(cls, options: LossScaleOptions) -> LossScale:
        return cls(scale=float(options.initial), hysteresis_left=options.hysteresis)

    def after(self, overflowed: bool, options: LossScaleOptions) -> LossScale:
        """The scale after a step, skipped when it ``overflowed``."""
        if overflowed:
            left = max(0, self.hysteresis_left - 1)
            can_fall = not options.fixed and self.scale > options.floor
            falls = can_fall and left == 0
            return replace(
                self,
                scale=max(options.floor, self.scale / options.factor) if falls else self.scale,
                good_steps=0,
                hysteresis_left=left,
                skipped_steps=self.skipped_steps + 1,
                stuck_steps=0 if can_fall else self.stuck_steps + 1,
            )
        if self.good_steps + 1 < options.window or options.fixed:
            return replace(self, good_steps=self.good_steps + 1, stuck_steps=0)
        raised = self.scale * options.factor
        return replace(
            self,
            scale=raised if math.isfinite(raised) else self.scale,
            good_steps=0,
            hysteresis_left=options.hysteresis,
            stuck_steps=0,
        )


def given_loss_scale(value: Any) -> LossScaleOptions | None:
    """The options from what a user gives.

    Args:
        value: ``None`` (the defaults, under ``16-mixed``), a :class:`LossScaleOptions`, a mapping of its arguments, or
            a number: a fixed scale.

    Raises:
        ConfigError: on anything else, with the nearest valid values.
    """
    if value is None or isinstance(value, LossScaleOptions):
        return value
    if isinstance(value, Mapping):
        refuse_unknown("loss_scale", map(str, value), [field.name for field in fields(LossScaleOptions)])
        return LossScaleOptions(**value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_power_of_two("loss_scale", value)
        return LossScaleOptions(initial=float(value), floor=min(1.0, float(value)), fixed=True)
    names = ", ".join(field.name for field in fields(LossScaleOptions))
    raise ConfigError(f"loss_scale={value!r}: expected null, a number (a fixed scale), or a mapping of {names}")


def safe_static_scale(largest_gradient: float, headroom: float = 4.0) -> float:
    """The largest power of two that keeps gradients of this size within float16.

    ``2 ** floor(log2(65504 / (headroom * max|g|)))``: the larger the gradients, the smaller the scale. The inverse,
    ``2 ** floor(log2(max|g|))``, which is found in print, is large exactly where gradients overflow already. Gradients
    are divided by the scale *before* they are clipped: clipping scaled ones to a norm ``c`` clips at ``c / scale``.

    Args:
        largest_gradient: largest magnitude of any (unscaled) gradient that a backward passes through, activations'
            included.
        headroom: how many times larger gradients may become.

    Raises:
        ConfigError: unless both are positive and finite.
    """
    for name, value in (("largest_gradient", largest_gradient), ("headroom", headroom)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"safe_static_scale: {name}={value!r}: expected a positive, finite number")
    _, exponent = math.frexp(LARGEST / (headroom * largest_gradient))
    return math.ldexp(1.0, exponent - 1)


def _check_power_of_two(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{name}={value!r}: expected a power of two above 0")
    mantissa, exponent = math.frexp(value)
    if mantissa != 0.5:
        below, above = 2.0 ** (exponent - 1), 2.0**exponent
        raise ConfigError(
            f"{name}={value!r}: expected a power of two, by which nothing is rounded; "
            f"nearest valid: {below:g} and {above:g}"
        )
