"""What a plan of layouts holds, and what a given one costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_megapar.config import ConfigError
from lightning_megapar.sharding.layouts.tensors import (
    INFINITY,
    Conversion,
    Conversions,
    Graph,
    Operation,
    Strategy,
    TensorLayout,
)

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Step:
    """One conversion that a plan performs."""

    value: str
    source: TensorLayout
    target: TensorLayout
    conversion: Conversion


class Deliveries:
    """The cheapest way to hold a value in several layouts, given the one in which it was written.

    A layout that was made once serves every reader and may itself be converted on (``PARTIAL`` -> ``SEQUENCE_SHARDED``
    -> ``COPIED``): a directed Steiner tree on the five layouts, solved exactly by the dynamic programme of Dreyfus and
    Wagner (Networks 1, 1971) over subsets of the layouts wanted.
    """

    def __init__(self, table: Conversions, wanted: Collection[TensorLayout]) -> None:
        self.table = table
        self.wanted = tuple(layout for layout in TensorLayout if layout in wanted)
        nodes = tuple(TensorLayout)
        cost: dict[tuple[TensorLayout, int], float] = {}
        via: dict[tuple[TensorLayout, int], tuple] = {}
        for subset in range(1 << len(self.wanted)):
            here: dict[TensorLayout, float] = {}
            for node in nodes:
                own = sum(1 << i for i, layout in enumerate(self.wanted) if layout == node and subset >> i & 1)
                here[node] = 0.0 if own == subset else INFINITY
                if own and own != subset:
                    here[node], via[node, subset] = cost[node, subset ^ own], ("split", own, subset ^ own)
                part = (subset - 1) & subset
                while part:
                    rest = subset ^ part
                    if part > rest and cost[node, part] + cost[node, rest] < here[node]:
                        here[node] = cost[node, part] + cost[node, rest]
                        via[node, subset] = ("split", part, rest)
                    part = (part - 1) & subset
            # The first step from a node: relaxed as often as a shortest path has steps.
            for _ in range(len(nodes) - 1):
                for (source, target), conversion in table.items():
                    if conversion.seconds + here[target] < here[source]:
                        here[source] = conversion.seconds + here[target]
                        via[source, subset] = ("step", target)
            for node in nodes:
                cost[node, subset] = here[node]
        self._cost, self._via = cost, via

    def _subset(self, layouts: Collection[TensorLayout]) -> int:
        return sum(1 << self.wanted.index(layout) for layout in set(layouts))

    def seconds(self, source: TensorLayout, layouts: Collection[TensorLayout]) -> float:
        """Of all conversions from ``source`` that serve ``layouts``; infinite when that is impossible."""
        return self._cost[source, self._subset(layouts)]

    def steps(self, source: TensorLayout, layouts: Collection[TensorLayout]) -> list[tuple[TensorLayout, TensorLayout]]:
        """The conversions themselves, in an order in which they can run."""
        found: list[tuple[TensorLayout, TensorLayout]] = []
        made = {source}
        todo = [(source, self._subset(layouts))]
        while todo:
            node, subset = todo.pop()
            kind = self._via.get((node, subset))
            if kind is None:
                continue
            if kind[0] == "split":
                todo += [(node, kind[1]), (node, kind[2])]
            else:
                if kind[1] not in made:
                    made.add(kind[1])
                    found.append((node, kind[1]))
                todo.append((kind[1], subset))
        return found


@dataclass(frozen=True)
class Choice:
    """What a plan does with one operation.

    Args:
        operation: the node.
        strategy: how it runs.
        alternatives: strategy name -> seconds of the whole graph when this operation runs that way and everything else
            is chosen anew (infinite when impossible); empty unless asked for.
    """

    operation: Operation
    strategy: Strategy
    alternatives: Mapping[str, float]


@dataclass(frozen=True)
class LayoutPlan:
    """A strategy for every operation and the conversions between them.

    Args:
        choices: in the order of the graph.
        steps: conversions, each once however many operations read its result.
        method: ``"chain"``, ``"milp"``, or ``"given"`` for :func:`evaluate`.
        parameter_bytes: of all weights on one rank.
    """

    choices: tuple[Choice, ...]
    steps: tuple[Step, ...]
    method: str
    parameter_bytes: float = 0.0

    @property
    def compute_seconds(self) -> float:
        return sum(c.strategy.compute for c in self.choices)

    @property
    def gradient_seconds(self) -> float:
        """Sums of the gradients of parameters that are held whole."""
        return sum(c.strategy.gradients for c in self.choices)

    @property
    def communication_seconds(self) -> float:
        """Collectives inside operations."""
        return sum(c.strategy.communication for c in self.choices)

    @property
    def forward_seconds(self) -> float:
        """Conversions in the forward."""
        return sum(s.conversion.forward for s in self.steps)

    @property
    def backward_seconds(self) -> float:
        """Conversions in the backward."""
        return sum(s.conversion.backward for s in self.steps)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part; they add to :attr:`seconds`."""
        return {
            "compute": self.compute_seconds,
            "conversions forward": self.forward_seconds,
            "conversions backward": self.backward_seconds,
            "parameter gradients": self.gradient_seconds,
            "inside operations": self.communication_seconds,
        }

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def strategies(self) -> dict[str, str]:
        """Operation name -> strategy name."""
        return {c.operation.name: c.strategy.name for c in self.choices}

    @property
    def layouts(self) -> dict[str, TensorLayout]:
        """Value name -> the layout in which it is written."""
        return {c.operation.output.name: c.strategy.output for c in self.choices}

    def table(self, title: str = "Layouts") -> Table:
        """One line per operation, for ``rich.print``."""
        from rich.table import Table

        table = Table(title=f"{title}: {_milliseconds(self.seconds)} by {self.method}")
        for heading in ("operation", "kind", "strategy", "reads", "writes", "compute", "before it", "otherwise"):
            table.add_column(heading)
        before: list[list[Step]] = [[] for _ in range(len(self.choices) + 1)]
        for step in self.steps:
            before[self._first_reader(step)].append(step)
        for choice, steps in zip(self.choices, before):
            others = sorted((t, n) for n, t in choice.alternatives.items() if n != choice.strategy.name)
            table.add_row(
                choice.operation.name,
                choice.operation.kind,
                choice.strategy.name,
                ", ".join(dict.fromkeys(map(str, choice.strategy.inputs))),
                str(choice.strategy.output),
                _milliseconds(choice.strategy.seconds),
                _collectives(steps),
                ", ".join(f"{n} {_milliseconds(t)}" for t, n in others[:2] if t < INFINITY),
            )
        if before[-1]:
            table.add_row("(output)", "", "", "", "", "", _collectives(before[-1]), "")
        table.caption = ", ".join(f"{name} {_milliseconds(part)}" for name, part in self.parts.items() if part)
        return table

    def _first_reader(self, step: Step) -> int:
        """Index of the first operation that a conversion is for; one past the last for what leaves the graph."""
        readers = [i for i, c in enumerate(self.choices) if step.value in c.operation.inputs]
        for index in readers:
            choice = self.choices[index]
            if (step.value, step.target) in zip(choice.operation.inputs, choice.strategy.inputs):
                return index
        return readers[0] if readers else len(self.choices)


