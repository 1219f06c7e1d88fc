"""Measure a link and a device, to describe the cluster that one is on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from lightning_megapar.config import ConfigError
from lightning_megapar.planner.cluster import Link


def fit_link(samples: Sequence[tuple[float, float]], size: int) -> Link:
    """The link under which a ring all-reduce of ``size`` ranks takes what was measured.

    Least squares on relative errors of ``2 (n-1) alpha + 2 (n-1)/n m / beta``, with ``alpha >= 0``.

    Args:
        samples: pairs (bytes, seconds), at least two different sizes.
        size: ranks of the all-reduce, two or more.

    Raises:
        ConfigError: with fewer than two sizes, one rank, a time that is not positive, or times that do not grow with
            the size.
    """
    if size < 2 or len({nbytes for nbytes, _ in samples}) < 2:
        raise ConfigError(f"size={size}, {len(samples)} samples: a link is fitted to two ranks and two sizes or more")
    if any(seconds <= 0 for _, seconds in samples):
        raise ConfigError(f"samples={list(samples)!r}: every time must be positive")
    # Relative errors: each equation is divided by its own time, so that the small messages count as well.
    rows = [(2 * (size - 1) / t, 2 * (size - 1) / size * m / t) for m, t in samples]
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = (sum(r[i] for r in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    alpha = (a1 * bb - b1 * ab) / determinant
    inverse = (b1 * aa - a1 * ab) / determinant
    if alpha < 0:
        alpha, inverse = 0.0, b1 / bb
    if inverse <= 0:
        raise ConfigError(f"samples={list(samples)!r}: the time does not grow with the size; measure larger messages")
    return Link(alpha, 1.0 / inverse)


def measure_link(
    group: Any = None, sizes: Sequence[int] = (1 << 12, 1 << 20, 1 << 22), repeats: int = 5, device: Any = "cpu"
) -> Link:
    """Time real all-reduces over ``group`` and fit their latency and bandwidth. Every rank gets the same link.

    A collective: every rank of the group calls it. Each sample is the median of ``repeats``, on the slowest rank.

    Args:
        group: a process group of two ranks or more; ``None`` for the default one.
        sizes: bytes per message, at least two.
        repeats: timed all-reduces per size, after one that is not.
        device: where the messages lie (gloo: ``"cpu"``).

    Raises:
        ConfigError: as :func:`fit_link`.
    """
    import torch
    import torch.distributed as dist

    def wait() -> None:
        if torch.device(device).type != "cpu":
            torch.accelerator.synchronize()

    taken = torch.zeros(len(sizes), dtype=torch.float64, device=device)
    for place, nbytes in enumerate(sizes):
        message = torch.zeros(max(1, nbytes // 4), dtype=torch.float32, device=device)
        times = []
        for _ in range(repeats + 1):
            dist.barrier(group)
            wait()
            start = time.perf_counter()
            dist.all_reduce(message, group=group)
            wait()
            times.append(time.perf_counter() - start)
        taken[place] = median(times[1:])
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=group)
    return fit_link(list(zip(sizes, taken.tolist())), dist.get_world_size(group))


def measure_flops(
    tokens: int, in_features: int, out_features: int, dtype: Any = None, device: Any = "cpu", repeats: int = 5
) -> float:
    """FLOP/s that one device reaches on a product of this shape: the best of ``repeats``."""
    import torch

    x = torch.randn(tokens, in_features, dtype=dtype, device=device)
    weight = torch.randn(in_features, out_features, dtype=dtype, device=device)
    seconds = _best(lambda: x @ weight, repeats, torch.device(device).type)
    return 2.0 * tokens * in_features * out_features / seconds


def _best(work: Callable[[], Any], repeats: int, device_type: str) -> float:
    import torch

    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device_type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])
