"""Training cases of ``gpu_check.py``: a GPT for a few steps through the Trainer, with its time, memory and losses."""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from budgets import spread
from chains import Chain, ChainShape, counted, wait
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_megapar.memory.meter import metered, quiet_profiler
from lightning_megapar.models.gpt import GPTConfig
from lightning_megapar.models.language_model import LanguageModel, OptimizerConfig
from lightning_megapar.strategy import MegaParStrategy

WARM = 4
"""Steps before those that count: kernels are chosen, a plan is made, the optimizer makes its state."""
PEAK_FLOPS = (
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362e12),
)
"""Products in bfloat16 without sparsity, by a part of the device's name; the first that fits counts."""


@dataclass(frozen=True)
class Size:
    """A GPT-2 and its batches.

    Args:
        layers, width, heads, vocabulary, sequence, batch: of the model and a step.
        steps: that are timed.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    steps: int

    @property
    def config(self) -> GPTConfig:
        return GPTConfig.gpt2(
            vocab_size=self.vocabulary,
            num_layers=self.layers,
            num_heads=self.heads,
            hidden_size=self.width,
            max_sequence_length=self.sequence,
        )

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.sequence

    @property
    def flops(self) -> float:
        """Of the model in a step: 6 for each token and weight that multiplies (blocks and head), and attention.

        A token sees half of the sequence on average: 2 x 2 x width x sequence / 2 operations for scores and values in
        the forward, twice as many in the backward. Recomputation does not count.
        """
        weights = 12 * self.layers * self.width**2 + self.vocabulary * self.width
        return self.tokens * (6.0 * weights + 6.0 * self.layers * self.width * self.sequence)

    def chain(self, layers: int, name: str = "blocks", dropout: float = 0.0) -> ChainShape:
        """Some of the blocks with a batch that goes through them."""
        return ChainShape(name, "gpt2", layers, self.width, self.heads, self.sequence, self.batch, dropout=dropout)


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        name: for the table.
        precision: Lightning's.
        recompute: a mode; ``"auto"`` needs a share.
        share: of ``"auto"``: where its budget lies between the smallest possible one (0) and everything (1).
        fp8: recipe, or ``None``.
        arena: whether the strategy's arena is on; ``None`` says nothing to the strategy.
    """

    name: str
    precision: str = "bf16-mixed"
    recompute: str = "none"
    share: float | None = None
    fp8: str | None = None
    arena: bool | None = None

    @property
    def kind(self) -> tuple[str, str | None]:
        """Cases of one kind compute alike, and their losses should be equal."""
        return self.precision, self.fp8


def strategy_takes_arena() -> bool:
    """Whether the strategy can be told to use an arena."""
    return "arena" in inspect.signature(MegaParStrategy.__init__).parameters


def training_cases() -> list[Case]:
    """In the order of their worth, should time run out."""
    cases = [
        Case("recompute none"),
        Case("recompute none, once more"),
        Case("recompute selective", recompute="selective"),
        Case("recompute full", recompute="full"),
        *(Case(f"recompute auto, budget {s:.0%}", recompute="auto", share=s) for s in (0.15, 0.4, 0.7)),
    ]
    cases += [Case(f"fp8 {recipe}", fp8=recipe) for recipe in ("rowwise", "tensorwise")]
    cases += [Case("fp8 rowwise, recompute full", fp8="rowwise", recompute="full")]
    cases += [Case("bf16-true", "bf16-true"), Case("bf16-true, recompute full", "bf16-true", "full")]
    if strategy_takes_arena():  # last, since on a GPU it lets the segments of the whole process expand
        cases += [Case("arena off", arena=False), Case("arena on", arena=True)]
    return cases


class Probe(Callback):
    """Times the steps that count, and sees what memory they take.

    Args:
        device: where.
        steps: that count.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self.device, self.steps = device, steps
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []
        self.peak_bytes = self.reserved_bytes = self.held_bytes = 0
        self._began = 0.0
        self._metering = contextlib.ExitStack()
        self._meter: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.held_bytes = torch.cuda.memory_allocated(self.device)
        if batch_idx == WARM + self.steps:
            self._metering.enter_context(quiet_profiler())
            self._meter = self._metering.enter_context(metered(self.device))
        wait(self.device)
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        wait(self.device)
        if WARM <= batch_idx < WARM + self.steps:
            self.seconds.append(time.perf_counter() - self._began)
        self.losses.append(outputs["loss"].detach())
        if batch_idx == WARM + self.steps - 1 and self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
            self.reserved_bytes = torch.cuda.max_memory_reserved(self.device)
        if self._meter is not None:
            self._metering.close()
            if self.device.type != "cuda":
                self.peak_bytes = self._meter.usages[0].peak_bytes

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._metering.close()


def budget_of(share: float, size: Size, device: torch.device) -> int:
    """Bytes between the smallest budget that all blocks can have and what they take when they keep everything."""
    chain = Chain(size.chain(1), device, torch.bfloat16)
    costs = chain.costs() * size.layers
    return spread(costs, 1, [share])[0]


def train(case: Case, size: Size, device: torch.device) -> dict[str, Any]:
    """Some steps of a case; its figures."""
    settings: dict[str, Any] = {"recompute": case.recompute}
    budget = None
    if case.share is not None:
        budget = budget_of(case.share, size, device)
        settings["recompute"] = {"mode": "auto", "budget_bytes": budget}
    if case.arena is not None:
        settings["arena"] = case.arena
    strategy = MegaParStrategy(fp8=case.fp8, **settings)
    probe = Probe(device, size.steps)
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        precision=case.precision,  # type: ignore[arg-type]
        max_epochs=1,
        callbacks=[probe],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    generator = torch.Generator().manual_seed(0)
    count = (WARM + size.steps + 1) * size.batch
    rows = torch.randint(0, size.vocabulary, (count, size.sequence + 1), generator=generator)
    data = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]
    loader: Any = DataLoader(data, batch_size=size.batch)  # type: ignore[arg-type]
    module = LanguageModel(size.config, OptimizerConfig(schedule="constant", fused=device.type == "cuda" or None))
    with contextlib.redirect_stdout(io.StringIO()):  # the strategy's notes on each case
        trainer.fit(module, loader)
    seconds = statistics.median(probe.seconds)
    return {
        "step_seconds": seconds,
        "seconds": probe.seconds,
        "tokens_per_second": size.tokens / seconds,
        "flops_per_second": size.flops / seconds,
        "peak_bytes": probe.peak_bytes,
        "reserved_bytes": probe.reserved_bytes,
        "held_bytes": probe.held_bytes,
        "losses": [float(loss) for loss in probe.losses],
        "budget_bytes": budget,
        "note": _note(strategy, budget),
    }


def _note(strategy: MegaParStrategy, budget: int | None) -> str:
    notes = []
    if budget is not None:
        notes.append(f"budget {budget / 2**20:,.1f} MiB: {counted(list(strategy.recompute_choices.values()))}")
    float8 = strategy.prepared.float8
    if float8 is not None and float8.products.emulate:
        notes.append("8-bit products are emulated")
    return "; ".join(notes)


def model_utilisation(flops_per_second: float, device: torch.device) -> float | None:
    """Share of what the device can do in bfloat16; ``None`` where that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops_per_second / peak for part, peak in PEAK_FLOPS if part in name), None)


def parted(losses: Sequence[float], others: Sequence[float]) -> float:
    """Largest relative difference of two runs' losses; 0 where they are equal to the last bit."""
    return max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(losses, others, strict=True))


def release(device: torch.device) -> None:
    """Give back what a case has left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
