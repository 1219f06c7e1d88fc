from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import RankPool

from lightning_megapar.config import AXES, ConfigError, Layout
from lightning_megapar.planner import Cluster, Link, Ring
from lightning_megapar.planner.cluster import COLLECTIVES
from lightning_megapar.planner.measure import (
    fit_link,
    measure_factors,
    measure_flops,
    measure_link,
    measure_memory_bandwidth,
)

FAST, SLOW = Link(1e-6, 200e9), Link(1e-5, 25e9)


def cluster(**changes) -> Cluster:
    values = {"devices_per_node": 8, "nodes": 4, "peak_flops": {"bf16": 312e12, "fp32": 19.5e12}}
    values |= {"memory_bandwidth": 2e12, "intra_node": FAST, "inter_node": SLOW, "launch_seconds": 5e-6}
    return Cluster(**(values | changes))  # type: ignore[arg-type]


LINKS = st.builds(Link, st.floats(0, 1), st.floats(1, 1e12))


# ---- collectives ----


@settings(deadline=None, derandomize=True)
@given(LINKS, st.integers(1, 9), st.integers(1, 10**9))
def test_ring_collectives_take_what_their_rounds_take(link: Link, size: int, nbytes: int) -> None:
    """Play the rounds: in each, every rank passes one n-th of the message to its neighbour."""

    def rounds(chunks_to_see: int) -> float:
        seconds, seen = 0.0, [{rank} for rank in range(size)]
        while any(len(s) < chunks_to_see for s in seen):
            seen = [s | seen[rank - 1] for rank, s in enumerate(seen)]
            seconds += link.latency + nbytes / size / link.bandwidth
        return seconds

    ring = Ring(size, link)
    assert ring.all_gather(nbytes) == pytest.approx(rounds(size))
    assert ring.reduce_scatter(nbytes) == ring.all_to_all(nbytes) == ring.all_gather(nbytes)
    assert ring.all_reduce(nbytes) == pytest.approx(2 * rounds(size))
    assert ring.send(nbytes) == (0.0 if size == 1 else pytest.approx(link.latency + nbytes / link.bandwidth))


def test_the_published_bus_bandwidth_follows() -> None:
    """Bus bandwidth is 2 (n-1)/n bytes over seconds: the link's own when the message is long."""
    nbytes = 2**34
    assert 2 * 7 / 8 * nbytes / Ring(8, FAST).all_reduce(nbytes) == pytest.approx(FAST.bandwidth, rel=1e-3)


