"""Scripts that import ``pytorch_lightning``: the other tree of the same classes, by name and by object."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import everyday
import pytest
import torch
from everyday import BOTH, Block, Net
from pool import RankPool
from strategy.hostile import differences
from torch import nn

ROOT = Path(__file__).parents[2]


def classes() -> tuple[Any, Any, Any]:
    """(package, module, callback) of the other tree; everything is written as in everyday.py."""
    import pytorch_lightning as pl

    class PlNet(pl.LightningModule):
        forward, loss = Net.forward, Net.loss
        validation_step, test_step, predict_step = Net.validation_step, Net.test_step, Net.predict_step

        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.inp = nn.Linear(8, width)
            self.blocks = nn.Sequential(*[Block() for _ in range(4)])
            self.head = nn.Linear(width, 5)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            return {"loss": loss, "rows": batch[1]}

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            follower = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": follower, "monitor": "val_loss"}}

    class PlWatch(pl.Callback):
        __init__ = everyday.Watch.__init__
        on_before_optimizer_step = everyday.Watch.on_before_optimizer_step
        on_train_batch_end = everyday.Watch.on_train_batch_end
        on_validation_end = everyday.Watch.on_validation_end
        on_train_end = everyday.Watch.on_train_end

    return pl, PlNet, PlWatch


def train(layout: str, root: str, how: str) -> dict[str, Any]:
    pl, module_type, watch_type = classes()
    from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

    strategy: Any = "auto" if layout == everyday.PLAIN else everyday.strategy_of(layout)
    if how == "name" and layout != everyday.PLAIN:
        strategy = "megapar"
    watch = watch_type()
    best = ModelCheckpoint(root, monitor="val_loss", filename="{epoch}", save_top_k=-1, save_last=True)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=everyday.world(layout),
        max_epochs=3,
        precision="64-true",
        accumulate_grad_batches=2,
        gradient_clip_val=0.2,
        callbacks=[watch, best, EarlyStopping("val_loss", patience=9)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    torch.manual_seed(0)
    module = module_type().double()
    data = everyday.loader(layout, 16, 4)
    trainer.fit(module, everyday.loader(layout, shuffle=False), data)
    seen = [trainer.validate(module, data, verbose=False), trainer.test(module, data, verbose=False)]
    kinds = {type(optimizer).__mro__[1].__module__ for optimizer in trainer.strategy._lightning_optimizers}
    assert all(kind.startswith("pytorch_lightning.") for kind in kinds) and not isinstance(module.optimizers(), list)
    return {
        "batches": watch.batches,
        "validations": watch.validations,
        "losses": watch.losses,
        "rates": watch.rates,
        "seen": seen,
        "best": Path(best.best_model_path).name,
        "steps": trainer.global_step,
        "of_rank_0": {
            "weights": watch.weights,
            "gradients": watch.gradients,
            "files": sorted(p.name for p in Path(root).iterdir()),
            "predicted": trainer.predict(module, data) if layout in (everyday.PLAIN, *BOTH) else None,
        },
    }


@pytest.mark.parametrize("layout", BOTH)
def test_a_module_of_pytorch_lightning(pool: RankPool, tmp_path: Path, layout: str) -> None:
    expected = train(everyday.PLAIN, str(tmp_path / "plain"), "object")
    results = pool.run(train, 2, layout, str(tmp_path / layout), "object", mode="trainer")
    everyday.agree(results, expected)
    # Its checkpoint opens in its own tree.
    from lightning_megapar.checkpoint.export import to_lightning, write_single_file

    out = tmp_path / f"{layout}.ckpt"
    write_single_file(to_lightning(tmp_path / layout / "last.ckpt"), out)
    loaded = classes()[1].load_from_checkpoint(out)
    found = {name: value.double() for name, value in loaded.state_dict().items()}
    assert differences(found, results[0]["of_rank_0"]["weights"], tolerance=1e-6) == []


def manual(layout: str) -> dict[str, Any]:
    """Manual optimization: the optimizer objects come from the module's tree."""
    pl, module_type, watch_type = classes()

    class Manual(module_type):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            return {"loss": torch.zeros(())}

    watch = watch_type()
    strategy: Any = "auto" if layout == everyday.PLAIN else everyday.strategy_of(layout)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=everyday.world(layout), max_epochs=1, callbacks=[watch],
        enable_model_summary=False, precision="64-true", **quiet,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer.fit(Manual().double(), everyday.loader(layout))
    return {"of_rank_0": {"weights": watch.weights, "gradients": watch.gradients}}


def test_manual_optimization_of_pytorch_lightning(pool: RankPool) -> None:
    everyday.compare(pool, manual, "tp2")


def refused(kind: str) -> str:
    pl, module_type, _ = classes()
    from pytorch_lightning.callbacks import StochasticWeightAveraging

    torch.manual_seed(0)
    trainer = pl.Trainer(
        strategy=everyday.strategy_of("pp2"), accelerator="cpu", devices=2, logger=False, enable_checkpointing=False,
        callbacks=[StochasticWeightAveraging(0.1)], enable_progress_bar=False,
    )  # fmt: skip
    try:
        trainer.fit(module_type(), everyday.loader("pp2"))
    except Exception as error:
        return str(error)
    return ""


def test_its_callbacks_are_told_apart(pool: RankPool) -> None:
    for message in pool.run(refused, 2, "swa", mode="trainer"):
        assert "StochasticWeightAveraging averages copies of the whole module" in message


SCRIPT = """
import sys
first, second = sys.argv[1:3]
__import__(first), __import__(second)
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(strategy="megapar", devices=2, accelerator="cpu", max_steps=3, limit_val_batches=1, **quiet)
trainer.fit(BoringModel())
from lightning_megapar import MegaParStrategy
same = pl.Trainer(strategy=MegaParStrategy(data_parallel_size=2), devices=2, accelerator="cpu", max_steps=1, **quiet)
same.fit(BoringModel())
waiting = [f for f in sys.meta_path if type(f).__name__ == "_Awaited"]
if trainer.is_global_zero:
    print("done", trainer.strategy.layout.describe(), trainer.global_step, same.global_step, len(waiting), flush=True)
"""


@pytest.mark.parametrize(
    "order", [("pytorch_lightning", "lightning_megapar"), ("lightning_megapar", "pytorch_lightning")], ids="-".join
)
def test_by_name_in_a_script_whichever_is_imported_first(tmp_path: Path, order: tuple[str, str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", *order]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done data=2 3 1 0") == 1, done.stdout
