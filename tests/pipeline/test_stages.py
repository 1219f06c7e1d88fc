"""Which stack is cut, where everything beside it goes, and what is refused."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from lightning_megapar.config import ConfigError, ParallelConfig
from lightning_megapar.pipeline.cutting.stages import blocks_of, find_stack, outside_of, plan_stages
from lightning_megapar.pipeline.cutting.state import state_kept
from lightning_megapar.pipeline.cutting.survey import Survey, observe, survey_module, without_numbers
from lightning_megapar.strategy import MegaParStrategy


def linears(count: int, width: int = 4) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(count)]


def holder(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def test_the_largest_stack_is_found() -> None:
    module = holder(small=nn.ModuleList(linears(3)), model=holder(layers=nn.ModuleList(linears(5))))
    assert find_stack(module)[0] == "model.layers"
    assert find_stack(module, "small")[0] == "small"


def test_of_nested_stacks_of_one_size_the_inner_one_is_meant() -> None:
    assert find_stack(holder(net=nn.Sequential(nn.Sequential(*linears(4)), nn.ReLU())))[0] == "net.0"


def test_no_stack() -> None:
    module = holder(only=nn.ModuleList(linears(1)), names=nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    with pytest.raises(
        ConfigError, match=r"Module has none \(containers and their lengths: 'only' \(1\), 'names' \(2\)"
    ):
        find_stack(module)


def test_two_stacks_of_one_size() -> None:
    module = holder(left=holder(layers=nn.ModuleList(linears(4))), right=holder(layers=nn.ModuleList(linears(4))))
    with pytest.raises(ConfigError) as error:
        plan_stages(module, 2)
    message = str(error.value)
    assert "'left.layers' and 'right.layers'" in message and "pipeline_blocks='left.layers'" in message
    assert plan_stages(module, 2, stack="right.layers").stack == "right.layers"
    module.add_module("third", holder(layers=nn.ModuleList(linears(4))))
    with pytest.raises(ConfigError, match=r"3 stacks of blocks .*'right.layers' and 'third.layers'.*='third.layers'"):
        find_stack(module)


def test_wrong_name() -> None:
    module = holder(model=holder(layers=nn.ModuleList(linears(4))))
    with pytest.raises(
        ConfigError, match=r"pipeline_blocks='model.layer' is not a stack .*did you mean 'model.layers'"
    ):
        find_stack(module, "model.layer")


def test_pipeline_stack_is_another_name_of_pipeline_blocks() -> None:
    for options in (
        {"pipeline_blocks": "a.b"},
        {"pipeline_stack": "a.b"},
        {"pipeline_blocks": "a.b", "pipeline_stack": "a.b"},
    ):
        config = ParallelConfig(**options)
        assert config.pipeline_blocks == config.pipeline_stack == "a.b"
        assert MegaParStrategy(**options).config.pipeline_blocks == "a.b"
    with pytest.raises(ConfigError, match="pipeline_blocks='a' and pipeline_stack='b' are two names of one setting"):
        ParallelConfig(pipeline_blocks="a", pipeline_stack="b")


def test_random_layer_drop_is_refused() -> None:
    module: Any = holder(decoder=holder(layers=nn.ModuleList(linears(4))))
    module.decoder.layerdrop = 0.1
    with pytest.raises(ConfigError, match=r"decoder\.layerdrop=0\.1 leaves out blocks .* at random"):
        plan_stages(module, 2)
    module.decoder.layerdrop = 0.0
    assert plan_stages(module, 2).ranges == ((0, 2), (2, 4))


def test_sequentials_are_opened_until_the_stages_balance() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*linears(6)), nn.Linear(4, 4))
    _, names = blocks_of(holder(net=net), 2)
    assert names == ["net.0", *[f"net.1.{i}" for i in range(6)], "net.2"]
    assert plan_stages(holder(net=net), 2).ranges == ((0, 4), (4, 8))
    # A split that the user gives counts the items of the stack itself.
    assert plan_stages(holder(net=net), 2, split=(1, 2)).ranges == ((0, 1), (1, 3))


def test_lists_are_placed_by_their_items() -> None:
    module = holder(first=nn.ModuleList(linears(2)), layers=nn.ModuleList(linears(4)), heads=nn.ModuleList(linears(3)))
    expected = {"first.0": "first", "first.1": "first", "heads.0": "last", "heads.1": "last", "heads.2": "last"}
    assert outside_of(module, "layers") == expected
    plan = plan_stages(module, 2, keep={"heads": "all", "first.1": "last"})
    assert plan.outside == {**expected, "first.1": "last", "heads.0": "all", "heads.1": "all", "heads.2": "all"}


class Model(nn.Module):
    """Registered in the wrong order; a part of a container that nobody calls as a whole; a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 9, bias=False)
        self.layers = nn.ModuleList(linears(4))
        self.box = holder(before=nn.Linear(4, 4), after=nn.Linear(4, 4), unused=nn.Linear(4, 4))
        self.norm = nn.LayerNorm(4)
        self.embed = nn.Embedding(9, 4)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.box.before(self.embed(ids))  # type: ignore[union-attr,operator]
        for layer in self.layers:
            hidden = self.norm(layer(hidden))
        return self.head(self.box.after(hidden))  # type: ignore[union-attr,operator]