def _collectives(steps: list[Step]) -> str:
    return "; ".join(f"{s.conversion.collectives} {_milliseconds(s.conversion.seconds)}" for s in steps)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def evaluate(graph: Graph, strategies: Mapping[str, str]) -> LayoutPlan:
    """What given strategies cost, with the cheapest conversions between them.

    Args:
        graph: the operations.
        strategies: operation name -> strategy name, for every operation.

    Raises:
        ConfigError: on an unknown name, when no conversions join the strategies (the value is named), or when tied
            operations would store their weight differently.
    """
    missing = [o.name for o in graph.operations if o.name not in strategies]
    if missing:
        raise ConfigError(f"strategies: no entry for {', '.join(missing)}")
    chosen = [o.strategy(strategies[o.name]) for o in graph.operations]
    return assemble(graph, chosen, "given", deliveries_of(graph), {})


def deliveries_of(graph: Graph) -> dict[str, Deliveries]:
    """For each value the costs of holding it in what its readers may want. Values with equal tables share the work."""
    wanted: dict[str, set[TensorLayout]] = {name: set() for name in graph.values}
    for operation in graph.operations:
        for place, name in enumerate(operation.inputs):
            wanted[name] |= {s.inputs[place] for s in operation.strategies}
    for name, layout in graph.results:
        wanted[name].add(layout)
    made: dict[tuple[int, frozenset[TensorLayout]], Deliveries] = {}
    result = {}
    for name, value in graph.values.items():
        key = (id(value.conversions), frozenset(wanted[name]))
        if key not in made:
            made[key] = Deliveries(value.conversions, wanted[name])
        result[name] = made[key]
    return result


def assemble(
    graph: Graph,
    chosen: list[Strategy],
    method: str,
    deliveries: Mapping[str, Deliveries],
    alternatives: Mapping[str, Mapping[str, float]],
) -> LayoutPlan:
    """The plan that runs ``chosen``, one strategy per operation, with the cheapest conversions between them."""
    stored = {o.name: s.parameter for o, s in zip(graph.operations, chosen)}
    for one, other in graph.tied:
        if stored[one] != stored[other]:
            raise ConfigError(
                f"operations {one!r} and {other!r} share a weight, but one stores it {stored[one]} and the other "
                f"{stored[other]}"
            )
    written = {v.name: layout for v, layout in graph.sources}
    written |= {o.output.name: s.output for o, s in zip(graph.operations, chosen)}
    wanted: dict[str, set[TensorLayout]] = {name: set() for name in written}
    for operation, strategy in zip(graph.operations, chosen):
        for name, layout in zip(operation.inputs, strategy.inputs):
            wanted[name].add(layout)
    for name, layout in graph.results:
        wanted[name].add(layout)
    steps = []
    for name, value in graph.values.items():
        if deliveries[name].seconds(written[name], wanted[name]) == INFINITY:
            raise ConfigError(
                f"value {name!r} is written {written[name]} and cannot be converted to "
                f"{', '.join(sorted(map(str, wanted[name] - {written[name]})))}"
            )
        for source, target in deliveries[name].steps(written[name], wanted[name]):
            steps.append(Step(name, source, target, value.conversions[source, target]))
    choices = [Choice(o, s, alternatives.get(o.name, {})) for o, s in zip(graph.operations, chosen)]
    weights = sum(s.parameter_bytes for s, own in zip(chosen, graph.owners) if own)
    return LayoutPlan(tuple(choices), tuple(steps), method, weights)
