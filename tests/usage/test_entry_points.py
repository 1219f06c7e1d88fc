"""validate, test and predict before and after fit; hyper-parameters; a checkpoint exported for plain Lightning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import everyday
import pytest
import torch
from everyday import BOTH, Net
from lightning.pytorch.callbacks import ModelCheckpoint
from pool import RankPool
from strategy.hostile import differences
from torch import nn

ROOT = Path(__file__).parents[2]


class Configured(Net):
    """Keeps its hyper-parameters, leaves out one argument, has a metric to monitor."""

    def __init__(self, width: int = 16, rates: dict[str, float] | None = None, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["extra"])
        self.inp, self.head = nn.Linear(8, width), nn.Linear(width, 5)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["rates"]["body"])


def everything(layout: str, root: str) -> dict[str, Any]:
    """All four entry points before and after fit, on one trainer and one module."""
    memory, watch = everyday.Memory(), everyday.Watch()
    best = ModelCheckpoint(root, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}")
    trainer = everyday.make_trainer(
        layout, [watch, best], logger=memory, enable_checkpointing=True, default_root_dir=root, max_epochs=3
    )
    torch.manual_seed(0)
    module = Configured(16, {"body": 0.02}, extra=object()).double()
    data = everyday.loader(layout, 12, 4)
    seen: dict[str, Any] = {}

    def look(when: str, path: str | None = None) -> None:
        seen[f"{when} validate"] = trainer.validate(module, data, ckpt_path=path, verbose=False)
        seen[f"{when} test"] = trainer.test(module, data, ckpt_path=path, verbose=False)
        seen[f"{when} predict"] = trainer.predict(module, data, ckpt_path=path)

    look("before")
    trainer.fit(module, everyday.loader(layout), data)
    look("after")
    look("best", "best")
    return {
        "seen": seen,
        "best": Path(best.best_model_path).name,
        "score": float(best.best_model_score),  # type: ignore[arg-type]
        "hparams": dict(module.hparams),
        "of_rank_0": {
            "weights": watch.weights,
            "logged": memory.rows,
            "logged_hparams": memory.hparams,
            "files": sorted(p.name for p in Path(root).glob("*.ckpt")),
        },
    }


def go_on(layout: str, path: str) -> dict[str, Any]:
    """Two more epochs, from a file."""
    watch = everyday.Watch()
    trainer = everyday.make_trainer(layout, [watch], max_epochs=5)
    torch.manual_seed(1)
    trainer.fit(Configured(16, {"body": 0.02}).double(), everyday.loader(layout), ckpt_path=path)
    return {"steps": trainer.global_step, "of_rank_0": {"weights": watch.weights, "gradients": watch.gradients}}


@pytest.mark.parametrize("layout", BOTH)
def test_before_and_after_fit_and_back_to_plain_lightning(pool: RankPool, tmp_path: Path, layout: str) -> None:
    plain_root, root = tmp_path / "plain", tmp_path / layout
    expected = everything(everyday.PLAIN, str(plain_root))
    everyday.agree(pool.run(everything, 2, layout, str(root), mode="trainer"), expected)
    assert expected["hparams"] == {"width": 16, "rates": {"body": 0.02}}
    assert expected["of_rank_0"]["logged_hparams"] == expected["hparams"]
    first, last = expected["seen"]["before predict"], expected["seen"]["after predict"]
    assert differences(last, first) != []  # training has changed the predictions

    # One file for plain Lightning: hyper-parameters from the file, weights, optimizer, epoch.
    out = tmp_path / "model.ckpt"
    command = [sys.executable, str(ROOT / "recipes" / "export.py"), str(root / "last.ckpt"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    torch.set_default_dtype(torch.float64)
    try:
        loaded = Configured.load_from_checkpoint(out, map_location="cpu")
        original = Configured.load_from_checkpoint(plain_root / "last.ckpt", map_location="cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    assert dict(loaded.hparams) == dict(original.hparams)
    assert differences(dict(loaded.state_dict()), dict(original.state_dict())) == []
    changed = Configured.load_from_checkpoint(out, map_location="cpu", rates={"body": 0.5})
    assert changed.hparams["rates"] == {"body": 0.5}

    # Plain Lightning goes on where the layout stopped, and the layout where plain Lightning stopped.
    further = go_on(everyday.PLAIN, str(plain_root / "last.ckpt"))
    assert further["steps"] == 20 and len(further["of_rank_0"]["gradients"]) == 8
    everyday.agree([go_on(everyday.PLAIN, str(out))], further)
    everyday.agree(pool.run(go_on, 2, layout, str(plain_root / "last.ckpt"), mode="trainer"), further)
