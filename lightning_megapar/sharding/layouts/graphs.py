"""Graphs of whole models: a transformer block, an MLP, or anything that was traced into a list of linear layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_megapar.config import ConfigError, nearest_name
from lightning_megapar.planner.cluster import Cluster
from lightning_megapar.sharding.layouts.operations import GraphBuilder
from lightning_megapar.sharding.layouts.tensors import C, Graph, H, Operation, R, TensorLayout

NONLINEARITIES = ("elementwise", "norm", "norm_elementwise", "attention")


@dataclass(frozen=True)
class LinearEntry:
    """A linear layer of a traced model.

    Args:
        name: unique; its output is read by this name.
        in_features, out_features: widths.
        reads: names of the layers that it reads, or ``"input"``. Several are added, unless ``nonlinearity`` takes them.
        nonlinearity: what lies between: ``"elementwise"`` (several inputs: a function of all of them, as in
            ``silu(gate) * up``), ``"norm"``, ``"norm_elementwise"``, ``"attention"`` (reads q, k, v or one fused
            projection), ``None`` for nothing.

    Raises:
        ConfigError: on a width below 1, no ``reads``, or an unknown ``nonlinearity``.
    """

    name: str
    in_features: int
    out_features: int
    reads: tuple[str, ...] = ("input",)
    nonlinearity: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", (self.reads,) if isinstance(self.reads, str) else tuple(self.reads))
        if min(self.in_features, self.out_features) < 1 or not self.reads:
            raise ConfigError(f"linear {self.name!r}: {self}: needs positive widths and something to read")
        if self.nonlinearity is not None and self.nonlinearity not in NONLINEARITIES:
            near = nearest_name(str(self.nonlinearity), NONLINEARITIES)
            hint = f"; did you mean {near!r}?" if near else ""
            valid = ", ".join(NONLINEARITIES)
            raise ConfigError(f"linear {self.name!r}: nonlinearity={self.nonlinearity!r} is not one of {valid}{hint}")


def linear_graph(
    entries: Iterable[LinearEntry | Sequence],
    seq: int,
    batch: int,
    dtype: object = "bf16",
    *,
    cluster: Cluster,
    tensor_size: int,
    heads: int | None = None,
    kv_heads: int | None = None,
    causal: bool = True,
    output: Sequence[str] = (),
    boundary: TensorLayout = R,
    sequence_sharding: bool = True,
    training: bool = True,
    microbatches: int = 1,
) -> Graph:
    """The graph of a list of linear layers in call order; a norm or sum that several of them read exists once.

    Args:
        entries: :class:`LinearEntry`, or tuples of its fields.
        seq, batch, dtype, cluster, tensor_size, sequence_sharding, training, microbatches: as
            :class:`~lightning_megapar.sharding.layouts.operations.GraphBuilder`.
        heads, kv_heads: of ``"attention"``; ``kv_heads`` defaults to ``heads``.
        causal: of ``"attention"``.
        output: what is added to give the output, such as ``("input", "o", "down")``. By default everything that no
            layer reads leaves by itself.
        boundary: layout in which the input comes and the output leaves.

    Raises:
        ConfigError: on widths that do not fit, attention without ``heads``, or a value that is read before it is there.
    """
    layers = [e if isinstance(e, LinearEntry) else LinearEntry(*e) for e in entries]
    widths = {e.in_features for e in layers if e.reads[0] == "input"}
    if not widths:
        raise ConfigError("entries: no layer reads 'input'")
    build = GraphBuilder(
        cluster,
        tensor_size,
        batch,
        seq,
        dtype,
        sequence_sharding=sequence_sharding,
        training=training,
        microbatches=microbatches,
    )
    build.source("input", widths.pop(), boundary)
    kv_heads = heads if kv_heads is None else kv_heads
    shared = {name for e in layers if e.nonlinearity == "attention" and len(e.reads) == 3 for name in e.reads[1:]}

    def once(name: str, make: str, *arguments: object) -> str:
        return name if name in build else getattr(build, make)(name, *arguments)

    def total(names: Sequence[str]) -> str:
        # From the left, so that the residual stream is a prefix that later sums start from.
        result = names[0]
        for position in range(1, len(names)):
            result = once(f"add({', '.join(names[: position + 1])})", "add", (result, names[position]))
        return result

    def prepared(entry: LinearEntry) -> str:
        reads = entry.reads
        if entry.nonlinearity == "attention":
            if heads is None or kv_heads is None:
                raise ConfigError(f"linear {entry.name!r} reads attention, but heads is not given")
            name = f"attention({', '.join(reads)})"
            if name not in build:
                build.attention(name, reads, entry.in_features, heads, kv_heads, causal=causal)
            return name
        if entry.nonlinearity == "elementwise":
            return once(f"act({', '.join(reads)})", "elementwise", reads)
        result = total(reads)
        if entry.nonlinearity is not None:
            result = once(f"norm({', '.join(reads)})", "norm", result)
        if entry.nonlinearity == "norm_elementwise":
            result = once(f"act({result})", "elementwise", (result,))
        return result

    for entry in layers:
        read = prepared(entry)
        if build.width(read) != entry.in_features:
            raise ConfigError(
                f"linear {entry.name!r}: in_features={entry.in_features}, but {read} is {build.width(read)} wide"
            )
        # Ranks share a key/value head only where the queries' heads divide; elsewhere attention is not split by heads.
        units = kv_heads if entry.name in shared and heads and heads % tensor_size == 0 else None
        build.linear(entry.name, read, entry.out_features, units=units)
    if output:
        return build.graph([(total(tuple(output)), boundary)])
    read_by_some = {name for e in layers for name in e.reads}
    return build.graph([(e.name, boundary) for e in layers if e.name not in read_by_some])


def mlp_graph(
    hidden: int,
    ffn: int,
    seq: int,
    batch: int,
    dtype: object = "bf16",
    gated: bool = False,
    *,
    cluster: Cluster,
    tensor_size: int,
    boundary: TensorLayout = R,
    sequence_sharding: bool = True,
    training: bool = True,
    microbatches: int = 1,
) -> Graph:
    """``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))``; arguments as :func:`linear_graph`."""
    ways_in = ("gate", "up") if gated else ("up",)
    entries = [LinearEntry(name, hidden, ffn) for name in ways_in]
    entries.append(LinearEntry("down", ffn, hidden, ways_in, "elementwise"))
    return linear_graph(
        entries,
        seq,
        batch,
        dtype,
        cluster=cluster,
        tensor_size=tensor_size,
        boundary=boundary,
        sequence_sharding=sequence_sharding,
        training=training,
        microbatches=microbatches,
    )


def transformer_block_graph(
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    seq: int,
    batch: int,
    dtype: object = "bf16",
    gated: bool = False,
    *,
    cluster: Cluster,
    tensor_size: int,
    parallel: bool = False,
    causal: bool = True,
    boundary: TensorLayout = R,
    sequence_sharding: bool = True,
    training: bool = True,
    microbatches: int = 1,
) -> Graph:
    """A pre-norm block: attention and MLP with residual sums, (batch, seq, hidden) -> the same.

    Args:
        hidden, heads, kv_heads, ffn: widths and head counts.
        gated: the MLP is ``down(act(gate) * up)``.
        parallel: attention and MLP read one norm (GPT-J, GPT-NeoX) instead of following each other.
        boundary: layout between blocks.
        seq, batch, dtype, cluster, tensor_size, causal, sequence_sharding, training, microbatches: as
            :func:`linear_graph`.

    Raises:
        ConfigError: when the head counts do not divide.
    """
    if hidden % heads or heads % kv_heads:
        raise ConfigError(f"hidden={hidden}, heads={heads}, kv_heads={kv_heads}: each must divide the one before")
    kv_width = hidden // heads * kv_heads
    stream = ("input",) if parallel else ("input", "o")
    ways_in = ("gate", "up") if gated else ("up",)
    entries = [
        LinearEntry("q", hidden, hidden, ("input",), "norm"),
        LinearEntry("k", hidden, kv_width, ("input",), "norm"),
        LinearEntry("v", hidden, kv_width, ("input",), "norm"),
        LinearEntry("o", hidden, hidden, ("q", "k", "v"), "attention"),
        *(LinearEntry(name, hidden, ffn, stream, "norm") for name in ways_in),
        LinearEntry("down", ffn, hidden, ways_in, "elementwise"),
    ]
    return linear_graph(
        entries,
        seq,
        batch,
        dtype,
        cluster=cluster,
        tensor_size=tensor_size,
        heads=heads,
        kv_heads=kv_heads,
        causal=causal,
        # Of parallel branches the addends are summed first and reduced once.
        output=("o", "down", "input") if parallel else ("input", "o", "down"),
        boundary=boundary,
        sequence_sharding=sequence_sharding,
        training=training,
        microbatches=microbatches,
    )


def column_row_pattern(graph: Graph) -> dict[str, str]:
    """Megatron-LM's fixed rule as strategies: column first, row where the input is split, whole heads, vocabulary.

    What it cannot split stays replicated. Operation name -> strategy name, for
    :func:`lightning_megapar.sharding.layouts.plans.evaluate`.
    """
    written = {value.name: layout for value, layout in graph.sources}
    result: dict[str, str] = {}
    for operation in graph.operations:
        name = _by_rule(operation, [written[n] for n in operation.inputs])
        result[operation.name] = name
        # A table split by vocabulary is reduced at once, whatever reads it.
        written[operation.output.name] = R if operation.kind == "embedding" else operation.strategy(name).output
    return result


def _by_rule(operation: Operation, layouts: list[TensorLayout]) -> str:
    names = [s.name for s in operation.strategies]
    preferred: tuple[str, ...]
    if operation.kind == "linear":
        preferred = ("row", "column", "column_shared") if layouts == [H] else ("column", "column_shared")
    elif operation.kind == "embedding":
        preferred = ("vocabulary",)
    else:
        # Whatever reads the layouts as they are.
        preferred = tuple(s.name for s in operation.strategies if list(s.inputs) == layouts and s.output is not C)
    return next((n for n in preferred if n in names), names[0])


def break_even_fan_in(element_bytes: float, flops: float, bandwidth: float) -> float:
    """The fan-in above which splitting one linear layer by rows over a ring beats leaving it whole, forward only.

    Whole it takes ``2 N k m / F``; split, ``1/n`` of that and an all-reduce of its output, ``2 (n-1)/n N m b / B``. The
    factor ``(n-1)/n``, the tokens ``N`` and the fan-out ``m`` cancel: it pays when ``k > b F / B``. By the same sum, a
    column layer with gathered output pays above half of that, and a column and row pair with its backward when the
    width between the two exceeds a third. Latency, launches and memory traffic are left out.

    Args:
        element_bytes: b, of one activation.
        flops: F, FLOP/s that the product reaches.
        bandwidth: B, bytes/s of the ring.
    """
    return element_bytes * flops / bandwidth
