"""Rules of allocation on traces that are small enough to follow by hand."""

from __future__ import annotations

from lightning_megapar.memory import Trace
from lightning_megapar.memory.replay import best_fit, best_fit_without_coalescing, planned, torch_caching
from lightning_megapar.memory.trace import Event

KIB, MIB = 1 << 10, 1 << 20


def trace(*events: tuple[int, int]) -> Trace:
    return Trace(Event(buffer, size) for buffer, size in events)


def test_two_freed_neighbours_hold_what_neither_could() -> None:
    steps = trace((0, 4 * KIB), (1, 4 * KIB), (0, -4 * KIB), (1, -4 * KIB), (2, 8 * KIB))
    assert best_fit(steps) == planned(steps) == 8 * KIB
    assert best_fit_without_coalescing(steps) == 16 * KIB


def test_a_freed_block_is_cut_for_less() -> None:
    steps = trace((0, 8 * KIB), (0, -8 * KIB), (1, 4 * KIB), (2, 4 * KIB))
    assert best_fit(steps) == best_fit_without_coalescing(steps) == 8 * KIB


def test_sizes_are_aligned() -> None:
    assert best_fit(trace((0, 1), (1, 513))) == 512 + 1024


def test_segments_of_torch() -> None:
    assert torch_caching(trace((0, KIB))) == 2 * MIB
    assert torch_caching(trace((0, MIB), (1, MIB))) == 2 * MIB  # two small ones in one segment
    assert torch_caching(trace((0, MIB), (1, MIB), (2, KIB))) == 4 * MIB
    assert torch_caching(trace((0, 2 * MIB), (1, 19 * MIB))) == 40 * MIB  # 19 MiB take a segment of their own
    assert torch_caching(trace((0, 12 * MIB))) == 12 * MIB  # multiples of 2 MiB
    assert torch_caching(trace((0, 2 * MIB), (1, 9 * MIB), (2, 9 * MIB))) == 20 * MIB  # one segment holds all three
    assert torch_caching(trace((0, 9 * MIB), (1, 9 * MIB), (0, -9 * MIB), (1, -9 * MIB), (2, 18 * MIB))) == 20 * MIB
    assert torch_caching(trace((0, 9 * MIB), (1, 9 * MIB), (2, 3 * MIB))) == 40 * MIB


def test_what_is_left_of_a_large_block_below_a_mebibyte_is_not_used() -> None:
    # 19.5 of 20 MiB: the rest stays with the block, and the next one needs a segment.
    steps = trace((0, 9 * MIB), (1, 10 * MIB + 512 * KIB), (2, 512 * KIB + 600 * KIB))
    assert torch_caching(steps) == 20 * MIB + 20 * MIB


def test_a_plan_made_from_another_step() -> None:
    first = trace((0, 4 * KIB), (1, 8 * KIB), (0, -4 * KIB), (2, 4 * KIB))
    assert planned(first, first) == 12 * KIB
    # One more than was planned for lies behind the rest, and what comes in another order does no harm.
    assert planned(trace((0, 8 * KIB), (1, 4 * KIB), (2, 4 * KIB), (3, 512)), first) == 16 * KIB + 512
