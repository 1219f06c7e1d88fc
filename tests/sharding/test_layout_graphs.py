from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_oracles import A100, bare, pattern, replicated

from lightning_megapar.config import ConfigError
from lightning_megapar.planner import Cluster, Link
from lightning_megapar.sharding.layouts.graphs import (
    LinearEntry,
    column_row_pattern,
    linear_graph,
    mlp_graph,
    transformer_block_graph,
)
from lightning_megapar.sharding.layouts.operations import GraphBuilder
from lightning_megapar.sharding.layouts.plans import evaluate
from lightning_megapar.sharding.layouts.search import search
from lightning_megapar.sharding.layouts.tensors import C, H, P, R, S, TensorLayout

# ---- what everybody does by hand is found ----

BLOCKS = [
    {"hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 16384, "seq": 2048, "batch": 1},
    {"hidden": 1600, "heads": 32, "kv_heads": 32, "ffn": 6400, "seq": 1024, "batch": 4},
    {"hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "seq": 4096, "batch": 1, "gated": True},
]


@pytest.mark.parametrize("tensor_size", [2, 4, 8])
@pytest.mark.parametrize("sizes", BLOCKS, ids=lambda s: f"hidden{s['hidden']}")
def test_a_gpt_block_is_split_by_columns_heads_and_rows(sizes: dict, tensor_size: int) -> None:
    graph = transformer_block_graph(**sizes, cluster=A100, tensor_size=tensor_size, sequence_sharding=False)
    plan = search(graph)
    assert plan.method == "milp"
    ways = {n: s for n, s in plan.strategies.items() if not n.startswith(("norm", "add"))}
    ups = ("gate", "up") if sizes.get("gated") else ("up",)
    expected = dict.fromkeys(["q", "k", "v", *ups], "column") | {"o": "row", "down": "row"}
    expected |= {"attention(q, k, v)": "heads", f"act({', '.join(ups)})": "hidden"}
    assert ways == expected
    # Two all-reduces forward and two backward, of one activation each: q, k and v share theirs.
    nbytes = sizes["batch"] * sizes["seq"] * sizes["hidden"] * 2
    ring = A100.ring(tensor_size)
    assert plan.forward_seconds == pytest.approx(2 * ring.all_reduce(nbytes))
    assert plan.backward_seconds == pytest.approx(2 * ring.all_reduce(nbytes))
    assert plan.seconds == pytest.approx(pattern(graph).seconds)


def test_between_sequence_sharded_blocks_the_norms_are_sharded_as_well() -> None:
    graph = transformer_block_graph(**BLOCKS[0], cluster=A100, tensor_size=8, boundary=S)
    plan = search(graph)
    assert {n: s for n, s in plan.strategies.items() if n.startswith(("norm", "add"))} == dict.fromkeys(
        ["norm(input)", "add(input, o)", "norm(input, o)", "add(input, o, down)"], "sequence"
    )
    assert plan.strategies["q"] == plan.strategies["up"] == "column"
    assert plan.strategies["o"] == plan.strategies["down"] == "row"
    assert {s.value: s.conversion.collectives for s in plan.steps} == {
        "norm(input)": "all-gather / reduce-scatter",
        "o": "reduce-scatter / all-gather",
        "norm(input, o)": "all-gather / reduce-scatter",
        "down": "reduce-scatter / all-gather",
    }
    # The same bytes as without, less work; what is added are the sums of the norms' gradients.
    whole = search(transformer_block_graph(**BLOCKS[0], cluster=A100, tensor_size=8))
    assert plan.compute_seconds < whole.compute_seconds
    assert plan.forward_seconds + plan.backward_seconds == pytest.approx(whole.forward_seconds + whole.backward_seconds)
    assert plan.gradient_seconds == pytest.approx(2 * 2 * 7 / 8 * (2 * 4096 * 2) / 229e9)
    assert plan.seconds < whole.seconds
    # A step of several microbatches sums them once.
    graph = transformer_block_graph(**BLOCKS[0], cluster=A100, tensor_size=8, boundary=S, microbatches=4)
    four = evaluate(graph, plan.strategies)
    assert four.gradient_seconds == pytest.approx(plan.gradient_seconds / 4)


def test_parallel_attention_and_mlp_are_reduced_once() -> None:
    graph = transformer_block_graph(**BLOCKS[0], cluster=A100, tensor_size=8, parallel=True)
    plan = search(graph)
    assert plan.strategies["o"] == plan.strategies["down"] == "row"
    assert plan.strategies["add(o, down)"] == "partial"
    assert [(s.value, s.source, s.target) for s in plan.steps] == [("norm(input)", R, C), ("add(o, down)", P, R)]


def test_an_mlp_is_a_chain_column_then_row() -> None:
    graph = mlp_graph(4096, 16384, 2048, 1, cluster=A100, tensor_size=4)
    assert graph.is_chain
    assert search(graph).strategies == {"up": "column", "act(up)": "hidden", "down": "row"}
    gated = mlp_graph(4096, 11008, 2048, 1, gated=True, cluster=A100, tensor_size=4)
    assert search(gated).strategies == {"gate": "column", "up": "column", "act(gate, up)": "hidden", "down": "row"}


def test_a_whole_gpt_splits_table_head_and_loss_by_vocabulary() -> None:
    build = GraphBuilder(A100, 8, batch=1, seq=2048)
    build.source("ids", 1, gradient=False)
    stream = build.embedding("embed", "ids", 50304, 4096)
    for i in range(2):
        normed = build.norm(f"{i}.ln1", stream)
        qkv = [build.linear(f"{i}.{n}", normed, 4096) for n in "qkv"]
        core = build.attention(f"{i}.core", qkv, 4096, 32, 32)
        stream = build.add(f"{i}.add1", [stream, build.linear(f"{i}.o", core, 4096)])
        up = build.linear(f"{i}.up", build.norm(f"{i}.ln2", stream), 16384)
        down = build.linear(f"{i}.down", build.elementwise(f"{i}.act", [up]), 4096)
        stream = build.add(f"{i}.add2", [stream, down])
    logits = build.linear("head", build.norm("ln", stream), 50304)
    loss = build.loss("loss", logits)
    graph = build.graph([(loss, R)], tied=[("embed", "head")])
    plan = search(graph)
    assert plan.strategies["embed"] == "vocabulary"
    assert plan.strategies["head"] == "column"
    assert plan.strategies["loss"] == "vocabulary"
    # A table of its own is cheaper split by features: an all-to-all moves less than a reduce-scatter.
    untied = search(build.graph([(loss, R)]))
    assert untied.strategies["embed"] == "column" and untied.strategies["head"] == "column"
    assert untied.seconds < plan.seconds
    with pytest.raises(ConfigError, match="'embed' and 'head' share a weight, but one stores it dim 1 and the other"):
        evaluate(graph, untied.strategies)
    assert plan.communication_seconds == pytest.approx(3 * A100.ring(8).all_reduce(4 * 2048))
    # Nothing pins the stream between blocks, so it is cut along the sequence, which halves what norms and sums cost.
    assert {s for n, s in plan.strategies.items() if "ln" in n or "add" in n} == {"sequence"}
    assert plan.seconds < pattern(graph).seconds


def test_of_equal_plans_the_preferred_one_is_taken() -> None:
    """A residual stream that stays partial costs the same as one that is reduced where it is written."""
    build = GraphBuilder(bare(1e14, 1e12), 8, batch=1, seq=2048, sequence_sharding=False)
    build.source("ids", 1, gradient=False)
    stream = build.embedding("embed", "ids", 50304, 4096)
    up = build.linear("up", build.norm("ln1", stream), 16384)
    stream = build.add("add", [stream, build.linear("down", build.elementwise("act", [up]), 4096)])
    logits = build.linear("head", build.norm("ln2", stream), 50304)
    graph = build.graph([(build.loss("loss", logits), R)], tied=[("embed", "head")])
    fixed = column_row_pattern(graph)
    plan = search(graph, prefer=fixed, alternatives=True)
    assert plan.strategies == fixed and fixed["add"] == "replicate"
    assert plan.method == "milp"
    (add,) = [c for c in plan.choices if c.operation.name == "add"]
    assert add.alternatives["partial"] == pytest.approx(plan.seconds)
    worse = {o.name: "replicate" for o in graph.operations}
    assert search(graph, prefer=worse).strategies != worse


# ---- decisions that differ from the fixed pattern ----


def test_a_bottleneck_is_split_by_rows_then_columns() -> None:
    """Wide outside, narrow inside: it pays to reduce the narrow tensor and to gather the wide one."""
    graph = mlp_graph(8192, 256, 4096, 1, cluster=bare(1e14, 1e12), tensor_size=8, sequence_sharding=False)
    plan = search(graph)
    assert (plan.strategies["up"], plan.strategies["down"]) == ("row", "column")
    assert plan.seconds < 0.7 * pattern(graph).seconds


def test_many_tokens_of_a_small_model_are_split_and_weights_kept_whole() -> None:
    """Small width, long sequence: cut the tokens, sum the gradients of the weights."""
    graph = transformer_block_graph(256, 4, 4, 1024, 16384, 8, cluster=A100, tensor_size=4, boundary=S, causal=False)
    plan = search(graph)
    assert plan.strategies["up"] == plan.strategies["down"] == "sequence"
    assert plan.gradient_seconds > 0
    assert plan.seconds < pattern(graph).seconds
    # It costs memory: where there is too little, the weights are split as usual.
    tight = search(graph, parameter_bytes=pattern(graph).parameter_bytes)
    assert tight.parameter_bytes == pattern(graph).parameter_bytes < plan.parameter_bytes / 3
    assert tight.strategies["up"] == "column" and tight.strategies["down"] == "row"


def test_a_narrow_layer_is_left_whole_between_wide_ones() -> None:
    entries = [("a", 4096, 16384), ("b", 16384, 4096, ("a",), "elementwise"), ("router", 4096, 8, ("b",), "norm")]
    graph = linear_graph(entries, 2048, 1, cluster=A100, tensor_size=8, sequence_sharding=False)
    plan = search(graph)
    assert plan.strategies["a"] == "column" and plan.strategies["b"] == "row"
    assert plan.strategies["router"] == "replicate"
    assert pattern(graph).strategies["router"] == "column"
    assert plan.seconds < pattern(graph).seconds


CLUSTERS = st.builds(
    lambda flops, memory, launch, fast, slow, alpha: Cluster(
        4, 4, flops, memory, Link(alpha, fast), Link(3 * alpha, slow), launch_seconds=launch
    ),
    st.sampled_from([1e10, 1e12, 1e14, 1e15]),
    st.sampled_from([1e10, 1e12, 3e12]),
    st.sampled_from([0.0, 5e-6, 1e-4]),
    st.sampled_from([1e8, 1e10, 3e11]),
    st.sampled_from([1e7, 1e9, 5e10]),
    st.sampled_from([0.0, 1e-6, 1e-4]),
)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    CLUSTERS,
    st.sampled_from([2, 3, 4, 8, 16]),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (8, 8), (12, 4), (32, 2)]),
    st.sampled_from([8, 48, 128]),
    st.sampled_from([64, 250, 3072, 16384]),
    st.sampled_from([1, 60, 512, 8192]),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.sampled_from([R, S]),
)
def test_never_slower_than_the_fixed_pattern(
    cluster: Cluster,
    n: int,
    heads: tuple[int, int],
    head_dim: int,
    ffn: int,
    seq: int,
    batch: int,
    gated: bool,
    parallel: bool,
    boundary: TensorLayout,
) -> None:
    boundary = boundary if seq % n == 0 else R
    common: dict = {"cluster": cluster, "tensor_size": n, "gated": gated, "boundary": boundary}
    sizes = (heads[0] * head_dim, *heads, ffn, seq, batch)
    for graph in (
        transformer_block_graph(*sizes, parallel=parallel, **common),
        transformer_block_graph(*sizes, parallel=parallel, training=False, **common),
        mlp_graph(sizes[0], ffn, seq, batch, **common),
    ):
        best = search(graph).seconds
        assert best <= pattern(graph).seconds * (1 + 1e-9)
        assert best <= replicated(graph).seconds * (1 + 1e-9)


