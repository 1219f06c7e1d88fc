"""What tensor ranks show of a step they must show alike: they have the same samples, weights and random numbers.

Inside a sharded region each rank holds a part. A step that logs or returns something from there, or computes it from a
sharded weight, gives each rank another value, and nothing else tells that rank 0's is not the whole one. The loss and
the gradients may be exact all the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_megapar.data_parallel.agreement import TOLERANCE

REMEDY = (
    "it was taken from inside a sharded region, where each rank holds a part, or from sharded weights. Take it from a "
    "block's output, or keep those layers whole: sharding_plan={'their.name': 'replicate', ...}, or 'off'"
)


@dataclass(frozen=True)
class Unlike:
    """What two tensor ranks have logged differently.

    Args:
        name: as logged.
        first, other: on the first tensor rank and on another one.
    """

    name: str
    first: float
    other: float


def tolerance_of(dtype: torch.dtype | None) -> float:
    """Relative difference that rounding may explain; a number's dtype is unknown, and counts as float32."""
    return TOLERANCE.get(dtype or torch.float32, TOLERANCE[torch.float32])


def unlike(first: Tensor, other: Tensor, tolerance: Tensor) -> Tensor:
    """Where two ranks' values differ by more than rounding explains.

    Args:
        first, other: float64, of shapes that broadcast; a NaN is like a NaN only.
        tolerance: relative.
    """
    finite = first.isfinite() & other.isfinite()
    apart = (first - other).abs() > tolerance * torch.maximum(first.abs(), other.abs())
    return torch.where(finite, apart, (first != other) & ~(first.isnan() & other.isnan()))


def state_of(metric: Metric, device: torch.device) -> Tensor:
    """A number that tells states of a metric apart: 0-dim float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name in metric._defaults:
        state = getattr(metric, name)
        last = state[-1] if isinstance(state, list) and state else state
        if isinstance(last, Tensor) and not last.is_complex():
            total += last.detach().to(device, torch.float64).nan_to_num(1.0, 2.0, 3.0).sum()
    return total


def tell_unlike(found: Iterable[Unlike], told: set[str], step: str | None = None) -> None:
    """Warn once of each name.

    Args:
        found: of one step.
        told: names that have been told of; changed.
        step: the step's name, if what it returned differs as well.
    """
    for one in found:
        if one.name in told:
            continue
        told.add(one.name)
        warnings.warn(
            f"self.log({one.name!r}) got {one.first:.6g} and {one.other:.6g} on tensor ranks that share their samples. "
            "Either it is a figure of each rank, such as a time: self.log(..., rank_zero_only=True). "
            f"Or {REMEDY}. What the first of them has is logged.",
            stacklevel=2,
        )
    if step is not None and step not in told:
        told.add(step)
        warnings.warn(
            f"{step} returned different values on tensor ranks that share their samples. Unless it is a figure of each "
            f"rank, such as a time, {REMEDY}. What the first of them has is not the whole",
            stacklevel=2,
        )


def tell_news(news: Mapping[str, str], step: int) -> None:
    """Warn of what the training step has begun to do inside sharded regions.

    Args:
        news: see :meth:`~lightning_megapar.step.watching.Watch.news`.
        step: number of the step.
    """
    shown = ", ".join(f"{name} (a piece of {path!r})" for name, path in sorted(news.items()))
    warnings.warn(
        f"training_step calls functions on pieces of sharded layers that it did not call before step {step}: {shown}. "
        "The sharding plan is proven for the first step only; such functions see this rank's features and not all. "
        "Prove the later step with recipes/verify.py, or keep these layers whole: sharding_plan={'their.name': "
        "'replicate', ...}, or 'off'",
        stacklevel=2,
    )
