"""Schedule and costs of a measured step, so that the simulator can be asked what it should have taken. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline.planning.simulate import StageCosts
from lightning_megapar.pipeline.planning.trace import TraceEvent
from lightning_megapar.pipeline.schedules.data import Action, Schedule


def schedule_of(events: Sequence[TraceEvent], name: str = "measured") -> Schedule:
    """The schedule that a step's events followed.

    Which virtual stage each chunk is follows from the order in which the first microbatch's forwards started.

    Args:
        events: of one step (:func:`~lightning_megapar.pipeline.planning.trace.one_step`).
        name: name of the schedule.

    Raises:
        ConfigError: when the events are no complete step.
    """
    work = sorted((event for event in events if event.is_work), key=lambda event: (event.start, event.end))
    first = [(event.rank, event.chunk) for event in work if event.kind == "forward" and event.microbatch == 0]
    if not first:
        raise ConfigError("the trace has no forward of microbatch 0")
    num_ranks, num_chunks = 1 + max(event.rank for event in work), 1 + max(event.chunk for event in work)
    missing = [(r, c) for r in range(num_ranks) for c in range(num_chunks) if (r, c) not in first]
    if missing:
        raise ConfigError(f"the trace has no forward of microbatch 0 on (rank, chunk) {missing}")
    placement = tuple(tuple(first.index((rank, chunk)) for chunk in range(num_chunks)) for rank in range(num_ranks))
    ranks = tuple(
        tuple(Action(event.kind, event.microbatch, event.chunk) for event in work if event.rank == rank)  # type: ignore[arg-type]
        for rank in range(num_ranks)
    )
    return Schedule(name, 1 + max(event.microbatch for event in work), ranks, placement)


def costs_of(events: Sequence[TraceEvent], schedule: Schedule) -> StageCosts:
    """Costs per rank and chunk that explain a step: medians over its microbatches, in seconds.

    A message takes the shortest time that was seen between the end of an action and the start of the one on another
    rank that uses its result. A whole backward counts as one of the inputs.

    Args:
        events: of one step.
        schedule: :func:`schedule_of` the same events.
    """
    durations: dict[tuple[str, int, int], list[float]] = {}
    spans: dict[tuple[str, int, int], TraceEvent] = {}
    for event in events:
        if event.is_work:
            kind = "backward_input" if event.kind == "backward" else event.kind
            durations.setdefault((kind, event.rank, event.chunk), []).append(event.duration)
            spans[kind, schedule.placement[event.rank][event.chunk], event.microbatch] = event

    def table(kind: str) -> list[list[float]]:
        return [
            [median(durations.get((kind, rank, chunk), [0.0])) for chunk in range(schedule.num_chunks)]
            for rank in range(schedule.num_stages)
        ]

    messages = []
    for k in range(schedule.num_virtual_stages - 1):
        gaps = []
        for microbatch in range(schedule.num_microbatches):
            gaps.append(spans["forward", k + 1, microbatch].start - spans["forward", k, microbatch].end)
            if schedule.is_training:
                later, earlier = spans["backward_input", k + 1, microbatch], spans["backward_input", k, microbatch]
                gaps.append(earlier.start - later.end)
        messages.append(max(0.0, min(gaps)))
    chunk = 1 / schedule.num_chunks
    activation = [[chunk] * schedule.num_chunks] * schedule.num_stages
    return StageCosts(
        forward=table("forward"),
        backward_input=table("backward_input"),
        backward_weight=table("backward_weight"),
        communication=messages,
        activation=activation,
    )
