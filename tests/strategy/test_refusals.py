"""What cannot work is refused by message, before ranks wait for each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
from lightning.pytorch import LightningModule, Trainer
from pool import RankError, RankPool
from torch.utils.data import DataLoader

from lightning_megapar import ConfigError, MegaParStrategy

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def test_devices_are_not_the_product() -> None:
    with pytest.raises(
        ConfigError, match=r"multiply to 6 but devices x num_nodes = 4.*tensor_parallel_size=2"
    ) as error:
        Trainer(
            strategy=MegaParStrategy(tensor_parallel_size=3, pipeline_parallel_size=2), accelerator="cpu", devices=4
        )
    assert "devices=6" in str(error.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tensor_model_parallel_size", "tensor_parallel_size"),
        ("tp_size", "tensor_parallel_size"),
        ("pipeline_paralel_size", "pipeline_parallel_size"),
        ("zero_stag", "zero_stage"),
        ("num_micro_batches", "num_microbatches"),
    ],
)
def test_unknown_argument(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown argument '{name}'; did you mean '{meant}'"):
        MegaParStrategy(**{name: 2})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0: expected a positive integer or 'auto'"),
        ({"pipeline_parallel_size": "two"}, "pipeline_parallel_size='two'"),
        ({"zero_stage": 4}, "zero_stage=4 is none of ZeRO's; valid values: 0, 1, 2, 3"),
        ({"pipeline_schedule": "1f1"}, "did you mean '1f1b'"),
        ({"context_parallel_size": 2}, "context_parallel_size=2 is not available"),
        ({"sequence_parallel": "yes"}, "sequence_parallel='yes'"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
        ({"pipeline_split": (2, 0)}, "every stage needs at least one block"),
        ({"pipeline_split": (2, 2), "pipeline_parallel_size": 3}, "names 2 stages but pipeline_parallel_size=3"),
    ],
)
def test_bad_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        MegaParStrategy(**options)
    assert message in str(error.value)


class Manual(parity.Model):
    def __init__(self) -> None:
        super().__init__(parity.style("gpt2"), "sgd")
        self.automatic_optimization = False


class Twice(parity.Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.gpt(batch["tokens"], batch["labels"]) + self.gpt(batch["tokens"], batch["labels"])


class Hybrid(LightningModule):
    """Never calls its stack of blocks."""

    def __init__(self) -> None:
        import torch

        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(4)])
        self.offset = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch["tokens"].float().mean() + self.offset

    def configure_optimizers(self) -> Any:
        return parity.make_optimizer(self.parameters(), "sgd", 0.1)


def fit(
    options: dict[str, Any], world: int, model: str = "gpt2", batch: int = 16, ckpt: str | None = None, **style: Any
) -> None:
    made: LightningModule
    if model == "manual":
        made = Manual()
    elif model == "twice":
        made = Twice(parity.style("gpt2"), "sgd")
    elif model == "never":
        made = Hybrid()
    else:
        made = parity.Model(parity.style(model, **style), "sgd")
    trainer = Trainer(strategy=MegaParStrategy(**options), accelerator="cpu", devices=world, max_steps=1, **QUIET)
    length = style.get("max_sequence_length", 16)
    trainer.fit(made, DataLoader(parity.Tokens(16, length, 61), batch_size=batch), ckpt_path=ckpt)


@pytest.mark.parametrize(
    ("world", "options", "kwargs", "message"),
    [
        (3, {"tensor_parallel_size": 3}, {"vocab_multiple": 9}, "num_heads=4"),
        (3, {"tensor_parallel_size": 3}, {}, "nearest valid vocab_multiple: 6, 9"),
        (2, {"pipeline_parallel_size": 2}, {"num_layers": 1}, "has none"),
        (3, {"pipeline_parallel_size": 3}, {"num_layers": 2}, "the stack has only 2 blocks; valid values: 1 to 2"),
        (2, {"pipeline_parallel_size": 2, "pipeline_split": (3, 3)}, {}, "adds up to 6 but the stack has 4 blocks"),
        (2, {"pipeline_parallel_size": 2, "pipeline_stack": "gpt.block"}, {}, "did you mean 'gpt.blocks'"),
        (2, {"pipeline_parallel_size": 2}, {"batch": 6}, "batch_size=6 (per data rank) is not divisible by"),
        (2, {"pipeline_parallel_size": 2}, {"model": "manual"}, "needs automatic optimization"),
        (2, {"pipeline_parallel_size": 2}, {"model": "twice"}, "was called 2 times in one step"),
        (2, {"pipeline_parallel_size": 2}, {"model": "never"}, "never called the pipelined stack 'blocks'"),
        (2, {"tensor_parallel_size": 2, "sequence_parallel": True}, {"max_sequence_length": 15}, "sequence length 15"),
    ],
)
def test_refused_in_set_up(
    pool: RankPool, world: int, options: dict[str, Any], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(RankError) as error:
        pool.run(fit, world, options, world, mode="trainer", timeout=60, **kwargs)
    assert message in str(error.value)


def test_path_that_is_no_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("nothing")
    with pytest.raises(RankError, match=r"notes.*checkpoint"):
        pool.run(fit, 2, {"tensor_parallel_size": 2}, 2, ckpt=str(tmp_path / "notes"), mode="trainer")