# ---- heads, traced models, one rank ----


def test_fewer_key_value_heads_than_ranks_are_shared() -> None:
    graph = transformer_block_graph(4096, 32, 2, 16384, 2048, 1, cluster=A100, tensor_size=8)
    plan = search(graph)
    assert plan.strategies["k"] == plan.strategies["v"] == "column_shared"
    assert plan.strategies["attention(q, k, v)"] == "heads"
    # Four ranks hold the same head and sum its gradient.
    each = 2 * 3 / 4 * 4096 * 128 * 2 / 229e9
    assert plan.gradient_seconds == pytest.approx(2 * each)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(12, 12, 8), (12, 3, 4), (12, 4, 6)])
def test_attention_is_never_cut_inside_a_head(heads: int, kv_heads: int, ranks: int) -> None:
    width = heads * 64
    graph = transformer_block_graph(width, heads, kv_heads, 4 * width, 48, 1, cluster=A100, tensor_size=ranks)
    core = next(o for o in graph.operations if o.kind == "attention")
    assert all(H not in s.inputs for s in core.strategies)
    evaluate(graph, column_row_pattern(graph))  # gathers, and runs


def test_a_traced_gpt2_with_fused_attention() -> None:
    entries = [
        LinearEntry("c_attn", 1024, 3072, ("input",), "norm"),
        LinearEntry("c_proj", 1024, 1024, ("c_attn",), "attention"),
        LinearEntry("c_fc", 1024, 4096, ("input", "c_proj"), "norm"),
        LinearEntry("mlp.c_proj", 4096, 1024, ("c_fc",), "elementwise"),
    ]
    output = ("input", "c_proj", "mlp.c_proj")
    graph = linear_graph(
        entries, 1024, 8, cluster=A100, tensor_size=4, heads=16, output=output, sequence_sharding=False
    )
    assert [o.name for o in graph.operations] == [
        "norm(input)",
        "c_attn",
        "attention(c_attn)",
        "c_proj",
        "add(input, c_proj)",
        "norm(input, c_proj)",
        "c_fc",
        "act(c_fc)",
        "mlp.c_proj",
        "add(input, c_proj, mlp.c_proj)",
    ]
    plan = search(graph)
    names = ("c_attn", "attention(c_attn)", "c_proj", "c_fc", "mlp.c_proj")
    assert [plan.strategies[n] for n in names] == ["column", "heads", "row", "column", "row"]


