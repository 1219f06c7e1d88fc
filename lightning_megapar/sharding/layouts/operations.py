"""Operations of a model with every way to run them on the ranks that share a layer, priced for a cluster.

The ways are those of Megatron-LM (arXiv 1909.08053, 2205.05198) and of plain sequence sharding: column and row split of
a linear layer, attention by heads or by queries, tables and losses by vocabulary. ``PARTIAL`` is read by sums only: a
nonlinearity of a sum is not the sum of nonlinearities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_megapar.config import ConfigError, Layout
from lightning_megapar.planner.cluster import ELEMENT_BYTES, Cluster, Link, Ring, dtype_name
from lightning_megapar.sharding.layouts.tensors import (
    C,
    Conversions,
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


class GraphBuilder:
    """Collects operations; each method adds one and returns the name of the value that it writes.

    A kernel takes the longest of its arithmetic, its memory traffic and its launch. The backward of a matrix product is
    two products more, that of attention twice its forward; other operations are bound by memory.

    Args:
        cluster: prices kernels and collectives.
        tensor_size: ranks that share a layer (the innermost mesh axis).
        batch, seq: samples and positions of one microbatch.
        dtype: of parameters and activations, see :func:`lightning_megapar.planner.cluster.dtype_name`.
        sequence_sharding: offer layouts that cut dim -2.
        training: count the backward.
        microbatches: of a step; the gradients of parameters that are held whole are summed once for all of them.

    Raises:
        ConfigError: on sizes that are not positive, or a group that does not fit the cluster.
    """

    def __init__(
        self,
        cluster: Cluster,
        tensor_size: int,
        batch: int,
        seq: int,
        dtype: object = "bf16",
        *,
        sequence_sharding: bool = True,
        training: bool = True,
        microbatches: int = 1,
    ) -> None:
        if min(batch, seq, tensor_size, microbatches) < 1:
            raise ConfigError(
                f"batch={batch}, seq={seq}, tensor_size={tensor_size}, microbatches={microbatches}: all must be at "
                "least 1"
            )
        self.microbatches = microbatches
        self.cluster, self.ranks = cluster, tensor_size
        self.ring = cluster.axis_ring("tensor", Layout(tensor=tensor_size))
        self.batch, self.seq, self.tokens = batch, seq, batch * seq
        self.dtype = dtype_name(dtype)
        self.element = ELEMENT_BYTES[self.dtype]
        self.training = training
        self.sequence = sequence_sharding and seq % tensor_size == 0
        self._values: dict[str, Value] = {}
        self._tables: dict[tuple, Conversions] = {}
        self._sources: list[tuple[Value, TensorLayout]] = []
        self._operations: list[Operation] = []
        self._without_gradient: set[str] = set()

    def graph(self, results: Sequence[tuple[str, TensorLayout]] = (), tied: Sequence[tuple[str, str]] = ()) -> Graph:
        """What was added; ``results`` must leave in the given layouts, ``tied`` operations share a weight."""
        return Graph(tuple(self._sources), tuple(self._operations), tuple(results), tuple(tied))

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def width(self, name: str) -> int:
        """Size of the last dimension of a value.

        Raises:
            ConfigError: when nothing wrote it.
        """
        return self._value(name).shape[-1]

    def source(self, name: str, width: int, layout: TensorLayout = R, *, gradient: bool = True) -> str:
        """A value from outside: (batch, seq, width)."""
        if not gradient:
            self._without_gradient.add(name)
        value = self._new(name, (self.batch, self.seq, width), gradient=gradient)
        self._sources.append((value, layout))
        return name

    def linear(self, name: str, reads: str, out_features: int, *, units: int | None = None) -> str:
        """``y = x W^T``: (batch, seq, in) -> (batch, seq, out).

        Args:
            units: pieces of the output that must not be cut, such as key/value heads. When the ranks are a multiple of
                them, ranks share a piece and sum its gradient.
        """
        x = self._value(reads)
        k, m, n = x.shape[-1], out_features, self.ranks
        products = 1 if not self.training else 2 if reads in self._without_gradient else 3

        def time(tokens: float, fan_in: float, fan_out: float) -> float:
            nbytes = (tokens * fan_in + fan_in * fan_out + tokens * fan_out) * self.element
            return products * self._kernel(2 * tokens * fan_in * fan_out, nbytes)

        weight = k * m * self.element
        ways = [Strategy("replicate", (R,), R, time(self.tokens, k, m), parameter_bytes=weight)]
        shared = units is not None and units % n and n % units == 0
        if shared:
            assert units is not None
            among = replace(self.ring, size=n // units)
            summed = self._sum(k * m // units, among)
            where: dict = {"parameter": "shared", "parameter_bytes": weight / units}
            ways.append(Strategy("column_shared", (C,), H, time(self.tokens, k, m / units), summed, **where))
        elif m % n == 0 and n > 1:
            where = {"parameter": "dim 0", "parameter_bytes": weight / n}
            ways.append(Strategy("column", (C,), H, time(self.tokens, k, m / n), **where))
        if k % n == 0 and n > 1:
            where = {"parameter": "dim 1", "parameter_bytes": weight / n}
            ways.append(Strategy("row", (H,), P, time(self.tokens, k / n, m), **where))
        if self.sequence and n > 1:
            seconds, summed = time(self.tokens / n, k, m), self._sum(k * m)
            ways.append(Strategy("sequence", (S,), S, seconds, summed, parameter_bytes=weight))
        flops, nbytes = 2.0 * self.tokens * k * m, (self.tokens * (k + m) + k * m) * self.element
        return self._add(name, "linear", (reads,), (*x.shape[:-1], m), ways, flops, nbytes, hidden=not shared)

    def elementwise(self, name: str, reads: Sequence[str]) -> str:
        """A nonlinear function of values of one shape, such as ``silu(gate) * up``."""
        return self._pointwise(name, "elementwise", reads, (R, S, C, H), backward=2 * len(reads) + 1)

    def add(self, name: str, reads: Sequence[str]) -> str:
        """The sum of values of one shape. Addends may be ``PARTIAL``: they are then reduced once, after the sum."""
        return self._pointwise(name, "add", reads, (R, S, C, H, P), backward=0)

    def norm(self, name: str, reads: str) -> str:
        """A norm over the whole width, with scale and shift. It needs every feature of a position."""
        return self._pointwise(name, "norm", (reads,), (R, S, C), backward=3, parameters=2 * self.width(reads))

    def head_norm(self, name: str, reads: str, head_dim: int) -> str:
        """A norm over each head by itself; its scale is shared by the heads."""
        return self._pointwise(name, "head_norm", (reads,), (R, S, C, H), backward=3, parameters=2 * head_dim)

    def matmul(self, name: str, left: str, right: str) -> str:
        """The product of two activations: (batch, s, k) x (batch, k, m) -> (batch, s, m)."""
        a, b, n = self._value(left), self._value(right), self.ranks
        s, k, m = a.shape[-2], a.shape[-1], b.shape[-1]
        if b.shape[-2] != k:
            raise ConfigError(f"matmul {name!r}: {left} is {a.shape} and {right} is {b.shape}")

        def time(rows: float, inner: float, columns: float) -> float:
            nbytes = self.batch * (rows * inner + inner * columns + rows * columns) * self.element
            return (3 if self.training else 1) * self._kernel(2 * self.batch * rows * inner * columns, nbytes)

        ways = [Strategy("replicate", (R, R), R, time(s, k, m))]
        if k % n == 0 and n > 1:
            ways.append(Strategy("contract", (H, S), P, time(s, k / n, m)))
        if m % n == 0 and n > 1:
            ways.append(Strategy("columns", (C, H), H, time(s, k, m / n)))
        if self.sequence and s % n == 0 and n > 1:
            ways.append(Strategy("rows", (S, C), S, time(s / n, k, m)))
        flops, nbytes = 2.0 * self.batch * s * k * m, self.batch * (s * k + k * m + s * m) * self.element
        return self._add(name, "matmul", (left, right), (*a.shape[:-1], m), ways, flops, nbytes)

    def attention(
        self, name: str, reads: Sequence[str], width: int, heads: int, kv_heads: int, *, causal: bool = True
    ) -> str:
        """The core ``softmax(q k^T) v``: no parameters, (batch, seq, ...) -> (batch, seq, width).

        Args:
            reads: ``(q, k, v)``, or one fused projection.
            width: heads x head size.
            heads, kv_heads: whole ones go to each rank, or all of them to every rank.
            causal: half of the scores count.
        """
        if len(reads) not in (1, 3):
            raise ConfigError(f"attention {name!r} reads {len(reads)} values; valid numbers: 1 (fused), 3 (q, k, v)")
        if width % heads or heads % kv_heads:
            raise ConfigError(f"attention {name!r}: width={width}, heads={heads}, kv_heads={kv_heads} do not divide")
        n, values = self.ranks, [self._value(r) for r in reads]
        flops = 4.0 * self.batch * self.seq**2 * width * (0.5 if causal else 1.0)
        nbytes = sum(v.nbytes for v in values) + self.tokens * width * self.element

        def time(share: float) -> float:
            forward = self._kernel(flops * share, nbytes * share)
            return forward + (self._kernel(2 * flops * share, 2 * nbytes * share) if self.training else 0.0)

        many = len(reads)
        ways = [Strategy("replicate", (R,) * many, R, time(1.0))]
        whole_heads = heads % n == 0 and (kv_heads % n == 0 or (many == 3 and n % kv_heads == 0))
        if whole_heads and n > 1:
            ways.append(Strategy("heads", (H,) * many, H, time(1 / n)))
        if self.sequence and many == 3 and n > 1:
            # Each rank's queries, all keys. Causal slices are uneven: the last one sees (2 - 1/n)/n of the scores.
            share = (2 - 1 / n) / n if causal else 1 / n
            ways.append(Strategy("queries", (S, C, C), S, time(share)))
        return self._add(name, "attention", tuple(reads), (self.batch, self.seq, width), ways, flops, nbytes)

    def embedding(self, name: str, reads: str, vocabulary: int, width: int) -> str:
        """A table of (vocabulary, width) looked up by token ids (batch, seq, 1)."""
        n, dense = self.ranks, float(vocabulary) * width
        written = self.tokens * width

        def time(moved: float, rows: float) -> float:
            # Read and write what is looked up; the gradient of the table is dense.
            forward = self._kernel(0, 2 * moved * self.element)
            return forward + (self._kernel(0, (2 * moved + rows) * self.element) if self.training else 0.0)

        weight = dense * self.element
        ways = [Strategy("replicate", (R,), R, time(written, dense), parameter_bytes=weight)]
        if vocabulary % n == 0 and n > 1:
            where: dict = {"parameter": "dim 0", "parameter_bytes": weight / n}
            ways.append(Strategy("vocabulary", (R,), P, time(written, dense / n), **where))
        if width % n == 0 and n > 1:
            where = {"parameter": "dim 1", "parameter_bytes": weight / n}
            ways.append(Strategy("column", (R,), H, time(written / n, dense / n), **where))
        if self.sequence and n > 1:
            seconds, summed = time(written / n, dense), self._sum(dense)
            ways.append(Strategy("sequence", (S,), S, seconds, summed, parameter_bytes=weight))
        shape = (self.batch, self.seq, width)
        return self._add(name, "embedding", (reads,), shape, ways, 0.0, 2.0 * written * self.element)

    def loss(self, name: str, reads: str) -> str:
        """Cross entropy of logits (batch, seq, vocabulary): a scalar.

        Over a split vocabulary it exchanges the maximum, the sum of exponentials and the target's logit per position.
        """
        x, n = self._value(reads), self.ranks
        nbytes = 2 * x.nbytes

        def time(share: float) -> float:
            return (2 if self.training else 1) * self._kernel(0, nbytes * share)

        ways = [Strategy("replicate", (R,), R, time(1.0))]
        if x.shape[-1] % n == 0 and n > 1:
            exchanged = 3 * self.ring.all_reduce(4 * self.tokens)
            ways.append(Strategy("vocabulary", (H,), R, time(1 / n), communication=exchanged))
        if self.sequence and n > 1:
            ways.append(Strategy("sequence", (S,), P, time(1 / n)))
        return self._add(name, "loss", (reads,), (1,), ways, 0.0, nbytes, sequence=False, hidden=False)

    # ---- below the surface ----

    def _pointwise(
        self,
        name: str,
        kind: str,
        reads: Sequence[str],
        layouts: Sequence[TensorLayout],
        backward: int,
        parameters: float = 0,
    ) -> str:
        """Every input and the output in one layout; ``backward`` tensors are read or written there."""
        values = [self._value(r) for r in reads]
        if len({v.shape for v in values}) != 1:
            raise ConfigError(f"{kind} {name!r} reads shapes {', '.join(str(v.shape) for v in values)}: all must agree")
        x, n = values[0], self.ranks
        names = {R: "replicate", S: "sequence", C: "copied", H: "hidden", P: "partial"}
        ways = []
        for layout in layouts:
            possible = {S: self.sequence, H: x.shape[-1] % n == 0}.get(layout, True)
            if layout is not R and (n == 1 or not possible):
                continue
            share = 1 / n if layout in (S, H) else 1.0
            seconds = self._kernel(0, (len(values) + 1) * x.nbytes * share)
            if self.training and backward:
                seconds += self._kernel(0, backward * x.nbytes * share)
            # A parameter that sees a part of the positions, heads or addends has a part of its gradient.
            summed = self._sum(parameters) if parameters and layout is not R else 0.0
            weight = parameters * self.element
            ways.append(
                Strategy(names[layout], (layout,) * len(values), layout, seconds, summed, parameter_bytes=weight)
            )
        moved = (len(values) + 1) * x.nbytes
        return self._add(name, kind, tuple(reads), x.shape, ways, 0.0, moved)

    def _kernel(self, flops: float, nbytes: float) -> float:
        return self.cluster.kernel_seconds(flops, nbytes, self.dtype)

    def _sum(self, elements: float, ring: Ring | None = None) -> float:
        """A parameter's share of the all-reduce that sums gradients, once per step and many in one message."""
        if not self.training:
            return 0.0
        ring = ring or self.ring
        without_latency = replace(ring, link=Link(0.0, ring.link.bandwidth))
        return without_latency.all_reduce(elements * self.element) / self.microbatches

    def _value(self, name: str) -> Value:
        if name not in self._values:
            raise ConfigError(f"{name!r} is read before anything writes it; values: {', '.join(self._values)}")
        return self._values[name]

    def _new(
        self, name: str, shape: tuple[int, ...], *, sequence: bool = True, hidden: bool = True, gradient: bool = True
    ) -> Value:
        if name in self._values:
            raise ConfigError(f"two values are called {name!r}")
        nbytes = float(self.element)
        for size in shape:
            nbytes *= size
        key = (
            nbytes,
            sequence and self.sequence,
            hidden and shape[-1] % self.ranks == 0,
            gradient and self.training,
        )
        if key not in self._tables:
            self._tables[key] = conversions(nbytes, self.ring, sequence=key[1], hidden=key[2], gradient=key[3])
        self._values[name] = Value(name, shape, nbytes, self._tables[key])
        return self._values[name]

    def _add(
        self,
        name: str,
        kind: str,
        reads: tuple[str, ...],
        shape: tuple[int, ...],
        ways: list[Strategy],
        flops: float,
        nbytes: float,
        *,
        sequence: bool = True,
        hidden: bool = True,
    ) -> str:
        output = self._new(name, shape, sequence=sequence, hidden=hidden)
        self._operations.append(Operation(name, kind, reads, output, tuple(ways), flops, nbytes))
        return name
