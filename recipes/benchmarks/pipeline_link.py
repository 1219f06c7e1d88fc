"""1F1B over a slow link: measured against simulated, and against a version that does not overlap its messages.

Four stages that sleep, two in each of two network namespaces; a link of a fixed rate joins the namespaces, so that a
boundary takes a good share of a forward to get from stage 1 to stage 2. The same run measures, in this order:

1. the time of one boundary over each connection (half a round trip);
2. steps of this package's runtime, which posts receives early and lets messages travel beside the computation. Aim: at
   most 1.05 of the makespan that the simulator gives for the measured times, messages not occupying the stages;
3. the same order of actions with synchronous messages: a stage sends and receives when it needs to and waits for both,
   as in Megatron-LM's schedule without interleaving (Narayanan et al. 2021).

    sudo python recipes/benchmarks/pipeline_link.py --steps 5 --out link.json

Needs root, ``ip`` and ``tc`` (iproute2); elsewhere it says so and leaves with 0. gloo, CPU, one thread per rank.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_megapar.config import Layout
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.pipeline import StageCosts, build_schedule, simulate
from lightning_megapar.pipeline.engine.runtime import PipelineRuntime

RANKS = 4
AIM = 1.05


class Skipped(Exception):
    """There is no shaped link on this machine; the text says why."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None, None


class Stage:
    """A stage's work on boundaries of ``(elements,)`` float32."""

    def __init__(self, rank: int, arguments: argparse.Namespace) -> None:
        self.rank, self.seconds = rank, (arguments.forward, arguments.backward)
        self.first = torch.zeros(elements(arguments), requires_grad=True)
        self.weight = torch.ones(elements(arguments))

    def forward(self, received: Tensor | None) -> Tensor:
        """The boundary to send; on the last stage the loss (of which the gradient is as large)."""
        self.first.grad = None
        output: Tensor = _Sleep.apply(self.first if received is None else received, *self.seconds)
        return (output * self.weight).sum() if self.rank == RANKS - 1 else output


def elements(arguments: argparse.Namespace) -> int:
    """Of a boundary that takes the wanted share of a forward, by the link's nominal rate."""
    return int(arguments.share * arguments.forward * arguments.mbit * 1e6 / 8 / 4)


def link_seconds(rank: int, count: int, tries: int = 5) -> list[float]:
    """Time of one message over each connection between neighbours; the same list on every rank."""
    buffer, found = torch.zeros(count), torch.zeros(RANKS - 1, dtype=torch.float64)
    for left in range(RANKS - 1):
        times = []
        for _ in range(tries + 1):  # the first opens the connection
            dist.barrier()
            began = time.perf_counter()
            if rank == left:
                dist.send(buffer, left + 1)
                dist.recv(buffer, left + 1)
            elif rank == left + 1:
                dist.recv(buffer, left)
                dist.send(buffer, left)
            times.append((time.perf_counter() - began) / 2)
        if rank == left:
            found[left] = statistics.median(times[1:])
    dist.all_reduce(found)
    return found.tolist()


def overlapped(rank: int, arguments: argparse.Namespace) -> Callable[[], None]:
    """A step of this package's runtime."""
    schedule = build_schedule("1f1b", RANKS, arguments.microbatches)
    runtime = PipelineRuntime(ParallelMesh(Layout(pipeline=RANKS), rank), torch.device("cpu"))
    stage = Stage(rank, arguments)

    def step() -> None:
        runtime.run(
            schedule,
            lambda chunk, microbatch, received: (rank == RANKS - 1, stage.forward(received)),
            lambda microbatch, loss: loss.backward(),
        )

    return step


def synchronous(rank: int, arguments: argparse.Namespace) -> Callable[[], None]:
    """A step in the same order whose messages are posted when they are needed, and waited for."""
    stage, count = Stage(rank, arguments), elements(arguments)
    total, before, after = arguments.microbatches, rank - 1, rank + 1
    ahead = min(RANKS - 1 - rank, total)

    def exchange(send: Tensor | None, target: int, source: int | None) -> Tensor | None:
        """Send to a neighbour and receive from one, either of which may not exist; returns when both are done."""
        works: list[Any] = []
        if send is not None and 0 <= target < RANKS:
            works.append(dist.isend(send.detach(), target))
        received = None
        if source is not None and 0 <= source < RANKS:
            received = torch.empty(count)
            works.append(dist.irecv(received, source))
        for work in works:
            work.wait()
        return received

    def step() -> None:
        waiting: list[tuple[Tensor | None, Tensor]] = []

        def forward(received: Tensor | None) -> Tensor:
            waiting.append((None if received is None else received.requires_grad_(), stage.forward(received)))
            return waiting[-1][1]

        def backward(gradient: Tensor | None) -> Tensor | None:
            received, output = waiting.pop(0)
            output.backward(gradient)
            return None if received is None else received.grad

        for _ in range(ahead):
            exchange(forward(exchange(None, before, before)), after, None)
        received = exchange(None, before, before) if ahead < total else None
        for index in range(ahead, total):
            gradient = backward(exchange(forward(received), after, after))
            received = exchange(gradient, before, before if index < total - 1 else None)
        for _ in range(ahead):
            exchange(backward(exchange(None, after, after)), before, None)

    return step


