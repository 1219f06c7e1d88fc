"""The cheapest layouts of a graph of operations: minimise compute plus changes of layout, in seconds. Exact.

A chain is solved by dynamic programming over the strategies of each operation, O(n k^2). Any other graph is a mixed
integer linear programme (HiGHS by way of ``scipy.optimize.milp``): one binary per operation and strategy; per value one
variable for each pair (layout written, set of layouts held), so that a conversion that serves several readers is paid
once. Alpa (arXiv 2201.12023, section 4) and AutoParallel pose the problem the same way, with a cost per edge instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from lightning_megapar.config import ConfigError
from lightning_megapar.sharding.layouts.plans import Deliveries, LayoutPlan, assemble, deliveries_of, evaluate
from lightning_megapar.sharding.layouts.tensors import INFINITY, Graph, Strategy, TensorLayout

Method = Literal["auto", "chain", "milp"]
TIE = 1e-9
"""Relative difference below which two plans cost the same."""


def search(
    graph: Graph,
    *,
    method: Method = "auto",
    alternatives: bool = False,
    prefer: Mapping[str, str] | None = None,
    parameter_bytes: float | None = None,
) -> LayoutPlan:
    """The cheapest plan.

    Args:
        graph: the operations, with the seconds of each strategy and conversion.
        method: ``"chain"`` (dynamic programme), ``"milp"``, or whichever fits the graph.
        alternatives: also say what every other strategy of every operation would lead to. On a chain that is free;
            otherwise one more programme is solved for each.
        prefer: operation name -> strategy name: taken when nothing is cheaper, such as
            :func:`lightning_megapar.sharding.layouts.graphs.column_row_pattern`.
        parameter_bytes: what the weights may take on one rank, kept to six digits; unlimited by default. A limit makes
            a chain a programme as well.

    Raises:
        ConfigError: when no plan exists, ``method="chain"`` and the graph is none, or ``prefer`` is not a plan.
    """
    if method not in ("auto", "chain", "milp"):
        raise ConfigError(f"method={method!r} is not one of auto, chain, milp")
    deliveries = deliveries_of(graph)
    if method == "chain" and (not graph.is_chain or parameter_bytes is not None):
        what = "parameter_bytes is limited" if graph.is_chain else "the graph is not a chain"
        raise ConfigError(f"method='chain': {what}; nearest valid: 'milp'")
    if method == "chain" or (method == "auto" and graph.is_chain and parameter_bytes is None):
        plan = _search_chain(graph, deliveries, alternatives)
    else:
        plan = _search_milp(graph, deliveries, alternatives, parameter_bytes)
    if prefer is None:
        return plan
    preferred = evaluate(graph, prefer)
    too_large = parameter_bytes is not None and preferred.parameter_bytes > parameter_bytes
    if too_large or preferred.seconds > plan.seconds * (1 + TIE):
        return plan
    choices = tuple(replace(p, alternatives=c.alternatives) for p, c in zip(preferred.choices, plan.choices))
    return replace(preferred, choices=choices, method=plan.method)


# ---- chains ----


def _search_chain(graph: Graph, deliveries: Mapping[str, Deliveries], alternatives: bool) -> LayoutPlan:
    (_, layout), *_ = graph.sources
    # before[i][k]: cheapest start of the chain up to and with strategy k of operation i.
    before: list[list[float]] = []
    came_from: list[list[int]] = []
    costs, outputs = [0.0], [layout]
    for operation in graph.operations:
        reach = deliveries[operation.inputs[0]]
        row, back = [], []
        for s in operation.strategies:
            options = [c + reach.seconds(out, [s.inputs[0]]) for c, out in zip(costs, outputs)]
            best = min(range(len(options)), key=options.__getitem__)
            row.append(options[best] + s.seconds)
            back.append(best)
        before.append(row)
        came_from.append(back)
        costs, outputs = row, [s.output for s in operation.strategies]

    # after[k]: cheapest rest of the chain behind strategy k of the operation at hand.
    last = graph.operations[-1].output.name
    ends = [layout for _, layout in graph.results]
    after = [deliveries[last].seconds(out, ends) for out in outputs]
    totals = [c + a for c, a in zip(costs, after)]
    best = min(range(len(totals)), key=totals.__getitem__)
    if totals[best] == INFINITY:
        raise ConfigError(_no_plan(graph))
    chosen = []
    place = best
    for operation, back in zip(reversed(graph.operations), reversed(came_from)):
        chosen.append(operation.strategies[place])
        place = back[place]

    others: dict[str, dict[str, float]] = {}
    if alternatives:
        for index in range(len(graph.operations) - 1, -1, -1):
            operation = graph.operations[index]
            others[operation.name] = {s.name: b + a for s, b, a in zip(operation.strategies, before[index], after)}
            if index:
                reach = deliveries[operation.inputs[0]]
                after = [
                    min(
                        reach.seconds(p.output, [s.inputs[0]]) + s.seconds + a
                        for s, a in zip(operation.strategies, after)
                    )
                    for p in graph.operations[index - 1].strategies
                ]
    return assemble(graph, chosen[::-1], "chain", deliveries, others)


def _no_plan(graph: Graph, limit: float | None = None) -> str:
    names = ", ".join(o.name for o in graph.operations)
    if limit is None:
        return f"no choice of strategies joins the operations {names}: some value can never be converted as it must be"
    least = sum(min(s.parameter_bytes for s in o.strategies) for o, own in zip(graph.operations, graph.owners) if own)
    return (
        f"no choice of strategies for the operations {names} keeps parameter_bytes={limit:g}; "
        f"the weights take {least:g} bytes or more on each rank"
    )


# ---- any graph ----


class _Programme:
    """The mixed integer linear programme of a graph: built once, solved as often as an alternative is asked for."""

    def __init__(self, graph: Graph, deliveries: Mapping[str, Deliveries], limit: float | None) -> None:
        import numpy as np
        from scipy.sparse import csr_array

        self.graph = graph
        consumers = graph.consumers()
        cost: list[float] = []
        entries: list[tuple[int, int, float]] = []
        low: list[float] = []
        high: list[float] = []

        def row(terms: list[tuple[int, float]], lower: float, upper: float) -> None:
            entries.extend((len(low), column, factor) for column, factor in terms)
            low.append(lower)
            high.append(upper)

        self.column: dict[tuple[int, str], int] = {}
        for index, operation in enumerate(graph.operations):
            for s in operation.strategies:
                self.column[index, s.name] = len(cost)
                cost.append(s.seconds)
            row([(self.column[index, s.name], 1.0) for s in operation.strategies], 1.0, 1.0)
        self.binaries = len(cost)

        writers = {o.output.name: i for i, o in enumerate(graph.operations)}
        given = {v.name: layout for v, layout in graph.sources}
        for name in graph.values:
            readers = consumers[name]
            ends = {layout for n, layout in graph.results if n == name}
            reach = deliveries[name]
            outputs = {given[name]} if name in given else {s.output for s in graph.operations[writers[name]].strategies}
            # Columns (layout written, layouts held); no more layouts than readers can want.
            held: list[tuple[TensorLayout, set[TensorLayout], int]] = []
            for out in sorted(outputs):
                for size in range(len(ends), len(readers) + len(ends) + 1):
                    for subset in itertools.combinations(reach.wanted, size):
                        seconds = reach.seconds(out, subset)
                        if seconds < INFINITY and ends <= set(subset):
                            held.append((out, set(subset), len(cost)))
                            cost.append(seconds)
            for out in sorted(outputs):
                made = [(c, 1.0) for o, _, c in held if o == out]
                if name in given:
                    row(made, 1.0, 1.0)
                else:
                    index = writers[name]
                    ways = [
                        (self.column[index, s.name], -1.0)
                        for s in graph.operations[index].strategies
                        if s.output == out
                    ]
                    row(made + ways, 0.0, 0.0)
            for index, place in readers:
                for layout in reach.wanted:
                    asking = [
                        (self.column[index, s.name], -1.0)
                        for s in graph.operations[index].strategies
                        if s.inputs[place] == layout
                    ]
                    if asking:
                        row([(c, 1.0) for _, has, c in held if layout in has] + asking, 0.0, INFINITY)

        where = {o.name: i for i, o in enumerate(graph.operations)}
        for one, other in ((where[a], where[b]) for a, b in graph.tied):
            first, second = graph.operations[one].strategies, graph.operations[other].strategies
            for stored in sorted({s.parameter for s in (*first, *second)}):
                terms = [(self.column[one, s.name], 1.0) for s in first if s.parameter == stored]
                terms += [(self.column[other, s.name], -1.0) for s in second if s.parameter == stored]
                row(terms, 0.0, 0.0)

        if limit is not None:
            # In units of the limit, for the same tolerances as the costs below.
            terms = [
                (self.column[index, s.name], s.parameter_bytes / limit)
                for index, (operation, own) in enumerate(zip(graph.operations, graph.owners))
                for s in operation.strategies
                if own and s.parameter_bytes
            ]
            if terms:
                row(terms, 0.0, 1.0)

        # HiGHS compares with absolute tolerances near 1e-6: microseconds must not drown in them.
        self.scale = 1e4 / (sum(max(s.seconds for s in o.strategies) for o in graph.operations) or max(cost) or 1.0)
        self.cost = np.array(cost) * self.scale
        self.low, self.high = np.array(low), np.array(high)
        rows, columns, factors = zip(*entries)
        self.matrix = csr_array((factors, (rows, columns)), shape=(len(low), len(cost)))

    def solve(self, forced: int | None = None) -> list[Strategy] | None:
        """The chosen strategies, with column ``forced`` among them; ``None`` when impossible."""
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp

        lower = np.zeros(len(self.cost))
        if forced is not None:
            lower[forced] = 1.0
        # The columns of what is held come out integral by themselves once the strategies are.
        integrality = np.zeros(len(self.cost))
        integrality[: self.binaries] = 1
        result = milp(
            self.cost,
            integrality=integrality,
            bounds=Bounds(lower, np.ones(len(self.cost))),
            constraints=LinearConstraint(self.matrix, self.low, self.high),
            options={"mip_rel_gap": 0.0},
        )
        if result.x is None:
            if result.status == 2:
                return None
            raise RuntimeError(f"scipy.optimize.milp stopped without a plan: {result.message}")
        return [
            max(operation.strategies, key=lambda s, i=index: result.x[self.column[i, s.name]])  # type: ignore[misc]
            for index, operation in enumerate(self.graph.operations)
        ]


def _search_milp(
    graph: Graph, deliveries: Mapping[str, Deliveries], alternatives: bool, limit: float | None
) -> LayoutPlan:
    if limit is not None and limit <= 0:
        raise ConfigError(f"parameter_bytes={limit!r}: expected a positive number of bytes")
    programme = _Programme(graph, deliveries, limit)
    chosen = programme.solve()
    if chosen is None:
        raise ConfigError(_no_plan(graph, limit))
    plan = assemble(graph, chosen, "milp", deliveries, {})
    if not alternatives:
        return plan
    others: dict[str, dict[str, float]] = {}
    for index, operation in enumerate(graph.operations):
        others[operation.name] = {}
        for s in operation.strategies:
            forced = chosen if s is chosen[index] else programme.solve(programme.column[index, s.name])
            found = INFINITY if forced is None else assemble(graph, forced, "milp", deliveries, {}).seconds
            others[operation.name][s.name] = found
    return assemble(graph, chosen, "milp", deliveries, others)
