"""Blocks that are recomputed on ranks: gradients bit for bit those without it, forwards as many as planned."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from pool import RankPool
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megapar import MegaParStrategy
from lightning_megapar.data_parallel.parameters import local_tensor
from lightning_megapar.models.gpt import GPT, GPTConfig

WORDS, STEPS, MICROBATCHES = 32, 4, 4
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Model(LightningModule):
    """A decoder that drops, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = GPTConfig.gpt2(
            vocab_size=WORDS, num_layers=4, num_heads=2, hidden_size=16, max_sequence_length=12, dropout=0.2
        )
        self.model = GPT(config).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[:, :-1], batch[:, 1:])
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Foreign(Model):
    """A decoder of transformers, whose cache of keys and values goes along."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, use_cache=True,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch, labels=batch).loss
        return loss


class Gradients(Callback):
    """Each step's gradients on this rank, and in each step but the first two how often parts of blocks began."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.calls: Counter[tuple[str, str]] = Counter()
        self.counts = False

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        for number, block in enumerate(getattr(pl_module.model, "blocks", ())):
            if hasattr(block, "attention"):  # it lives on this stage
                for name, part in (("core", block.attention.core), ("mlp", block.mlp)):
                    part.forward = self._noting(str(number), name, part.forward)

    def _noting(self, number: str, name: str, forward: Any) -> Any:
        def noted(*args: Any) -> Any:
            self.calls[number, name] += self.counts
            return forward(*args)

        return noted

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.counts = batch_idx >= 2

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        named = pl_module.named_parameters()
        self.steps.append({name: local_tensor(p.grad).clone() for name, p in named if p.grad is not None})


def train(
    recompute: Any,
    layout: dict[str, Any],
    arena: bool = False,
    make: type[Model] = Model,
    compress: Any = None,
    **kwargs: Any,
) -> tuple[Gradients, dict[str, str]]:
    devices = 1
    for name, size in layout.items():
        devices *= size if name.endswith("parallel_size") else 1
    settings = {"recompute": recompute, "arena": arena, "compress_activations": compress}
    strategy = MegaParStrategy(seed=3, timeout_seconds=30, **settings, **layout)
    seen = Gradients()
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_steps=STEPS, callbacks=[seen], **QUIET, **kwargs
    )
    module = make()
    rows = torch.randint(
        0, WORDS, (8 * STEPS * kwargs.get("accumulate_grad_batches", 1), 13), generator=torch.Generator().manual_seed(1)
    )
    trainer.fit(module, DataLoader(rows, batch_size=8 // layout.get("data_parallel_size", 1)))
    return seen, strategy.recompute_choices


def compare(
    layout: dict[str, Any], modes: list[Any], **kwargs: Any
) -> list[tuple[bool, dict[Any, int], dict[str, str]]]:
    """For each mode whether gradients are those of "none", calls of parts, and what blocks keep.

    A mode is what is recomputed, or that and whether there is an arena.
    """
    expected, _ = train("none", layout, **kwargs)
    found = []
    for mode in modes:
        recompute, arena = mode if isinstance(mode, tuple) else (mode, False)
        seen, choices = train(recompute, layout, arena, **kwargs)
        alike = len(seen.steps) == len(expected.steps) == STEPS and all(
            one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)
            for one, other in zip(seen.steps, expected.steps)
        )
        found.append((alike, dict(seen.calls), choices))
    return found


def expected_calls(choices: dict[str, str], microbatches: int) -> dict[Any, int]:
    """How often attention and MLP begin in the steps that count: once more where they are recomputed."""
    calls = {}
    for name, option in choices.items():
        number = name.rpartition(".")[2]
        each = microbatches * (STEPS - 2)
        calls[number, "core"] = each * (1 if option == "all" else 2)
        calls[number, "mlp"] = each * (2 if option == "inputs" else 1)
    return calls


@pytest.mark.parametrize(
    ("schedule", "budget"),
    # Weight gradients that wait take most of a budget.
    [("1f1b", 150_000), ("interleaved_1f1b", 150_000), ("zb_h1", 600_000), ("zbv", 600_000)],
)
def test_gradients_are_the_same_and_forwards_as_many_as_planned(pool: RankPool, schedule: str, budget: int) -> None:
    modes = ["selective", ("full", True), {"budget_bytes": budget}]
    layout = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "num_microbatches": MICROBATCHES,
        "pipeline_schedule": schedule,
    }
    for rank, found in enumerate(pool.run(compare, 4, layout, modes, mode="trainer")):
        for mode, (alike, calls, choices) in zip(modes, found):
            assert alike, (schedule, mode, rank)
            assert len(choices) == 2
            assert calls == expected_calls(choices, MICROBATCHES), (schedule, mode, rank)
        assert set(found[0][2].values()) == {"no_attention"} and set(found[1][2].values()) == {"inputs"}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_beside_sharded_data_ranks_with_accumulation(pool: RankPool, stage: int) -> None:
    layout = {"data_parallel_size": 2, "zero_stage": stage, "num_microbatches": 2}
    modes = ["full", ({"options": ["products"]}, True), {"options": ["offload"]}, {"budget_bytes": 150_000}]
    for rank, found in enumerate(pool.run(compare, 2, layout, modes, accumulate_grad_batches=2, mode="trainer")):
        for mode, (alike, _, choices) in zip(modes, found):
            assert alike and len(choices) == 4, (stage, mode, rank)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "zb_h2", "dualpipe_v"])
