"""The Trainer's settings mean on two stages and on two tensor ranks what they mean on one process."""

from __future__ import annotations

from typing import Any

import everyday
import pytest
import torch
from everyday import BOTH, Net
from pool import RankPool


def settings(name: str) -> dict[str, Any]:
    """Trainer arguments; several settings share a run where one does not hide another."""
    return {
        "accumulate_clip_norm": {
            "accumulate_grad_batches": 3,  # four batches an epoch: the last window is short
            "gradient_clip_val": 0.05,
            "log_every_n_steps": 1,
            "loggers": 2,
        },
        "accumulate_clip_value": {
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.01,
            "gradient_clip_algorithm": "value",
            "log_every_n_steps": 2,
            "loggers": 1,
        },
        "overfit": {"overfit_batches": 2, "max_epochs": 3, "validate": True},
        "overfit_fraction": {"overfit_batches": 0.5, "validate": True},
        "limits": {"limit_train_batches": 3, "limit_val_batches": 2, "validate": True},
        "limits_fractions": {"limit_train_batches": 0.5, "limit_val_batches": 0.34, "validate": True},
        "check_every_2": {"val_check_interval": 2, "validate": True, "limit_val_batches": 2},
        "check_every_half": {"val_check_interval": 0.5, "validate": True, "log_every_n_steps": 3, "loggers": 1},
        "check_across_epochs": {
            "val_check_interval": 3,
            "check_val_every_n_epoch": None,
            "max_steps": 10,
            "max_epochs": -1,
            "validate": True,
        },
        "every_second_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4, "validate": True},
    }[name]


def run(layout: str, names: list[str]) -> dict[str, Any]:
    return {"of_rank_0": {}, **{name: everyday.fit(layout, **settings(name)) for name in names}}


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize(
    "names",
    [
        ["accumulate_clip_norm", "accumulate_clip_value"],
        ["overfit", "overfit_fraction", "limits", "limits_fractions"],
        ["check_every_2", "check_every_half", "check_across_epochs", "every_second_epoch"],
    ],
    ids=["windows_and_clipping", "limits", "validation_intervals"],
)
def test_settings(pool: RankPool, layout: str, names: list[str]) -> None:
    expected = run(everyday.PLAIN, names)
    results = pool.run(run, everyday.world(layout), layout, names, mode="trainer")
    for name in names:
        everyday.agree([rank[name] for rank in results], expected[name])
    for name in names:
        one, clips = expected[name], settings(name).get("gradient_clip_val")
        assert one["steps"] == len(one["of_rank_0"]["gradients"])
        if clips:  # the setting was felt: some gradient was longer
            norm = torch.stack([g.norm() for g in one["of_rank_0"]["gradients"][0].values()]).norm()
            assert float(norm) > clips
        assert bool(settings(name).get("validate")) == (one["validations"] != [])


def test_each_setting_changed_the_run() -> None:
    """The comparison above would pass for a setting that neither side heeds."""
    seen = {}
    for name in ("overfit", "limits", "limits_fractions", "check_every_2", "check_every_half", "check_across_epochs"):
        result = everyday.fit(everyday.PLAIN, **settings(name))
        seen[name] = (len(result["batches"]), [step for step, _ in result["validations"]])
    assert seen["overfit"][0] == 6 and seen["limits"][0] == 6 and seen["limits_fractions"][0] == 4
    assert seen["check_every_2"][1][1:] == [2, 4, 6, 8]
    assert seen["check_every_half"][1][1:] == [2, 4, 6, 8]
    assert seen["check_across_epochs"][1][1:] == [3, 6, 9]


class Settings(Net):
    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch), on_step=True, on_epoch=True)


def evaluate(layout: str, how: str) -> dict[str, Any]:
    limits: dict[str, Any] = {"ints": {"limit_test_batches": 2, "limit_predict_batches": 1}}.get(
        how, {"limit_test_batches": 0.34, "limit_predict_batches": 0.67, "limit_val_batches": 0.34}
    )
    torch.manual_seed(0)
    module = Settings().double()
    trainer = everyday.make_trainer(layout, **limits)
    data = everyday.loader(layout, 12, 4)
    validated = trainer.validate(module, data, verbose=False)
    tested = trainer.test(module, data, verbose=False)
    predicted = trainer.predict(module, data)
    return {"validated": validated, "tested": tested, "predicted": predicted}


@pytest.mark.parametrize("layout", BOTH)
def test_limits_of_test_and_predict(pool: RankPool, layout: str) -> None:
    for how in ("ints", "fractions"):
        expected = everyday.compare(pool, evaluate, layout, how)
        assert len(expected["predicted"]) == {"ints": 1, "fractions": 2}[how]
