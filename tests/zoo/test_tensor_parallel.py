"""Architectures that differ in kind, sharded over tensor ranks in one process: every gradient against the whole model.

The plan is transformers' own (corrected) with the chooser for what it leaves; the chooser alone where there is none.
"""

from __future__ import annotations

import copy

import pytest
from torch import nn
from zoo import architectures as zoo

from lightning_megapar.config import ConfigError
from lightning_megapar.sharding.by_plan import apply_assignments
from lightning_megapar.sharding.choice import PlanChoice, choose_plan
from lightning_megapar.sharding.chooser.choose import Choice, choose
from lightning_megapar.sharding.chooser.trial import TrialRanks, _Meeting, try_assignments
from lightning_megapar.sharding.plan import ShardingPlan, resolve
from lightning_megapar.sharding.table import plan_rows, stage_part
from lightning_megapar.sharding.transformers_plan import PROVEN, PROVEN_WITH, _type_of, transformers_plan

LITTLE_CUT = {"mamba": 0.4, "xlm": 0.5, "rwkv": 0.3, "zamba2": 0.3, "recurrent_gemma": 0.5, "cpmant": 0.8, "jamba": 0.5}
"""Least share of the parameters that is cut; 0.8 for the others. Weights that are read without calling their module, as
state-space cores do, stay whole."""


def chosen(name: str, size: int = 2, planned: bool = True) -> tuple[nn.Module, Choice]:
    try:
        model = zoo.build(zoo.architectures()[name])
    except zoo.CannotRunAlone as error:
        pytest.skip(str(error))
    batches = zoo.tokens(2, 16, 3), zoo.tokens(3, 20, 4)
    runs = [lambda module, ids=ids: zoo.loss_of(module, ids) for ids in batches]
    return model, choose(model, size, runs, planned=transformers_plan(model) if planned else None)


def share_cut(model: nn.Module, plan: ShardingPlan, size: int = 2) -> float:
    twin = copy.deepcopy(model)
    assignments = resolve(plan, twin, strict=False)
    apply_assignments(twin, assignments, TrialRanks(_Meeting(size), 0))
    return 1 - plan_rows(PlanChoice(assignments), [stage_part(twin, assignments)])[-1].share


SLOW = {"zamba2", "rwkv", "gemma3n_text", "jamba", "mamba", "deepseek_v3"}
"""Choosers that take long; ``test_whole_zoo_on_ranks.py`` trains these kinds on ranks."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in zoo.KINDS])
def test_every_gradient_equals_one_process(name: str) -> None:
    model, choice = chosen(name)
    assert choice.verdict.exact(1e-4)
    assert share_cut(model, choice.plan) >= LITTLE_CUT.get(name, 0.8), [f for f in choice.found if f.how == "whole"]
    # Once more from the plan's words, on a batch that neither chose nor proved it.
    again = ShardingPlan.from_mapping(choice.plan.to_mapping())
    verdict = try_assignments(
        model, resolve(again, model, strict=False), 2, lambda module: zoo.loss_of(module, zoo.tokens(1, 12, 9))
    )
    assert verdict.exact(1e-4), verdict


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_bigcode", "mixtral"])
def test_four_ranks(name: str) -> None:
    """More ranks than key/value heads: ranks share them."""
    model, choice = chosen(name, size=4)
    assert choice.verdict.exact(1e-4)
    assert share_cut(model, choice.plan, 4) > 0.6


def test_a_plan_that_is_wrong_is_dropped_and_the_chooser_does_its_work() -> None:
    model = zoo.build(zoo.architectures()["gpt_neox"])
    wrong = ShardingPlan.from_mapping(
        {"attention.query_key_value": "packed_colwise:parts=3", "attention.dense": "rowwise"}
    )
    ids = zoo.tokens()
    choice = choose(model, 2, [lambda module: zoo.loss_of(module, ids)], planned=wrong)
    assert choice.found[0].how == "dropped" and "off by" in choice.found[0].reason
    assert share_cut(model, choice.plan) > 0.9


def test_a_module_that_cannot_run_by_itself_is_refused() -> None:
    def broken(module: nn.Module) -> None:
        raise KeyError("needs a trainer")

    with pytest.raises(ConfigError, match=r"Linear cannot be run by itself.*needs a trainer"):
        choose(nn.Linear(4, 4), 2, [broken])


@pytest.mark.slow
def test_the_plans_that_are_used_without_a_trial_are_exact() -> None:
    import transformers

    if not transformers.__version__.startswith(f"{PROVEN_WITH}."):
        pytest.skip(f"the table is of transformers {PROVEN_WITH}")
    seen = set()
    ids = zoo.tokens()
    for architecture in zoo.architectures().values():
        try:
            model = zoo.build(architecture)
        except zoo.CannotRunAlone:
            continue
        kind = _type_of(model)
        if kind in PROVEN:
            assignments = resolve(transformers_plan(model), model, strict=False)
            verdict = try_assignments(model, assignments, 2, lambda module: zoo.loss_of(module, ids))
            assert verdict.exact(1e-4), (architecture, verdict)
            seen.add(kind)
    assert seen == PROVEN


def test_a_proven_plan_is_used_as_it_is_unless_it_leaves_much() -> None:
    def asked(name: str) -> list[str]:
        model = zoo.build(zoo.architectures()[name])
        calls = []
        no_samples = lambda module: calls.append(name) or "no samples"  # noqa: E731
        whole = lambda module, shorten, planned: copy.deepcopy(module)  # noqa: E731
        choice = choose_plan(
            model,
            "auto",
            2,
            runs=no_samples,
            alone=whole,
            share=lambda value: value,
            is_first=True,
        )
        assert choice.assignments
        return calls

    assert asked("llama") == [] and asked("mixtral") == []
    assert asked("gpt_oss") == ["gpt_oss"]  # its plan leaves the experts


@pytest.mark.slow
def test_the_whole_zoo(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every class that runs alone; what the chooser finds may differ in share, never in numbers."""
    lines, wrong = ["| architecture | share cut | largest difference | stays whole |", "|---|---|---|---|"], []
    for name in zoo.architectures():
        try:
            model, choice = chosen(name)
        except (pytest.skip.Exception, ConfigError) as reason:
            lines.append(f"| {name} | not run | | {str(reason)[:80]} |")
            continue
        if not choice.verdict.exact(1e-4):
            wrong.append(name)
        whole = ", ".join(f.kind.rsplit(".", 1)[-1] for f in choice.found if f.how in ("whole", "dropped"))
        lines.append(f"| {name} | {share_cut(model, choice.plan):.2f} | {choice.verdict.worst:.0e} | {whole} |")
    path = tmp_path_factory.getbasetemp() / "tensor_parallel_zoo.md"
    path.write_text("\n".join(lines))
    print(path)
    assert not wrong
