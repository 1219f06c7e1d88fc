"""What ``recipes/verify.py`` cannot compare is refused with exit code 2 and one line that says what to change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recipe_module import load_recipe


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    loaded = load_recipe("verify.py")
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return loaded


@pytest.fixture
def refused(recipe: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        assert recipe.main(list(arguments)) == 2
        said = capsys.readouterr().err
        return said[said.index("verify: ") :]

    return run


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ragget:Ragged"], "'ragget:Ragged' cannot be imported: there is no module 'ragget'; did you mean 'ragged'?"),
        (["lightning_megapar.veryfy:verify"], "did you mean 'lightning_megapar.verify'?"),
        (["no_package_of_this_name.model:Net"], "there is no module 'no_package_of_this_name'"),
        (["ragged:Raged"], "ragged has no 'Raged'; did you mean 'Ragged'?"),
        (["ragged:Xyz"], "ragged has no 'Xyz' (it has: Ragged, Data, not_a_module)"),
        (["breaks_on_import:Net"], "breaks_on_import needs 'no_such_library', which is not there"),
        (["corners:WIDTH"], "MODULE 'corners:WIDTH' is a int, expected a class or a function"),
        (["corners:Alone"], "gave a Alone, not a LightningModule"),
        (
            ["corners:Needy"],
            "MODULE 'corners:Needy' needs 'width', 'depth': give --arguments '{\"width\": ..., \"depth\": ...}'",
        ),
        (["corners:Needy", "--arguments", '{"widht": 3}'], "takes no argument 'widht'; did you mean 'width'?"),
        (["corners:Needy", "--arguments", '{"q": 3}'], "takes no argument 'q' (it takes: width, depth, bias)"),
        (["corners:Needy", "--arguments", "[3]"], "--arguments '[3]': expected a JSON object of keyword arguments"),
        (["corners:Needy", "--arguments", "{width: 3}"], "--arguments '{width: 3}' is no JSON"),
        (["ragged:Ragged"], "there is no batch: Ragged has no train_dataloader(); name a data module, or a function"),
        (["ragged:Ragged", "--data", "corners:nothing"], "--data 'corners:nothing' gave None, expected a"),
        (["ragged:Ragged", "--data", "corners:empty"], "--data 'corners:empty' gives no batch: it is empty"),
        (["ragged:Ragged", "--data", "corners:nothin"], "corners has no 'nothin'; did you mean 'nothing'?"),
        (["ragged:Ragged", "--data", "corners:empty", "--data-arguments", '{"n": 1}'], "takes no argument 'n'"),
        (["ragged:Ragged", "--data", "ragged:Data", "--steps", "0"], "steps=0: expected an integer >= 1"),
        (["ragged:Ragged", "--data", "ragged:Data", "--tolerance=-1"], "tolerance=-1.0: expected a number >= 0"),
        (["ragged:Ragged", "--data", "ragged:Data", "--precision", "65"], "precision='65'"),
        (["ragged:Ragged", "--data", "ragged:Data", "--set", "zero_stage"], "--set zero_stage: expected KEY=VALUE"),
        (["ragged:Ragged", "--data", "ragged:Data", "--set", "zero_stage=[1"], "'[1' is no YAML value"),
    ],
)  # fmt: skip
def test_wrong_usage(refused: Callable[..., str], arguments: list[str], says: str) -> None:
    assert says in refused(*arguments)


@pytest.mark.parametrize(
    ("what", "where", "kind"),
    [
        ("lock", "net.1.guard", "_thread.lock"),
        ("file", "log_file", "_io.TextIOWrapper"),
        ("generator", "source.draws[0]", "generator"),
        ("nested", "holder.kept.kept", "_thread.RLock"),
        ("activation", "net.0.cached", "torch.Tensor"),
    ],
)
def test_a_module_that_cannot_be_copied(refused: Callable[..., str], what: str, where: str, kind: str) -> None:
    said = refused("corners:Locked", "--arguments", json.dumps({"what": what}), "--data", "ragged:Data")
    assert f"Locked cannot be copied for the run in one process: its attribute {where!r} holds a {kind} (" in said
    assert "Make it in setup() or when it is first used" in said


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        ("nothing", "Steps.training_step returned None; there is no loss to compare"),
        ("float", "returned a float as loss; there is no loss to compare"),
        ("dict", "returned a dict with the keys ['train_loss']; there is no loss to compare"),
        ("vector", "returned a loss of shape (3,); a loss is one number"),
        ("detached", "returned a loss that depends on no trainable parameter"),
    ],
)
def test_a_step_without_a_loss(refused: Callable[..., str], returns: str, says: str) -> None:
    said = refused("corners:Steps", "--arguments", json.dumps({"returns": returns}), "--data", "ragged:Data")
    assert says in said and "It must return a loss tensor, or a dict with 'loss'" in said


@pytest.mark.parametrize("arguments", [["corners:WithData"], ["ragged:Ragged", "--data", "corners:batches"]])
def test_loaders_of_every_form_give_a_batch(
    recipe: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert recipe.main(arguments) == 0
    assert "equal: largest difference" in capsys.readouterr().out
