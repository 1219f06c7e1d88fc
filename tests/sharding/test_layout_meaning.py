"""What the layouts, conversions and strategies say is true of numbers: one process plays all ranks, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megapar.planner import Cluster, Link, Ring
from lightning_megapar.sharding.layouts.operations import GraphBuilder
from lightning_megapar.sharding.layouts.tensors import C, H, Operation, P, R, S, Strategy, TensorLayout, conversions

B, T, D, HEADS, V = 2, 12, 24, 12, 36
RANKS = [2, 3]
CUT = {S: -2, H: -1}
Local = Callable[..., Tensor]


def addends(x: Tensor, n: int) -> list[Tensor]:
    parts = [torch.randn_like(x) for _ in range(n - 1)]
    return [*parts, x - sum(parts)]


def spread(layout: TensorLayout, x: Tensor, n: int, gradient: bool = False) -> list[Tensor]:
    """What each rank holds of a value, or of its gradient."""
    if layout in CUT:
        return list(x.chunk(n, CUT[layout]))
    partial = layout == (C if gradient else P)
    return addends(x, n) if partial else [x.clone() for _ in range(n)]


def collect(layout: TensorLayout, parts: list[Tensor], gradient: bool = False) -> Tensor:
    """The whole value, or gradient, from what the ranks hold; whole copies must agree."""
    if layout in CUT:
        return torch.cat(parts, CUT[layout])
    if layout == (C if gradient else P):
        return sum(parts[1:], parts[0])
    for other in parts[1:]:
        torch.testing.assert_close(other, parts[0])
    return parts[0]


def collective(name: str, parts: list[Tensor], source: TensorLayout, target: TensorLayout) -> list[Tensor]:
    """The named collective, with tensors in place of ranks; slices are cut along the sharded dimension involved."""
    n = len(parts)
    if name == "-":
        return parts
    if name == "all-reduce":
        return [sum(parts[1:], parts[0])] * n
    if name == "all-gather":
        return [torch.cat(parts, CUT[source])] * n
    if name == "reduce-scatter":
        return list(sum(parts[1:], parts[0]).chunk(n, CUT[target]))
    if name == "slice":
        return [part.chunk(n, CUT[target])[rank] for rank, part in enumerate(parts)]
    assert name == "all-to-all"
    pieces = [part.chunk(n, CUT[target]) for part in parts]
    return [torch.cat([pieces[sender][rank] for sender in range(n)], CUT[source]) for rank in range(n)]


@pytest.mark.parametrize("n", RANKS)
def test_each_conversion_turns_one_layout_into_the_other_and_its_gradient_back(n: int) -> None:
    torch.manual_seed(0)
    ring = Ring(n, Link(1e-3, 1e6))
    x, g = torch.randn(2, B, T, D, dtype=torch.float64)
    table = conversions(6e6, ring)
    price = {"-": 0.0, "slice": 0.0, "all-reduce": ring.all_reduce(6e6), "all-gather": ring.all_gather(6e6)}
    price |= {"reduce-scatter": ring.reduce_scatter(6e6), "all-to-all": ring.all_to_all(6e6 / n)}
    for (source, target), conversion in table.items():
        there, back = conversion.collectives.split(" / ")
        held = collective(there, spread(source, x, n), source, target)
        torch.testing.assert_close(collect(target, held), x)
        gradients = collective(back, spread(target, g, n, gradient=True), target, source)
        torch.testing.assert_close(collect(source, gradients, gradient=True), g)
        assert (conversion.forward, conversion.backward) == (price[there], price[back])
    # Every layout reaches every other, except those that a plan never returns to.
    assert {target for _, target in table} == {R, C, S, H}
    assert {source for source, _ in table} == {R, S, H, P}


def test_without_a_backward_only_the_forward_is_paid() -> None:
    ring = Ring(2, Link(1e-3, 1e6))
    for pair, conversion in conversions(1e6, ring, gradient=False).items():
        assert conversion.backward == 0.0
        assert conversion.forward == conversions(1e6, ring)[pair].forward
    assert not {S, H} & {x for pair in conversions(1e6, ring, sequence=False, hidden=False) for x in pair}


# ---- strategies: for each a function of (rank, ranks, what the rank holds) ----


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, first: int = 0) -> Tensor:
    """Causal; ``first`` is the position of the first query."""

    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, D // HEADS)).transpose(1, 2)

    q, k, v = split(q), split(k), split(v)
    assert q.shape[1] == heads
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    seen = torch.arange(k.shape[2]) <= first + torch.arange(q.shape[2])[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)


def run(
    operation: Operation,
    strategy: Strategy,
    n: int,
    inputs: list[Tensor],
    parameter: Tensor | None,
    local: Callable[[int, list[Tensor], Tensor | None], Tensor],
    cut: int | None,
) -> None:
    """Compare outputs, gradients of inputs and of the parameter with the operation on one rank."""
    whole = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    whole_parameter = None if parameter is None else parameter.clone().requires_grad_()
    reference = local(-1, whole, whole_parameter)
    g = torch.randn_like(reference)
    reference.backward(g)

    spread_inputs = [spread(layout, x, n) for layout, x in zip(strategy.inputs, inputs)]
    spread_gradient = spread(strategy.output, g, n, gradient=True)
    outputs, gradients, parameter_gradients = [], [], []
    for rank in range(n):
        mine = [parts[rank].clone() for parts in spread_inputs]
        mine = [x.requires_grad_() if x.is_floating_point() else x for x in mine]
        own = parameter if parameter is None or cut is None else parameter.chunk(n, cut)[rank]
        own = None if own is None else own.clone().requires_grad_()
        result = local(rank, mine, own)
        result.backward(spread_gradient[rank])
        outputs.append(result.detach())
        gradients.append([x.grad for x in mine])
        parameter_gradients.append(None if own is None else own.grad)
    torch.testing.assert_close(collect(strategy.output, outputs), reference.detach())
    for place, (layout, x) in enumerate(zip(strategy.inputs, whole)):
        if x.is_floating_point():
            torch.testing.assert_close(collect(layout, [g[place] for g in gradients], gradient=True), x.grad)
    if whole_parameter is not None:
        held = R if cut is None else (S if cut == 0 else H)  # rows or columns of a matrix
        if strategy.gradients:
            assert cut is None
            held = C
        torch.testing.assert_close(collect(held, parameter_gradients, gradient=True), whole_parameter.grad)


def build(n: int) -> GraphBuilder:
    cluster = Cluster(n, 1, 1e12, 1e11, Link(1e-6, 1e9), Link(1e-6, 1e9))
    made = GraphBuilder(cluster, n, batch=B, seq=T)
    made.source("x", D)
    made.source("y", D)
    return made


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def every(made: GraphBuilder, names: set[str]) -> tuple[Operation, list[Strategy]]:
    operation = made.graph().operations[-1]
    assert {s.name for s in operation.strategies} == names
    return operation, list(operation.strategies)


@pytest.mark.parametrize("n", RANKS)
def test_linear(n: int) -> None:
    made = build(n)
    made.linear("l", "x", 2 * D)
    operation, strategies = every(made, {"replicate", "column", "row", "sequence"})
    weight = randn(2 * D, D)
    for s in strategies:
        cut = {"column": 0, "row": 1}.get(s.name)
        run(operation, s, n, [randn(B, T, D)], weight, lambda _, xs, w: xs[0] @ w.t(), cut)


@pytest.mark.parametrize("n", RANKS)
def test_pointwise(n: int) -> None:
    made = build(n)
    made.elementwise("e", ["x", "y"])
    operation, strategies = every(made, {"replicate", "sequence", "copied", "hidden"})
    for s in strategies:
        run(operation, s, n, [randn(B, T, D), randn(B, T, D)], None, lambda _, xs, __: F.silu(xs[0]) * xs[1], None)
    made.add("a", ["x", "y"])
    operation, strategies = every(made, {"replicate", "sequence", "copied", "hidden", "partial"})
    for s in strategies:
        run(operation, s, n, [randn(B, T, D), randn(B, T, D)], None, lambda _, xs, __: xs[0] + xs[1], None)


@pytest.mark.parametrize("n", RANKS)
def test_norms(n: int) -> None:
    made = build(n)
    made.norm("n", "x")
    operation, strategies = every(made, {"replicate", "sequence", "copied"})
    for s in strategies:
        run(operation, s, n, [randn(B, T, D)], randn(D), lambda _, xs, w: F.layer_norm(xs[0], (D,), w), None)
    size = D // HEADS
    made.head_norm("h", "x", size)
    operation, strategies = every(made, {"replicate", "sequence", "copied", "hidden"})

    def by_head(_: int, xs: list[Tensor], w: Tensor | None) -> Tensor:
        return F.rms_norm(xs[0].unflatten(-1, (-1, size)), (size,), w).flatten(-2)

    for s in strategies:
        run(operation, s, n, [randn(B, T, D)], randn(size), by_head, None)


@pytest.mark.parametrize("n", RANKS)
def test_attention(n: int) -> None:
    made = build(n)
    made.linear("kv", "x", D // 2)
    made.attention("core", ["x", "kv", "kv"], D, HEADS, HEADS // 2)
    operation, strategies = every(made, {"replicate", "heads", "queries"})
    for s in strategies:

        def local(rank: int, xs: list[Tensor], _: Tensor | None, s: Strategy = s) -> Tensor:
            split = rank >= 0 and s.name == "heads"
            return attend(*xs, HEADS // n if split else HEADS, rank * T // n if rank > 0 and s.name == "queries" else 0)

        run(operation, s, n, [randn(B, T, D), randn(B, T, D // 2), randn(B, T, D // 2)], None, local, None)


def test_shared_key_value_heads() -> None:
    """Four ranks, two key/value heads: each computes the head that its queries need; sharers sum its gradient."""
    n, units, size = 4, 2, D // HEADS
    made = build(n)
    made.linear("k", "x", units * size, units=units)
    (shared,) = [s for s in made.graph().operations[-1].strategies if s.name == "column_shared"]
    assert (shared.inputs, shared.output, shared.parameter) == ((C,), H, "shared")
    x, q_all, w = randn(B, T, D), randn(B, T, D), randn(units * size, D)
    whole_x, whole_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    k = whole_x @ whole_w.t()
    reference = attend(q_all, k, k, HEADS)
    g = torch.randn_like(reference)
    reference.backward(g)
    outputs, x_gradients, w_gradients = [], [], [torch.zeros_like(w).chunk(units)[i].clone() for i in range(units)]
    for rank in range(n):
        mine, unit = x.clone().requires_grad_(), rank * units // n
        own = w.chunk(units)[unit].clone().requires_grad_()
        k = mine @ own.t()
        result = attend(q_all.chunk(n, -1)[rank], k, k, HEADS // n)
        result.backward(g.chunk(n, -1)[rank])
        outputs.append(result.detach())
        x_gradients.append(mine.grad)
        w_gradients[unit] += own.grad
    torch.testing.assert_close(collect(H, outputs), reference.detach())
    torch.testing.assert_close(collect(C, x_gradients, gradient=True), whole_x.grad)
    torch.testing.assert_close(torch.cat(w_gradients), whole_w.grad)


@pytest.mark.parametrize("n", RANKS)
def test_product_of_activations(n: int) -> None:
    made = build(n)
    made.source("z", T)
    made.matmul("m", "z", "y")
    operation, strategies = every(made, {"replicate", "contract", "columns", "rows"})
    for s in strategies:
        run(operation, s, n, [randn(B, T, T), randn(B, T, D)], None, lambda _, xs, __: xs[0] @ xs[1], None)


@pytest.mark.parametrize("n", RANKS)
def test_embedding(n: int) -> None:
    made = build(n)
    made.source("ids", 1, gradient=False)
    made.embedding("e", "ids", V, D)
    operation, strategies = every(made, {"replicate", "vocabulary", "column", "sequence"})
    for s in strategies:

        def local(rank: int, xs: list[Tensor], table: Tensor | None, s: Strategy = s) -> Tensor:
            assert table is not None
            ids = xs[0].squeeze(-1)
            if rank < 0 or s.name != "vocabulary":
                return F.embedding(ids, table)
            ids = ids - rank * (V // n)
            mine = (ids >= 0) & (ids < V // n)
            return F.embedding(ids.clamp(0, V // n - 1), table) * mine.unsqueeze(-1)

        cut = {"vocabulary": 0, "column": 1}.get(s.name)
        run(operation, s, n, [torch.randint(0, V, (B, T, 1))], randn(V, D), local, cut)


@pytest.mark.parametrize("n", RANKS)
def test_loss(n: int) -> None:
    made = build(n)
    made.loss("l", "x")
    operation, strategies = every(made, {"replicate", "vocabulary", "sequence"})
    target = torch.randint(0, D, (B, T))
    for s in strategies:
        if s.name == "vocabulary":
            assert s.communication > 0 and s.inputs == (H,) and s.output == R
            continue  # exchanges values inside: tests/layers/test_vocab_parallel.py compares it with one rank

        def local(rank: int, xs: list[Tensor], _: Tensor | None, s: Strategy = s) -> Tensor:
            split = rank >= 0 and s.name == "sequence"
            wanted = target.chunk(n, 1)[rank] if split else target
            return F.cross_entropy(xs[0].flatten(0, 1), wanted.flatten(), reduction="sum") / (B * T)

        run(operation, s, n, [randn(B, T, D)], None, local, None)


def test_a_partial_sum_is_no_input_of_a_nonlinearity() -> None:
    """GELU of a sum is not the sum of GELUs: no strategy offers it, and numbers show that none may."""
    made = build(2)
    for name in (
        made.elementwise("e", ["x"]),
        made.norm("n", "x"),
        made.head_norm("h", "x", 2),
        made.attention("a", ["x", "x", "x"], D, HEADS, HEADS),
        made.linear("l", "x", D),
        made.loss("loss", "x"),
    ):
        operation = next(o for o in made.graph().operations if o.name == name)
        assert all(P not in s.inputs for s in operation.strategies), name
    operation = next(o for o in made.graph().operations if o.name == "e")
    wrong = Strategy("partial", (P,), P, 0.0)
    with pytest.raises(AssertionError, match="not close"):
        run(operation, wrong, 2, [randn(B, T, D)], None, lambda _, xs, __: F.gelu(xs[0]), None)
