from __future__ import annotations

import builtins
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline import StageCosts, build_schedule, load_schedule, simulate
from lightning_megapar.pipeline.picture import Drawing, draw, simulated_panel
from lightning_megapar.pipeline.picture.drawing import Box, Line, Words
from lightning_megapar.pipeline.planning.trace import TraceEvent, write_trace

RECIPE = Path(__file__).parents[2] / "recipes" / "show_schedule.py"
SVG = "{http://www.w3.org/2000/svg}"


def show(*words: str) -> int:
    return runpy.run_path(str(RECIPE))["main"](list(words))


def parsed(path: Path) -> ElementTree.Element:
    return ElementTree.fromstring(path.read_text())


def boxes(root: ElementTree.Element, what: str) -> list[dict[str, str]]:
    """Boxes whose hint starts with ``what``."""
    hints = ((box, box.find(f"{SVG}title")) for box in root.iter(f"{SVG}rect"))
    return [box.attrib for box, hint in hints if hint is not None and hint.text.startswith(what)]


def test_every_action_is_a_box_in_its_place() -> None:
    timeline = simulate(build_schedule("zbv", 4, 8), StageCosts(1, 1, 1, communication=0.1))
    page = draw([simulated_panel(timeline)])
    drawn = [shape for shape in page.shapes if isinstance(shape, Box) and shape.hint]
    assert len(drawn) == len(timeline.events) == 4 * 2 * 8 * 3
    scale = (900 - 58 - 14) / timeline.makespan
    for box, event in zip(drawn, timeline.events):
        assert box.x == pytest.approx(58 + event.start * scale, abs=1)
        assert box.x + box.width == pytest.approx(58 + event.end * scale, abs=1)
        assert box.x + box.width <= 900 - 14
        assert str(event.microbatch) in box.hint
    # Three kinds in two shades, told apart from each other and from what is idle.
    assert len({box.fill for box in drawn}) == 6 and "#ececec" not in {box.fill for box in drawn}
    numbers = [
        shape for shape in page.shapes if isinstance(shape, Words) and shape.anchor == "middle" and shape.size < 12
    ]
    assert sum(words.text.isdigit() for words in numbers) >= len(drawn)
    assert min(words.size for words in numbers) >= 6
    # One curve per rank; it ends at the base line, where it started.
    curves = [shape for shape in page.shapes if isinstance(shape, Line) and shape.width == 1.6]
    assert len(curves) == 4
    assert all(curve.points[0][1] == pytest.approx(curve.points[-1][1]) for curve in curves)
    base, top = curves[0].points[0][1], min(y for curve in curves for _, y in curve.points)
    assert base - top == pytest.approx(56 / 1.05)


def test_pages_share_their_axes() -> None:
    slow, fast = (simulate(build_schedule(name, 4, 8)) for name in ("1f1b", "zbv"))
    page = draw([simulated_panel(slow), simulated_panel(fast)])
    idle = [shape for shape in page.shapes if isinstance(shape, Box) and shape.fill == "#ececec"][
        1:
    ]  # after the legend
    assert idle[0].width / idle[4].width == pytest.approx(slow.makespan / fast.makespan)
    titles = [shape.text for shape in page.shapes if isinstance(shape, Words) and shape.bold]
    assert titles == ["1f1b", "zbv"]
    assert all(0 <= getattr(shape, "y", 1) <= page.height for shape in page.shapes)


def test_svg_is_well_formed_whatever_the_words() -> None:
    page = Drawing(10, 10, (Words(1, 1, 'a < b & "c"', 5), Box(0, 0, 1, 1, "#000000", "<hint>")), "t & u")
    root = ElementTree.fromstring(page.svg())
    assert root.find(f"{SVG}text").text == 'a < b & "c"'
    assert root.find(f"{SVG}title").text == "t & u"


