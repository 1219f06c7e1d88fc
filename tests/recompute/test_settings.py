"""The setting ``recompute`` on one rank: what it chooses, what it refuses, beside what else it works."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megapar import MegaParStrategy
from lightning_megapar.config import ConfigError
from lightning_megapar.memory import RecomputeConfig
from lightning_megapar.memory.blocks import forward_of
from lightning_megapar.models.gpt import GPT, GPTConfig

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
WORDS = 32


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = GPTConfig.llama(
            vocab_size=WORDS, num_layers=3, num_heads=2, hidden_size=32, max_sequence_length=64, dropout=0.1
        )
        self.model = GPT(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[:, :-1], batch[:, 1:])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(batch[:, :-1], batch[:, 1:]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss: Tensor = self.model(batch[:, :-1], batch[:, 1:])
        (slope,) = torch.autograd.grad(loss, [self.model.final_norm.weight], create_graph=True)
        self.manual_backward(loss + slope.square().sum())
        optimizer.step()


def batches(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (4, length + 1), generator=generator) for length in lengths]


def fit(
    recompute: Any, make: Callable[[], LightningModule] = Model, lengths: tuple[int, ...] = (16,) * 5, **kwargs: Any
) -> tuple[dict[str, Tensor], MegaParStrategy]:
    options = kwargs.pop("options", {})
    strategy = MegaParStrategy(recompute=recompute, seed=3, **options)
    torch.manual_seed(7)
    module = make()
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **QUIET, **kwargs)
    rows: Any = DataLoader(batches(list(lengths)), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, rows, rows if kwargs.get("val_check_interval") else None)
    return {name: value.clone() for name, value in module.state_dict().items()}, strategy


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("make", [Model, Manual])
def test_weights_are_the_same_whatever_is_recomputed(make: type[Model]) -> None:
    expected, _ = fit("none", make)
    for recompute, option in (("selective", "no_attention"), ("full", "inputs")):
        found, strategy = fit(recompute, make)
        assert same(found, expected), recompute
        assert strategy.recompute_choices == {f"model.blocks.{number}": option for number in range(3)}
    found, strategy = fit({"options": ["products"]}, make)
    assert same(found, expected) and set(strategy.recompute_choices.values()) == {"products"}


def test_a_budget_is_kept_to_by_the_blocks_that_pay_most() -> None:
    expected, none = fit("none")
    assert none.recompute_choices == {}
    found, strategy = fit(RecomputeConfig(budget_bytes=400_000, options=("all", "inputs")))
    assert same(found, expected)
    assert strategy.recompute_choices == {
        "model.blocks.0": "inputs",
        "model.blocks.1": "inputs",
        "model.blocks.2": "all",
    }
    chosen = strategy.prepared.recomputation.chosen  # type: ignore[union-attr]
    assert chosen is not None and chosen.plan.peak_bytes <= chosen.budget_bytes == 400_000


def test_without_a_budget_it_is_what_the_device_has_left() -> None:
    expected, _ = fit("none")
    found, strategy = fit("auto")
    assert same(found, expected)
    chosen = strategy.prepared.recomputation.chosen  # type: ignore[union-attr]
    assert chosen is not None and chosen.budget_bytes > 2**20  # a machine with some memory left
    # It was planned some steps later, for one call of each block in a microbatch all the same.
    _, early = fit({"budget_bytes": 10**9})
    sooner = early.prepared.recomputation.chosen  # type: ignore[union-attr]
    assert sooner is not None and chosen.plan.peak_bytes == sooner.plan.peak_bytes
    assert set(strategy.recompute_choices.values()) == {"all"}


def test_larger_inputs_are_planned_for_anew() -> None:
    lengths = (16, 16, 16, 60, 60, 60, 60)
    expected, _ = fit("none", lengths=lengths)
    budget = 1_300_000
    found, strategy = fit({"budget_bytes": budget, "options": ["all", "inputs"]}, lengths=lengths[:3])
    assert set(strategy.recompute_choices.values()) == {"all"}
    found, strategy = fit({"budget_bytes": budget, "options": ["all", "inputs"]}, lengths=lengths)
    assert same(found, expected)
    assert "inputs" in strategy.recompute_choices.values()


@pytest.mark.parametrize("options", [{"num_microbatches": 2}, {}])
def test_beside_accumulation_validation_clipping_and_mixed_precision(options: dict[str, Any]) -> None:
    kwargs = {
        "accumulate_grad_batches": 2,
        "val_check_interval": 2,
        "gradient_clip_val": 0.1,
        "precision": "bf16-mixed",
        "options": options,
    }
    expected, _ = fit("none", **kwargs)
    for recompute in ("selective", "full", {"budget_bytes": 300_000}):
        assert same(fit(recompute, **kwargs)[0], expected), recompute


def test_blocks_that_are_compiled() -> None:
    def compiled() -> Model:
        module = Model()
        for block in module.model.blocks:
            block.compile(backend="aot_eager")
        return module

    expected, _ = fit("none", compiled)
    assert same(fit("full", compiled)[0], expected)
    found, strategy = fit({"budget_bytes": 600_000}, compiled)
    assert same(found, expected) and set(strategy.recompute_choices.values()) <= {"all", "inputs"}
    with pytest.raises(ConfigError, match=r"recompute='selective': block 'model\.blocks\.0' is compiled"):
        fit("selective", compiled)


def test_a_second_trainer_may_recompute_something_else() -> None:
    module = Model()
    seen = []
    for recompute in ("full", "none", "selective"):
        strategy = MegaParStrategy(recompute=recompute)
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **QUIET)
        trainer.fit(module, DataLoader(batches([8]), batch_size=None))  # type: ignore[arg-type]
        stands = [forward_of(block) for block in module.model.blocks]
        seen.append({None if one is None else one.option for one in stands})
    assert seen == [{"inputs"}, {None}, {"no_attention"}]


class TwoStacks(LightningModule):
    """Two stacks, of which the smaller one is large as well, and a third that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.decoder = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.small = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch[:, :8].float()
        for block in (*self.encoder, *self.decoder):
            x = torch.tanh(block(x))
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_every_large_stack_is_meant_unless_some_are_named() -> None:
    _, strategy = fit("full", TwoStacks)
    assert {name.partition(".")[0] for name in strategy.recompute_choices} == {"encoder", "decoder"}
    _, strategy = fit({"mode": "full", "blocks": ["decoder"]}, TwoStacks)
    assert list(strategy.recompute_choices) == ["decoder.0", "decoder.1"]
    _, strategy = fit("full", TwoStacks, options={"pipeline_blocks": "encoder"})
    assert {name.partition(".")[0] for name in strategy.recompute_choices} == {"encoder"}


