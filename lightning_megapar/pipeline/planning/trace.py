"""What ran when: events of a simulated or a measured pipeline step, as JSON and as a Chrome/Perfetto trace. No torch.

A trace file is the JSON object that ``chrome://tracing`` and https://ui.perfetto.dev open: one complete event
(``"ph": "X"``, microseconds) per :class:`TraceEvent`, a process per step, a thread per rank, and the exact fields
under ``"args"``. Events of others in the same file (a profiler's) are left alone when it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning_megapar.config import ConfigError, refuse_unknown
from lightning_megapar.pipeline.schedules.data import KINDS, LETTERS

CATEGORY = "pipeline"
EVENT_KINDS: tuple[str, ...] = (*KINDS, "send", "receive", "reduce", "optimizer")
"""A stage's work (the kinds of a schedule's actions), and what else may occupy it."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One span of time on one rank.

    Args:
        kind: one of :data:`EVENT_KINDS`.
        rank: the pipeline rank (the stage), from 0.
        start, end: seconds from an origin that all ranks share (in a simulation: the unit of its costs).
        microbatch: index within the step; -1 for what belongs to none.
        chunk: the rank's model chunk; -1 for what belongs to none.
        step: the training step.

    Raises:
        ConfigError: on an unknown kind, a negative rank, or an end before the start.
    """

    kind: str
    rank: int
    start: float
    end: float
    microbatch: int = -1
    chunk: int = -1
    step: int = 0

    def __post_init__(self) -> None:
        if self.kind not in EVENT_KINDS:
            raise ConfigError(f"trace event of kind {self.kind!r}; valid kinds: {', '.join(EVENT_KINDS)}")
        for name in ("rank", "microbatch", "chunk", "step"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < (0 if name in ("rank", "step") else -1):
                raise ConfigError(f"trace event with {name}={value!r}: expected an integer")
        for name in ("start", "end"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise ConfigError(f"trace event with {name}={value!r}: expected a number of seconds")
        if self.end < self.start:
            raise ConfigError(f"trace event ends ({self.end}) before it starts ({self.start})")

    @property
    def duration(self) -> float:
        return self.end - self.start

    @property
    def is_work(self) -> bool:
        """Whether it is an action of a schedule."""
        return self.kind in KINDS

    def to_json(self) -> dict[str, Any]:
        """Plain values by field name."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TraceEvent:
        """The inverse of :meth:`to_json`; unknown and missing fields are refused."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"trace event {values!r}: expected a mapping")
        refuse_unknown("trace event", values, [field.name for field in fields(cls)])
        missing = [name for name in ("kind", "rank", "start", "end") if name not in values]
        if missing:
            raise ConfigError(f"trace event without {', '.join(missing)}: {dict(values)}")
        return cls(**values)


def to_chrome(
    events: Iterable[TraceEvent], title: str = "pipeline", notes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The object that ``chrome://tracing`` and Perfetto open.

    Args:
        events: start and end in seconds.
        title: shown as the name of the process.
        notes: what else a reader should know (plain values); they stand under ``"otherData"``.
    """
    spans = sorted(events, key=lambda event: (event.step, event.rank, event.start))
    written: list[dict[str, Any]] = []
    for step in sorted({event.step for event in spans}):
        name = {"name": f"{title}, step {step}"}
        written.append({"ph": "M", "name": "process_name", "pid": step, "tid": 0, "args": name})
    for step, rank in sorted({(event.step, event.rank) for event in spans}):
        written.append({"ph": "M", "name": "thread_name", "pid": step, "tid": rank, "args": {"name": f"stage {rank}"}})
    for event in spans:
        letter = LETTERS.get(event.kind, event.kind)  # type: ignore[call-overload]
        label = letter if event.microbatch < 0 else f"{letter}{event.microbatch}"
        written.append(
            {
                "ph": "X",
                "name": label + (f".{event.chunk}" if event.chunk > 0 else ""),
                "cat": f"{CATEGORY},{event.kind}",
                "pid": event.step,
                "tid": event.rank,
                "ts": event.start * 1e6,
                "dur": event.duration * 1e6,
                "args": event.to_json(),
            }
        )
    document = {"traceEvents": written, "displayTimeUnit": "ms"}
    return document if notes is None else {**document, "otherData": dict(notes)}


def from_chrome(document: Any) -> tuple[TraceEvent, ...]:
    """The pipeline's events of a Chrome trace (the object, or its bare list of events), by step, rank and start.

    Raises:
        ConfigError: when it is no Chrome trace, or one without events of a pipeline.
    """
    entries = document.get("traceEvents") if isinstance(document, Mapping) else document
    if not isinstance(entries, list):
        raise ConfigError("not a Chrome trace: no list 'traceEvents'")
    ours = [
        TraceEvent.from_json(entry.get("args", {}))
        for entry in entries
        if isinstance(entry, Mapping) and str(entry.get("cat", "")).split(",")[0] == CATEGORY
    ]
    if not ours:
        raise ConfigError(f"the trace has {len(entries)} events, none of a pipeline (category {CATEGORY!r})")
    return tuple(sorted(ours, key=lambda event: (event.step, event.rank, event.start)))


def write_trace(
    path: str | Path,
    events: Iterable[TraceEvent],
    title: str = "pipeline",
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write a file that ``chrome://tracing``, Perfetto and :func:`read_trace` open; arguments: :func:`to_chrome`."""
    Path(path).write_text(json.dumps(to_chrome(events, title, notes)) + "\n", encoding="utf-8")


def read_trace(path: str | Path) -> tuple[TraceEvent, ...]:
    """The pipeline's events of a trace file.

    Raises:
        ConfigError: naming the file, when it cannot be read or is no such trace.
    """
    try:
        return from_chrome(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a trace: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def activation_steps(events: Iterable[TraceEvent], rank: int) -> list[tuple[float, int, int]]:
    """When a rank's activations come and go: ``(time, chunk, change)`` in order of time.

    A (microbatch, chunk) comes with the start of its forward. It goes with the end of its whole backward or of its
    backward_weight; in a forward-only step with the end of the forward.
    """
    own = [event for event in events if event.rank == rank and event.is_work]
    last = {"backward", "backward_weight"} if any(event.kind != "forward" for event in own) else {"forward"}
    changes = [(event.start, event.chunk, 1) for event in own if event.kind == "forward"]
    changes += [(event.end, event.chunk, -1) for event in own if event.kind in last]
    return sorted(changes, key=lambda change: (change[0], change[2]))  # what goes makes room for what comes


def one_step(events: Sequence[TraceEvent], step: int | None = None) -> tuple[TraceEvent, ...]:
    """The events of one step (the last one by default), shifted so that its first starts at 0.

    Raises:
        ConfigError: when there is no such step; the ones that there are are named.
    """
    steps = sorted({event.step for event in events})
    if not steps or (step is not None and step not in steps):
        raise ConfigError(f"step={step} is not in the trace; it has steps {', '.join(map(str, steps)) or 'none'}")
    chosen = [event for event in events if event.step == (steps[-1] if step is None else step)]
    origin = min(event.start for event in chosen)
    return tuple(
        TraceEvent(**{**event.to_json(), "start": event.start - origin, "end": event.end - origin}) for event in chosen
    )
