from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, product
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megapar import schedule_names
from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline.schedules import (
    SCHEDULE_NAMES,
    Action,
    Schedule,
    build_schedule,
    forward_schedule,
    from_csv,
    load_schedule,
    loop_placement,
    save_schedule,
    to_csv,
    v_placement,
)

CHUNKS = {"1f1b": (1, 1), "zb_h1": (1, 1), "zb_h2": (1, 1), "zbv": (2, 2), "dualpipe_v": (2, 2)}
CHUNKS |= {"gpipe": (1, 9), "forward": (1, 9), "interleaved_1f1b": (2, 9)}
HALVED = {"zb_h1", "zb_h2", "zbv"}

F, B, I, W = "forward", "backward", "backward_input", "backward_weight"  # noqa: E741


def documented_peak(name: str, stages: int, microbatches: int, chunks: int, rank: int) -> int:
    """The table of the module's docstring."""
    group = ceil(microbatches / max(1, microbatches // stages))
    return {
        "gpipe": chunks * microbatches,
        "1f1b": min(stages - rank, microbatches),
        "interleaved_1f1b": min((chunks - 1) * group + 2 * (stages - 1 - rank) + 1, chunks * microbatches),
        "zb_h1": min(stages, microbatches),
        "zb_h2": min(2 * stages - 1, microbatches),
        "zbv": min(2 * stages, 2 * microbatches, microbatches + 1 + rank),
        "dualpipe_v": min(2 * stages + 1, 2 * microbatches, microbatches + 1 + rank),
        "forward": 1,
    }[name]


def check_by_hand(schedule: Schedule) -> None:
    """Execute it with no help of the package: what an action needs is looked up in what has been done, by the paper."""
    stage_of = {k: rank for rank, row in enumerate(schedule.placement) for k in row}
    last = len(stage_of) - 1
    done: set[tuple[str, int, int]] = set()
    position = [0] * len(schedule.ranks)
    total = sum(map(len, schedule.ranks))
    while len(done) < total:
        before = len(done)
        for rank, row in enumerate(schedule.ranks):
            while position[rank] < len(row):
                action = row[position[rank]]
                k, m = schedule.placement[rank][action.chunk], action.microbatch
                above = (B, k + 1, m) in done or (I, k + 1, m) in done or k == last
                may = {
                    F: k == 0 or (F, k - 1, m) in done,
                    B: (F, k, m) in done and above,
                    I: (F, k, m) in done and above,
                    W: (I, k, m) in done,
                }[action.kind]
                if not may:
                    break
                assert (action.kind, k, m) not in done
                done.add((action.kind, k, m))
                position[rank] += 1
        assert len(done) > before, "deadlock"


def counted_peak(row: Sequence[Action]) -> int:
    """The most (chunk, microbatch) pairs that have gone forward and still wait for an action of their backward."""
    last = {(a.chunk, a.microbatch): index for index, a in enumerate(row)}
    begins, ends = Counter(index for index, a in enumerate(row) if a.kind == F), Counter(last.values())
    return max(accumulate(begins[index] - ends[index - 1] for index in range(len(row))))


def check_case(name: str, stages: int, microbatches: int, chunks: int) -> bool:
    """Whether there is such a schedule; one that there is must be right, one that there is not refused by message."""
    least, most = CHUNKS[name]
    if not least <= chunks <= most:
        with pytest.raises(ConfigError, match=rf"{name}' cannot have num_chunks={chunks}; valid values: {least}"):
            build_schedule(name, stages, microbatches, chunks)
        return False
    schedule = build_schedule(name, stages, microbatches, chunks)
    assert (schedule.num_stages, schedule.num_chunks, schedule.num_microbatches) == (stages, chunks, microbatches)
    assert schedule.placement == (
        v_placement(stages) if name in ("zbv", "dualpipe_v") else loop_placement(stages, chunks)
    )
    check_by_hand(schedule)
    for rank, row in enumerate(schedule.ranks):
        count = Counter(a.kind for a in row)
        assert count[F] == chunks * microbatches
        assert len(set(row)) == len(row)
        if name == "forward":
            assert len(row) == count[F]
        else:
            assert count[B] + count[I] == chunks * microbatches and count[I] == count[W]
            assert count[B] == 0 if name in HALVED else name == "dualpipe_v" or count[I] == 0
        assert schedule.peak_activations()[rank] == documented_peak(name, stages, microbatches, chunks, rank)
        assert schedule.peak_activations()[rank] == counted_peak(row)
    assert from_csv(to_csv(schedule), name) == schedule
    return True


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 12), st.integers(1, 40), st.integers(1, 4))
def test_every_schedule(name: str, stages: int, microbatches: int, chunks: int) -> None:
    check_case(name, stages, microbatches, chunks)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_schedule_exhaustively(name: str) -> None:
    """The whole grid; how many combinations there are, and how many of them are refused, is counted as well."""
    grid = list(product(range(1, 13), range(1, 41), range(1, 5)))
    made = sum(check_case(name, *numbers) for numbers in grid)
    least, most = CHUNKS[name]
    assert (len(grid), made) == (1920, 480 * len(range(least, min(most, 4) + 1)))


