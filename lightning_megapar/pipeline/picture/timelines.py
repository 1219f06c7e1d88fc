"""Timelines as pictures: a lane per rank, and below it what each rank holds. Several on one page share their axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline.picture.drawing import Box, Drawing, Line, Words, nice_step
from lightning_megapar.pipeline.planning.measured import costs_of, schedule_of
from lightning_megapar.pipeline.planning.simulate import Timeline, simulate
from lightning_megapar.pipeline.planning.trace import TraceEvent, activation_steps, one_step
from lightning_megapar.pipeline.schedules.data import Schedule

COLOURS: dict[str, str] = {
    "forward": "#0072b2",
    "backward": "#c44e00",
    "backward_input": "#e69f00",
    "backward_weight": "#009e73",
    "send": "#8c8c8c",
    "receive": "#b5b5b5",
    "reduce": "#cc79a7",
    "optimizer": "#7a4f9a",
}
"""Okabe and Ito's palette, which the colour-blind can tell apart."""
LABELS: dict[str, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward of inputs",
    "backward_weight": "backward of weights",
    "send": "send",
    "receive": "receive",
    "reduce": "gradient reduction",
    "optimizer": "optimizer",
}
IDLE = "#ececec"
INK, FAINT = "#222222", "#777777"
_LIGHTER = (0.0, 0.42, 0.62, 0.76)
"""How much white is mixed into the colour of chunk 0, 1, 2, 3 and later ones."""
_LEFT, _RIGHT, _TOP, _GAP = 58.0, 14.0, 48.0, 22.0


@dataclass(frozen=True)
class Panel:
    """One timeline of a page.

    Args:
        title: bold, on its first line.
        subtitle: the figures beside it.
        events: what each rank does; times from 0.
        num_ranks: lanes.
        memory: per rank ``(time, held from then on)`` in order of time.
    """

    title: str
    subtitle: str
    events: tuple[TraceEvent, ...]
    num_ranks: int
    memory: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def end(self) -> float:
        return max(event.end for event in self.events)


def simulated_panel(timeline: Timeline, title: str = "", seconds: bool = False) -> Panel:
    """The panel of a simulated schedule. ``seconds`` says whether its costs are in seconds, or in units of their own.

    Memory is in the unit of ``StageCosts.activation``: by default one microbatch through a rank's whole share.
    """
    schedule = timeline.schedule
    length = _seconds(timeline.makespan) if seconds else f"{timeline.makespan:.5g}"
    peak = max(timeline.peak_memory)
    subtitle = f"makespan {length}, idle {_idle_share(timeline.events, schedule.num_stages):.1%}, peak {peak:.4g}"
    ranks = range(schedule.num_stages)
    memory = tuple(timeline.memory(rank) for rank in ranks)
    return Panel(title or schedule.name, subtitle, timeline.events, schedule.num_stages, memory)


def measured_panel(events: Sequence[TraceEvent], title: str = "measured") -> Panel:
    """The panel of one step of a trace, shifted to 0 (:func:`~lightning_megapar.pipeline.planning.trace.one_step`).

    Memory counts microbatches, a chunk as the share of its rank's chunks.
    """
    num_ranks = 1 + max(event.rank for event in events)
    chunks = 1 + max(event.chunk for event in events)
    memory = []
    for rank in range(num_ranks):
        held, steps = 0.0, []
        for time, _, change in activation_steps(events, rank):
            held += change / chunks
            steps.append((time, held))
        memory.append(tuple(steps))
    span = makespan(events)
    peak = max((held for row in memory for _, held in row), default=0.0)
    subtitle = f"makespan {_seconds(span)}, idle {_idle_share(events, num_ranks):.1%}, peak {peak:.4g}"
    return Panel(title, subtitle, tuple(events), num_ranks, tuple(memory))


def makespan(events: Sequence[TraceEvent]) -> float:
    """When the last action of a step ends that starts at 0: what a simulation gives, which knows no optimizer."""
    return max((event.end for event in events if event.is_work), default=0.0) or max(event.end for event in events)


