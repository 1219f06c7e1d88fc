"""What is refused before a rank exists, by message; and what devices are chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_megapar.config import ConfigError, ParallelConfig
from lightning_megapar.hydra_app import plan
from lightning_megapar.hydra_app.plan import checkpoint_to_resume, choose_devices, plan_run
from lightning_megapar.models.gpt import GPTConfig

MODEL = GPTConfig(vocab_size=257, num_layers=4, num_heads=4, hidden_size=64, max_sequence_length=32)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_gpus", lambda: 0)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def planned(**changes: Any) -> plan.RunPlan:
    settings: dict[str, Any] = {"global_batch_size": 16, "model": MODEL, "sequence_length": 32}
    parallel = {"devices": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 1}
    parallel.update({key: changes.pop(key) for key in list(changes) if key not in settings and "acc" not in key})
    return plan_run(parallel, **{**settings, **changes})


def test_a_right_run() -> None:
    run = planned()
    assert (run.layout.tensor, run.layout.pipeline, run.layout.data) == (2, 2, 1)
    assert run.batch.micro_batch == 4
    assert "4 processes on each node, on cpu" in run.describe() and "global batch 16" in run.describe()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"devices": 3}, r"multiply to 4 but devices x num_nodes = 3.*Nearest valid layouts for 3"),
        ({"devices": 0}, r"parallel.devices=0.*nearest valid: 1"),
        ({"tensor_parallel_size": "two"}, r"tensor_parallel_size='two'"),
        ({"global_batch_size": 6}, r"global_batch_size=6 is not divisible.*Nearest valid global batch sizes: 4, 8"),
        ({"model": replace(MODEL, num_heads=1)}, r"num_heads=1 is not divisible by tensor_parallel_size=2"),
        ({"model": replace(MODEL, num_layers=1)}, r"num_layers=1 is less than pipeline_parallel_size=2.*num_layers: 2"),
        ({"model": replace(MODEL, ffn_hidden_size=65)}, r"ffn_hidden_size=65 is not divisible"),
        ({"model": replace(MODEL, vocab_multiple=1)}, r"vocab_multiple=1 pads vocab_size=257 to 257 rows.*: 2"),
        ({"sequence_length": 31, "sequence_parallel": True}, r"sequence_length=31 is not divisible by tensor_par"),
        ({"sequence_length": 64}, r"sequence_length=64 is above max_sequence_length=32"),
        ({"context_parallel_size": 2}, r"context_parallel_size=2 is not available yet"),
        (
            {"devices": 6, "tensor_parallel_size": 6, "pipeline_parallel_size": 1,
             "model": replace(MODEL, num_heads=6, hidden_size=96, num_kv_heads=2)},
            r"ffn_hidden_size=384|vocab_multiple",
        ),
        (
            {"devices": 4, "tensor_parallel_size": 4, "pipeline_parallel_size": 1,
             "model": replace(MODEL, num_heads=12, hidden_size=96, num_kv_heads=6)},
            r"num_kv_heads=6 and tensor_parallel_size=4: one must divide the other",
        ),
    ],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(**changes)


def test_fewer_key_value_heads_than_ranks_are_fine_when_one_divides_the_other() -> None:
    model = replace(MODEL, num_heads=4, num_kv_heads=2)
    assert planned(devices=4, tensor_parallel_size=4, pipeline_parallel_size=1, model=model).layout.tensor == 4


def test_gpus_when_there_are_enough_else_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = ParallelConfig()
    assert choose_devices(4, "auto", parallel).accelerator == "cpu"
    monkeypatch.setattr(plan, "_gpus", lambda: 4)
    assert choose_devices(4, "auto", parallel).accelerator == "cuda"
    assert choose_devices("auto", "auto", parallel).count == 4
    fallback = choose_devices(8, "auto", parallel)
    assert (fallback.accelerator, fallback.reason) == ("cpu", "4 GPUs here")
    with pytest.raises(ConfigError, match=r"this machine has 4 GPUs; nearest valid: trainer.accelerator=cpu, or"):
        choose_devices(8, "gpu", parallel)
    with pytest.raises(ConfigError, match="accelerator=mps has no communication"):
        choose_devices(2, "mps", parallel)
    assert choose_devices(2, "cpu", parallel).accelerator == "cpu"


def test_auto_on_a_cpu_follows_cores_sizes_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert choose_devices("auto", "auto", ParallelConfig(), global_batch_size=16).count == 4
    assert choose_devices("auto", "auto", ParallelConfig(), global_batch_size=18).count == 6
    assert choose_devices("auto", "cpu", ParallelConfig(tensor_parallel_size=3), global_batch_size=16).count == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_devices("auto", "auto", ParallelConfig(), global_batch_size=16).count == 2


def test_what_cannot_be_resumed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a run directory nor a checkpoint: it does not exist"):
        checkpoint_to_resume(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match="it is a file of another kind"):
        checkpoint_to_resume(tmp_path / "notes.txt")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a run without a checkpoint yet"):
        checkpoint_to_resume(tmp_path / "run")
