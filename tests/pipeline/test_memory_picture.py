"""The picture of a step's memory: what stands in it, and where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_megapar.config import ConfigError
from lightning_megapar.memory.report import RankMemory
from lightning_megapar.memory.timeline import CATEGORIES, Timeline
from lightning_megapar.pipeline.picture.drawing import Area, Drawing, Line, Words, nice_step
from lightning_megapar.pipeline.picture.memory import FILLS, draw_memory

MIB = 2**20
HELD = ((2, 4, 2, 0, 0, 0), (2, 4, 0, 10, 0, 1), (2, 4, 2, 0, 0, 0))


def rank(number: int, factor: int = 1, predicted: int | None = 18) -> RankMemory:
    held = tuple(tuple(factor * MIB * one for one in row) for row in HELD)
    most = {use: max(row[place] for row in held) for place, use in enumerate(CATEGORIES)}
    line = Timeline((0.0, 0.2, 0.8), held, {}, (("forward", 0.0, 0.5), ("backward", 0.5, 1.0)), {}, most, 0.2, 1.0)
    return RankMemory(
        rank=number,
        place=f"pipeline {number}",
        stage=number,
        step=3,
        measured=most,
        measured_peak=17 * factor * MIB,
        predicted_peak=None if predicted is None else predicted * MIB,
        timeline=line,
    )


def test_areas_stand_on_each_other_on_one_scale() -> None:
    drawing = draw_memory([rank(0)])
    areas = {one.fill: one.points for one in drawing.shapes if isinstance(one, Area)}
    assert set(areas) == {FILLS[use] for use in CATEGORIES if use != "communication"}
    bottom = max(y for points in areas.values() for _, y in points)
    ups = {use: bottom - min(y for _, y in areas[FILLS[use]]) for use in CATEGORIES if FILLS[use] in areas}
    assert ups["optimizer"] == pytest.approx(3 * ups["parameters"])
    assert ups["temporary"] == pytest.approx(17 / 2 * ups["parameters"])
    dashed = next(one for one in drawing.shapes if isinstance(one, Line) and one.dash and len(one.points) == 2
                  and one.points[1][0] - one.points[0][0] > 100)  # fmt: skip
    assert bottom - dashed.points[0][1] == pytest.approx(18 / 2 * ups["parameters"])
    said = [one.text for one in drawing.shapes if isinstance(one, Words)]
    assert "rank 0 (pipeline 0), step 3" in said and "peak 17.0 MiB, predicted 18.0 (ratio 1.06)" in said
    assert "MiB" in said and "forward" in said and "gradients" in said


def test_the_ranks_with_the_highest_peaks_are_drawn() -> None:
    drawing = draw_memory([rank(number, factor=number + 1) for number in range(6)])
    titles = [one.text for one in drawing.shapes if isinstance(one, Words) and one.bold]
    assert [title[:6] for title in titles] == ["rank 2", "rank 3", "rank 4", "rank 5"]


def test_without_prediction_there_is_no_line(tmp_path: Path) -> None:
    drawing = draw_memory([rank(0, predicted=None)])
    assert not any(isinstance(one, Line) and one.dash for one in drawing.shapes)
    drawing.save(tmp_path / "memory.svg")
    text = (tmp_path / "memory.svg").read_text()
    assert len(re.findall("<polygon", text)) == 5 and "predicted" not in text


def test_nothing_to_draw() -> None:
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw_memory([])
    with pytest.raises(ConfigError, match="width=5: expected 300 to 20000"):
        draw_memory([rank(0)], width=5)


def test_shapes_as_svg_and_as_png(tmp_path: Path) -> None:
    shapes = (Area(((0, 0), (10, 0), (5, 8)), "#123456", "a < b"), Line(((0, 0), (9, 9)), "#000000", 2, dash=4))
    text = Drawing(20, 20, shapes).svg()
    assert '<polygon points="0,0 10,0 5,8" fill="#123456"><title>a &lt; b</title></polygon>' in text
    assert 'stroke-dasharray="4"' in text
    pytest.importorskip("matplotlib")
    Drawing(20, 20, shapes).save(tmp_path / "a.png")


def test_steps_of_an_axis() -> None:
    assert [nice_step(one) for one in (0.7, 1.0, 1.1, 3.0, 70.0)] == [1, 1, 2, 5, 100]
