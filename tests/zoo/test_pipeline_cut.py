"""Architectures of transformers cut into pipeline stages, in one process: loss and every gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from zoo.architectures import KINDS, architectures
from zoo.pipeline_table import markdown, trial, verdicts
from zoo.trial import compare, evaluation_error

pytest.importorskip("transformers")
from zoo.models import MODELS

REFUSED = {"dory", "hrm_text", "reformer"}
"""Looped stacks, two stacks of equal size in a loop, reversible layers."""


SLOW = {"zamba2", "qwen3_next"}
"""Ranks train them in ``test_whole_zoo_on_ranks.py``."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in KINDS])
def test_kinds(name: str) -> None:
    size = (32, 64)[KINDS.index(name) % 2]
    verdict = trial(architectures()[name], hidden=size)
    assert verdict.kind == "exact", verdict


@pytest.mark.parametrize("name", ["llama", "gemma3n_text", "cpmant", "xlm", "zamba2"])
def test_one_block_per_stage(name: str) -> None:
    verdict = trial(architectures()[name], stages=4)
    assert verdict.kind == "exact", verdict


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused(name: str) -> None:
    verdict = trial(architectures()[name])
    assert verdict.kind == "refused", verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "stages", "also"),
    [
        (32, 2, set()),
        (64, 2, set()),
        # Two double blocks only; a block for images that text alone leaves out.
        (32, 4, {"longcat_flash", "mllama"}),
    ],
)
def test_every_class(hidden: int, stages: int, also: set[str], tmp_path: Path) -> None:
    found = verdicts(hidden=hidden, stages=stages)
    (tmp_path / "pipeline.md").write_text(markdown(found))
    bad = {name: v for name, v in found.items() if v.kind in ("wrong", "crash")}
    assert not bad
    assert {name for name, v in found.items() if v.kind == "refused"} == REFUSED | also
    assert sum(v.kind == "exact" for v in found.values()) >= 170


@pytest.mark.parametrize(("make", "step"), MODELS, ids=lambda x: x.__name__)
def test_models_of_other_kinds(make: Any, step: Any) -> None:
    """Three stages; ranks play two of them in ``test_pipeline_ranks.py``."""
    torch.manual_seed(0)
    verdict = compare(make(), step, 3)
    assert verdict.kind == "exact", verdict
    assert evaluation_error(make(), step, 3) < 1e-9
