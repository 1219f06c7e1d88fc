"""Layouts of a tensor over the ranks that share a layer, what it costs to change one, and graphs of operations.

Pure data: nothing here touches torch.distributed. A layout says what a rank holds of a tensor (..., s, h), and with it
what it holds of the tensor's gradient:

===================== ======================= ===========================
layout                value on each rank      gradient on each rank
===================== ======================= ===========================
``REPLICATED``        whole                   whole
``COPIED``            whole                   an addend of it
``SEQUENCE_SHARDED``  its slice of dim -2     its slice
``HIDDEN_SHARDED``    its slice of dim -1     its slice
``PARTIAL``           an addend of it         whole
===================== ======================= ===========================

``COPIED`` is the replicated input of a sharded region (``copy_in`` of :mod:`lightning_megapar.layers.collectives`): its
gradient is summed where it leaves the region, which makes it the mirror image of ``PARTIAL``. A layer that is split by
columns reads it; one split by rows writes ``PARTIAL``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from lightning_megapar.config import ConfigError
from lightning_megapar.planner.cluster import Ring


class TensorLayout(str, Enum):
    """What each rank holds of a tensor (the table above)."""

    REPLICATED = "replicated"
    COPIED = "copied"
    SEQUENCE_SHARDED = "sequence_sharded"
    HIDDEN_SHARDED = "hidden_sharded"
    PARTIAL = "partial"

    def __str__(self) -> str:
        return self.value


R, C, S, H, P = TensorLayout
INFINITY = float("inf")


@dataclass(frozen=True)
class Conversion:
    """From one layout to another: a collective in the forward and its mirror image in the backward, in seconds."""

    forward: float
    backward: float = 0.0
    collectives: str = ""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


Conversions = Mapping[tuple[TensorLayout, TensorLayout], Conversion]
"""The single steps that are possible for a tensor. What is missing is reached in several steps, or not at all."""


def conversions(
    nbytes: float,
    ring: Ring,
    *,
    sequence: bool = True,
    hidden: bool = True,
    gradient: bool = True,
) -> dict[tuple[TensorLayout, TensorLayout], Conversion]:
    """What each change of layout of a tensor of ``nbytes`` (whole) costs over ``ring``.

    Cutting a slice that a rank holds already costs nothing. ``REPLICATED`` -> ``PARTIAL`` is left out: a sum that is
    made partial again never pays in a model.

    Args:
        nbytes: of the whole tensor; its gradient has the same dtype.
        ring: the ranks that share the layer.
        sequence, hidden: whether dim -2 and dim -1 can be cut into equal slices.
        gradient: the tensor has one and the backward runs.
    """
    gather, scatter = ring.all_gather(nbytes), ring.reduce_scatter(nbytes)
    reduce, exchange = ring.all_reduce(nbytes), ring.all_to_all(nbytes / ring.size)
    steps: dict[tuple[TensorLayout, TensorLayout], tuple[str, float, str, float]] = {
        (R, C): ("-", 0.0, "all-reduce", reduce),
        (P, R): ("all-reduce", reduce, "-", 0.0),
    }
    for cut, possible in ((S, sequence), (H, hidden)):
        if possible:
            steps[R, cut] = ("slice", 0.0, "all-gather", gather)
            steps[cut, R] = ("all-gather", gather, "slice", 0.0)
            steps[cut, C] = ("all-gather", gather, "reduce-scatter", scatter)
            steps[P, cut] = ("reduce-scatter", scatter, "all-gather", gather)
    if sequence and hidden:
        for pair in ((S, H), (H, S)):
            steps[pair] = ("all-to-all", exchange, "all-to-all", exchange)
    return {
        pair: Conversion(forward, backward, f"{there} / {back}") if gradient else Conversion(forward, 0.0, there)
        for pair, (there, forward, back, backward) in steps.items()
    }


@dataclass(frozen=True)
class Value:
    """A tensor of the graph.

    Args:
        name: unique in the graph.
        shape: of the whole tensor, any dimensions in front of (s, h).
        nbytes: of the whole tensor.
        conversions: what each single change of its layout costs.
    """

    name: str
    shape: tuple[int, ...] = ()
    nbytes: float = 0.0
    conversions: Conversions = field(default_factory=dict)


@dataclass(frozen=True)
class Strategy:
    """One way to run an operation on the ranks. Seconds are of one rank, forward and backward.

    Args:
        name: unique in the operation, such as ``"column"``.
        inputs: the layout that it reads of each input.
        output: the layout that it writes.
        compute: kernels.
        gradients: sum of the gradients of parameters that every rank holds whole but sees only a part of the data for.
        communication: other collectives inside the operation, such as those of a loss over a split vocabulary.
        parameter: how its weight is stored: ``"whole"``, or which dimension is cut. Tied operations must agree.
        parameter_bytes: of its weight on one rank.
    """

    name: str
    inputs: tuple[TensorLayout, ...]
    output: TensorLayout
    compute: float
    gradients: float = 0.0
    communication: float = 0.0
    parameter: str = "whole"
    parameter_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.gradients + self.communication


@dataclass(frozen=True)
class Operation:
    """A node of the graph: reads values, writes one.

    Args:
        name: unique in the graph; ``output.name`` is what consumers read.
        kind: ``"linear"``, ``"norm"``, ... for tables.
        inputs: names of the values that it reads, in the order of each strategy's ``inputs``.
        output: what it writes.
        strategies: at least one.
        flops, nbytes: of the whole operation on one rank, forward only.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    output: Value
    strategies: tuple[Strategy, ...]
    flops: float = 0.0
    nbytes: float = 0.0

    def __post_init__(self) -> None:
        names = [s.name for s in self.strategies]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"operation {self.name!r}: needs strategies with distinct names, got {names}")
        for s in self.strategies:
            if len(s.inputs) != len(self.inputs):
                raise ConfigError(
                    f"operation {self.name!r} reads {len(self.inputs)} values but its strategy {s.name!r} names "
                    f"{len(s.inputs)} layouts"
                )
            if not 0 <= s.seconds < INFINITY:
                raise ConfigError(f"operation {self.name!r}, strategy {s.name!r}: takes {s.seconds} seconds")

    def strategy(self, name: str) -> Strategy:
        """The strategy called ``name``.

        Raises:
            ConfigError: when there is none; those that exist are named.
        """
        for s in self.strategies:
            if s.name == name:
                return s
        raise ConfigError(
            f"operation {self.name!r} has no strategy {name!r}; it has: {', '.join(s.name for s in self.strategies)}"
        )


