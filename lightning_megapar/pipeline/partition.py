"""Contiguous min-max split of a stack of blocks into stages. Pure functions, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_megapar.config import ConfigError


def split_blocks(
    costs: Sequence[float], num_stages: int, before: float = 0.0, after: float = 0.0
) -> tuple[tuple[int, int], ...]:
    """Cut ``len(costs)`` consecutive blocks into ``num_stages`` non-empty ranges with the smallest largest cost.

    Exact dynamic programme over prefixes, O(blocks^2 x stages). Ties go to the smaller sum of squares, so that equal
    blocks are spread evenly.

    Args:
        costs: cost of each block (parameters, FLOPs or seconds; any one unit).
        num_stages: number of stages.
        before: cost of what the first stage runs before its first block (the embedding).
        after: cost of what the last stage runs after its last block (the head and the loss).

    Returns:
        ``(start, stop)`` per stage; the ranges cover ``0 .. len(costs)`` without gaps.

    Raises:
        ConfigError: when there are fewer blocks than stages.
    """
    blocks = len(costs)
    if blocks < num_stages:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} but the stack has only {blocks} blocks; valid values: 1 to {blocks}"
        )
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    def stage_cost(stage: int, start: int, stop: int) -> float:
        cost = prefix[stop] - prefix[start]
        if stage == 0:
            cost += before
        if stage == num_stages - 1:
            cost += after
        return cost

    # best[stop] = (largest cost, sum of squares, cut points) of the first stages over blocks[:stop]
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for stop in range(stage + 1, blocks - (num_stages - stage - 1) + 1):
            options = []
            for start, (worst, squares, cuts) in best.items():
                if start < stop:
                    cost = stage_cost(stage, start, stop)
                    options.append((max(worst, cost), squares + cost * cost, (*cuts, stop)))
            following[stop] = min(options)
        best = following
    stops = best[blocks][2]
    return tuple(zip((0, *stops[:-1]), stops))


def given_split(split: Sequence[int], blocks: int) -> tuple[tuple[int, int], ...]:
    """Ranges for a user's ``pipeline_split`` (blocks per stage).

    Raises:
        ConfigError: when the sum is not the number of blocks (nothing is silently dropped).
    """
    if sum(split) != blocks:
        raise ConfigError(f"pipeline_split={tuple(split)} adds up to {sum(split)} but the stack has {blocks} blocks")
    ranges, start = [], 0
    for count in split:
        ranges.append((start, start + count))
        start += count
    return tuple(ranges)