def beside_simulated(
    events: Sequence[TraceEvent], step: int | None = None, name: str = "measured"
) -> tuple[list[Panel], Schedule, float]:
    """A measured step and what the simulator makes of its medians.

    Args:
        events: of a trace.
        step: which of its steps; the last by default.
        name: of the schedule.

    Returns:
        the two panels, the schedule that the step followed, and its measured makespan over the simulated one.

    Raises:
        ConfigError: when there is no such step, or not all of it.
    """
    chosen = one_step(events, step)
    schedule = schedule_of(chosen, name)
    timeline = simulate(schedule, costs_of(chosen, schedule))
    measured = measured_panel(chosen, f"measured, step {chosen[0].step}")
    simulated = simulated_panel(timeline, "simulated with the medians of that step", seconds=True)
    return [measured, simulated], schedule, makespan(chosen) / timeline.makespan


def draw(panels: Sequence[Panel], width: float = 900.0, seconds: bool = False, title: str = "") -> Drawing:
    """A page with all panels below each other, on one time axis and one memory axis.

    Args:
        panels: at least one.
        width: pixels; at 900 eight ranks with twenty microbatches are legible.
        seconds: whether times are seconds (ticks then say ms or s).
        title: for readers who do not see the picture.
    """
    if not panels:
        raise ConfigError("nothing to draw")
    if not 300 <= width <= 20000:
        raise ConfigError(f"width={width}: expected 300 to 20000 pixels")
    end = max(panel.end for panel in panels) or 1.0
    most = max((held for panel in panels for row in panel.memory for _, held in row), default=0.0) or 1.0
    most *= 1.05  # the highest curve stays clear of what is above it
    scale = (width - _LEFT - _RIGHT) / end
    shapes: list[Box | Line | Words] = list(_legend(panels, width))
    y = _TOP
    for panel in panels:
        y = _draw_panel(shapes, panel, y, width, scale, end, most, seconds)
    names = ", ".join(panel.title for panel in panels)
    return Drawing(width, y, tuple(shapes), title or f"Pipeline timelines: {names}")


def _draw_panel(
    shapes: list[Box | Line | Words],
    panel: Panel,
    y: float,
    width: float,
    scale: float,
    end: float,
    most: float,
    seconds: bool,
) -> float:
    lane = 22.0 if panel.num_ranks <= 8 else 16.0 if panel.num_ranks <= 16 else 12.0
    y += _GAP
    shapes.append(Words(_LEFT, y - 7, panel.title, 13.5, INK, bold=True))
    shapes.append(Words(width - _RIGHT, y - 7, panel.subtitle, 12, INK, "end"))
    for rank in range(panel.num_ranks):
        top = y + rank * lane
        shapes.append(Words(_LEFT - 8, top + lane / 2 + 4, f"rank {rank}", 11, FAINT, "end"))
        shapes.append(Box(_LEFT, top + 1, panel.end * scale, lane - 2, IDLE))
    digits = len(str(max(event.microbatch for event in panel.events)))
    for event in panel.events:
        _draw_event(shapes, event, y + event.rank * lane + 1, lane - 2, scale, digits)
    y += panel.num_ranks * lane + 8
    height = 56.0
    shapes.append(Line(((_LEFT, y), (_LEFT, y + height), (width - _RIGHT, y + height)), FAINT, 0.8))
    for value in (0.0, most / 1.05):
        level = y + height * (1 - value / most)
        shapes.append(Words(_LEFT - 8, level + (7 if value else 3), f"{value:.4g}", 10.5, FAINT, "end"))
    shapes.append(Words(_LEFT - 8, y + height / 2 + 7, "held", 10.5, FAINT, "end"))
    for rank in reversed(range(panel.num_ranks)):
        corners = _staircase(panel.memory[rank], panel.end)
        points = tuple((_LEFT + time * scale, y + height * (1 - held / most)) for time, held in corners)
        shapes.append(Line(points, _rank_colour(rank, panel.num_ranks), 1.6))
    y += height
    step = nice_step(end / 9)
    for index in range(int(end / step + 1e-9) + 1):
        x = _LEFT + index * step * scale
        shapes.append(Line(((x, y), (x, y + 3)), FAINT, 0.8))
        label = _tick(index * step, step) if seconds else f"{index * step:.6g}"
        shapes.append(Words(x, y + 14, label, 10.5, FAINT, "middle" if index else "start"))
    return y + 22


