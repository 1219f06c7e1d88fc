"""Modules without a plan, sharded by the chooser (and cut by a pipeline) on real ranks, against plain Lightning."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import somebody
from pool import RankPool

TENSOR = {"tensor_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}
CUT = {"gpt2": 0.6, "bert": 0.6, "vit": 0.6, "demo": 0.95, "mlp": 0.7, "resnet": 1.0}
"""Share of the parameters that a rank of two may hold at most (convolutions and torch's attention stay whole)."""
_plain: dict[str, dict[str, Any]] = {}


def plain(pool: RankPool, kind: str) -> dict[str, Any]:
    if kind not in _plain:
        _plain[kind] = pool.run(somebody.train, 1, kind, 1, None, mode="trainer")[0]
    return _plain[kind]


KINDS = [kind for kind in somebody.MODULES if kind != "late"]


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallel(pool: RankPool, kind: str) -> None:
    results = pool.run(somebody.train, 2, kind, 2, TENSOR, mode="trainer")
    expected = plain(pool, kind)
    parity.compare(results[0], expected, 1e-9)
    assert results[0]["styles"] or CUT[kind] == 1.0
    assert results[0]["local"] <= CUT[kind] * expected["local"]


@pytest.mark.parametrize("kind", KINDS)
def test_pipeline(pool: RankPool, kind: str) -> None:
    results = pool.run(somebody.train, 2, kind, 2, PIPELINE, mode="trainer")
    parity.compare(results[0], plain(pool, kind), 1e-9)


@pytest.mark.parametrize("kind", ["gpt2", "mlp"])
def test_both(pool: RankPool, kind: str) -> None:
    results = pool.run(somebody.train, 4, kind, 4, {**TENSOR, **PIPELINE}, mode="trainer")
    parity.compare(results[0], plain(pool, kind), 1e-9)


def test_a_module_without_memory_is_tried_on_a_copy_that_has_some(pool: RankPool) -> None:
    options = {"empty_init": True, "seed": 3}
    results = pool.run(somebody.train, 2, "late", 2, {**TENSOR, **options}, mode="trainer")
    expected = pool.run(somebody.train, 1, "late", 1, options, mode="trainer")[0]
    parity.compare(results[0], expected, 1e-9)
    assert any("packed_colwise:parts=3" in style for style in results[0]["styles"])
    assert results[0]["local"] < 0.6 * expected["local"]
