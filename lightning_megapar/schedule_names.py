"""Names of pipeline schedules, and what a setting must know of each. No torch."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "dualpipe_v"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
AUTO: Literal["auto"] = "auto"
SPLIT_BACKWARDS = ("zb_h1", "zb_h2", "zbv", "dualpipe_v")
"""Schedules that compute weight gradients apart from the rest of the backward."""
_CHUNKS: dict[str, tuple[int, int | None]] = {
    "forward": (1, None),
    "gpipe": (1, None),
    "interleaved_1f1b": (2, None),
    "zbv": (2, 2),
    "dualpipe_v": (2, 2),
    "auto": (1, None),
}


class OwnSchedule(Protocol):
    """A schedule that is no name: a :class:`~lightning_megapar.pipeline.schedules.data.Schedule`."""

    @property
    def name(self) -> str: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def is_training(self) -> bool: ...
    @property
    def splits_backward(self) -> bool: ...


def chunks_of(schedule: str | OwnSchedule) -> tuple[int, int | None]:
    """Fewest and most chunks per stage that a schedule can have; ``None`` for as many as there are blocks."""
    if not isinstance(schedule, str):
        return schedule.num_chunks, schedule.num_chunks
    return _CHUNKS.get(schedule, (1, 1))


def splits_backward(schedule: str | OwnSchedule) -> bool:
    """Whether a schedule computes weight gradients apart from the rest of the backward."""
    return schedule in SPLIT_BACKWARDS if isinstance(schedule, str) else schedule.splits_backward
