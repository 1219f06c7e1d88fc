"""What ranks hold during a training step, as areas on top of each other, with the predicted peak as a line."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_megapar.config import ConfigError
from lightning_megapar.memory.report import LABELS, RankMemory
from lightning_megapar.memory.timeline import (
    ACTIVATIONS,
    BACKWARD,
    CATEGORIES,
    FORWARD,
    GRADIENTS,
    MESSAGES,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    TEMPORARY,
    UPDATE,
)
from lightning_megapar.pipeline.picture.drawing import Area, Box, Drawing, Line, Shape, Words, nice_step
from lightning_megapar.pipeline.picture.timelines import FAINT, IDLE, INK

FILLS = {
    PARAMETERS: "#0072b2",
    OPTIMIZER: "#7a4f9a",
    GRADIENTS: "#009e73",
    ACTIVATIONS: "#e69f00",
    MESSAGES: "#cc79a7",
    TEMPORARY: "#b5b5b5",
}
PHASES = {FORWARD: "#56b4e9", BACKWARD: "#d55e00", UPDATE: "#222222", OTHER: IDLE}
PREDICTED = "#b00020"
MOST_PANELS = 4
_LEFT, _RIGHT, _TOP = 66.0, 16.0, 74.0
_HEIGHT, _STRIP, _BETWEEN = 190.0, 7.0, 62.0


def draw_memory(ranks: Sequence[RankMemory], width: float = 900.0, title: str = "") -> Drawing:
    """A page with a panel for each of some ranks, on one axis of bytes.

    Args:
        ranks: with timelines; of more than :data:`MOST_PANELS` those with the highest peaks are drawn.
        width: pixels.
        title: for readers who do not see the picture.

    Raises:
        ConfigError: without a timeline there is nothing to draw; a width that is none.
    """
    with_lines = [one for one in ranks if one.timeline is not None]
    if not with_lines:
        raise ConfigError("nothing to draw: no rank has a timeline")
    if not 300 <= width <= 20000:
        raise ConfigError(f"width={width}: expected 300 to 20000 pixels")
    highest = sorted(with_lines, key=lambda one: -one.measured_peak)[:MOST_PANELS]
    shown = [one for one in with_lines if one in highest]
    top = 1.08 * max(max(one.measured_peak, one.predicted_peak or 0) for one in shown)
    shapes = _legend(shown)
    y = _TOP
    for one in shown:
        shapes += _panel(one, y, width, top)
        y += _HEIGHT + _STRIP + _BETWEEN
    names = ", ".join(f"rank {one.rank}" for one in shown)
    return Drawing(width, y - 14, tuple(shapes), title or f"Memory of a training step over time: {names}")


def _legend(shown: Sequence[RankMemory]) -> list[Shape]:
    found: list[Shape] = []
    x = _LEFT
    for category in CATEGORIES:
        if any(one.measured.get(category) for one in shown):
            found += [Box(x, 10, 13, 13, FILLS[category]), Words(x + 18, 21, LABELS[category], 12)]
            x += 18 + 6.7 * len(LABELS[category]) + 12
    x = _LEFT
    for phase, colour in PHASES.items():
        found += [Box(x, 34, 22, _STRIP, colour), Words(x + 28, 41, phase, 11, FAINT)]
        x += 28 + 6.2 * len(phase) + 16
    if any(one.predicted_peak for one in shown):
        found += [Line(((x, 37.5), (x + 22, 37.5)), PREDICTED, 1.6, 5), Words(x + 28, 41, "predicted peak", 11, FAINT)]
    return found


def _panel(one: RankMemory, y: float, width: float, top: float) -> list[Shape]:
    assert one.timeline is not None
    line = one.timeline.thinned()
    end = line.end or 1.0
    bottom = y + _HEIGHT
    across, up = (width - _LEFT - _RIGHT) / end, _HEIGHT / top

    def at(second: float, held: float) -> tuple[float, float]:
        return _LEFT + second * across, bottom - held * up

    found: list[Shape] = [Words(_LEFT, y - 10, _name(one), 13.5, INK, bold=True)]
    found.append(Words(width - _RIGHT, y - 10, _figures(one), 12, INK, "end"))
    ticks = _ticks(top)
    found += [Line((at(0, tick), at(end, tick)), "#e3e3e3", 0.8) for tick in ticks]
    moments = [*zip(line.seconds, line.held), (end, line.held[-1])]
    below = [0.0] * len(moments)
    for number, category in enumerate(CATEGORIES):
        if not line.most[category]:
            continue
        above = [under + held[number] for under, (_, held) in zip(below, moments)]
        lower, upper = _corners(moments, below), _corners(moments, above)
        hint = f"{LABELS[category]}: at most {line.most[category] / 2**20:,.1f} MiB"
        outline = tuple(at(*point) for point in [*upper, *reversed(lower)])
        found.append(Area(outline, FILLS[category], hint))
        below = above
    found.append(Line((at(0, top), at(0, 0), at(end, 0)), FAINT, 0.8))
    unit, name = _unit(top)
    for tick in ticks:
        found.append(Words(_LEFT - 8, at(0, tick)[1] + 4, f"{tick / unit:g}", 10.5, FAINT, "end"))
    found.append(Words(_LEFT - 8, y - 10, name, 10.5, FAINT, "end"))
    if one.predicted_peak is not None:
        found.append(Line((at(0, one.predicted_peak), at(end, one.predicted_peak)), PREDICTED, 1.6, 5))
    for kind, start, stop in line.phases:
        hint = f"{kind}: {start * 1e3:.4g} to {stop * 1e3:.4g} ms"
        found.append(Box(_LEFT + start * across, bottom + 3, (stop - start) * across, _STRIP, PHASES[kind], hint))
    return found + _time_axis(end, across, bottom + 3 + _STRIP)


def _time_axis(end: float, across: float, y: float) -> list[Shape]:
    found: list[Shape] = []
    step = nice_step(end / 8)
    for number in range(int(end / step + 1e-9) + 1):
        x = _LEFT + number * step * across
        found.append(Line(((x, y), (x, y + 3)), FAINT, 0.8))
        label = f"{number * step:g} s" if step >= 1 else f"{number * step * 1e3:g} ms"
        anchor = "start" if number == 0 else "end" if x > _LEFT + end * across - 12 else "middle"
        found.append(Words(x, y + 15, label, 10.5, FAINT, anchor))
    return found


def _corners(moments: Sequence[tuple[float, Sequence[int]]], heights: Sequence[float]) -> list[tuple[float, float]]:
    """A staircase: each height from its moment to the next."""
    found: list[tuple[float, float]] = []
    for (second, _), height in zip(moments, heights):
        if found:
            if found[-1][1] == height:
                continue
            found.append((second, found[-1][1]))
        found.append((second, height))
    return [*found, (moments[-1][0], heights[-1])]


def _name(one: RankMemory) -> str:
    return f"rank {one.rank}" + (f" ({one.place})" if one.place else "") + f", step {one.step}"


def _figures(one: RankMemory) -> str:
    said = f"peak {one.measured_peak / 2**20:,.1f} MiB"
    if one.predicted_peak:
        said += f", predicted {one.predicted_peak / 2**20:,.1f} (ratio {one.predicted_peak / one.measured_peak:.2f})"
    return said


def _unit(top: float) -> tuple[float, str]:
    return (2**30, "GiB") if top >= 4 * 2**30 else (2**20, "MiB") if top >= 2**20 else (2**10, "KiB")


def _ticks(top: float) -> list[float]:
    unit, _ = _unit(top)
    step = nice_step(top / unit / 4)
    return [number * step * unit for number in range(int(top / unit / step) + 1)]
