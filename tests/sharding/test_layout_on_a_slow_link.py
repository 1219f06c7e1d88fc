"""Decisions of the layout search confirmed by clocks: two ranks in two network namespaces, joined by a shaped link."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

RATE = "200mbit"
HERE = Path(__file__).parent


def command(line: str) -> None:
    subprocess.run(line.split(), check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def namespaces() -> Iterator[list[tuple[str, str]]]:
    """Pairs (namespace, network interface); each end of the link sends at most RATE."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (package iproute2)")
    ends = [(f"megapar{os.getpid()}{end}", f"mp{os.getpid()}{end}") for end in "ab"]
    try:
        try:
            for space, _ in ends:
                command(f"ip netns add {space}")
                command(f"ip -n {space} link set lo up")
            (a, a_port), (b, b_port) = ends
            command(f"ip -n {a} link add {a_port} type veth peer name {b_port} netns {b}")
            for number, (space, port) in enumerate(ends, 1):
                command(f"ip -n {space} addr add 10.231.7.{number}/24 dev {port}")
                command(f"ip -n {space} link set {port} up")
                command(f"ip netns exec {space} tc qdisc add dev {port} root tbf rate {RATE} burst 64kb latency 400ms")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no shaped link here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        yield ends
    finally:
        for space, _ in ends:  # takes the link with it
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, timeout=20)


@pytest.mark.slow
def test_clocks_agree_with_decisions_on_a_slow_link(namespaces: list[tuple[str, str]], tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    root = HERE.parent.parent
    ranks = []
    for rank, (space, port) in enumerate(namespaces):
        environment = os.environ | {"GLOO_SOCKET_IFNAME": port, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        line = ["ip", "netns", "exec", space, sys.executable, str(HERE / "shaped_link_rank.py"), str(rank)]
        line += ["10.231.7.1:29531", str(result)]
        with (tmp_path / f"rank{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen(line, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    logs = "\n".join((tmp_path / f"rank{rank}.log").read_text() for rank in (0, 1))
    assert codes == [0, 0], logs

    found = json.loads(result.read_text())
    print(json.dumps(found, indent=1))
    narrow, wide, bottleneck = found["cases"]
    pattern = {"up": "column", "act(up)": "hidden", "down": "row"}
    assert all(case["fixed"] == pattern for case in found["cases"])

    # Below the break-even the search leaves the MLP whole. By the model the pattern takes 5.5 times as long.
    assert narrow["chosen"] == dict.fromkeys(pattern, "replicate")
    assert narrow["measured"]["pattern"] > 1.4 * narrow["measured"]["replicate"], found

    # Far above it splits the MLP. By the model it takes 0.6 of the time.
    assert wide["chosen"] == pattern
    assert wide["measured"]["pattern"] < 0.9 * wide["measured"]["replicate"], found

    # A bottleneck whose weights must be split: gather the wide tensor, half of the bytes of an all-reduce.
    assert (bottleneck["chosen"]["up"], bottleneck["chosen"]["down"]) == ("row", "column")
    assert bottleneck["measured"]["row_column"] < 0.9 * bottleneck["measured"]["pattern"], found
