"""Which schedule to take: the fastest by the simulator of those whose activations fit. Pure functions, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline.planning.simulate import StageCosts, Timeline, simulate
from lightning_megapar.pipeline.schedules import Schedule, build_schedule

if TYPE_CHECKING:
    from rich.table import Table

CANDIDATES: tuple[tuple[str, int], ...] = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("interleaved_1f1b", 2),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("zbv", 2),
    ("dualpipe_v", 2),
)
"""Schedules and chunks per rank that :func:`choose_schedule` tries, simplest first."""

_SLACK = 1e-9  # sums of the same numbers in another order count as equal
_AS_PRINTED = 1e-5  # what a message says is needed, with six digits, is enough


@dataclass(frozen=True)
class Candidate:
    """One schedule that was tried.

    Args:
        name, num_chunks: what was tried.
        timeline: its simulation; ``None`` when the schedule cannot have these numbers.
        reason: why it was taken or not, in one line.
    """

    name: str
    num_chunks: int
    timeline: Timeline | None
    reason: str


@dataclass(frozen=True)
class Choice:
    """What :func:`choose_schedule` took, and why.

    Args:
        timeline: the simulation of the schedule that was taken.
        candidates: everything that was tried, in the order in which it was given.
        memory_limit: per rank, in the unit of ``StageCosts.activation``; ``None`` without a limit.
    """

    timeline: Timeline
    candidates: tuple[Candidate, ...]
    memory_limit: tuple[float, ...] | None

    @property
    def name(self) -> str:
        return self.timeline.schedule.name

    @property
    def num_chunks(self) -> int:
        return self.timeline.schedule.num_chunks

    def rows(self) -> list[tuple[str, str, str, str, str, str]]:
        """(schedule, chunks, makespan, idle share of it, largest activation memory, reason) for a table."""
        rows = []
        for one in self.candidates:
            if one.timeline is None:
                figures = ("-", "-", "-")
            else:
                memory = max(one.timeline.peak_memory)
                whole = one.timeline.makespan * one.timeline.schedule.num_stages
                idle = 1 - sum(one.timeline.busy) / whole if whole else 0.0
                figures = (f"{one.timeline.makespan:.6g}", f"{idle:.1%}", f"{memory:.6g}")
            rows.append((one.name, str(one.num_chunks), *figures, one.reason))
        return rows

    def table(self) -> Table:
        """The same for the terminal."""
        from rich.table import Table

        schedule = self.timeline.schedule
        title = f"pipeline schedule: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches"
        table = Table(title=title)
        for column in ("schedule", "chunks", "makespan", "idle", "activations", "reason"):
            names = column in ("schedule", "reason")
            table.add_column(column, justify="left" if names else "right", no_wrap=column == "schedule")
        for row in self.rows():
            table.add_row(*row, style="bold" if row[5] == "taken" else None)
        return table


def choose_schedule(
    num_stages: int,
    num_microbatches: int,
    costs: StageCosts | Callable[[Schedule], StageCosts] | None = None,
    memory_limit: float | Sequence[float] | None = None,
    candidates: Sequence[str | tuple[str, int]] = CANDIDATES,
) -> Choice:
    """The schedule with the smallest makespan of those whose activations fit.

    The makespan counts, and not the time of a step that follows without a barrier, because an optimizer step with a
    global gradient norm is a barrier. Of equally fast schedules the one with the smaller peak is taken, then the one
    that stands first.

    Args:
        num_stages: ranks of the pipeline.
        num_microbatches: microbatches per step.
        costs: of a rank's whole share (numbers, or one per rank), so that all candidates do the same work; the numbers
            of a rank's chunks fit only candidates with as many chunks, and the others are left out with that reason.
            A function gives each candidate's; the :class:`~lightning_megapar.config.ConfigError` that it raises is the
            reason why one is left out.
        memory_limit: the most that the activations of a rank may take, in the unit of ``costs.activation`` (by default
            microbatches through a rank's whole share); one number, or one per rank.
        candidates: names, or names with chunks per rank.

    Raises:
        ConfigError: on an unknown name, and when nothing fits; the smallest need is named.
    """
    given = costs or StageCosts()
    limit = per_rank(memory_limit, num_stages)
    tried: list[tuple[str, int, Timeline | None, str]] = []
    for entry in candidates:
        name, chunks = (entry, None) if isinstance(entry, str) else entry
        try:
            schedule = build_schedule(name, num_stages, num_microbatches, chunks)
            timeline = simulate(schedule, given if isinstance(given, StageCosts) else given(schedule))
        except ConfigError as error:
            if "is not one of" in str(error) or "auto" in name:
                raise
            tried.append((name, chunks or 1, None, f"cannot: {error}"))
            continue
        tried.append((name, schedule.num_chunks, timeline, too_much(timeline, limit)))
    fitting = [one for _, _, one, reason in tried if one is not None and not reason]
    if not fitting:
        needs = [(max(t.peak_memory), name) for name, _, t, _ in tried if t is not None]
        least = f"; the smallest need is {min(needs)[0]:.6g} ({min(needs)[1]})" if needs else ""
        reasons = "; ".join(f"{name}: {reason}" for name, _, _, reason in tried)
        raise ConfigError(f"memory_limit={memory_limit}: no schedule fits{least}. {reasons}")
    fastest = min(timeline.makespan for timeline in fitting) * (1 + _SLACK)
    best = min(
        (timeline for timeline in fitting if timeline.makespan <= fastest),
        key=lambda timeline: round(max(timeline.peak_memory), 9),
    )
    rows = []
    for name, chunks, one, reason in tried:
        if one is best:
            reason = "taken"
        elif one is not None and not reason:
            slower = one.makespan / best.makespan - 1
            reason = f"{slower:.1%} slower" if slower > _SLACK else "as fast, not with less memory"
        rows.append(Candidate(name, chunks, one, reason))
    return Choice(best, tuple(rows), limit)


def too_much(timeline: Timeline, limit: tuple[float, ...] | None) -> str:
    """Which rank needs more than it may, or nothing."""
    if limit is None:
        return ""
    needs = enumerate(zip(timeline.peak_memory, limit))
    over = [(need - most, rank) for rank, (need, most) in needs if need > most * (1 + _AS_PRINTED)]
    if not over:
        return ""
    most = max(excess for excess, _ in over)
    rank = next(rank for excess, rank in over if excess >= most * (1 - _SLACK))
    alike = len(over) == len(limit) and len({*timeline.peak_memory}) == len({*limit}) == 1
    where = "every rank" if alike else f"rank {rank}"
    return f"needs {timeline.peak_memory[rank]:.6g} on {where}, limit {limit[rank]:.6g}"


def per_rank(value: float | Sequence[float] | None, num_stages: int) -> tuple[float, ...] | None:
    """A limit as one number for each rank.

    Raises:
        ConfigError: unless every number is positive, and there are as many as ranks.
    """
    if value is None:
        return None
    numbers = tuple(value) if isinstance(value, Sequence) else (value,) * num_stages
    if len(numbers) != num_stages or any(isinstance(n, bool | str) or not n > 0 for n in numbers):
        raise ConfigError(f"memory_limit={value!r}: expected a positive number, or one for each of {num_stages} ranks")
    return tuple(float(number) for number in numbers)
