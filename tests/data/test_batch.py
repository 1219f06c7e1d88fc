from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megapar.config import ConfigError
from lightning_megapar.data.batch import BatchPlan


def test_describes_itself_in_one_line() -> None:
    assert BatchPlan(16, data_size=2, microbatches=4).describe() == (
        "micro batch 2 x 4 microbatches = batch 8 per data rank; x 2 data ranks x 1 accumulation = global batch 16"
    )
    assert BatchPlan(8).describe() == (
        "micro batch 8 x 1 microbatch = batch 8 per data rank; x 1 data rank x 1 accumulation = global batch 8"
    )


def test_table_holds_every_factor() -> None:
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(BatchPlan(48, data_size=2, accumulate=3, microbatches=4).table())
    text = console.export_text()
    for word in ("micro batch", "microbatches", "data ranks", "accumulation", "48"):
        assert word in text


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_factors_multiply_to_the_global_batch(micro: int, pieces: int, data: int, accumulate: int) -> None:
    plan = BatchPlan(micro * pieces * data * accumulate, data, accumulate, pieces)
    assert plan.micro_batch == micro
    assert plan.batch_per_rank == micro * pieces


@given(st.integers(1, 200), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_refusal_names_sizes_that_are_accepted_and_near(size: int, data: int, accumulate: int, pieces: int) -> None:
    unit = data * accumulate * pieces
    if size % unit == 0:
        BatchPlan(size, data, accumulate, pieces)
        return
    with pytest.raises(ConfigError, match=f"global_batch_size={size} is not divisible") as refusal:
        BatchPlan(size, data, accumulate, pieces)
    named = [int(n) for n in re.findall(r"\d+", str(refusal.value).rsplit(":", 1)[1])]
    assert len(named) == 2
    for near in named:
        assert BatchPlan(near, data, accumulate, pieces).micro_batch >= 1
        assert abs(near - size) <= 2 * unit


@pytest.mark.parametrize("name", ["global_batch_size", "data_size", "accumulate", "microbatches"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_only_positive_integers(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r}"):
        BatchPlan(**{"global_batch_size": 4, name: value})  # type: ignore[arg-type]
