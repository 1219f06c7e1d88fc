"""The loss scale's rule, as a value."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megapar import ConfigError, MegaParStrategy
from lightning_megapar.precision import LossScale, LossScaleOptions, safe_static_scale
from lightning_megapar.precision.loss_scale import given_loss_scale

SMALL = LossScaleOptions(initial=16.0, window=3, hysteresis=2, patience=4)


def scales(options: LossScaleOptions, overflows: str) -> list[float]:
    """The scale before each step and after the last one; ``x`` is an overflow."""
    state = LossScale.start(options)
    found = [state.scale]
    for step in overflows:
        state = state.after(step == "x", options)
        found.append(state.scale)
    return found


@pytest.mark.parametrize(
    ("overflows", "expected"),
    [
        ("...", [16, 16, 16, 32]),
        ("..x..", [16, 16, 16, 16, 16, 16]),  # the first overflow only restarts the window
        ("x...", [16, 16, 16, 16, 32]),
        ("xx", [16, 16, 8]),  # the second lowers the scale
        ("x.x", [16, 16, 16, 8]),  # a good step in between does not forgive the first
        ("xxx", [16, 16, 8, 4]),  # and so does every further one
        ("xx...xx", [16, 16, 8, 8, 8, 16, 16, 8]),  # until a whole window was good
        ("xxxxxxxx", [16, 16, 8, 4, 2, 1, 1, 1, 1]),  # the floor
    ],
)
def test_rule(overflows: str, expected: list[float]) -> None:
    assert scales(SMALL, overflows) == expected


def test_the_defaults_are_those_that_are_documented() -> None:
    options = LossScaleOptions()
    assert (options.initial, options.window, options.hysteresis, options.floor) == (2.0**16, 1000, 2, 1.0)
    assert scales(options, "." * 1000)[-2:] == [2.0**16, 2.0**17]


@given(st.lists(st.booleans(), max_size=60))
def test_counts_and_bounds(overflows: list[bool]) -> None:
    state = LossScale.start(SMALL)
    for overflowed in overflows:
        before, state = state, state.after(overflowed, SMALL)
        assert state.scale in (before.scale / 2, before.scale, before.scale * 2)
        assert state.scale >= SMALL.floor and math.frexp(state.scale)[0] == 0.5
        assert not (overflowed and state.scale > before.scale) and not (not overflowed and state.scale < before.scale)
        # Only overflows at the floor count towards giving up, and a good step ends the row.
        assert state.stuck_steps == (before.stuck_steps + 1 if overflowed and before.scale == SMALL.floor else 0)
    assert state.skipped_steps == sum(overflows)


def test_a_fixed_scale_stays_and_still_skips() -> None:
    options = given_loss_scale(1024)
    assert options is not None and options.fixed
    state = LossScale.start(options)
    for overflowed in [False] * 3 + [True] * 5:
        state = state.after(overflowed, options)
    assert (state.scale, state.skipped_steps, state.stuck_steps) == (1024.0, 5, 5)


@given(st.floats(1e-12, 1e4), st.floats(1.0, 64.0))
def test_a_safe_static_scale_is_the_largest_that_fits(largest: float, headroom: float) -> None:
    scale = safe_static_scale(largest, headroom)
    assert scale * largest * headroom <= 65504.0 < 2 * scale * largest * headroom


def test_a_safe_static_scale_falls_as_gradients_grow() -> None:
    assert [safe_static_scale(g, 1.0) for g in (2.0**-10, 1.0, 2.0**10)] == [2.0**25, 2.0**15, 2.0**5]
    with pytest.raises(ConfigError, match=r"largest_gradient=0\.0: expected a positive, finite number"):
        safe_static_scale(0.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"widow": 5}, "loss_scale: unknown argument 'widow'; did you mean 'window'"),
        ({"initial": 1000}, "loss_scale.initial=1000: expected a power of two.*nearest valid: 512 and 1024"),
        ({"initial": 0}, "loss_scale.initial=0: expected a power of two above 0"),
        ({"window": 0}, "loss_scale.window=0: expected a number of steps, 1 or more"),
        ({"hysteresis": 1.5}, "loss_scale.hysteresis=1.5"),
        ({"factor": 1}, "loss_scale.factor=1: expected a power of two above 1; nearest valid: 2"),
        ({"floor": 2.0**20}, "loss_scale.floor=1.04858e.06 is above.*nearest valid floor: 65536"),
        ({"fixed": "yes"}, "loss_scale.fixed='yes': expected true or false"),
        ("dynamic", "loss_scale='dynamic': expected null, a number .a fixed scale., or a mapping of initial"),
        (3, "loss_scale=3: expected a power of two.*nearest valid: 2 and 4"),
        (True, "loss_scale=True: expected null, a number"),
    ],
)
def test_bad_options(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MegaParStrategy(loss_scale=value)