# ---- which link a group uses ----


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 8), st.integers(1, 4), st.data())
def test_a_group_uses_the_slow_link_exactly_when_some_group_leaves_its_node(
    per_node: int, nodes: int, data: st.DataObject
) -> None:
    sizes = {axis: data.draw(st.integers(1, 4), axis) for axis in AXES}
    layout = Layout(**sizes)
    described = cluster(devices_per_node=per_node, nodes=nodes)
    for axis in AXES:
        inner = math.prod(sizes[a] for a in AXES[AXES.index(axis) :])
        if inner > described.devices:
            with pytest.raises(ConfigError, match=f"do not fit {described.devices} devices"):
                described.axis_ring(axis, layout)
            continue
        stride = inner // sizes[axis]
        crosses = any(
            len({(start + i * stride) // per_node for i in range(sizes[axis])}) > 1
            for block in range(0, described.devices - inner + 1, inner)
            for start in range(block, block + stride)
        )
        ring = described.axis_ring(axis, layout)
        assert ring.size == sizes[axis]
        if crosses:
            assert ring.link == SLOW
        elif ring.size > 1 and described.devices % inner == 0 and (nodes == 1 or per_node % inner == 0):
            assert ring.link == FAST


def test_axis_links_replace_both() -> None:
    optical = Link(2e-6, 50e9)
    described = cluster(axis_links={"data": optical})
    layout = Layout(data=4, tensor=8)
    assert described.axis_ring("data", layout) == Ring(4, optical)
    assert described.axis_ring("tensor", layout) == Ring(8, FAST)
    assert cluster().axis_ring("data", layout) == Ring(4, SLOW)


def test_a_library_that_is_no_ring_is_described_by_factors() -> None:
    ring = cluster(collective_factors={"reduce_scatter": 2}).ring(4)
    assert ring.reduce_scatter(1e6) == ring.all_reduce(1e6) == 2 * ring.all_gather(1e6)
    assert ring.all_reduce(1e6) == cluster().ring(4).all_reduce(1e6)


# ---- kernels ----


def test_a_kernel_takes_the_longest_of_three() -> None:
    described = cluster(efficiency=0.5)
    assert described.kernel_seconds(156e12, 0, "bf16") == pytest.approx(1.0)
    assert described.kernel_seconds(156e12, 0, "float32") == pytest.approx(16.0)
    assert described.kernel_seconds(0, 2e12, "torch.bfloat16") == pytest.approx(1.0)
    assert described.kernel_seconds(1, 1, "bf16") == 5e-6
    assert cluster(peak_flops=1e9).kernel_seconds(1e9, 0, "fp64") == 1.0


# ---- files ----


CLUSTERS = st.builds(
    cluster,
    devices_per_node=st.integers(1, 72),
    nodes=st.integers(1, 4096),
    peak_flops=st.one_of(
        st.floats(1, 1e16), st.dictionaries(st.sampled_from(["fp64", "fp32", "bf16"]), st.floats(1, 1e16), min_size=1)
    ),
    memory_bandwidth=st.floats(1, 1e13),
    intra_node=LINKS,
    inter_node=LINKS,
    launch_seconds=st.floats(0, 1),
    efficiency=st.floats(0.01, 1),
    collective_factors=st.dictionaries(st.sampled_from(COLLECTIVES), st.floats(0.1, 10)),
    axis_links=st.dictionaries(st.sampled_from(AXES), LINKS),
    name=st.sampled_from(["", "DGX A100", "yes"]),
)


@settings(deadline=None, derandomize=True)
@given(CLUSTERS)
def test_files_give_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, described: Cluster) -> None:
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    described.to_yaml(path)
    assert Cluster.from_yaml(path) == described
    assert Cluster.from_dict(described.to_dict()) == described


def test_a_file_as_people_write_it(tmp_path: Path) -> None:
    """YAML 1.1 takes 312e12 for text."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "devices_per_node: 8\nnodes: 4\npeak_flops: {bfloat16: 312e12, float32: 19.5e12}\nmemory_bandwidth: 2e12\n"
        "launch_seconds: 5e-6\nintra_node: {latency: 1e-6, bandwidth: 200e9}\n"
        "inter_node: {latency: 1e-5, bandwidth: 25e9}\n"
    )
    assert Cluster.from_yaml(path) == cluster()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, r"nodes=0: expected a positive integer \(nearest valid: 1\)"),
        ({"devices_per_node": True}, "devices_per_node=True: expected a positive integer"),
        ({"memory_bandwidth": "fast"}, "memory_bandwidth='fast': expected a positive number"),
        ({"launch_seconds": -1}, "launch_seconds=-1: expected a number of 0 or more"),
        ({"efficiency": 1.5}, r"efficiency=1.5: a share of the peak is at most 1 \(nearest valid: 1\)"),
        ({"peak_flops": {}}, "peak_flops={}: expected a number or one number per dtype"),
        ({"peak_flops": {"bf61": 1}}, "dtype=bf61 is not one of fp64, fp32, bf16, fp16; did you mean 'bf16'"),
        ({"peak_flops": {"bf16": 0}}, "peak_flops.bf16=0: expected a positive number"),
        ({"intra_node": {"latency": 0}}, "intra_node: bandwidth missing"),
        ({"inter_node": {"latency": 0, "bandwith": 1}}, "unknown argument 'bandwith'; did you mean 'bandwidth'"),
        ({"inter_node": {"latency": 0, "bandwidth": 0}}, "inter_node.bandwidth=0.*: expected a positive number"),
        ({"inter_node": 5}, "inter_node=5: expected a mapping with latency and bandwidth"),
        ({"collective_factors": {"reduce": 1}}, "collective_factors: unknown argument 'reduce'"),
        ({"collective_factors": {"all_gather": 0}}, "collective_factors.all_gather=0: expected a positive number"),
        ({"collective_factors": 2}, "collective_factors=2: expected a mapping to numbers"),
        ({"axis_links": 2}, "axis_links=2: expected a mapping from axis to link"),
        ({"axis_links": {"tensors": FAST}}, "axis_links: unknown argument 'tensors'; did you mean 'tensor'"),
    ],
)
def test_wrong_settings_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster(**changes)
    with pytest.raises(ConfigError, match=message):
        Cluster.from_dict(cluster().to_dict() | changes)


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("devices_per_node: 8\nnode: 4\n")
    with pytest.raises(ConfigError, match=r"mine.yaml: cluster: unknown argument 'node'; did you mean 'nodes'"):
        Cluster.from_yaml(path)
    path.write_text("devices_per_node: 8\nnodes: 4\n")
    with pytest.raises(ConfigError, match="missing peak_flops, memory_bandwidth, intra_node, inter_node"):
        Cluster.from_yaml(path)
    path.write_text("[: 8")
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        Cluster.from_yaml(path)
    with pytest.raises(ConfigError, match=r"size=5 ranks, 8 apart, do not fit 32 devices .* nearest valid size: 4"):
        cluster().ring(5, 8)
    with pytest.raises(ConfigError, match="peak_flops has no figure for fp16; it has: bf16, fp32"):
        cluster().kernel_seconds(1, 1, "fp16")


# ---- measuring ----


@settings(deadline=None, derandomize=True)
@given(st.builds(Link, st.floats(1e-7, 1e-2), st.floats(1e6, 1e12)), st.integers(2, 16))
def test_a_fit_recovers_the_link(link: Link, size: int) -> None:
    ring = Ring(size, link)
    # Sizes around the one at which latency and bandwidth weigh the same; elsewhere one of them cannot be seen.
    middle = link.latency * link.bandwidth * size
    samples = [(middle * factor, ring.all_reduce(middle * factor)) for factor in (0.05, 0.3, 1, 4, 20)]
    fitted = fit_link(samples, size)
    assert fitted.latency == pytest.approx(link.latency, rel=1e-6)
    assert fitted.bandwidth == pytest.approx(link.bandwidth, rel=1e-6)


def test_a_fit_has_no_negative_latency() -> None:
    fitted = fit_link([(1e6, 0.9), (2e6, 2.1)], 2)
    assert fitted.latency == 0.0
    assert fitted.bandwidth == pytest.approx(1e6, rel=0.3)


@pytest.mark.parametrize(
    ("samples", "size", "message"),
    [
        ([(1e6, 1.0), (2e6, 2.0)], 1, "fitted to two ranks and two sizes or more"),
        ([(1e6, 1.0), (1e6, 1.1)], 2, "fitted to two ranks and two sizes or more"),
        ([(1e6, 1.0), (2e6, 0.0)], 2, "every time must be positive"),
        ([(1e6, 2.0), (2e6, 1.0)], 2, "the time does not grow with the size; measure larger messages"),
    ],
)
def test_what_cannot_be_fitted(samples: list, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_link(samples, size)


def measured() -> tuple[Link, dict[str, float], float, float]:
    link = measure_link(sizes=(1 << 10, 1 << 18, 1 << 22), repeats=3)
    factors = measure_factors(link, nbytes=1 << 16, repeats=3)
    return link, factors, measure_flops(64, 64, 64), measure_memory_bandwidth(1 << 16)


def test_every_rank_measures_the_same_link(pool: RankPool) -> None:
    results = pool.run(measured, 2)
    (link, factors, *rates), (other_link, other_factors, *other_rates) = results
    assert link == other_link and factors == other_factors
    assert all(rate > 0 for rate in (*rates, *other_rates))
    # What was measured makes a valid description.
    described = cluster(intra_node=link, inter_node=link, collective_factors=factors)
    assert described.collective_factors.keys() == {"all_gather", "reduce_scatter", "all_to_all"}
