"""``MemoryReport`` in one process: settings, files, numbers that stay; on ranks: tests/strategy."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from decoders import Decoder
from hydra.utils import instantiate
from lightning.pytorch import LightningModule
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megapar.callbacks import MemoryReport
from lightning_megapar.callbacks.memory_report import read_report
from lightning_megapar.config import ConfigError
from lightning_megapar.memory.blocks import forward_of
from lightning_megapar.memory.timeline import ACTIVATIONS, GRADIENTS, MESSAGES, OPTIMIZER, PARAMETERS
from lightning_megapar.strategy import MegaParStrategy

STEPS = 5


def fit(
    root: Path, callbacks: list[Any], strategy: Any = None, make: type[LightningModule] = Decoder, **options: Any
) -> dict[str, Tensor]:
    rows = torch.randint(0, 64, (4 * STEPS * options.get("accumulate_grad_batches", 1), 33))
    torch.manual_seed(5)
    module = make()
    trainer = toy.trainer(root, callbacks, strategy=strategy or MegaParStrategy(seed=1), devices=1, **options)
    trainer.fit(module, DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"at_step": 0}, r"at_step=0: expected a step from 1 on .*nearest valid: 1"),
        ({"at_step": True}, "at_step=True"),
        ({"at_step": 2.5}, "at_step=2.5"),
        ({"path": "memory.txt"}, r"path='memory\.txt': expected .* ends with \.json, such as 'memory\.json'"),
        ({"picture": "a.gif"}, r"picture='a\.gif': expected .* \.svg or \.png, such as 'a\.svg'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^MemoryReport {message}"):
        MemoryReport(**settings)


def test_the_option_of_the_recipes() -> None:
    node = OmegaConf.load(Path(__file__).parents[2] / "conf" / "callbacks" / "memory.yaml")
    made = instantiate(OmegaConf.create({"run_dir": "runs/a", "memory": node.memory_report}).memory)
    assert (made.at_step, made.path, made.picture) == (None, Path("runs/a/memory.json"), Path("runs/a/memory.svg"))


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2}, {"strategy": "auto"}, {"precision": "bf16-true"}],
    ids=["plain", "accumulated", "lightning", "bfloat16"],
)
def test_measured_as_predicted_and_the_training_is_as_without(
    tmp_path: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(2)
    expected = fit(tmp_path, [], **options)
    torch.manual_seed(2)
    report = MemoryReport()
    found = fit(tmp_path, [report], **options)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    (one,) = report.ranks
    assert one.step == 2
    for use in (PARAMETERS, OPTIMIZER, GRADIENTS):
        assert one.measured[use] == pytest.approx(one.predicted[use], rel=0.01), use
    assert one.measured[ACTIVATIONS] == pytest.approx(one.predicted[ACTIVATIONS], rel=0.03)
    assert one.measured[MESSAGES] == 0
    for number in range(3):
        name = f"model.blocks.{number}"
        assert one.layers[name] == pytest.approx(one.predicted_layers[name], rel=0.02)
    assert one.measured_peak == pytest.approx(one.predicted_peak, rel=0.1)
    assert "memory of training step 2" in capsys.readouterr().out
    assert read_report(tmp_path / "memory.json") == report.ranks
    assert "<polygon" in (tmp_path / "memory.svg").read_text()


def test_what_is_recomputed_is_predicted_by_its_plan(tmp_path: Path) -> None:
    kept = {}
    for recompute in ("none", "selective", "full", {"budget_bytes": 1_000_000, "options": ["all", "inputs"]}):
        report = MemoryReport(path=None, picture=None)
        fit(tmp_path, [report], MegaParStrategy(seed=1, recompute=recompute))
        (one,) = report.ranks
        assert one.measured[ACTIVATIONS] == pytest.approx(one.predicted[ACTIVATIONS], rel=0.03), recompute
        kept[str(recompute)] = one.measured[ACTIVATIONS]
    none, selective, full, planned = kept.values()
    assert full < planned < none and full < selective < none


def test_blocks_and_hooks_are_as_before(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Watched(Decoder):
        def on_train_end(self) -> None:
            for block in self.model.blocks:
                seen.append((forward_of(block), len(block._forward_hooks), len(block._forward_pre_hooks)))
            seen.append([len(one._post_accumulate_grad_hooks or ()) for one in self.parameters()])

    fit(tmp_path, [MemoryReport(at_step=1, path=None, picture=None)], make=Watched)
    assert seen[:3] == [(None, 0, 0)] * 3 and set(seen[3]) == {0}


def test_a_module_without_blocks_is_measured_all_the_same(tmp_path: Path) -> None:
    report = MemoryReport(path=None, picture=None)
    trainer = toy.trainer(tmp_path, [report], strategy=MegaParStrategy(), devices=1)
    trainer.fit(toy.Toy(), toy.loader())
    (one,) = report.ranks
    assert one.measured[PARAMETERS] == one.predicted[PARAMETERS] == 16 * 16 * 4
    assert one.measured[OPTIMIZER] == one.predicted[OPTIMIZER] == 0
    assert set(one.layers) <= {""}


def test_it_says_why_there_is_no_report(tmp_path: Path) -> None:
    for callback, options, said in (
        (MemoryReport(at_step=20), {}, "MemoryReport at_step=20: training ended at step 10 before"),
        (MemoryReport(), {"profiler": "pytorch"}, "there is another one"),
    ):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fit(tmp_path, [callback], **options)
        assert any(said in str(one.message) for one in told)
        assert callback.ranks == [] and not (tmp_path / "memory.json").exists()


def test_a_failing_step_ends_the_measurement(tmp_path: Path) -> None:
    class Failing(Decoder):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                raise ValueError("of the user")
            return loss

    with pytest.raises(ValueError, match="of the user"):
        fit(tmp_path, [MemoryReport()], make=Failing)
    assert not torch.autograd._profiler_enabled()


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(ConfigError, match="is no memory report"):
        read_report(tmp_path / "a.json")
