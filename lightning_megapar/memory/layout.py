"""A static layout for a recorded step: every buffer gets its place in the arena beforehand.

Placing buffers of known lifetimes in the smallest arena is dynamic storage allocation (Garey and Johnson, problem SR2:
NP-hard); no arena is smaller than the most bytes that are alive at once. Here buffers are placed one by one, each in
the smallest gap that is free throughout its lifetime (best gap), in several orders, of which the best one is kept:
by size times lifetime, by size, by lifetime. What comes first finds an empty arena.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_megapar.memory.trace import Trace


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


def plan_offline(trace: Trace, alignment: int = 512) -> Layout:
    """Place every buffer of a trace so that no two that are alive together overlap.

    Args:
        trace: of a step.
        alignment: of offsets and sizes.
    """
    aligned = trace.aligned(alignment)
    if not aligned.lifetimes:
        return Layout((), 0, 0)
    size = np.array([one.size for one in aligned.lifetimes], dtype=np.int64)
    start = np.array([one.start for one in aligned.lifetimes], dtype=np.int64)
    end = np.array([one.end for one in aligned.lifetimes], dtype=np.int64)
    orders = (size.astype(np.float64) * (end - start), size, end - start)
    best: tuple[int, np.ndarray] | None = None
    for weight in orders:
        offsets = _placed(np.lexsort((start, -weight)), size, start, end)
        arena = int((offsets + size).max())
        if best is None or arena < best[0]:
            best = arena, offsets
        if best[0] == aligned.max_live_bytes:
            break
    assert best is not None
    return Layout(tuple(best[1].tolist()), best[0], aligned.max_live_bytes)


def _placed(order: np.ndarray, size: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Best gap: offsets of buffers that are placed in an order."""
    count = len(order)
    offsets = np.zeros(count, dtype=np.int64)
    first, last = start[order], end[order]
    low, high = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for number, buffer in enumerate(order):
        together = np.flatnonzero((first[:number] < end[buffer]) & (start[buffer] < last[:number]))
        where = 0
        if len(together):
            together = together[np.argsort(low[together], kind="stable")]
            taken = np.maximum.accumulate(high[together])
            begins = np.concatenate(([0], taken))
            room = np.concatenate((low[together], [np.iinfo(np.int64).max])) - begins
            # Above the highest there is always room, and less than what stands for none: something lies below it.
            where = int(begins[np.argmin(np.where(room >= size[buffer], room, np.iinfo(np.int64).max))])
        low[number], high[number] = where, where + size[buffer]
        offsets[buffer] = where
    return offsets
