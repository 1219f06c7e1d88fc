"""What the layout search is compared with: brute force over strategies and trees of conversions, and fixed plans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from random import Random
from typing import Any

import numpy as np

from lightning_megapar.planner import Cluster, Link, Ring
from lightning_megapar.sharding.layouts.graphs import column_row_pattern
from lightning_megapar.sharding.layouts.plans import LayoutPlan, evaluate
from lightning_megapar.sharding.layouts.tensors import (
    Conversion,
    Conversions,
    Graph,
    Operation,
    Strategy,
    TensorLayout,
    Value,
    conversions,
)

INFINITY = float("inf")
FOUR = tuple(layout for layout in TensorLayout if layout != "copied")
MESHES = (
    Ring(2, Link(3e-6, 200e9)),
    Ring(4, Link(1e-5, 12e9)),
    Ring(8, Link(5e-4, 1e8)),
)
"""Two ranks on a fast link, four on a network, eight on a slow one."""


def paths(table: Conversions) -> dict[tuple[TensorLayout, TensorLayout], float]:
    """Cheapest way between any two layouts: Floyd and Warshall."""
    cost = {(a, b): 0.0 if a == b else INFINITY for a in TensorLayout for b in TensorLayout}
    for pair, conversion in table.items():
        if pair[0] != pair[1]:
            cost[pair] = conversion.forward + conversion.backward
    for middle, a, b in itertools.product(TensorLayout, repeat=3):
        cost[a, b] = min(cost[a, b], cost[a, middle] + cost[middle, b])
    return cost


def best_tree(table: Conversions, source: TensorLayout, wanted: Collection[TensorLayout]) -> float:
    """Cheapest set of conversions that makes ``wanted`` from ``source``: every assignment of parents to layouts."""
    others = [layout for layout in TensorLayout if layout != source]
    best = INFINITY
    for parents in itertools.product([None, *TensorLayout], repeat=len(others)):
        parent = {layout: p for layout, p in zip(others, parents) if p is not None}
        if not set(wanted) <= {source, *parent} or any((p, layout) not in table for layout, p in parent.items()):
            continue
        reached = {source}
        for _ in others:
            reached |= {layout for layout, p in parent.items() if p in reached}
        if reached == {source, *parent}:
            best = min(best, sum(table[p, layout].seconds for layout, p in parent.items()))
    return best


def brute_force_chain(graph: Graph) -> float:
    """The best total of every combination of strategies, all of them in one array."""
    ((value, layout),) = graph.sources
    count = len(graph.operations)
    total = np.zeros((1,) * count)
    outputs, table = [layout], value.conversions
    for index, operation in enumerate(graph.operations):
        cost = paths(table)
        between = np.array([[cost[o, s.inputs[0]] + s.seconds for s in operation.strategies] for o in outputs])
        shape = [1] * count
        shape[index] = len(operation.strategies)
        if index:
            shape[index - 1] = len(outputs)
        total = total + between.reshape(shape)
        outputs, table = [s.output for s in operation.strategies], operation.output.conversions
    cost = paths(table)
    for _, end in graph.results:
        total = total + np.array([cost[o, end] for o in outputs]).reshape((1,) * (count - 1) + (-1,))
    return float(total.min())


def brute_force(graph: Graph, limit: float = INFINITY) -> float:
    """The best total of every combination of strategies, with the best tree of conversions for every value."""
    trees: dict[tuple, float] = {}
    best = INFINITY
    names = [o.name for o in graph.operations]
    borrowed = {other for _, other in graph.tied}
    for chosen in itertools.product(*(o.strategies for o in graph.operations)):
        stored = dict(zip(names, (s.parameter for s in chosen)))
        if any(stored[a] != stored[b] for a, b in graph.tied):
            continue
        if sum(s.parameter_bytes for n, s in zip(names, chosen) if n not in borrowed) > limit:
            continue
        wanted: dict[str, set[TensorLayout]] = {name: set() for name in graph.values}
        written = {v.name: layout for v, layout in graph.sources}
        for operation, s in zip(graph.operations, chosen):
            written[operation.output.name] = s.output
            for name, layout in zip(operation.inputs, s.inputs):
                wanted[name].add(layout)
        for name, layout in graph.results:
            wanted[name].add(layout)
        seconds = sum(s.seconds for s in chosen)
        for name, value in graph.values.items():
            key = (id(value.conversions), written[name], frozenset(wanted[name]))
            if key not in trees:
                trees[key] = best_tree(value.conversions, written[name], wanted[name])
            seconds += trees[key]
        best = min(best, seconds)
    return best


def random_table(random: Random, layouts: Collection[TensorLayout], possible: float = 0.7) -> Conversions:
    """Any costs, some conversions missing."""
    return {
        (a, b): Conversion(random.choice([0.0, random.uniform(0, 9)]), random.uniform(0, 9))
        for a, b in itertools.permutations(layouts, 2)
        if random.random() < possible
    }


def mesh_table(random: Random, ring: Ring) -> Conversions:
    """What a tensor of a random size costs on a mesh; sometimes it cannot be cut."""
    return conversions(10 ** random.uniform(2, 9), ring, sequence=random.random() < 0.9, hidden=random.random() < 0.9)


def random_strategies(random: Random, inputs: int, layouts: Collection[TensorLayout], scale: float, most: int) -> tuple:
    """Up to ``most`` strategies between random layouts: what is not among them is impossible."""
    pairs = list(itertools.product(itertools.product(layouts, repeat=inputs), layouts))
    chosen = random.sample(pairs, k=random.randint(1, min(most, len(pairs))))
    return tuple(
        Strategy(
            f"way {i}",
            reads,
            writes,
            random.uniform(0, scale),
            gradients=random.choice([0.0, scale / 7]),
            parameter=random.choice(["whole", "dim 0"]),
            parameter_bytes=random.choice([0, 10, 40]),
        )
        for i, (reads, writes) in enumerate(chosen)
    )


def random_chain(random: Random, length: int, ring: Ring | None) -> Graph:
    """A chain whose costs come from a mesh, or from nowhere."""

    def table() -> Conversions:
        return random_table(random, FOUR) if ring is None else mesh_table(random, ring)

    scale = 10.0 if ring is None else 10 ** random.uniform(-5, 0)
    source = Value("x0", conversions=table())
    operations = tuple(
        Operation(
            f"op {i}", "any", (f"x{i}",), Value(f"x{i + 1}", conversions=table()),
            random_strategies(random, 1, FOUR, scale, 4),
        )
        for i in range(length)
    )  # fmt: skip
    results = ((f"x{length}", random.choice(FOUR)),) if random.random() < 0.8 else ()
    return Graph(((source, random.choice(FOUR)),), operations, results)


def random_graph(random: Random, length: int) -> Graph:
    """Operations that read one to three earlier values each, so that values have several readers."""
    layouts = tuple(TensorLayout)
    ring = random.choice([None, *MESHES])

    def table() -> Conversions:
        return random_table(random, layouts, 0.8) if ring is None else mesh_table(random, ring)

    scale = 10.0 if ring is None else 10 ** random.uniform(-5, 0)
    sources = [(Value(f"s{i}", conversions=table()), random.choice(layouts)) for i in range(random.randint(1, 2))]
    names = [v.name for v, _ in sources]
    operations = []
    for i in range(length):
        reads = tuple(random.choices(names, k=random.randint(1, 3)))
        ways = random_strategies(random, len(reads), random.sample(layouts, k=3), scale, 3)
        operations.append(Operation(f"op {i}", "any", reads, Value(f"x{i}", conversions=table()), ways))
        names.append(f"x{i}")
    results = tuple((random.choice(names), random.choice(layouts)) for _ in range(random.randint(0, 2)))
    tied = ()
    if length > 1 and random.random() < 0.4:
        tied = (tuple(random.sample([o.name for o in operations], k=2)),)
    return Graph(tuple(sources), tuple(operations), results, tied)


# ---- machines and plans to compare with ----


A100 = Cluster(
    devices_per_node=8,
    nodes=4,
    peak_flops={"bf16": 312e12, "fp32": 19.5e12},
    memory_bandwidth=2e12,
    intra_node=Link(1e-5, 229e9),
    inter_node=Link(2e-5, 25e9),
    launch_seconds=5e-6,
    efficiency=0.5,
)
"""Half of an A100's peak, its measured ring bandwidth inside a node, one 200 Gbit/s card per device between nodes."""


def bare(flops: float, bandwidth: float, **changes: Any) -> Cluster:
    """A cluster of products and bytes alone: no latency, no launches, no memory traffic."""
    link = Link(0.0, bandwidth)
    return Cluster(16, 1, flops, math.inf, link, link, **changes)


def pattern(graph: Graph) -> LayoutPlan:
    return evaluate(graph, column_row_pattern(graph))


def replicated(graph: Graph) -> LayoutPlan:
    return evaluate(graph, {o.name: "replicate" for o in graph.operations})