def timed(step: Callable[[], None]) -> float:
    """Seconds from the moment when all ranks start to the end of the last one."""
    dist.barrier()
    began = time.perf_counter()
    step()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def work(arguments: argparse.Namespace) -> None:
    """One rank, inside its namespace; rank 0 writes the figures."""
    torch.set_num_threads(1)
    rank = arguments.rank
    dist.init_process_group("gloo", init_method=f"tcp://{arguments.address}", rank=rank, world_size=RANKS)
    links = link_seconds(rank, elements(arguments))
    steps = {"overlapped": overlapped(rank, arguments), "synchronous": synchronous(rank, arguments)}
    for step in steps.values():
        timed(step)
    runs: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.steps):
        for name, step in steps.items():
            runs[name].append(timed(step))
    if rank == 0:
        arguments.out.write_text(json.dumps({"links": links, "runs": runs}))
    dist.barrier()
    dist.destroy_process_group()


def summary(found: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Measured over simulated."""
    schedule = build_schedule("1f1b", RANKS, arguments.microbatches)
    rows: dict[str, Any] = {}
    for name, runs in found["runs"].items():
        # A whole backward takes the sum of its halves.
        costs = StageCosts(arguments.forward, arguments.backward, 0.0, found["links"], name == "synchronous")
        seconds, simulated = statistics.median(runs), simulate(schedule, costs).makespan
        rows[name] = {"seconds": seconds, "simulated": simulated, "ratio": seconds / simulated, "runs": runs}
    free = simulate(schedule, StageCosts(arguments.forward, arguments.backward, 0.0)).makespan
    return {
        "links": found["links"],
        "link_over_forward": max(found["links"]) / arguments.forward,
        "without_messages": free,
        "versions": rows,
        "aim": AIM,
    }


def show(figures: dict[str, Any]) -> None:
    share, links = figures["link_over_forward"], figures["links"]
    title = (
        f"1F1B on {RANKS} stages; a boundary takes {max(links) * 1e3:.1f} ms over the link, {share:.0%} of a forward"
    )
    table = Table(title=title)
    for heading in ("messages", "measured", "simulated", "ratio"):
        table.add_column(heading, justify="left" if heading == "messages" else "right")
    words = {"overlapped": "beside the computation", "synchronous": "occupy the stages"}
    for name, row in figures["versions"].items():
        table.add_row(words[name], f"{row['seconds']:.3f} s", f"{row['simulated']:.3f} s", f"{row['ratio']:.3f}")
    table.add_row("none", "", f"{figures['without_messages']:.3f} s", "")
    Console(width=120).print(table)


def command(line: str) -> None:
    try:
        subprocess.run(line.split(), check=True, capture_output=True, text=True, timeout=20)
    except subprocess.CalledProcessError as error:
        raise Skipped(f"no shaped link here: {line}: {error.stderr.strip()}") from error


@contextmanager
def namespaces(mbit: float) -> Iterator[list[tuple[str, str]]]:
    """Two (namespace, network interface), joined by a link of which each end sends at most ``mbit`` Mbit/s.

    Raises:
        Skipped: without root, without iproute2, or where the kernel refuses.
    """
    if os.geteuid() != 0:
        raise Skipped("network namespaces need root")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise Skipped(f"{' and '.join(missing)} not found (package iproute2)")
    ends = [(f"pipelink{os.getpid()}{end}", f"pl{os.getpid()}{end}") for end in "ab"]
    try:
        for space, _ in ends:
            command(f"ip netns add {space}")
            command(f"ip -n {space} link set lo up")
        (a, a_port), (b, b_port) = ends
        command(f"ip -n {a} link add {a_port} type veth peer name {b_port} netns {b}")
        for number, (space, port) in enumerate(ends, 1):
            command(f"ip -n {space} addr add 10.231.8.{number}/24 dev {port}")
            command(f"ip -n {space} link set {port} up")
            shape = f"tbf rate {mbit}mbit burst 64kb latency 400ms"
            command(f"ip netns exec {space} tc qdisc add dev {port} root {shape}")
        yield ends
    finally:
        for space, _ in ends:  # takes the link with it
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, timeout=20)


def launch(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks, the first half of them in one namespace; returns what rank 0 found."""
    with namespaces(arguments.mbit) as ends, tempfile.TemporaryDirectory() as folder:
        result, ranks = Path(folder) / "result.json", []
        for rank in range(RANKS):
            space, port = ends[rank * 2 // RANKS]
            line = ["ip", "netns", "exec", space, sys.executable, str(Path(__file__).resolve()), f"--rank={rank}"]
            line += ["--address=10.231.8.1:29541", f"--out={result}", f"--steps={arguments.steps}"]
            line += [f"--{name}={getattr(arguments, name)}" for name in ("microbatches", *_TIMES)]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": port, "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen(line, env=environment))
        try:
            codes = [process.wait(timeout=arguments.timeout) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(codes):
            raise SystemExit("a rank failed; its traceback stands above")
        found: dict[str, Any] = json.loads(result.read_text())
    return found


_TIMES = ("forward", "backward", "share", "mbit")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--forward", type=float, default=0.1, help="seconds per microbatch and stage")
    parser.add_argument("--backward", type=float, default=0.1, help="likewise, the whole of it")
    parser.add_argument("--share", type=float, default=0.45, help="of a forward that a boundary takes over the link")
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of the link, each way")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.rank is not None:
        work(arguments)
        return
    try:
        figures = summary(launch(arguments), arguments)
        show(figures)
    except Skipped as reason:
        print(f"skipped: {reason}")
        figures = {"skipped": str(reason)}
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