def test_the_recipe_compares_schedules(tmp_path, capsys) -> None:
    out = tmp_path / "compared.svg"
    assert show("schedule=1f1b,zb_h1,interleaved_1f1b:3", "stages=2", "microbatches=4", "grid=true", f"out={out}") == 0
    root = parsed(out)
    assert root.attrib["width"] == "900"
    assert len(boxes(root, "forward")) == 2 * 4 * (1 + 1 + 3)
    assert len(boxes(root, "backward of weights")) == 2 * 4
    assert len(boxes(root, "backward of microbatch")) == 2 * 4 * (1 + 3)
    text = capsys.readouterr().out
    assert "rank 0: F0 F1 .  B0 F2 " in text and "zb_h1: makespan 13, idle 7.7%, peak 2" in text


def test_the_recipe_chooses_and_saves(tmp_path, capsys) -> None:
    saved = tmp_path / "chosen.csv"
    words = ["schedule=auto", "stages=3", "microbatches=9", "memory_limit=[3, 2.5, 2]", f"out={tmp_path / 'a.svg'}"]
    assert show(*words, f"save={saved}") == 0
    assert "taken" in capsys.readouterr().out
    assert load_schedule(saved).ranks == build_schedule("1f1b", 3, 9).ranks
    assert show(f"schedule={saved}", "communication=0.5", "occupies=true", f"out={tmp_path / 'b.svg'}") == 0
    assert len(boxes(parsed(tmp_path / "b.svg"), "send")) == 2 * 2 * 9


def test_the_recipe_draws_a_trace(tmp_path, capsys) -> None:
    timeline = simulate(build_schedule("zb_h1", 2, 4), StageCosts(0.05, 0.04, 0.03, 0.001))
    events = [TraceEvent(**{**event.to_json(), "step": 3}) for event in timeline.events]
    write_trace(tmp_path / "trace.json", [*events, TraceEvent("optimizer", 0, 0.55, 0.6, step=3)])
    assert show(f"trace={tmp_path / 'trace.json'}", "step=3", f"out={tmp_path / 'run.svg'}") == 0
    root = parsed(tmp_path / "run.svg")
    assert len(boxes(root, "forward")) == 2 * 2 * 4 and len(boxes(root, "optimizer")) == 1
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert "measured, step 3" in words and "simulated with the medians of that step" in words
    assert any(word.endswith(" ms") for word in words)
    ratio = float(capsys.readouterr().out.split("measured over simulated: ")[1].split()[0])
    assert ratio == pytest.approx(1.0, abs=0.01)  # the optimizer is no part of the schedule


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["schedul=1f1b"], "unknown setting 'schedul'; did you mean 'schedule'?"),
        (["schedule=1f2b"], "did you mean '1f1b'"),
        (["schedule=zbv:x"], "expected chunks after the colon"),
        (["schedule="], "names no schedule"),
        (["1f1b"], "expected key=value"),
        (["out=picture.gif"], "ends with .svg or .png"),
        (["out=no/such/directory/a.svg"], "there is no directory 'no/such/directory'"),
        (["stages=two"], "num_stages='two': expected a positive integer"),
        (["forward=[1,2]"], "forward has 2 entries but the schedule has 4 ranks"),
        (["schedule=1f1b,zbv", "save=a.csv"], "takes one schedule, not 2"),
        (["schedule=none.csv"], "none.csv cannot be read"),
        (["trace=none.json"], "none.json cannot be read"),
        (["occupies=1"], "occupies=1: expected true or false"),
        (["width=10"], "width=10: expected 300 to 20000 pixels"),
        (["forward={"], "cannot be read"),
    ],
)
def test_refused(tmp_path, monkeypatch, capsys, words: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert show(*words) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_png_needs_matplotlib(tmp_path, monkeypatch) -> None:
    page = draw([simulated_panel(simulate(build_schedule("1f1b", 2, 3)))])
    with monkeypatch.context() as patch:
        real = builtins.__import__

        def without(name: str, *rest, **more):
            if name.startswith("matplotlib"):
                raise ImportError(name)
            return real(name, *rest, **more)

        patch.setattr(builtins, "__import__", without)
        with pytest.raises(ConfigError, match=r"pip install 'lightning_megapar\[plot\]'.*a\.svg' needs nothing"):
            page.save(tmp_path / "a.png")
    pytest.importorskip("matplotlib")
    page.save(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
