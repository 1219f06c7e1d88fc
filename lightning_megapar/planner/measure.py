"""Measure a link and a device, to describe the cluster that one is on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from lightning_megapar.config import ConfigError
from lightning_megapar.planner.cluster import Link, Ring


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

    messages = [torch.zeros(max(1, nbytes // 4), device=device) for nbytes in sizes]
    taken = _collective_seconds(
        [lambda m=m: dist.all_reduce(m, group=group) for m in messages],  # type: ignore[misc]
        group,
        repeats,
        device,
    )
    return fit_link(list(zip(sizes, taken)), dist.get_world_size(group))


def measure_factors(
    link: Link, group: Any = None, nbytes: int = 1 << 21, repeats: int = 5, device: Any = "cpu"
) -> dict[str, float]:
    """How long this library's collectives take over what the ring formula says for ``link``: one number for each.

    For ``collective_factors`` of a :class:`~lightning_megapar.planner.cluster.Cluster`; a collective, as
    :func:`measure_link`. ``all_reduce`` is 1 by definition, since it is what the link was fitted to.

    Args:
        link: from :func:`measure_link`.
        group, repeats, device: as :func:`measure_link`.
        nbytes: of the whole tensor; large enough that bandwidth decides.
    """
    import torch
    import torch.distributed as dist

    ring = Ring(dist.get_world_size(group), link)
    piece = torch.zeros(max(1, nbytes // 4 // ring.size), device=device)
    whole = torch.zeros(piece.numel() * ring.size, device=device)
    held = whole.numel() * 4.0
    # torch 2.13 renamed both and warns of the old names, which torch 2.11 knows alone.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    received = torch.zeros_like(whole)
    taken = _collective_seconds(
        [
            lambda: gather(whole, piece, group=group),
            lambda: scatter(piece, whole, group=group),
            lambda: dist.all_to_all_single(received, whole, group=group),
        ],
        group,
        repeats,
        device,
    )
    expected = {
        "all_gather": ring.all_gather(held),
        "reduce_scatter": ring.reduce_scatter(held),
        "all_to_all": ring.all_to_all(held),
    }
    return {name: seconds / rule for (name, rule), seconds in zip(expected.items(), taken)}


def _collective_seconds(works: Sequence[Callable[[], Any]], group: Any, repeats: int, device: Any) -> list[float]:
    """The median of each work's times, on the slowest rank; every rank gets the same numbers."""
    import torch
    import torch.distributed as dist

    def wait() -> None:
        if torch.device(device).type != "cpu":
            torch.accelerator.synchronize()

    taken = torch.zeros(len(works), dtype=torch.float64, device=device)
    for place, work in enumerate(works):
        times = []
        for _ in range(repeats + 1):
            dist.barrier(group)
            wait()
            start = time.perf_counter()
            work()
            wait()
            times.append(time.perf_counter() - start)
        taken[place] = median(times[1:])
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=group)
    return taken.tolist()


def measure_flops(
    tokens: int, in_features: int, out_features: int, dtype: Any = None, device: Any = "cpu", repeats: int = 5
) -> float:
    """FLOP/s that one device reaches on a product of this shape: the median of ``repeats``."""
    import torch

    x = torch.randn(tokens, in_features, dtype=dtype, device=device)
    weight = torch.randn(in_features, out_features, dtype=dtype, device=device)
    seconds = _median_seconds(lambda: x @ weight, repeats, torch.device(device).type)
    return 2.0 * tokens * in_features * out_features / seconds


def measure_memory_bandwidth(nbytes: int = 1 << 26, device: Any = "cpu", repeats: int = 5) -> float:
    """Bytes/s read and written when a tensor of ``nbytes`` is copied: the median of ``repeats``."""
    import torch

    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * nbytes / _median_seconds(lambda: target.copy_(source), repeats, torch.device(device).type)


def _median_seconds(work: Callable[[], Any], repeats: int, device_type: str) -> float:
    import torch

    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device_type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[1:])
