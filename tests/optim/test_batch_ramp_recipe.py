"""What the recipe says of its curves."""

from __future__ import annotations

import io
from pathlib import Path
from types import ModuleType

import pytest
from recipe_module import load_recipe
from rich.console import Console


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("batch_ramp.py")


def curves(recipe: ModuleType) -> list:
    samples, sizes, noise = [0, 100, 200], [0, 16, 32], [None, 4.0, 40.0]
    return [
        recipe.Curve("fixed", 1, samples, [0, 10, 20], [5.0, 4.0, 3.0], [64] * 3, noise),
        recipe.Curve("schedule", 1, samples, [0, 20, 30], [5.0, 3.5, 2.5], sizes, noise),
        recipe.Curve("noise", 1, samples, [0, 20, 30], [5.0, 4.5, 4.0], sizes, noise),
    ]


def test_where_a_curve_reaches_a_loss(recipe: ModuleType) -> None:
    fixed, schedule, noise = curves(recipe)
    assert schedule.reached(3.0) == (150.0, 25.0) and fixed.reached(3.0) == (200.0, 20.0)
    assert noise.reached(3.0) is None


def test_the_table_says_who_does_not_get_there(recipe: ModuleType) -> None:
    out = io.StringIO()
    Console(file=out, width=140).print(recipe.table(curves(recipe)))
    lines = {line.split("│")[1].strip(): line for line in out.getvalue().splitlines() if line.startswith("│")}
    assert "0.75" in lines["schedule"] and "1.25" in lines["schedule"]
    assert "- (1 of 1 do not)" in lines["noise"] and "1.00" in lines["fixed"]


def test_the_picture_has_a_line_for_each_curve(recipe: ModuleType, tmp_path: Path) -> None:
    recipe.draw(curves(recipe), tmp_path / "ramp.svg")
    text = (tmp_path / "ramp.svg").read_text()
    assert text.count("<polyline") > 3 * 3 and "validation loss" in text and "noise scale" in text


def test_the_arms_differ_in_their_ramp_alone(recipe: ModuleType) -> None:
    class Args:
        batch, samples, noise_ratio = 64, 6144, 1.0

    fixed, schedule, noise = (recipe.ramp_of(arm, Args) for arm in recipe.ARMS)
    assert fixed.plan.points == ((0, 64),) and noise.noise_ratio == 1.0 and noise.start == 16
    assert schedule.plan.points == ((0, 16), (768, 32), (1536, 64), (3072, 128))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--points=0"], "--points 0: expected at least 1"),
        (["--seeds=0"], "--seeds 0: expected at least 1"),
        (["--max-bytes=0"], "--max-bytes 0: expected at least 1"),
        (["--samples=0"], "--samples 0: expected at least 256 with --batch 64 and 16 validations (--points)"),
        (["--points=500"], "--samples 6144: expected at least 8000"),
        (["--batch=0"], "--batch 0 is no multiple of 16 (nearest: 16)"),
        (["--noise-ratio=-1"], "--noise-ratio -1: expected a positive number"),
        (["--lr=nan"], "--lr nan: expected a positive number"),
        (["--out=x.jpg"], "--out='x.jpg': expected a name that ends with .svg or .png"),
    ],
)
def test_what_cannot_be_is_refused_before_the_hours(
    recipe: ModuleType,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        recipe.main(arguments)
    assert left.value.code == 2 and message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