@dataclass(frozen=True)
class Graph:
    """Operations in an order in which they can run.

    Args:
        sources: values that come from outside, with the layout in which they come.
        operations: each reads sources and values of earlier operations.
        results: values that leave, with the layout in which they must.
        tied: pairs of operations that share one weight, such as the table of tokens and the head.

    Raises:
        ConfigError: on a name that is used twice, a value that is read before it exists, or an unknown operation.
    """

    sources: tuple[tuple[Value, TensorLayout], ...]
    operations: tuple[Operation, ...]
    results: tuple[tuple[str, TensorLayout], ...] = ()
    tied: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        known: set[str] = set()
        for value in [v for v, _ in self.sources]:
            _add(known, value.name, "value")
        names: set[str] = set()
        for operation in self.operations:
            _add(names, operation.name, "operation")
            for name in operation.inputs:
                if name not in known:
                    raise ConfigError(f"operation {operation.name!r} reads {name!r}, which no earlier operation writes")
            _add(known, operation.output.name, "value")
        for name, _ in self.results:
            if name not in known:
                raise ConfigError(f"result {name!r} is written by no operation; values: {', '.join(sorted(known))}")
        for name in [n for pair in self.tied for n in pair]:
            if name not in names:
                raise ConfigError(f"tied={self.tied!r}: no operation is called {name!r}")

    @property
    def values(self) -> dict[str, Value]:
        return {v.name: v for v, _ in self.sources} | {o.output.name: o.output for o in self.operations}

    @property
    def owners(self) -> list[bool]:
        """For each operation whether its weight is its own: of tied operations only the first counts."""
        borrowed = {other for _, other in self.tied}
        return [o.name not in borrowed for o in self.operations]

    def consumers(self) -> dict[str, list[tuple[int, int]]]:
        """Value name -> (index of the operation that reads it, place among its inputs)."""
        readers: dict[str, list[tuple[int, int]]] = {name: [] for name in self.values}
        for index, operation in enumerate(self.operations):
            for place, name in enumerate(operation.inputs):
                readers[name].append((index, place))
        return readers

    @property
    def is_chain(self) -> bool:
        """Each operation reads the one before it and nothing else; only the last one's value leaves; none are tied."""
        if self.tied:
            return False
        previous = [v.name for v, _ in self.sources]
        for operation in self.operations:
            if len(previous) != 1 or list(operation.inputs) != previous:
                return False
            previous = [operation.output.name]
        return bool(self.operations) and [name for name, _ in self.results] in ([], previous)


def _add(names: set[str], name: str, what: str) -> None:
    if name in names:
        raise ConfigError(f"graph: two {what}s are called {name!r}")
    names.add(name)