class Flat(TwoStacks):
    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.encoder, self.decoder = [nn.Linear(8, 8)], []  # type: ignore[assignment]
        self.only = self.encoder[0]


@pytest.mark.parametrize(
    ("recompute", "make", "said"),
    [
        ("ful", Model, "recompute='ful' is not one of none, selective, full, auto.*did you mean 'full'"),
        ({"mode": "full", "budget_bytes": 5}, Model, "budget_bytes=5 is for mode='auto'"),
        ({"budget": 5}, Model, "unknown argument 'budget'; did you mean 'budget_bytes'"),
        ({"budget_bytes": 0}, Model, "budget_bytes=0: expected a whole number of bytes above 0"),
        ({"budget_bytes": 1.5}, Model, "budget_bytes=1.5"),
        ({"budget_bytes": float("inf")}, Model, "budget_bytes=inf"),
        ({"budget_bytes": "4GB"}, Model, "budget_bytes='4GB'"),
        ({"reserve": 1.0}, Model, "reserve=1.0"),
        ({"options": ["inputs", "atention"]}, Model, "options has 'atention'.*did you mean 'no_attention'"),
        ({"options": []}, Model, "options is empty"),
        ({"mode": "full", "blocks": ["model.block"]}, Model, r"blocks='model\.block' is not a stack.*'model\.blocks'"),
        (3, Model, "recompute=3: expected one of none, selective, full, auto"),
        ("full", Flat, "needs a stack of blocks .* and Flat has none; valid value: 'none'"),
        (
            {"budget_bytes": 10},
            Model,
            r"budget_bytes=10 is too small; the smallest possible budget is \d+ \(for the 3 blocks",
        ),
    ],
)
def test_settings_that_cannot_be(recompute: Any, make: type[LightningModule], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fit(recompute, make)


def test_the_smallest_budget_that_a_refusal_names_is_one() -> None:
    with pytest.raises(ConfigError) as refused:
        fit({"budget_bytes": 10})
    least = int(str(refused.value).partition("smallest possible budget is ")[2].split()[0])
    found, strategy = fit({"budget_bytes": least})
    assert same(found, fit("none")[0])
    assert strategy.prepared.recomputation.chosen.plan.peak_bytes == least  # type: ignore[union-attr]


def test_a_model_that_recomputes_itself() -> None:
    transformers = pytest.importorskip("transformers")

    class Llama(Model):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.LlamaConfig(
                vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
            )
            self.model = transformers.LlamaForCausalLM(config)
            self.model.gradient_checkpointing_enable()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.model(batch, labels=batch).loss
            return loss

    with pytest.raises(ConfigError, match=r"block 'model\.model\.layers\.0' recomputes itself already"):
        fit("full", Llama)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit("none", Llama)


def test_moves_of_blocks_and_plans_of_them_do_not_go_together() -> None:
    strategy = MegaParStrategy(recompute="auto", rebalance=True, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match=r"recompute=.auto. plans for the blocks that a rank holds.*rebalance=null"):
        Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=1, **QUIET)


@pytest.mark.parametrize(
    ("compress", "said"),
    [
        ("int9", "'int9'.*int8"),
        ({"codec": "int8", "kind": ["Linear"]}, "unknown argument 'kind'; did you mean 'kinds'"),
        ({"codec": "int8", "kinds": ["Linar"]}, "no layer is a 'Linar'; did you mean"),
        (8, "compress_activations=8: expected null"),
    ],
)
def test_compression_that_cannot_be(compress: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fit("none", options={"compress_activations": compress})


def test_an_arena_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="arena=1: expected true or false"):
        MegaParStrategy(arena=1)  # type: ignore[arg-type]
    expected, _ = fit("none")
    found, strategy = fit("full", options={"arena": True})
    assert same(found, expected)
    stats = strategy.prepared.arena.stats()  # type: ignore[union-attr]
    assert stats.planned_bytes > 0 and stats.capacity >= stats.peak_bytes
    # The first step has no gradients of its own, so that the second shows what is needed.
    _, longer = fit("full", lengths=(16,) * 9, options={"arena": True})
    later = longer.prepared.arena.stats()  # type: ignore[union-attr]
    assert (later.capacity, later.overflow_bytes) == (stats.capacity, stats.overflow_bytes)


def test_an_arena_serves_steps_of_other_lengths() -> None:
    lengths = (16, 16, 60, 60, 30, 60)
    expected, _ = fit("none", lengths=lengths)
    found, strategy = fit("full", lengths=lengths, options={"arena": True})
    assert same(found, expected)
    assert strategy.prepared.arena.stats().overflow_bytes > 0  # type: ignore[union-attr]
