from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_oracles import (
    INFINITY,
    MESHES,
    best_tree,
    brute_force,
    brute_force_chain,
    mesh_table,
    paths,
    random_chain,
    random_graph,
    random_table,
)

from lightning_megapar.config import ConfigError
from lightning_megapar.planner import Cluster, Link, Ring
from lightning_megapar.sharding.layouts.operations import GraphBuilder
from lightning_megapar.sharding.layouts.plans import Deliveries, LayoutPlan, evaluate
from lightning_megapar.sharding.layouts.search import search
from lightning_megapar.sharding.layouts.tensors import (
    C,
    Graph,
    H,
    Operation,
    P,
    R,
    S,
    Strategy,
    TensorLayout,
    Value,
    conversions,
)

SEEDS = st.integers(0, 2**32)


def found(graph: Graph, method: str, limit: float | None = None) -> float:
    """Seconds of the plan found; infinite where the search says that there is none."""
    try:
        plan = search(graph, method=method, parameter_bytes=limit)  # type: ignore[arg-type]
    except ConfigError as error:
        assert str(error).startswith("no choice of strategies")
        return INFINITY
    assert limit is None or plan.parameter_bytes <= limit
    check_plan(graph, plan)
    return plan.seconds


def check_plan(graph: Graph, plan: LayoutPlan) -> None:
    """The plan can be carried out: every layout that is read was written or made, from one that was there."""
    there: dict[str, set[TensorLayout]] = {v.name: {layout} for v, layout in graph.sources}
    for name, layout in plan.layouts.items():
        there[name] = {layout}
    for step in plan.steps:
        assert step.source in there[step.value] and step.target not in there[step.value]
        assert step.conversion is graph.values[step.value].conversions[step.source, step.target]
        there[step.value].add(step.target)
    for choice in plan.choices:
        for name, layout in zip(choice.operation.inputs, choice.strategy.inputs):
            assert layout in there[name]
    assert all(layout in there[name] for name, layout in graph.results)
    assert evaluate(graph, plan.strategies).seconds == pytest.approx(plan.seconds, rel=1e-12)
    assert sum(plan.parts.values()) == pytest.approx(plan.seconds, rel=1e-12)


# ---- chains: the dynamic programme, brute force and the programme agree ----


@settings(deadline=None, derandomize=True, max_examples=60)
@given(SEEDS, st.integers(1, 8), st.sampled_from([None, *MESHES]))
def test_random_chains_equal_brute_force(seed: int, length: int, ring: Ring | None) -> None:
    graph = random_chain(Random(seed), length, ring)
    assert graph.is_chain
    assert found(graph, "chain") == pytest.approx(brute_force_chain(graph), rel=1e-9)


@pytest.mark.parametrize("ring", MESHES, ids=lambda ring: f"{ring.size} ranks")
@pytest.mark.parametrize("length", range(1, 9))
def test_every_chain_of_linears_and_nonlinearities_equals_brute_force(length: int, ring: Ring) -> None:
    """All 510 chains of up to 8 operations, in training, with widths that alternate."""
    for kinds in itertools.product(("linear", "elementwise"), repeat=length):
        graph = chain_of(kinds, ring)
        assert max(len(o.strategies) for o in graph.operations) == 4
        assert found(graph, "chain") == pytest.approx(brute_force_chain(graph), rel=1e-9), kinds


@pytest.mark.slow
@pytest.mark.parametrize("ring", MESHES, ids=lambda ring: f"{ring.size} ranks")
def test_every_chain_with_norms_equals_brute_force(ring: Ring) -> None:
    """All 9,840 chains of up to 8 of three kinds."""
    for length in range(1, 9):
        for kinds in itertools.product(("linear", "elementwise", "norm"), repeat=length):
            graph = chain_of(kinds, ring)
            assert found(graph, "chain") == pytest.approx(brute_force_chain(graph), rel=1e-9), kinds


def chain_of(kinds: tuple[str, ...], ring: Ring) -> Graph:
    cluster = Cluster(8, 1, 1e12, 1e11, ring.link, ring.link, launch_seconds=1e-6)
    build = GraphBuilder(cluster, ring.size, batch=2, seq=64)
    last = build.source("x", 256)
    for i, kind in enumerate(kinds):
        if kind == "linear":
            last = build.linear(f"{i}", last, 1024 if build.width(last) == 256 else 256)
        elif kind == "norm":
            last = build.norm(f"{i}", last)
        else:
            last = build.elementwise(f"{i}", [last])
    return build.graph([(last, R)])


