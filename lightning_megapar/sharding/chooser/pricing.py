"""Which of a layer group's layouts is cheapest on a given cluster: compute and collectives in seconds.

Turns what a :class:`~lightning_megapar.sharding.survey.Survey` saw into a graph for
:func:`~lightning_megapar.sharding.layouts.search.search` and the answer back into a plan's words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_megapar.config import ConfigError
from lightning_megapar.planner.cluster import Cluster
from lightning_megapar.sharding.layouts.graphs import LinearEntry, column_row_pattern, linear_graph
from lightning_megapar.sharding.layouts.plans import LayoutPlan, evaluate
from lightning_megapar.sharding.layouts.search import search
from lightning_megapar.sharding.layouts.tensors import Graph, TensorLayout

Shape = tuple[int, ...]


def given_cluster(setting: Any) -> Cluster | None:
    """The strategy's ``cluster``: a description, a mapping of its fields, or the path of a YAML file.

    Raises:
        ConfigError: neither of them, or one with a value outside its range.
    """
    if setting is None or isinstance(setting, Cluster):
        return setting
    if isinstance(setting, Mapping):
        return Cluster.from_dict(setting)
    if isinstance(setting, (str, Path)):
        try:
            return Cluster.from_yaml(setting)
        except OSError as error:
            raise ConfigError(f"cluster={str(setting)!r} cannot be read: {error.strerror}") from None
    raise ConfigError(f"cluster={setting!r}: expected a Cluster, a mapping of its fields, or the path of a YAML file")


@dataclass(frozen=True)
class Price:
    """The cheapest layout of some layers.

    Args:
        styles: layer -> style in a plan's words; a layer that is missing stays whole.
        seconds: of one training step through these layers.
        whole, pattern: the same with nothing cut, and with the fixed rule (column, then row).
    """

    styles: Mapping[str, str]
    seconds: float
    whole: float
    pattern: float

    def describe(self) -> str:
        whole, pattern = self.whole * 1e3, self.pattern * 1e3
        return f"{self.seconds * 1e3:.3g} ms a step; whole {whole:.3g}, column and row {pattern:.3g}"


@dataclass(frozen=True)
class Pricing:
    """What layouts cost.

    Args:
        cluster: devices and links.
        size: tensor ranks.
        dtype: of activations and weights in a product, such as ``"bf16"``.
        scale: tokens of a microbatch over tokens of the batch that was traced.
    """

    cluster: Cluster
    size: int
    dtype: str = "fp32"
    scale: float = 1.0

    def pair(
        self, columns: Mapping[str, tuple[int, int]], row: str, row_width: tuple[int, int], shape: Shape, heads: int
    ) -> Price | None:
        """Column layers that read one tensor, then one layer.

        Args:
            columns: name -> (inputs, outputs).
            row: name of the closing layer; ``row_width`` its (inputs, outputs).
            shape: of the tensor that the columns read, on the traced batch.
            heads: 0 where what lies between is no attention.

        Returns:
            ``None`` when the widths make no graph.
        """
        inner, back = row_width
        entries, parts = [], {}
        for name, (width, out) in columns.items():
            for part, part_width in _parts(name, out, inner):
                entries.append(LinearEntry(part, width, part_width))
                parts[part] = name
        attention = bool(heads) and len(entries) in (1, 3)
        reads = tuple(entry.name for entry in entries)
        entries.append(LinearEntry(row, inner, back, reads, "attention" if attention else "elementwise"))
        kv_heads = heads
        if attention and len(entries) == 4 and entries[1].out_features < inner:
            kv_heads = max(1, heads * entries[1].out_features // inner)
        return self._cheapest(entries, {**parts, row: row}, shape, heads if attention else None, kv_heads)

    def single(self, name: str, width: tuple[int, int], shape: Shape) -> Price | None:
        """A linear layer by itself."""
        return self._cheapest([LinearEntry(name, *width)], {name: name}, shape, None, None)

    def _cheapest(
        self,
        entries: list[LinearEntry],
        layer_of: Mapping[str, str],
        shape: Shape,
        heads: int | None,
        kv_heads: int | None,
    ) -> Price | None:
        seq = shape[-2] if len(shape) > 2 else 1
        rows = max(1, round(math.prod(shape[:-1]) * self.scale / seq))
        try:
            graph = linear_graph(
                entries,
                seq,
                rows,
                self.dtype,
                cluster=self.cluster,
                tensor_size=self.size,
                heads=heads,
                kv_heads=kv_heads,
                sequence_sharding=False,
            )
            fixed = column_row_pattern(graph)
            plan = search(graph, prefer=fixed)
            pattern = evaluate(graph, fixed)
            whole = evaluate(graph, _whole(graph))
        except ConfigError:
            return None
        return Price(_styles(plan, layer_of), plan.seconds, whole.seconds, pattern.seconds)


def _parts(name: str, out: int, inner: int) -> list[tuple[str, int]]:
    """A fused layer as the layers that it stands for."""
    if out <= inner:
        return [(name, out)]
    if out % inner == 0:
        return [(f"{name}[{i}]", inner) for i in range(out // inner)]
    rest = (out - inner) // 2
    return [(f"{name}[0]", inner), (f"{name}[1]", rest), (f"{name}[2]", rest)]


def _whole(graph: Graph) -> dict[str, str]:
    return {
        operation.name: next(
            s.name
            for s in operation.strategies
            if s.output == TensorLayout.REPLICATED and all(i == TensorLayout.REPLICATED for i in s.inputs)
        )
        for operation in graph.operations
    }


def _styles(plan: LayoutPlan, layer_of: Mapping[str, str]) -> dict[str, str]:
    replicated, hidden = TensorLayout.REPLICATED, TensorLayout.HIDDEN_SHARDED
    gathered = {step.value for step in plan.steps if step.source == hidden and step.target != hidden}
    cut = {step.value for step in plan.steps if step.source == replicated and step.target == hidden}
    styles: dict[str, str] = {}
    for choice in plan.choices:
        name = layer_of.get(choice.operation.name)
        if name is None or name in styles:
            continue
        strategy = choice.strategy.name
        if strategy in ("column", "column_shared"):
            styles[name] = "colwise_gather_output" if choice.operation.output.name in gathered else "colwise"
        elif strategy == "row":
            styles[name] = "rowwise_split_input" if choice.operation.inputs[0] in cut else "rowwise"
    return styles
