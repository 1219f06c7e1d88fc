"""``PipelineTrace`` in one process: settings, runs without a pipeline, clocks; on ranks: tests/strategy."""

from __future__ import annotations

import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest
import toy
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_megapar.callbacks import PipelineTrace
from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline.engine.clocks import offset_of
from lightning_megapar.strategy import MegaParStrategy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": ()}, r"steps=\(\) names no step: expected a step or a list of steps"),
        ({"steps": (3, -2)}, r"steps=\(3, -2\) has -2: .*nearest valid: steps=\[0, 3\]"),
        ({"steps": -1}, r"steps=-1 has -1: .*nearest valid: steps=\[0\]"),
        ({"steps": 2.6}, r"steps=2\.6 has 2\.6: .*nearest valid: steps=\[3\]"),
        ({"steps": "2,3"}, r"steps='2,3' has '2,3': .*such as \[2, 3\]$"),
        ({"steps": None}, "steps=None has None"),
        ({"steps": [True]}, r"steps=\[True\] has True"),
        ({"path": "trace.txt"}, r"path='trace\.txt': expected .* ends with \.json, such as 'trace\.json'"),
        ({"path": ""}, r"path='': .*'trace\.json'"),
        ({"picture": "a/b.gif"}, r"picture='a/b\.gif': expected .* ends with \.svg or \.png, such as 'b\.svg' or"),
        ({"picture": True}, "picture=True"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^PipelineTrace {message}"):
        PipelineTrace(**settings)


def test_steps_are_sorted_and_counted_once() -> None:
    assert PipelineTrace(range(4, 1, -1)).steps == (2, 3, 4)
    assert PipelineTrace(0).steps == (0,)
    node = OmegaConf.load(Path(__file__).parents[2] / "conf" / "callbacks" / "trace.yaml")
    made = instantiate(OmegaConf.create({"run_dir": "runs/a", "trace": node.pipeline_trace}).trace)
    assert (made.steps, made.path, made.picture) == (
        (2, 3),
        Path("runs/a/pipeline_trace.json"),
        Path("runs/a/pipeline_trace.svg"),
    )


@pytest.mark.parametrize("strategy", ["auto", "megapar"])
def test_without_a_pipeline_it_says_so_once(tmp_path: Path, strategy: str) -> None:
    trace = PipelineTrace(0, picture="trace.svg")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            chosen: Any = MegaParStrategy() if strategy == "megapar" else strategy
            trainer = toy.trainer(tmp_path, [trace], max_steps=2, strategy=chosen, devices=1)
            trainer.fit(toy.Toy(), toy.loader())
    found = [str(warning.message) for warning in told if "PipelineTrace" in str(warning.message)]
    name = "pipeline_parallel_size=1" if strategy == "megapar" else "SingleDeviceStrategy"
    assert len(found) == 1 and f"PipelineTrace: {name} runs no pipeline" in found[0]
    assert not list(tmp_path.glob("**/*.json")) and not list(tmp_path.glob("**/*.svg"))


def test_two_of_them_are_refused(tmp_path: Path) -> None:
    trainer = toy.trainer(tmp_path, [PipelineTrace(0), PipelineTrace(5, "late.json")], max_steps=1)
    with pytest.raises(ConfigError, match="takes one PipelineTrace"):
        trainer.fit(toy.Toy(), toy.loader())


def test_offsets_stay_within_their_bounds() -> None:
    draw = Random(1)
    for ahead in (0.0, 40.0, -3e5, 2e-4):
        exchanges, now = [], 100.0
        for _ in range(16):
            there, back = draw.expovariate(1e4), draw.expovariate(1e4)
            exchanges.append((now, now + there + ahead, now + there + back))
            now += there + back + draw.random() * 1e-3
        found = offset_of(exchanges)
        assert abs(found.seconds - ahead) <= found.error + 1e-9
        # Sixteen exchanges hold it closer than the best of them alone.
        assert 0 < found.error <= min(arrived - sent for sent, _, arrived in exchanges)
        assert (found.seconds == 0.0) == (ahead == 0.0)


def test_one_clock_is_left_alone() -> None:
    assert offset_of([(1.0, 1.4, 1.5), (2.0, 2.1, 2.5)]).seconds == 0.0
    assert offset_of([(1.0, 1.4, 1.5), (2.0, 2.1, 2.5)]).error == pytest.approx(0.1)
    assert offset_of([(1.0, 3.5, 2.0)]).seconds == 2.0 and offset_of([(1.0, 3.5, 2.0)]).error == 0.5