def test_one_rank_has_one_strategy_and_no_collectives() -> None:
    graph = transformer_block_graph(256, 4, 4, 1024, 64, 1, cluster=A100, tensor_size=1)
    assert all([s.name for s in o.strategies] == ["replicate"] for o in graph.operations)
    assert search(graph).seconds == search(graph).compute_seconds


def test_flops_and_bytes_are_those_of_the_whole_operation() -> None:
    graph = transformer_block_graph(512, 8, 2, 2048, 128, 3, "fp32", True, cluster=A100, tensor_size=4, causal=False)
    tokens = 3 * 128
    linears = 512 * 512 * 2 + 2 * 512 * 128 + 3 * 512 * 2048
    assert sum(o.flops for o in graph.operations if o.kind == "linear") == 2 * tokens * linears
    (core,) = [o for o in graph.operations if o.kind == "attention"]
    assert core.flops == 4 * 3 * 128**2 * 512
    down = next(o for o in graph.operations if o.name == "down")
    assert down.nbytes == 4 * (tokens * 2048 + 2048 * 512 + tokens * 512)
    assert down.output.shape == (3, 128, 512) and down.output.nbytes == 4 * tokens * 512


def test_refusals() -> None:
    common: dict = {"cluster": A100, "tensor_size": 2}
    with pytest.raises(ConfigError, match="hidden=100, heads=3, kv_heads=3: each must divide the one before"):
        transformer_block_graph(100, 3, 3, 400, 8, 1, **common)
    with pytest.raises(ConfigError, match=r"nonlinearity='elementwize' is not one of .* did you mean 'elementwise'"):
        linear_graph([("a", 8, 8, ("input",), "elementwize")], 8, 1, **common)
    with pytest.raises(ConfigError, match="linear 'b': in_features=9, but a is 16 wide"):
        linear_graph([("a", 8, 16), ("b", 9, 8, ("a",))], 8, 1, **common)
    with pytest.raises(ConfigError, match="'c' is read before anything writes it; values: input"):
        linear_graph([("a", 8, 8), ("b", 8, 8, ("c",))], 8, 1, **common)
    with pytest.raises(ConfigError, match="no layer reads 'input'"):
        linear_graph([("b", 8, 8, ("a",))], 8, 1, **common)
    with pytest.raises(ConfigError, match="linear 'o' reads attention, but heads is not given"):
        linear_graph([("qkv", 8, 24), ("o", 8, 8, ("qkv",), "attention")], 8, 1, **common)
    with pytest.raises(ConfigError, match="two values are called 'a'"):
        linear_graph([("a", 8, 8), ("a", 8, 8, ("a",))], 8, 1, **common)
    with pytest.raises(ConfigError, match="add 'add\\(input, a\\)' reads shapes"):
        linear_graph([("a", 8, 16), ("b", 16, 8, ("input", "a"))], 8, 1, **common)
    with pytest.raises(ConfigError, match="peak_flops has no figure for fp16; it has: bf16, fp32"):
        mlp_graph(8, 8, 8, 1, "fp16", **common)
    with pytest.raises(ConfigError, match="tensor_size=0"):
        mlp_graph(8, 8, 8, 1, cluster=A100, tensor_size=0)
    with pytest.raises(ConfigError, match="size=64 ranks, 1 apart, do not fit 32 devices"):
        mlp_graph(8, 8, 8, 1, cluster=A100, tensor_size=64)