def _draw_event(
    shapes: list[Box | Line | Words], event: TraceEvent, top: float, height: float, scale: float, digits: int
) -> None:
    left, length = _LEFT + event.start * scale, event.duration * scale
    gap = min(0.8, length / 6)  # neighbours of one colour stay apart
    colour = _lighter(COLOURS[event.kind], _LIGHTER[min(max(event.chunk, 0), len(_LIGHTER) - 1)])
    chunk = f", chunk {event.chunk}" if event.chunk > 0 else ""
    what = LABELS[event.kind] + (f" of microbatch {event.microbatch}{chunk}" if event.microbatch >= 0 else "")
    hint = f"{what}: {event.start:.6g} to {event.end:.6g}"
    shapes.append(Box(left + gap / 2, top, max(length - gap, 0.2), height, colour, hint))
    if not event.is_work or event.microbatch < 0:
        return
    size = min(11.5, 0.72 * height, (length - gap) / (0.6 * digits))  # one size for boxes of one length
    if size >= 6:
        ink = "#ffffff" if _brightness(colour) < 0.62 else "#1a1a1a"
        shapes.append(
            Words(left + length / 2, top + height / 2 + 0.36 * size, str(event.microbatch), size, ink, "middle")
        )


def _legend(panels: Sequence[Panel], width: float) -> list[Box | Line | Words]:
    kinds = {event.kind for panel in panels for event in panel.events}
    entries = [(COLOURS[kind], LABELS[kind]) for kind in COLOURS if kind in kinds]
    chunks = max(event.chunk for panel in panels for event in panel.events) + 1
    if chunks > 1:
        entries.append((_lighter(COLOURS["forward"], _LIGHTER[1]), "lighter: later chunk"))
    entries.append((IDLE, "idle"))
    shapes: list[Box | Line | Words] = []
    x = _LEFT
    for colour, label in entries:
        shapes += [Box(x, 10, 13, 13, colour), Words(x + 18, 21, label, 12)]
        x += 18 + 6.3 * len(label) + 14
    ranks = max(panel.num_ranks for panel in panels)
    x = _LEFT
    for rank in (0, ranks - 1)[: min(2, ranks)]:
        label = f"rank {rank}"
        shapes += [Line(((x, 39), (x + 18, 39)), _rank_colour(rank, ranks), 2.2), Words(x + 23, 43, label, 11, FAINT)]
        x += 74
    shapes.append(Words(x, 43, "activations held, in microbatches through a rank's whole share", 11, FAINT))
    return shapes


def _staircase(steps: Sequence[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    corners, held = [(0.0, 0.0)], 0.0
    for time, value in steps:
        corners += [(time, held), (time, value)]
        held = value
    return [*corners, (end, held)]


def _idle_share(events: Sequence[TraceEvent], num_ranks: int) -> float:
    """Of the picture's own span: what is grey (or a message) in it."""
    span = makespan(events)
    busy = math.fsum(event.duration for event in events if event.is_work)
    return 1 - busy / (num_ranks * span) if span else 0.0


def _rgb(colour: str) -> tuple[float, float, float]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))  # type: ignore[return-value]


def _hex(rgb: Sequence[float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def _lighter(colour: str, white: float) -> str:
    return _hex([part + (1 - part) * white for part in _rgb(colour)])


def _brightness(colour: str) -> float:
    red, green, blue = _rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _rank_colour(rank: int, ranks: int) -> str:
    """From dark blue (rank 0) over purple to a light orange (the last)."""
    stops = [_rgb(colour) for colour in ("#1b2a6b", "#a03a85", "#f0a35e")]
    place = 2 * rank / max(1, ranks - 1)
    lower = min(int(place), 1)
    return _hex([a + (b - a) * (place - lower) for a, b in zip(stops[lower], stops[lower + 1])])


def _tick(value: float, step: float) -> str:
    return f"{value:.6g} s" if step >= 1 else f"{value * 1e3:.6g} ms"


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if value >= 1 else f"{value * 1e3:.4g} ms"