def test_zero_bubble_holds_as_much_as_one_forward_one_backward() -> None:
    first = build_schedule("1f1b", 6, 20).peak_activations()[0]
    assert build_schedule("zb_h1", 6, 20).peak_activations() == (first,) * 6
    assert build_schedule("zbv", 6, 20).peak_activations() == (2 * first,) * 6  # chunks of half the size


def test_grids() -> None:
    assert build_schedule("1f1b", 2, 2).grid().splitlines() == [
        "rank 0: F0 F1 .  B0 .  B1",
        "rank 1: .  F0 B0 F1 B1 .",
    ]
    # The picture of ZB-H1 with four stages in the paper (figure 3, top), its first columns and its last ones.
    rows = build_schedule("zb_h1", 4, 8).grid().splitlines()
    assert rows[0].startswith("rank 0: F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 ")
    assert rows[3].startswith("rank 3: .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 ")
    assert rows[3].endswith(" W4 W5 W6 W7")
    assert build_schedule("interleaved_1f1b", 2, 2).grid().splitlines() == [
        "rank 0: F0   F1   F0.1 F1.1 .    B0.1 .    B1.1 B0   B1",
        "rank 1: .    F0   F1   F0.1 B0.1 F1.1 B1.1 B0   B1   .",
    ]


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 11])
def test_forward_only_wastes_nothing(stages: int, microbatches: int) -> None:
    """No order needs fewer slots: a rank's work, or a microbatch's way, and what is before and after it."""
    for placement in (loop_placement(stages, 1), loop_placement(stages, 3), v_placement(stages)):
        schedule = forward_schedule(placement, microbatches)
        check_by_hand(schedule)
        assert not schedule.is_training
        slots = max(len(line.split(": ")[1].split()) for line in schedule.grid().splitlines())
        chunks = len(placement[0])
        if placement == v_placement(stages):
            assert slots == chunks * microbatches + 2 * (stages - 1)
        elif microbatches >= stages or microbatches == 1:
            assert slots == chunks * max(microbatches, stages) + min(stages, microbatches) - 1


def test_a_schedule_without_its_last_microbatches() -> None:
    schedule = build_schedule("zbv", 4, 12).restricted(5)
    check_by_hand(schedule)
    assert schedule.num_microbatches == 5


def actions(text: str) -> tuple[Action, ...]:
    kinds = {"F": F, "B": B, "I": I, "W": W}
    found = []
    for word in text.split():
        microbatch, _, chunk = word[1:].partition(".")
        found.append(Action(kinds[word[0]], int(microbatch), int(chunk or 0)))
    return tuple(found)


