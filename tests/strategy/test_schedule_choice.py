"""A schedule that is chosen, one from a file, and an order that nobody has named: the numbers of plain Lightning."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from hostile import Net
from lightning.pytorch import Callback, Trainer
from pool import RankError, RankPool
from torch import Tensor, nn

from lightning_megapar.pipeline import build_schedule, save_schedule
from lightning_megapar.pipeline.schedules import from_csv

SAMPLES = 19  # two batches of four microbatches, and one of three samples: three microbatches
ODD = """
# The stack goes from rank 1 to rank 0 and back. Microbatches go in no order, and only rank 0 halves its backwards.
1F2,2F2,1F0,2F0,1F3,2F3,1F1,2F1,2I0,1I0,2I2,2W0,1I2,1W0,2W2,2I3,1I3,2I1,1I1,1W2,2W3,1W3,2W1,1W1
0F2,0F0,0F3,0F1,3F2,3F0,3B0,3B2,0B0,0B2,3F1,3F3,3B3,3B1,0B3,0B1
"""
CLUSTER = {
    "devices_per_node": 2,
    "nodes": 1,
    "peak_flops": 1e12,
    "memory_bandwidth": 1e12,
    "intra_node": {"latency": 0.0, "bandwidth": 1e9},
    "inter_node": {"latency": 0.0, "bandwidth": 1e9},
}


class Returns(Net):
    """Gives its samples' logits back."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = torch.nn.functional.cross_entropy(logits, batch[1])
        self.log("train_loss", loss)
        return {"loss": loss, "logits": logits}


class Keep(Callback):
    """The outputs of each step, the schedule that was run, and a checkpoint of the first epoch."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.outputs: list[Any] = []
        self.schedule = ""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append(outputs["logits"].clone())

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == 0 and hasattr(trainer.strategy, "schedule"):
            trainer.save_checkpoint(self.path)
        self.schedule = getattr(getattr(trainer.strategy, "settled", None), "schedule_name", "")


def fit(layout: str, path: str, epochs: int = 1, ckpt_path: str | None = None, **options: Any) -> dict[str, Any]:
    keep = Keep(path)
    train = hostile.loader(layout, SAMPLES)
    more = {"max_epochs": epochs, "callbacks": [keep], "options": options, "ckpt_path": ckpt_path}
    found = hostile.fit(layout, Returns, train=train, validate=True, **more)
    return {**found, "outputs": keep.outputs, "schedule": keep.schedule}


def on_ranks(folder: str) -> dict[str, Any]:
    """Chosen, then from a file; then the chosen one's checkpoint goes on in the odd order."""
    printed, lines = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(lines)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    with contextlib.redirect_stdout(printed):
        chosen = fit("pp2", f"{folder}/chosen.ckpt", pipeline_schedule="auto")
    runs = {
        "auto": chosen,
        "file": fit("pp2", f"{folder}/file.ckpt", pipeline_schedule=f"{folder}/mine.csv"),
        "odd": fit("pp2", f"{folder}/odd.ckpt", pipeline_schedule=from_csv(ODD, "odd")),
        "on": fit("pp2", "", 2, f"{folder}/chosen.ckpt", pipeline_schedule=from_csv(ODD, "odd")),
    }
    return {"runs": runs, "printed": printed.getvalue(), "lines": lines.getvalue()}


def test_like_plain_lightning(pool: RankPool, tmp_path: Path) -> None:
    save_schedule(build_schedule("zb_h1", 2, 4), tmp_path / "mine.csv")
    ranks = pool.run(on_ranks, 2, str(tmp_path), mode="trainer")
    expected = fit(hostile.PLAIN, "")
    names = {"auto": "zb_h1", "file": "mine", "odd": "odd"}
    for kind, name in names.items():
        assert {rank["runs"][kind]["schedule"] for rank in ranks} == {name}
        hostile.agree([rank["runs"][kind] for rank in ranks], {**expected, "schedule": name})
    weights = fit(hostile.PLAIN, "", 2)["weights"]
    assert hostile.differences(ranks[0]["runs"]["on"]["weights"], weights) == []
    assert ranks[0]["printed"].count("taken") == 1 and ranks[1]["printed"] == ""
    assert "limit 2" in ranks[0]["printed"]
    told = [line for line in ranks[0]["lines"].splitlines() if line.startswith("layout: ")]
    assert [line.rpartition("; ")[2] for line in told] == [
        "pipeline schedule zb_h1",
        "pipeline schedule mine",
        "pipeline schedule odd, 2 chunks on each stage",
        "pipeline schedule odd, 2 chunks on each stage",
    ]


def again(first: str, second: dict[str, Any]) -> list[Any]:
    """A module that one trainer has cut, in the hands of another one that leaves the choice open."""
    torch.manual_seed(0)
    made = Net().double()
    one = hostile.trainer_for("pp2", options={"pipeline_schedule": first, "cluster": CLUSTER}, max_epochs=1)
    one.fit(made, hostile.loader("pp2"))
    two = hostile.trainer_for("pp2", options={"pipeline_schedule": "auto", **second})
    found = two.validate(made, hostile.loader("pp2", 12), verbose=False)
    return [one.strategy.schedule, two.strategy.schedule, found[0]["val_loss"]]


def test_a_module_that_is_cut_keeps_its_schedule(pool: RankPool) -> None:
    plain = hostile.trainer_for(hostile.PLAIN, max_epochs=1)
    torch.manual_seed(0)
    made = Net().double()
    plain.fit(made, hostile.loader(hostile.PLAIN))
    loss = plain.validate(made, hostile.loader(hostile.PLAIN, 12), verbose=False)[0]["val_loss"]
    for schedule, kept, value in pool.run(again, 2, "auto", {}, mode="trainer"):
        assert schedule == kept == "zb_h1" and value == pytest.approx(loss, rel=1e-9)
    with pytest.raises(RankError, match=r"the schedule 'gpipe', for which the module was already cut, needs 4 on"):
        pool.run(again, 2, "gpipe", {}, mode="trainer")


def unlike() -> None:
    name = "1f1b" if os.environ["RANK"] == "0" else "gpipe"
    fit("pp2", "", pipeline_schedule=build_schedule(name, 2, 4))


def test_ranks_with_different_files(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 0 has '1f1b' and rank 1 has another one \('gpipe'\)"):
        pool.run(unlike, 2, mode="trainer")


class Heavy(Net):
    """A wide input layer: by parameters its stage holds one block less."""

    def __init__(self) -> None:
        super().__init__()
        self.names = nn.Embedding(500, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.inp(x) + self.names(torch.zeros(len(x), dtype=torch.long))))


def balanced(by: str) -> tuple[Any, dict[str, Any]]:
    trainer = hostile.trainer_for("pp2", options={"pipeline_balance_by": by}, max_epochs=1)
    torch.manual_seed(0)
    watch = hostile.Watch()
    trainer.callbacks.append(watch)
    trainer.fit(Heavy().double(), hostile.loader("pp2"))
    strategy: Any = trainer.strategy
    return strategy.prepared.plan.ranges, watch.weights


def test_stages_balanced_by_operations(pool: RankPool) -> None:
    by_parameters, by_flops = (pool.run(balanced, 2, by, mode="trainer")[0] for by in ("parameters", "flops"))
    assert by_parameters[0] == ((0, 1), (1, 4)) and by_flops[0] == ((0, 2), (2, 4))
    assert hostile.differences(by_flops[1], by_parameters[1]) == []
