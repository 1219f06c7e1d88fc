"""Layouts priced in seconds on a described cluster, and what the chooser makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_megapar.config import ConfigError
from lightning_megapar.planner.cluster import Cluster, Link
from lightning_megapar.sharding.chooser.choose import choose
from lightning_megapar.sharding.chooser.pricing import Pricing, given_cluster


def cluster(bandwidth: float, latency: float = 1e-6) -> Cluster:
    link = Link(latency, bandwidth)
    return Cluster(8, 1, 1e14, 2e12, link, link, launch_seconds=2e-6)


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


@settings(max_examples=40, deadline=None)
@given(
    width=st.sampled_from([64, 256, 1024, 4096]),
    inner=st.sampled_from([64, 512, 4096]),
    tokens=st.sampled_from([16, 512, 8192]),
    bandwidth=st.sampled_from([1e8, 1e10, 3e11]),
    size=st.sampled_from([2, 4, 8]),
)
def test_never_slower_than_the_pattern_or_than_cutting_nothing(
    width: int, inner: int, tokens: int, bandwidth: float, size: int
) -> None:
    pricing = Pricing(cluster(bandwidth), size, "bf16")
    price = pricing.pair({"up": (width, inner)}, "down", (inner, width), (1, tokens, width), 0)
    assert price is not None
    assert price.seconds <= min(price.whole, price.pattern) * (1 + 1e-9)


def test_attention_by_heads_with_shared_key_value_heads() -> None:
    columns = {"q": (4096, 4096), "k": (4096, 1024), "v": (4096, 1024)}
    price = Pricing(cluster(3e11), 8, "bf16").pair(columns, "o", (4096, 4096), (2, 2048, 4096), 32)
    assert price is not None
    assert dict(price.styles) == {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
    fused = Pricing(cluster(3e11), 8, "bf16").pair({"qkv": (4096, 12288)}, "o", (4096, 4096), (2, 2048, 4096), 32)
    assert fused is not None and dict(fused.styles) == {"qkv": "colwise", "o": "rowwise"}


@pytest.mark.parametrize(("bandwidth", "cut"), [(1e13, True), (1e5, False)])
def test_the_chooser_cuts_where_it_pays(bandwidth: float, cut: bool) -> None:
    module = MLP(64, 256).double()
    batches = torch.randn(4, 32, 64, dtype=torch.float64), torch.randn(3, 16, 64, dtype=torch.float64)
    runs = [lambda m, x=x: m(x).square().sum() for x in batches]
    device = Cluster(2, 1, 1e9, 1e9, Link(1e-9, bandwidth), Link(1e-9, bandwidth))
    choice = choose(module, 2, runs, pricing=Pricing(device, 2, "fp32"))
    styles = {rule.pattern: rule.style.name for rule in choice.plan.rules}
    assert styles == ({"up": "colwise", "down": "rowwise"} if cut else {})
    assert cut or "cheapest" in choice.found[0].reason


def test_a_cluster_is_read_or_refused(tmp_path: Path) -> None:
    from lightning_megapar import MegaParStrategy

    path = tmp_path / "cluster.yaml"
    cluster(1e9).to_yaml(path)
    assert given_cluster(path) == cluster(1e9)
    assert MegaParStrategy(tensor_parallel_size=2, cluster=str(path)).config.cluster == cluster(1e9)
    for wrong, says in [(3, "cluster=3"), ("none.yaml", "none.yaml"), ({"nodes": 1}, "")]:
        with pytest.raises(ConfigError, match=says):
            MegaParStrategy(tensor_parallel_size=2, cluster=wrong)
