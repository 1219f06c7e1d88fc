"""What tensor ranks show of a step they must show alike: they have the same samples, weights and random numbers.

Inside a sharded region each rank holds a part. A step that logs or returns something from there, or computes it from a
sharded weight, gives each rank another value, and nothing else tells that rank 0's is not the whole one. The loss and
the gradients may be exact all the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_megapar.data_parallel.agreement import TOLERANCE

REMEDY = (
    "it was taken from inside a sharded region, where each rank holds a part, or from sharded weights. Take it from a "
    "block's output, or keep those layers whole: sharding_plan={'their.name': 'replicate', ...}, or 'off'"
)

OUTPUT_TOLERANCE = 1e-4
"""Relative difference of what steps return that rounding may explain; tensor ranks compute it from the same numbers."""


@dataclass(frozen=True)
class Unlike:
    """What two tensor ranks have differently.

    Args:
        name: as logged; ``""`` for what the step returned.
        first, other: on the first tensor rank and on another one.
    """

    name: str = ""
    first: float = 0.0
    other: float = 0.0


def unlike(a: float, b: float, dtype: torch.dtype | None) -> bool:
    """Whether two ranks' values differ by more than rounding explains.

    Args:
        a, b: values.
        dtype: in which they were computed, ``None`` where nobody knows: then as float32.
    """
    if a != a or b != b:
        return (a != a) != (b != b)
    return abs(a - b) > TOLERANCE.get(dtype or torch.float32, TOLERANCE[torch.float32]) * max(abs(a), abs(b))


def state_of(metric: Metric, device: torch.device) -> Tensor:
    """A number that tells states of a metric apart: 0-dim float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name in metric._defaults:
        state = getattr(metric, name)
        last = state[-1] if isinstance(state, list) and state else state
        if isinstance(last, Tensor) and not last.is_complex():
            total += last.detach().to(device, torch.float64).nan_to_num(1.0, 2.0, 3.0).sum()
    return total


def tell_unlike(found: Iterable[Unlike], told: set[str], step: str) -> None:
    """Warn once of each name.

    Args:
        found: of one step.
        told: names that have been told of; changed.
        step: the step's name.
    """
    for one in found:
        if (key := one.name or step) in told:
            continue
        told.add(key)
        what = f"self.log({one.name!r}) got {one.first:.6g} and {one.other:.6g} on" if one.name else f"{step} returned"
        what += "" if one.name else " other values on each of"
        own = "self.log(..., rank_zero_only=True)" if one.name else "leave it out"
        kept = "What the first of them has is logged." if one.name else "What the first of them has is not the whole."
        warnings.warn(
            f"{what} tensor ranks that share their samples. Either it is a figure of each rank, such as a time: {own}. "
            f"Or {REMEDY}. {kept}",
            stacklevel=2,
        )
