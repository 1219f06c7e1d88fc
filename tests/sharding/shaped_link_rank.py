"""One of two ranks at the ends of a shaped link; started by test_layout_on_a_slow_link.py inside a network namespace.

Describes the machine by measuring it, lets the search decide over three MLPs (below the break-even width, above it, and
a bottleneck whose weights must be split), and times the variants in turn: every rank computes everything; Megatron-LM's
column and row split; row, then column with gathered output.
"""

from __future__ import annotations

import copy
import datetime
import json
import sys
import time
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from lightning_megapar.layers.collectives import TensorRanks, copy_in, gather_last, reduce_out, split_last
from lightning_megapar.layers.mlp import GeluMLP
from lightning_megapar.planner import Cluster
from lightning_megapar.planner.measure import measure_factors, measure_flops, measure_link, measure_memory_bandwidth
from lightning_megapar.sharding import shard_module
from lightning_megapar.sharding.layouts.graphs import break_even_fan_in, column_row_pattern, mlp_graph
from lightning_megapar.sharding.layouts.plans import evaluate
from lightning_megapar.sharding.layouts.search import search

HIDDEN, TOKENS, ROUNDS = 256, 256, 7


class RowThenColumn(torch.nn.Module):
    """Reduces the narrow tensor and gathers the wide one."""

    def __init__(self, whole: GeluMLP, ranks: TensorRanks) -> None:
        super().__init__()
        self.ranks = ranks
        self.up = torch.nn.Parameter(whole.up.weight.detach().chunk(ranks.size, 1)[ranks.rank].clone())
        self.down = torch.nn.Parameter(whole.down.weight.detach().chunk(ranks.size, 0)[ranks.rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = reduce_out(F.linear(split_last(x, self.ranks), self.up), self.ranks)
        inside = F.gelu(inside, approximate="tanh")
        return gather_last(F.linear(copy_in(inside, self.ranks), self.down), self.ranks)


def slowest(value: float) -> float:
    held = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return held.item()


def describe() -> Cluster:
    link = measure_link(sizes=(1 << 16, 1 << 19, 1 << 21), repeats=5)
    flops = 1 / slowest(1 / measure_flops(TOKENS, HIDDEN, 4096, repeats=15))
    memory = 1 / slowest(1 / measure_memory_bandwidth())
    return Cluster(1, 2, flops, memory, link, link, collective_factors=measure_factors(link), name="two namespaces")


def step(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One forward and backward; the gradient of the input."""
    x = x.clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    module(x).sum().backward()
    assert x.grad is not None
    return x.grad


def compare(cluster: Cluster, hidden: int, ffn: int, *, split_weights: bool = False) -> dict:
    graph = mlp_graph(hidden, ffn, TOKENS, 1, "fp32", cluster=cluster, tensor_size=2)
    pattern = evaluate(graph, column_row_pattern(graph))
    plan = search(graph, prefer=pattern.strategies, parameter_bytes=pattern.parameter_bytes if split_weights else None)
    torch.manual_seed(0)
    whole = GeluMLP(hidden, ffn, bias=False)
    split = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    shard_module(split, mesh, False)
    variants = {"replicate": whole, "pattern": split, "row_column": RowThenColumn(whole, TensorRanks(mesh))}
    x = torch.randn(1, TOKENS, hidden)
    times: dict[str, list[float]] = {name: [] for name in variants}
    gradients = {}
    for _ in range(ROUNDS):
        for name, module in variants.items():
            dist.barrier()
            start = time.perf_counter()
            gradients[name] = step(module, x)
            times[name].append(slowest(time.perf_counter() - start))
    for name in ("pattern", "row_column"):
        expected = gradients["replicate"]
        assert (gradients[name] - expected).abs().max() <= 1e-5 * expected.abs().max()
    return {
        "sizes": (hidden, ffn),
        "chosen": plan.strategies,
        "fixed": pattern.strategies,
        "predicted": {
            "chosen": plan.seconds,
            "pattern": pattern.seconds,
            "replicate": evaluate(graph, {o.name: "replicate" for o in graph.operations}).seconds,
        },
        "measured": {name: median(taken[1:]) for name, taken in times.items()},
    }


def main(rank: int, address: str, result: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    cluster = describe()
    # A pair in training pays above a third of the break-even of one row layer.
    even = break_even_fan_in(4, cluster.flops_per_second("fp32"), cluster.inter_node.bandwidth) / 3
    narrow, wide = (max(64, round(even * factor / 64) * 64) for factor in (0.1, 6))
    cases = [compare(cluster, HIDDEN, narrow), compare(cluster, HIDDEN, wide)]
    cases.append(compare(cluster, 4 * HIDDEN, 32, split_weights=True))
    results = {"cluster": cluster.to_dict(), "even": even, "cases": cases}
    if rank == 0:
        with open(result, "w", encoding="utf-8") as file:
            json.dump(results, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
