"""An out-of-memory error in a step: what is said, once, on which rank, and that it stays what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megapar import MegaParStrategy
from lightning_megapar.callbacks import MemoryReport
from lightning_megapar.memory import ArenaFullError
from lightning_megapar.models.gpt import GPT, GPTConfig
from lightning_megapar.strategy.out_of_memory import estimated_bytes, is_out_of_memory

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
IMPOSSIBLE = 1 << 60


class Model(LightningModule):
    """Runs out of memory in some place of its third step."""

    def __init__(self, where: str = "step", rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = GPTConfig.gpt2(vocab_size=32, num_layers=2, num_heads=2, hidden_size=32, max_sequence_length=32)
        self.model = GPT(config)
        self.where, self.failing = where, rank
        self.refused: list[str] = []

    def fails(self, where: str) -> bool:
        return where == self.where and self.global_rank == self.failing and self.global_step == 2

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[:, :-1], batch[:, 1:])
        if self.fails("cuda"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        if self.fails("step"):
            torch.empty(IMPOSSIBLE, dtype=torch.uint8)
        if self.fails("caught"):
            try:
                torch.empty(IMPOSSIBLE, dtype=torch.uint8)
            except RuntimeError as error:
                self.refused.append(str(error))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.where == "validation":
            raise MemoryError("no more")
        self.log("val_loss", self.model(batch[:, :-1], batch[:, 1:]))

    def on_before_backward(self, loss: Tensor) -> None:
        if self.fails("backward"):
            loss.register_hook(lambda _: torch.empty(IMPOSSIBLE, dtype=torch.uint8))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def fit(root: str, module: Model, callbacks: list[Any] | None = None, devices: int = 1, **layout: Any) -> Any:
    rows = DataLoader(torch.randint(0, 32, (64, 17)), batch_size=8)  # type: ignore[arg-type]
    trainer = Trainer(
        strategy=MegaParStrategy(timeout_seconds=20, **layout),
        accelerator="cpu",
        devices=devices,
        max_steps=4,
        num_sanity_val_steps=0,
        val_check_interval=2,
        callbacks=callbacks or [],
        default_root_dir=root,
        **QUIET,
    )
    trainer.fit(module, rows, rows)
    return trainer


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (ArenaFullError(5, 3, 3, 10), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("a shape that does not fit"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) == expected
    outer = RuntimeError("while doing something")
    outer.__cause__ = error
    assert is_out_of_memory(outer) == expected


def notes(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", []) if note.startswith("out of memory")]


@pytest.mark.parametrize(
    ("where", "kind", "text"),
    [
        ("step", RuntimeError, "DefaultCPUAllocator: can't allocate memory"),
        ("cuda", torch.OutOfMemoryError, "Tried to allocate 20.00 GiB"),
        ("backward", RuntimeError, "DefaultCPUAllocator: can't allocate memory"),
        ("validation", MemoryError, "no more"),
    ],
)
def test_the_error_is_raised_as_it_is_with_one_answer(
    tmp_path: Path, where: str, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text) as raised:
        fit(str(tmp_path), Model(where))
    assert type(raised.value) is kind
    (answer,) = notes(raised.value)
    assert answer.startswith("out of memory on rank 0")
    assert ("validation step" if where == "validation" else "training step 2") in answer.splitlines()[0]
    for row in ("parameters", "gradients", "optimizer state", "activations kept"):
        assert row in answer
    assert "as estimated from the batch" in answer
    settings = [line.strip() for line in answer.splitlines() if line.strip()[:2] in ("1.", "2.", "3.")]
    assert len(settings) == 3 and all(" saves " in line and " MiB (" in line for line in settings)


def test_what_has_been_measured_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        fit(str(tmp_path), Model("step"), [MemoryReport(at_step=2)])
    assert "as measured block by block" in notes(raised.value)[0]


def test_an_error_that_the_step_catches_is_its_own_affair(tmp_path: Path) -> None:
    module = Model("caught")
    trainer = fit(str(tmp_path), module)
    assert len(module.refused) == 1 and trainer.strategy.out_of_memory_answer is None


def test_a_run_is_answered_once(tmp_path: Path) -> None:
    """A loop that goes on after the first error gets no second answer."""
    module = Model("none")
    trainer = fit(str(tmp_path), module)
    strategy = trainer.strategy
    strategy.out_of_memory_answer = "told"
    module.where = "validation"
    with pytest.raises(MemoryError) as raised:
        trainer.validate(module, DataLoader(torch.randint(0, 32, (8, 17)), batch_size=8), verbose=False)  # type: ignore[arg-type]
    assert notes(raised.value) == []


def test_estimates_by_widths() -> None:
    block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    # Of a row: the norm's input, 16; of each product its input and output, 80.
    assert estimated_bytes(block, 10) == (10 * 4 * (16 + 80 + 80), 10 * 4 * 16)
    assert estimated_bytes(nn.ReLU(), 10) == (0, 0)


def on_rank(root: str, layout: dict[str, Any]) -> tuple[str, list[str]]:
    try:
        fit(root, Model("step", rank=1), devices=2, **layout)
    except Exception as error:
        return type(error).__name__, notes(error)
    return "", []


@pytest.mark.parametrize("layout", [{"data_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["dp2", "pp2"])
def test_the_rank_that_fails_is_named_and_others_say_nothing(
    pool: RankPool, tmp_path: Path, layout: dict[str, Any]
) -> None:
    (_, silent), (kind, told) = pool.run(on_rank, 2, str(tmp_path), layout, mode="trainer")
    assert silent == []
    assert kind == "RuntimeError" and len(told) == 1 and told[0].startswith("out of memory on rank 1 (")
    assert ("zero_stage=" in told[0]) == ("data_parallel_size" in layout) or "recompute=" in told[0]