def run(module: nn.Module) -> torch.Tensor:
    return module(torch.zeros(2, 3, dtype=torch.int64, device=next(module.parameters()).device))


@pytest.mark.parametrize("numbers", [True, False])
def test_a_survey_places_what_the_step_uses(numbers: bool) -> None:
    module = Model()
    path, blocks = blocks_of(module, 2)
    trial = run if not numbers else lambda m: run(m) if not next(m.parameters()).is_meta else 1 / 0
    survey = survey_module(module, trial, blocks, outside_of(module, path))
    assert survey is not None and survey.complete and survey.calls == (0, 1, 2, 3)
    plan = plan_stages(module, 2, survey=survey)
    assert plan.outside == {
        "head": "last",
        "embed": "first",
        "norm": "all",
        "box.before": "first",
        "box.after": "last",
        "box.unused": "last",
    }


def test_a_step_that_fails_early_says_nothing() -> None:
    module = Model()
    path, blocks = blocks_of(module, 2)
    assert observe(module, lambda: 1 / 0, blocks, outside_of(module, path)) is None


def test_a_copy_without_numbers_shares_what_the_module_shares() -> None:
    module: Any = Model()
    module.list_of_modules = [module.norm]
    copy = without_numbers(module)
    assert all(p.is_meta for p in copy.parameters()) and not any(p.is_meta for p in module.parameters())
    assert copy.head.weight is copy.embed.weight and copy.list_of_modules[0] is copy.norm
    assert [n for n, _ in copy.named_parameters()] == [n for n, _ in module.named_parameters()]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ((), "the step never called the pipelined stack 'layers'"),
        ((0, 1, 2, 3, 0, 1, 2, 3), "was called 2 times in one step"),
        ((0, 2, 1, 3), "block 'layers.1' of the pipelined stack 'layers' is called after its successors"),
    ],
)
def test_what_a_survey_refuses(calls: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_stages(Model(), 2, survey=Survey({}, frozenset(), calls))


class Narrow(nn.Module):
    """Eight blocks, a large table of words that costs nothing to look up, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4000, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(8)])
        self.head = nn.Linear(16, 32)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.words(batch)
        for block in self.blocks:
            hidden = block(hidden)
        return torch.as_tensor(self.head(hidden).sum())


def test_balanced_by_the_operations_of_a_run() -> None:
    """Parameters: the table outweighs everything, and its stage gets one block. Operations: it costs nothing."""
    module = Narrow()
    path, names = blocks_of(module, 2)
    survey = survey_module(
        module, lambda m: m.training_step(torch.zeros(2, 3, dtype=torch.long)), names, outside_of(module, path)
    )
    assert survey is not None and survey.complete
    rows = 2 * 3
    assert survey.block_flops == (2.0 * rows * 16 * 16,) * 8
    assert (survey.flops_before, survey.flops_after) == (0.0, 2.0 * rows * 16 * 32)
    assert plan_stages(module, 2, survey=survey).ranges == ((0, 1), (1, 8))
    assert plan_stages(module, 2, survey=survey, by="flops").ranges == ((0, 5), (5, 8))


def test_a_run_that_counts_nothing_cannot_balance() -> None:
    module = Narrow()
    survey = Survey({}, frozenset(), tuple(range(8)), complete=False)
    with pytest.raises(ConfigError, match=r"pipeline_balance_by='flops': a trial run of the step did not get to its"):
        plan_stages(module, 2, survey=survey, by="flops")
    with pytest.raises(ConfigError, match=r"pipeline_balance_by='flop': expected .*; did you mean 'flops'"):
        ParallelConfig(pipeline_balance_by="flop")  # type: ignore[arg-type]


def test_a_trial_leaves_arrays_namespaces_and_random_numbers_as_they_were() -> None:
    module: Any = nn.Linear(2, 2)
    module.array, module.seen = numpy.zeros(3), SimpleNamespace(calls=0, sums=[1.0])
    module.dice = random.Random(3)
    array, seen, state = module.array, module.seen, module.dice.getstate()
    with state_kept(module):
        module.array += 1
        module.seen.calls, module.seen.more = 5, True
        module.seen.sums.append(2.0)
        module.dice.random()
    assert module.array is array and array.tolist() == [0.0, 0.0, 0.0]
    assert module.seen is seen and vars(seen) == {"calls": 0, "sums": [1.0]}
    assert module.dice.getstate() == state
