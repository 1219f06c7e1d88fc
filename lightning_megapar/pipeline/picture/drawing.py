"""Boxes, lines and words on a page, written as SVG without any library, or as PNG through matplotlib. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from lightning_megapar.config import ConfigError

FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
FORMATS: tuple[str, ...] = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle; ``x``, ``y`` is its upper left corner, in pixels from that of the page. ``hint`` is shown
    by browsers under the pointer."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points in pixels; ``dash`` is the length of its pieces and of the gaps, 0 for none."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.0
    dash: float = 0.0


@dataclass(frozen=True, slots=True)
class Area:
    """A filled polygon through points in pixels; ``hint`` as for a :class:`Box`."""

    points: tuple[tuple[float, float], ...]
    fill: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """Text; ``y`` is its base line, ``anchor`` is ``"start"``, ``"middle"`` or ``"end"``."""

    x: float
    y: float
    text: str
    size: float
    colour: str = "#222222"
    anchor: str = "start"
    bold: bool = False


Shape = Box | Line | Area | Words


@dataclass(frozen=True)
class Drawing:
    """A page of shapes, painted in order on white.

    Args:
        width, height: pixels.
        shapes: what is on it.
        title: for readers who do not see it.
    """

    width: float
    height: float
    shapes: tuple[Shape, ...]
    title: str = ""

    def svg(self) -> str:
        """The page as a standalone SVG document."""
        size = f'width="{_number(self.width)}" height="{_number(self.height)}"'
        view = f'viewBox="0 0 {_number(self.width)} {_number(self.height)}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} role="img" font-family={quoteattr(FONT)}>',
            f"<title>{escape(self.title)}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
        ]
        parts += [_element(shape) for shape in self.shapes]
        return "\n".join([*parts, "</svg>"]) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the page; the ending of the name decides the format.

        Raises:
            ConfigError: on another ending than ``.svg`` and ``.png``, a directory that is not there, and for PNG when
                matplotlib is not installed.
        """
        path = Path(path)
        if path.suffix.lower() not in FORMATS:
            hint = "; save=... writes the schedule itself as a CSV file" if path.suffix.lower() == ".csv" else ""
            raise ConfigError(f"out={str(path)!r}: expected a name that ends with {' or '.join(FORMATS)}{hint}")
        if not path.parent.is_dir():
            raise ConfigError(f"out={str(path)!r}: there is no directory {str(path.parent)!r}")
        if path.suffix.lower() == ".svg":
            path.write_text(self.svg(), encoding="utf-8")
        else:
            self._save_png(path)

    def _save_png(self, path: Path, dots_per_pixel: float = 2.0) -> None:
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
            from matplotlib.patches import Polygon, Rectangle
        except ImportError as error:
            raise ConfigError(
                f"out={str(path)!r}: PNG needs matplotlib (pip install 'lightning_megapar[plot]'); "
                f"out={str(path.with_suffix('.svg'))!r} needs nothing"
            ) from error
        inch = 100  # pixels of the page
        figure = Figure(figsize=(self.width / inch, self.height / inch), dpi=inch * dots_per_pixel, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, self.width)
        axes.set_ylim(self.height, 0)
        axes.axis("off")
        points = 72 / inch  # matplotlib's lines and letters are measured in points
        for layer, shape in enumerate(self.shapes):
            if isinstance(shape, Box):
                corner = (shape.x, shape.y)
                axes.add_patch(
                    Rectangle(corner, shape.width, shape.height, facecolor=shape.fill, linewidth=0, zorder=layer)
                )
            elif isinstance(shape, Line):
                columns, rows = zip(*shape.points)
                style: Any = {"linestyle": (0, (shape.dash, shape.dash))} if shape.dash else {}
                axes.plot(columns, rows, color=shape.colour, linewidth=shape.width * points, zorder=layer, **style)
            elif isinstance(shape, Area):
                axes.add_patch(Polygon(shape.points, facecolor=shape.fill, linewidth=0, zorder=layer))
            else:
                side = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
                weight = "bold" if shape.bold else "normal"
                style = {"fontsize": shape.size * points, "color": shape.colour, "weight": weight, "zorder": layer}
                axes.text(shape.x, shape.y, shape.text, ha=side, va="baseline", **style)
        figure.savefig(path)


def nice_step(step: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50, ... (or a decimal fraction) from ``step`` on: for ticks of an axis."""
    power = 10 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def _element(shape: Shape) -> str:
    if isinstance(shape, Box):
        place = f'x="{_number(shape.x)}" y="{_number(shape.y)}"'
        size = f'width="{_number(shape.width)}" height="{_number(shape.height)}"'
        body = f'<rect {place} {size} fill="{shape.fill}"'
        return f"{body}><title>{escape(shape.hint)}</title></rect>" if shape.hint else f"{body}/>"
    if isinstance(shape, Line):
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
        return (
            f'<polyline points="{points}" fill="none" stroke="{shape.colour}" stroke-width="{_number(shape.width)}" '
            + (f'stroke-dasharray="{_number(shape.dash)}" ' if shape.dash else "")
            + 'stroke-linejoin="round"/>'
        )
    if isinstance(shape, Area):
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
        body = f'<polygon points="{points}" fill="{shape.fill}"'
        return f"{body}><title>{escape(shape.hint)}</title></polygon>" if shape.hint else f"{body}/>"
    weight = ' font-weight="bold"' if shape.bold else ""
    anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
    return (
        f'<text x="{_number(shape.x)}" y="{_number(shape.y)}" font-size="{_number(shape.size)}" '
        f'fill="{shape.colour}"{anchor}{weight}>{escape(shape.text)}</text>'
    )


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