@settings(deadline=None, derandomize=True, max_examples=60)
@given(SEEDS, st.integers(1, 8), st.sampled_from([None, *MESHES]))
def test_the_programme_equals_the_dynamic_programme_on_chains(seed: int, length: int, ring: Ring | None) -> None:
    graph = random_chain(Random(seed), length, ring)
    assert found(graph, "milp") == pytest.approx(found(graph, "chain"), rel=1e-7)


# ---- any graph ----


@settings(deadline=None, derandomize=True, max_examples=200)
@given(SEEDS, st.integers(1, 6))
def test_random_graphs_equal_brute_force(seed: int, length: int) -> None:
    graph = random_graph(Random(seed), length)
    assert found(graph, "milp") == pytest.approx(brute_force(graph), rel=1e-7)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(SEEDS, st.integers(1, 5), st.integers(5, 120))
def test_random_graphs_under_a_memory_limit_equal_brute_force(seed: int, length: int, limit: int) -> None:
    graph = random_graph(Random(seed), length)
    assert found(graph, "milp", limit) == pytest.approx(brute_force(graph, limit), rel=1e-7)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(SEEDS, st.booleans())
def test_deliveries_equal_every_tree(seed: int, mesh: bool) -> None:
    random = Random(seed)
    table = mesh_table(random, random.choice(MESHES)) if mesh else random_table(random, list(TensorLayout))
    wanted = random.sample(list(TensorLayout), k=random.randint(1, 4))
    cost, deliveries = paths(table), Deliveries(table, wanted)
    for source in TensorLayout:
        assert deliveries.seconds(source, wanted) == pytest.approx(best_tree(table, source, wanted), rel=1e-12)
        assert deliveries.seconds(source, wanted[:1]) == pytest.approx(cost[source, wanted[0]], rel=1e-12)


def test_a_conversion_is_paid_once_however_many_read_it() -> None:
    table = conversions(8e6, Ring(4, Link(0, 1e9)))
    readers = [
        Operation(f"reader {i}", "linear", ("y",), Value(f"z{i}"), (Strategy("column", (C,), H, 0.0),))
        for i in range(3)
    ]
    writer = Operation("writer", "linear", ("x",), Value("y", conversions=table), (Strategy("row", (H,), P, 0.0),))
    plan = search(Graph(((Value("x"), H),), (writer, *readers)))
    assert plan.method == "milp"
    assert [(s.source, s.target) for s in plan.steps] in ([(P, R), (R, C)], [(P, S), (S, C)], [(P, H), (H, C)])
    assert plan.seconds == pytest.approx(2 * Ring(4, Link(0, 1e9)).all_reduce(8e6))


def test_a_converted_value_is_converted_on() -> None:
    """The residual sum reads a slice and the column layer the whole: one reduce-scatter serves both."""
    ring = Ring(4, Link(0, 1e9))
    table = conversions(8e6, ring)
    writer = Operation("writer", "linear", ("x",), Value("y", conversions=table), (Strategy("row", (H,), P, 0.0),))
    graph = Graph(
        ((Value("x"), H),),
        (
            writer,
            Operation("add", "add", ("y",), Value("a"), (Strategy("sequence", (S,), S, 0.0),)),
            Operation("up", "linear", ("y",), Value("u"), (Strategy("column", (C,), H, 0.0),)),
        ),
    )
    plan = search(graph)
    assert [(s.source, s.target) for s in plan.steps] == [(P, S), (S, C)]
    assert plan.forward_seconds == pytest.approx(ring.reduce_scatter(8e6) + ring.all_gather(8e6))
    assert plan.backward_seconds == pytest.approx(ring.all_gather(8e6) + ring.reduce_scatter(8e6))


# ---- alternatives, messages ----


@settings(deadline=None, derandomize=True, max_examples=25)
@given(SEEDS, st.integers(1, 4), st.booleans())
def test_alternatives_are_what_the_rest_makes_of_them(seed: int, length: int, chain: bool) -> None:
    random = Random(seed)
    graph = random_chain(random, length, random.choice(MESHES)) if chain else random_graph(random, length)
    try:
        plan = search(graph, alternatives=True)
    except ConfigError:
        assert brute_force(graph) == INFINITY
        return
    for index, choice in enumerate(plan.choices):
        assert choice.alternatives[choice.strategy.name] == pytest.approx(plan.seconds, rel=1e-7)
        for strategy in choice.operation.strategies:
            only = Operation(
                choice.operation.name, "any", choice.operation.inputs, choice.operation.output, (strategy,)
            )
            operations = (*graph.operations[:index], only, *graph.operations[index + 1 :])
            forced = brute_force(Graph(graph.sources, operations, graph.results, graph.tied))
            assert choice.alternatives[strategy.name] == pytest.approx(forced, rel=1e-7)