def test_other_schedules(pool: RankPool, schedule: str) -> None:
    layout = {"pipeline_parallel_size": 2, "num_microbatches": MICROBATCHES, "pipeline_schedule": schedule}
    modes = [("selective", True), "full", ({"options": ["products"]}, True), {"options": ["offload"]}]
    for rank, found in enumerate(pool.run(compare, 2, layout, modes, mode="trainer")):
        for mode, (alike, _, _) in zip(modes, found):
            assert alike, (schedule, mode, rank)


@pytest.mark.parametrize("layout", [{"pipeline_parallel_size": 2, "num_microbatches": 2}, {"tensor_parallel_size": 2}])
def test_a_decoder_of_transformers(pool: RankPool, layout: dict[str, Any]) -> None:
    modes = ["selective", ("full", True), {"budget_bytes": 400_000}]
    for rank, found in enumerate(pool.run(compare, 2, layout, modes, make=Foreign, mode="trainer")):
        for mode, (alike, _, choices) in zip(modes, found):
            assert alike and choices, (layout, mode, rank)


CODECS = {"int8": 0.9999, "fp8": 0.999, "int4": 0.98}


def compressed(layout: dict[str, Any], recompute: str) -> dict[str, float]:
    """For each codec the cosine of the first step's gradient to the exact one, on this rank."""
    exact, _ = train(recompute, layout)
    found = {}
    for codec in CODECS:
        compress = {"codec": codec, "minimum_elements": 64, "minimum_row": 8}
        seen, _ = train(recompute, layout, compress=compress)
        one, other = (torch.cat([g.flatten() for g in steps[0].values()]) for steps in (seen.steps, exact.steps))
        found[codec] = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
    return found


@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_parallel_size": 2, "num_microbatches": 2, "pipeline_schedule": "zb_h1"},
        {"data_parallel_size": 2, "zero_stage": 2},
    ],
)
def test_lossy_compression(pool: RankPool, layout: dict[str, Any]) -> None:
    for cosines in pool.run(compressed, 2, layout, "none", mode="trainer"):
        for codec, cosine in cosines.items():
            assert CODECS[codec] < cosine < 1 - 1e-12, (codec, cosine)


def test_compression_does_nothing_to_what_is_recomputed(pool: RankPool) -> None:
    layout = {"data_parallel_size": 2}
    for cosines in pool.run(compressed, 2, layout, "full", mode="trainer"):
        assert min(cosines.values()) > 1 - 1e-12


def test_beside_sequence_parallelism(pool: RankPool) -> None:
    layout = {"tensor_parallel_size": 2, "sequence_parallel": True}
    modes = ["selective", ("full", True), {"options": ["products"]}]
    for rank, found in enumerate(pool.run(compare, 2, layout, modes, mode="trainer")):
        for mode, (alike, _, _) in zip(modes, found):
            assert alike, (mode, rank)
