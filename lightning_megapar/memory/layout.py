"""A static layout for a recorded step: every buffer gets its place in the arena beforehand.

Placing buffers of known lifetimes in the smallest arena is dynamic storage allocation (Garey and Johnson, problem SR2:
NP-hard); no arena is smaller than the most bytes that are alive at once. Here buffers are placed one by one, each in
the smallest gap that is free throughout its lifetime (best gap), in several orders: by size times lifetime, by size, by
lifetime. What comes first finds an empty arena. While no layout is as small as the bound, the buffers that stick out
above it move to the front of their order, which is placed again, a fixed number of times; the best layout is kept.

Small buffers find room between the others, and there are many of them: the search is among the large ones alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_megapar.memory.trace import Trace

_SMALL = 256
"""A buffer below this share of the bound is small."""


@dataclass(frozen=True)
class Layout:
    """Places of a trace's buffers.

    Args:
        offsets: of each buffer, in the order of :attr:`Trace.lifetimes`.
        arena_bytes: end of the highest one.
        max_live_bytes: of the trace with aligned sizes: a lower bound of ``arena_bytes``.
    """

    offsets: tuple[int, ...]
    arena_bytes: int
    max_live_bytes: int


def plan_offline(trace: Trace, alignment: int = 512, rounds: int = 8) -> Layout:
    """Place every buffer of a trace so that no two that are alive together overlap. Deterministic.

    Args:
        trace: of a step.
        alignment: of offsets and sizes.
        rounds: how often each order is placed at most. Takes about 0.1 s a round and thousand large buffers.
    """
    aligned = trace.aligned(alignment)
    if not aligned.lifetimes:
        return Layout((), 0, 0)
    bound = aligned.max_live_bytes
    size = np.array([one.size for one in aligned.lifetimes], dtype=np.int64)
    start = np.array([one.start for one in aligned.lifetimes], dtype=np.int64)
    end = np.array([one.end for one in aligned.lifetimes], dtype=np.int64)
    area = size.astype(np.float64) * (end - start)
    large = np.flatnonzero(size * _SMALL >= bound)
    low = np.full(len(size), -1, dtype=np.int64)
    low[large] = _searched(size[large], start[large], end[large], area[large], bound, rounds)
    small = np.flatnonzero(low < 0)
    low = _placed(small[np.argsort(-area[small], kind="stable")], size, start, end, low)
    return Layout(tuple(low.tolist()), int((low + size).max()), bound)


def _searched(
    size: np.ndarray, start: np.ndarray, end: np.ndarray, area: np.ndarray, bound: int, rounds: int
) -> np.ndarray:
    """The best of several orders, each improved a number of times: offsets."""
    nowhere = np.full(len(size), -1, dtype=np.int64)
    orders = [np.lexsort((start, -weight)) for weight in (area, size, end - start)]
    best, least = nowhere, 0
    for _ in range(rounds if len(size) else 0):
        for number, order in enumerate(orders):
            low = _placed(order, size, start, end, nowhere)
            top = low + size
            if least == 0 or top.max() < least:
                best, least = low, int(top.max())
            if least <= bound:
                return best
            out = top[order] > bound
            orders[number] = np.concatenate((order[out], order[~out]))
    return best


def _placed(order: np.ndarray, size: np.ndarray, start: np.ndarray, end: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Best gap.

    Args:
        order: the buffers to place, one after the other.
        size, start, end: of all buffers, in the order of their starts.
        low: offsets of those that have a place, else -1.

    Returns:
        ``low`` with the others.
    """
    low = low.copy()
    high = np.where(low < 0, 0, low + size)
    until = np.searchsorted(start, end)
    for buffer in order.tolist():
        # Alive together: what was there when the buffer came, and what comes before it goes.
        before = np.flatnonzero(end[:buffer] > start[buffer])
        after = slice(buffer + 1, until[buffer])
        lows, highs = np.concatenate((low[before], low[after])), np.concatenate((high[before], high[after]))
        by_place = np.argsort(lows)
        lows = lows[by_place]
        begins = np.zeros(len(lows) + 1, dtype=np.int64)
        np.maximum.accumulate(highs[by_place], out=begins[1:])
        room = lows - begins[:-1]  # below each of them, and negative for those without a place
        fits = np.flatnonzero(room >= size[buffer])
        low[buffer] = begins[fits[np.argmin(room[fits])]] if len(fits) else begins[-1]
        high[buffer] = low[buffer] + size[buffer]
    return low