@pytest.mark.parametrize(
    ("rows", "microbatches", "message"),
    [
        (["F0", ""], 1, "rank 1 misses the forward of microbatch 0"),
        (["F0 F0 B0"], 1, "rank 0 repeats the forward of microbatch 0"),
        (["F0 F1 B0"], 2, "rank 0 misses the backward of microbatch 1"),
        (["F0 B0 F1 B1"], 1, "rank 0 has no business with the forward of microbatch 1"),
        (["F0 I0"], 1, "rank 0 misses the backward_weight of microbatch 0"),
        (["F0 B0 W0"], 1, "rank 0 runs W0 before its backward_input|has no business with the backward_weight"),
        (["F0 B0 I0 W0"], 1, "rank 0 repeats the backward of microbatch 0"),
        (["B0 F0"], 1, "rank 0 runs B0 before its forward"),
        (["F0 W0 I0"], 1, "rank 0 runs W0 before its backward_input"),
        (
            ["F0 B0 F1 B1", "F1 B1 F0 B0"],
            2,
            r"deadlocks: rank 0 at B0 waits for B0 of rank 1, rank 1 at F1 waits for F1 of rank 0 \(a cycle\)",
        ),
    ],
)
def test_broken_schedules_are_refused(rows: list[str], microbatches: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schedule("mine", microbatches, tuple(actions(row) for row in rows))


def test_a_cycle_is_named_without_those_that_only_wait_for_it() -> None:
    rows = ["F0 F1 F0.1 F1.1", "F0 F1.1 F1 F0.1"]
    with pytest.raises(ConfigError, match=r"rank 1 runs F1\.1 before F1, its input"):
        Schedule("mine", 2, tuple(actions(row) for row in rows), v_placement(2))
    rows = ["F0 F0.1 F1 F1.1", "F1 F0 F0.1 F1.1", "F0 F1 F0.1 F1.1"]
    with pytest.raises(ConfigError) as error:
        Schedule("mine", 2, tuple(actions(row) for row in rows), loop_placement(3, 2))
    assert str(error.value) == (
        "schedule 'mine' deadlocks: rank 0 at F0.1 waits for F0 of rank 2, rank 2 at F0 waits for F0 of rank 1, "
        "rank 1 at F1 waits for F1 of rank 0 (a cycle)"
    )
    training = ["F0 F1 B0 B1", "F0 B0 F1 B1", "F1 B1 F0 B0", "F0 B0 F1 B1"]
    with pytest.raises(ConfigError) as error:
        Schedule("mine", 2, tuple(actions(row) for row in training))
    assert str(error.value) == (
        "schedule 'mine' deadlocks: rank 1 at B0 waits for B0 of rank 2, rank 2 at F1 waits for F1 of rank 1 (a cycle)"
    )


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (((0, 1),), r"1 ranks|2 ranks but placement"),
        (((0,), (1, 2)), "same number of chunks"),
        (((0,), (0,)), "not a permutation of the virtual stages 0 to 1"),
        (((0,), (2,)), "not a permutation of the virtual stages 0 to 1"),
    ],
)
def test_bad_placements(placement: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schedule("mine", 1, (actions("F0 B0"), actions("F0 B0")), placement)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpip", 2, 2), "did you mean 'gpipe'"),
        (("ZB_H1", 2, 2), "did you mean 'zb_h1'"),
        (("auto", 2, 2), "choose_schedule"),
        (("1f1b", 0, 2), r"num_stages=0: expected a positive integer"),
        (("1f1b", 2, 2.5), r"num_microbatches=2.5: expected a positive integer"),
        (("gpipe", 2, 2, 0), r"num_chunks=0"),
        (("interleaved_1f1b", 2, 2, 1), "valid values: 2 or more .with one chunk it is 1f1b"),
        (("1f1b", 2, 2, 2), "valid values: 1 .with more chunks it is interleaved_1f1b"),
        (("zbv", 2, 2, 3), "valid values: 2 "),
    ],
)
def test_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_schedule(*arguments)


def test_a_schedule_of_ones_own(tmp_path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("# two ranks, V shape, idle slots shown\n0F0,,3F0,3I0,3W0,0I0,,0W0\n,1F0,2F0,,2B0,1B0\n")
    schedule = load_schedule(path)
    assert schedule.name == "mine"
    assert schedule.placement == ((0, 3), (1, 2))
    assert [str(a) for a in schedule.ranks[0]] == ["F0", "F0.1", "I0.1", "W0.1", "I0", "W0"]
    save_schedule(schedule, path)
    assert load_schedule(path) == schedule
    assert path.read_text().splitlines()[1] == "1F0,2F0,2B0,1B0"
    side_by_side = from_csv("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n")
    assert [str(a) for a in side_by_side.ranks[0]] == ["F0", "F1", "F2", "B0", "B1", "B2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", "line 1, column 2: '0X0' is no action; expected one such as 0F3"),
        ("0F0,0B0\n0F0,0B0\n", "line 2, column 1: virtual stage 0 is on rank 0 and on rank 1"),
        ("0F0,0B0\n2F0,2B0\n", "not a permutation"),
        ("\n# nothing\n", "no actions"),
        ("0F0,0B0\n1F0,1B0,1F1\n", "rank 0 misses the forward of microbatch 1"),
        ("0B0,0F0\n", "runs B0 before its forward"),
    ],
)
def test_files_that_are_no_schedule(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_csv(text)


def test_a_file_that_is_not_there(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_schedule(tmp_path / "none.csv")


def test_the_settings_know_the_chunks_of_every_schedule() -> None:
    """One table is at the bottom of the house, where settings are validated; this is the other one."""
    for name in schedule_names.SCHEDULES:
        least, most = schedule_names.chunks_of(name)
        assert build_schedule(name, 2, 4).num_chunks == least
        for chunks in range(1, 5):
            if least <= chunks <= (most or chunks):
                assert build_schedule(name, 2, 4, chunks).num_chunks == chunks
            else:
                with pytest.raises(ConfigError):
                    build_schedule(name, 2, 4, chunks)
        assert build_schedule(name, 2, 4).splits_backward == (name in schedule_names.SPLIT_BACKWARDS)
