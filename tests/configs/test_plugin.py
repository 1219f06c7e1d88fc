"""What the package does to somebody else's Hydra application: groups and a name, and no cost."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.core.config_search_path import ConfigSearchPath

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "hydra_plugins" / "lightning_megapar_plugin" / "__init__.py"

PLAIN_APP = """
import json, sys
import hydra
from hydra.core.plugins import Plugins

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    heavy = [name for name in ("torch", "lightning", "lightning_megapar", "numpy") if name in sys.modules]
    own = [name for name in Plugins.instance().get_stats().modules_import_time if "megapar" in name]
    print(json.dumps({"heavy": heavy, "own": own, "cfg": dict(cfg.get("parallel", {}))}))

main()
"""

TRAINING_APP = """
import json, sys
import hydra
from hydra.utils import instantiate
assert "lightning" not in sys.modules
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg):
    assert "lightning_megapar" not in sys.modules  # the name alone brings it in
    named = Trainer(strategy="megapar", devices=cfg.parallel.devices, accelerator="cpu", logger=False,
                    enable_checkpointing=False, enable_progress_bar=False)
    trainer = instantiate(cfg.trainer)
    strategy = trainer.strategy
    trainer.fit(Module(), DataLoader(torch.ones(32, 8), batch_size=4))
    if trainer.is_global_zero:
        print(json.dumps({"strategy": type(strategy).__name__, "layout": strategy.layout.describe(),
                          "named": named.strategy.layout.describe(), "zero": named.strategy.config.zero_stage,
                          "steps": trainer.global_step}))

main()
"""
TRAINING_CONF = """
defaults: [_self_]
trainer:
  _target_: lightning.pytorch.Trainer
  accelerator: cpu
  devices: 1
  strategy: auto
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
"""


def run(directory: Path, *overrides: str) -> dict[str, object]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "app.py", *overrides, "hydra.run.dir=.", "hydra.output_subdir=null"],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))


def test_an_application_that_does_not_train_imports_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(PLAIN_APP)
    found = run(tmp_path, "+parallel=tp2")
    assert found["own"] == ["hydra_plugins.lightning_megapar_plugin"]
    assert found["heavy"] == []
    assert found["cfg"]["devices"] == 2  # type: ignore[index]


def test_the_plugin_costs_less_than_twenty_milliseconds() -> None:
    spec = importlib.util.spec_from_file_location("hydra_plugins.lightning_megapar_plugin", PLUGIN)
    assert spec is not None and spec.loader is not None
    costs = []
    for _ in range(5):
        module = importlib.util.module_from_spec(spec)
        meta_path = list(sys.meta_path)
        began = time.process_time()
        spec.loader.exec_module(module)
        module.MegaParSearchPath().manipulate_search_path(_SearchPath())
        costs.append(time.process_time() - began)
        sys.meta_path[:] = meta_path
    assert min(costs) < 0.02, costs


class _SearchPath(ConfigSearchPath):
    def __init__(self) -> None:
        self.paths: list[str] = []

    def get_path(self) -> list[object]:  # type: ignore[override]
        return []

    def append(self, provider: str, path: str, anchor: object = None) -> None:
        self.paths.append(path)

    def prepend(self, provider: str, path: str, anchor: object = None) -> None:
        raise AssertionError("the application's own files come first")


def test_the_groups_stand_once_behind_the_application_s(tmp_path: Path) -> None:
    from hydra_plugins.lightning_megapar_plugin import MegaParSearchPath, config_directory

    search_path = _SearchPath()
    MegaParSearchPath().manipulate_search_path(search_path)
    assert search_path.paths == [f"file://{config_directory()}"]
    assert config_directory() == ROOT / "conf"


@pytest.mark.parametrize("package", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.slow)])
def test_a_training_application_gets_the_strategy_by_group_and_by_name(tmp_path: Path, package: str) -> None:
    (tmp_path / "app.py").write_text(TRAINING_APP.replace("lightning.pytorch", package))
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text(TRAINING_CONF.replace("lightning.pytorch", package))
    found = run(tmp_path, "+parallel=dp2_tp2", "parallel.zero_stage=1")
    layout = "data=2 x tensor=2"
    # By its bare name, in a file or in Python, the degrees of the group are not lost either.
    assert found == {"strategy": "MegaParStrategy", "layout": layout, "named": layout, "zero": 1, "steps": 2}
