from __future__ import annotations

import pytest
from rich.console import Console

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline import StageCosts, build_schedule, choose_schedule, simulate


def test_the_fastest_that_fits() -> None:
    free = choose_schedule(4, 16)
    assert free.name == "zbv" and free.num_chunks == 2
    spans = {c.name: c.timeline.makespan for c in free.candidates}
    assert free.timeline.makespan == min(spans.values()) == simulate(build_schedule("zbv", 4, 16)).makespan
    # ZB-V and ZB-H1 hold S on every rank; a first rank that may hold S and later ones fewer leaves what tapers off.
    tight = choose_schedule(4, 16, memory_limit=[4, 3.5, 3, 2])
    assert tight.name == "1f1b"
    reasons = {c.name: c.reason for c in tight.candidates}
    assert reasons["zbv"] == "needs 4 on rank 3, limit 2"
    assert reasons["gpipe"] == "needs 16 on rank 3, limit 2"
    assert reasons["1f1b"] == "taken"


def test_equally_fast_means_less_memory() -> None:
    choice = choose_schedule(3, 9, candidates=["gpipe", "1f1b"])
    assert choice.name == "1f1b"
    assert [c.reason for c in choice.candidates] == ["as fast, not with less memory", "taken"]


def test_costs_decide() -> None:
    """Twice the messages of a V, slow and in the way: one chunk per rank wins."""
    slow = StageCosts(1, 1, 1, communication=2.0, occupies=True)
    assert choose_schedule(4, 8, slow).num_chunks == 1
    assert choose_schedule(4, 8, StageCosts(1, 1, 1)).name == "zbv"


def test_numbers_of_chunks_that_do_not_fit_are_reasons() -> None:
    choice = choose_schedule(2, 4, StageCosts(forward=[[1, 2], [2, 1]]), candidates=["zbv", "1f1b", ("zb_h1", 2)])
    assert choice.name == "zbv"
    assert "has 2 entries but the schedule has 1 chunks" in choice.candidates[1].reason
    assert "cannot have num_chunks=2" in choice.candidates[2].reason


def test_the_table() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(choose_schedule(4, 16, memory_limit=4).table())
    text = capture.get()
    assert "4 stages, 16 microbatches" in text and "taken" in text and "needs 16 on every rank" in text
    assert [row[:5] for row in choose_schedule(2, 4, candidates=["1f1b"]).rows()] == [("1f1b", "1", "15", "20.0%", "2")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory_limit": 1}, "no schedule fits; the smallest need is 4 "),
        ({"memory_limit": 0}, "memory_limit=0: expected a positive number"),
        ({"memory_limit": [1, 2]}, "one for each of 4 ranks"),
        ({"candidates": ["1fb1"]}, "did you mean '1f1b'"),
    ],
)
def test_no_choice(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_schedule(4, 16, **arguments)
