"""Layers that are too small to pay for their collectives stay whole, exactly up to the closed-form break-even."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layout_oracles import A100, bare, pattern

from lightning_megapar.sharding.layouts.graphs import (
    break_even_fan_in,
    linear_graph,
    mlp_graph,
    transformer_block_graph,
)
from lightning_megapar.sharding.layouts.search import search


def test_a_layer_that_is_too_small_stays_whole() -> None:
    sizes = {"hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 512, "seq": 64, "batch": 1}
    graph = transformer_block_graph(**sizes, cluster=A100, tensor_size=4)
    plan = search(graph)
    assert set(plan.strategies.values()) == {"replicate"} and not plan.steps
    assert plan.seconds < 0.5 * pattern(graph).seconds


def test_the_break_even_of_the_text_books() -> None:
    assert break_even_fan_in(2, 156e12, 229e9) == pytest.approx(1362.4, abs=0.1)  # NVLink, A100
    assert break_even_fan_in(2, 156e12, 12.5e9) == pytest.approx(24960)  # 100 Gbit/s between nodes


RATES = {"flops": st.floats(1e9, 1e15), "threshold": st.floats(40, 20000), "n": st.sampled_from([2, 3, 4, 8, 16])}


def around(threshold: float, n: int) -> tuple[int, int]:
    """The widths next to a threshold that ``n`` ranks can divide, below and above it."""
    below = int(threshold // n) * n
    above = below + n
    assume(below > 0 and not any(math.isclose(width, threshold, rel_tol=1e-9) for width in (below, above)))
    return below, above


@settings(deadline=None, derandomize=True)
@given(**RATES, tokens=st.integers(1, 64), fan_out=st.integers(1, 64))
def test_a_row_layer_flips_exactly_at_the_break_even(
    flops: float, threshold: float, n: int, tokens: int, fan_out: int
) -> None:
    cluster = bare(flops, 2 * flops / threshold)
    assert break_even_fan_in(2, flops, cluster.intra_node.bandwidth) == pytest.approx(threshold)
    for width, expected in zip(around(threshold, n), ("replicate", "row")):
        graph = linear_graph(
            [("down", width, fan_out)],
            tokens,
            1,
            cluster=cluster,
            tensor_size=n,
            sequence_sharding=False,
            training=False,
        )
        (operation,) = graph.operations
        ways = tuple(s for s in operation.strategies if s.name in ("replicate", "row"))
        assert search(replace(graph, operations=(replace(operation, strategies=ways),))).strategies["down"] == expected


@settings(deadline=None, derandomize=True)
@given(**RATES, tokens=st.integers(1, 64), columns=st.integers(1, 64))
def test_a_column_layer_with_gathered_output_flips_at_half_of_it(
    flops: float, threshold: float, n: int, tokens: int, columns: int
) -> None:
    cluster = bare(flops, flops / threshold)
    for width, expected in zip(around(threshold, n), ("replicate", "column")):
        entries = [("up", width, columns * n)]
        common: dict = {"cluster": cluster, "tensor_size": n, "sequence_sharding": False, "training": False}
        assert search(linear_graph(entries, tokens, 1, **common)).strategies["up"] == expected


@settings(deadline=None, derandomize=True)
@given(**RATES, tokens=st.integers(1, 64))
def test_a_column_row_pair_in_training_flips_at_a_third_of_it(
    flops: float, threshold: float, n: int, tokens: int
) -> None:
    cluster = bare(flops, 2 * flops / (3 * threshold))
    hidden = n  # narrow outside: no other way to split the pair comes near
    for width, expected in zip(around(threshold, n), ({"replicate"}, {"column", "hidden", "row"})):
        assume(width > 4 * hidden)
        graph = mlp_graph(hidden, width, tokens, 1, cluster=cluster, tensor_size=n, sequence_sharding=False)
        plan = search(graph)
        assert set(plan.strategies.values()) == expected