def test_the_table_shows_every_operation_and_what_else_there_was() -> None:
    from rich.console import Console

    plan = search(chain_of(("linear", "elementwise", "linear"), MESHES[0]), alternatives=True)
    console = Console(width=200, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as captured:
        console.print(plan.table("An MLP"))
    text = captured.get()
    assert f"An MLP: {plan.seconds * 1e3:.3g} ms by chain" in text
    for choice in plan.choices:
        assert choice.strategy.name in text
    runner_up = sorted((t, n) for n, t in plan.choices[0].alternatives.items())[1]
    assert f"{runner_up[1]} {runner_up[0] * 1e3:.3g} ms" in text


def test_refusals() -> None:
    row = Operation("down", "linear", ("x",), Value("y"), (Strategy("row", (H,), P, 1.0),))
    act = Operation("act", "elementwise", ("y",), Value("z"), (Strategy("replicate", (R,), R, 1.0),))
    graph = Graph(((Value("x"), H),), (row, act))
    with pytest.raises(ConfigError, match="no choice of strategies joins the operations down, act"):
        search(graph)
    with pytest.raises(ConfigError, match="no choice of strategies joins the operations down, act"):
        search(graph, method="milp")
    with pytest.raises(ConfigError, match="value 'y' is written partial and cannot be converted to replicated"):
        evaluate(graph, {"down": "row", "act": "replicate"})
    with pytest.raises(ConfigError, match="operation 'down' has no strategy 'column'; it has: row"):
        evaluate(graph, {"down": "column", "act": "replicate"})
    with pytest.raises(ConfigError, match="strategies: no entry for act"):
        evaluate(graph, {"down": "row"})
    heavy = replace(row, strategies=(replace(row.strategies[0], parameter_bytes=100.0),))
    small: dict = {"parameter_bytes": 99.0}
    with pytest.raises(ConfigError, match="keeps parameter_bytes=99; the weights take 100 bytes or more on each rank"):
        search(Graph(((Value("x"), H),), (heavy,)), **small)
    with pytest.raises(ConfigError, match="method='chain': parameter_bytes is limited; nearest valid: 'milp'"):
        search(Graph(((Value("x"), H),), (heavy,)), method="chain", **small)
    with pytest.raises(ConfigError, match="parameter_bytes=-1: expected a positive number of bytes"):
        search(Graph(((Value("x"), H),), (heavy,)), parameter_bytes=-1)
    with pytest.raises(ConfigError, match="method='lp' is not one of auto, chain, milp"):
        search(graph, method="lp")  # type: ignore[arg-type]
    fan_out = Graph(((Value("x"), H),), (row, Operation("again", "any", ("x",), Value("w"), row.strategies)))
    with pytest.raises(ConfigError, match="the graph is not a chain; nearest valid: 'milp'"):
        search(fan_out, method="chain")
    with pytest.raises(ConfigError, match="operation 'act' reads 'y', which no earlier operation writes"):
        Graph(((Value("x"), H),), (act, row))
    with pytest.raises(ConfigError, match="two values are called 'y'"):
        Graph(((Value("x"), H),), (row, Operation("other", "any", ("x",), Value("y"), row.strategies)))
    with pytest.raises(ConfigError, match="result 'q' is written by no operation"):
        Graph(((Value("x"), H),), (row,), (("q", R),))
    with pytest.raises(ConfigError, match="no operation is called 'up'"):
        Graph(((Value("x"), H),), (row,), tied=(("down", "up"),))
    with pytest.raises(ConfigError, match="reads 1 values but its strategy 'row' names 2 layouts"):
        Operation("down", "linear", ("x",), Value("y"), (Strategy("row", (H, H), P, 1.0),))
    with pytest.raises(ConfigError, match="strategy 'row': takes nan seconds"):
        Operation("down", "linear", ("x",), Value("y"), (Strategy("row", (H,), P, float("nan")),))
