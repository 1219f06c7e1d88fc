"""Pipeline schedules on four ranks whose stages sleep: measured against simulated, and against torch's pipelining.

A stage sleeps 50 ms for a microbatch's forward, 50 ms for the gradient of its input and 50 ms for that of its weights
(with two chunks half of it each), so that what is measured is the runtime: its order, its messages, its waiting. For
every schedule: the median time of a step over the makespan that the simulator gives without communication (aim: at
most 1.05), and the idle share of the ranks; for those that ``torch.distributed.pipelining`` has as well, its time in
the same run, in turns (aim: never slower).

    python recipes/benchmarks/pipeline.py --steps 5 --out pipeline.json

gloo, CPU, one thread per rank; sleeping stages need no cores of their own, but a busy machine wakes them late.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules

from lightning_megapar.config import Layout
from lightning_megapar.layers.deferral import Deferral, put_off
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.pipeline import StageCosts, build_schedule, simulate
from lightning_megapar.pipeline.engine.runtime import PipelineRuntime

RANKS = 4
WIDTH = 64
NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "dualpipe_v")
TORCH: dict[str, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
"""The same schedules in ``torch.distributed.pipelining``."""
AIMS = {"over_simulated": 1.05, "idle_over_1f1b": {"zb_h1": 0.55, "zbv": 0.4}}


class _Input(torch.autograd.Function):
    """The path of the activations: sleeps forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


class _Weight(torch.autograd.Function):
    """The path of the weights: sleeps in the backward, or later."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float, deferral: Deferral | None) -> Tensor:
        ctx.weight, ctx.seconds, ctx.deferral = weight, seconds, deferral
        return torch.zeros_like(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        def slowly() -> Tensor:
            time.sleep(ctx.seconds)
            return gradient.clone()

        return put_off(ctx.deferral, ctx.weight, slowly), None, None


class Sleeper(nn.Module):
    """A chunk of the model: (batch, width) in and out.

    Args:
        seconds: of its forward, of its input's gradient and of its weight's gradient.
        deferral: where weight gradients wait under our runtime.
    """

    def __init__(self, seconds: float, deferral: Deferral | None = None) -> None:
        super().__init__()
        self.seconds, self.deferral = seconds, deferral
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return _Input.apply(x, self.seconds) + _Weight.apply(self.weight, self.seconds, self.deferral)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def ours(rank: int, name: str, microbatches: int, seconds: float) -> Callable[[], float]:
    """A step of our runtime; it returns the seconds that this rank worked."""
    schedule = build_schedule(name, RANKS, microbatches)
    deferral = Deferral()
    own = schedule.placement[rank]
    chunks = [Sleeper(seconds / len(own), deferral) for _ in own]
    last = schedule.num_virtual_stages - 1
    mesh = ParallelMesh(Layout(pipeline=RANKS), rank, placement=schedule.placement)
    runtime = PipelineRuntime(mesh, torch.device("cpu"))
    # The first stage has as much work as the others only if somebody wants its input's gradient.
    x, target = torch.zeros(1, WIDTH, requires_grad=True), torch.ones(1, WIDTH)

    def forward(chunk: int, microbatch: int, received: Any) -> tuple[bool, Any]:
        output = chunks[chunk](x if received is None else received)
        if own[chunk] == last:
            return True, loss_of(output, target) / microbatches
        return False, output

    def step() -> float:
        runtime.spans = []
        runtime.run(schedule, forward, lambda _, loss: loss.backward(), postponed=deferral)
        return sum(span.end - span.start for span in runtime.spans)

    return step


def theirs(rank: int, name: str, microbatches: int, seconds: float) -> Callable[[], float]:
    """A step of torch's pipelining."""
    schedule = build_schedule(name, RANKS, microbatches)
    own, total = schedule.placement[rank], schedule.num_virtual_stages
    device, output = torch.device("cpu"), torch.zeros(1, WIDTH, requires_grad=True)
    stages: Any = [pipelining.PipelineStage(Sleeper(seconds / len(own)), k, total, device, output, output) for k in own]
    kind = getattr(torch_schedules, TORCH[name])
    made = kind(stages if len(own) > 1 else stages[0], microbatches, loss_fn=loss_of)
    x, target = torch.zeros(microbatches, WIDTH, requires_grad=True), torch.ones(microbatches, WIDTH)

    def step() -> float:
        inputs = (x,) if 0 in own else ()
        made.step(*inputs, **({"target": target, "losses": []} if total - 1 in own else {}))
        return 0.0

    return step


def timed(step: Callable[[], float]) -> tuple[float, list[float]]:
    """Seconds from the moment when the first rank starts to the end of the last one, and each rank's seconds of work.

    All ranks share one machine and so one clock. Each rank's own time alone would be too short where the one that ends
    last left the barrier late, as happens on a busy machine.
    """
    dist.barrier()
    began = time.perf_counter()
    worked = step()
    figures = torch.tensor([began, time.perf_counter(), worked], dtype=torch.float64)
    everybody = [torch.zeros_like(figures) for _ in range(RANKS)]
    dist.all_gather(everybody, figures)
    starts, ends, works = torch.stack(everybody).T.tolist()
    return max(ends) - min(starts), works


def work(rank: int, meeting: str, arguments: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    # By a file: a free port may be somebody else's by the time that a busy machine has started the ranks.
    dist.init_process_group("gloo", store=dist.FileStore(meeting, RANKS), rank=rank, world_size=RANKS)
    found: dict[str, Any] = {}
    for name in arguments.schedules:
        steps = {"ours": ours(rank, name, arguments.microbatches, arguments.seconds)}
        if name in TORCH and hasattr(torch_schedules, TORCH[name]) and not arguments.alone:
            steps["torch"] = theirs(rank, name, arguments.microbatches, arguments.seconds)
        for step in steps.values():
            timed(step)
        runs: dict[str, list[float]] = {who: [] for who in steps}
        idle = []
        for _ in range(arguments.steps):
            for who, step in steps.items():
                seconds, worked = timed(step)
                runs[who].append(seconds)
                if who == "ours":
                    idle.append(1 - sum(worked) / RANKS / seconds)
        found[name] = {"runs": runs, "idle": statistics.median(idle)}
        if rank == 0:
            print(f"{name}: " + ", ".join(f"{k} {statistics.median(v):.3f} s" for k, v in runs.items()), flush=True)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def summary(found: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios by schedule."""
    costs = StageCosts(arguments.seconds, arguments.seconds, arguments.seconds)
    rows: dict[str, Any] = {}
    for name, one in found.items():
        simulated = simulate(build_schedule(name, RANKS, arguments.microbatches), costs).makespan
        medians = {who: statistics.median(runs) for who, runs in one["runs"].items()}
        rows[name] = {
            "seconds": medians["ours"],
            "simulated": simulated,
            "over_simulated": medians["ours"] / simulated,
            "idle": one["idle"],
            "torch_seconds": medians.get("torch"),
            "over_torch": medians["ours"] / medians["torch"] if "torch" in medians else None,
            "runs": one["runs"],
        }
    if "1f1b" in rows:
        for row in rows.values():
            row["idle_over_1f1b"] = row["idle"] / rows["1f1b"]["idle"]
    return rows


def show(rows: dict[str, Any]) -> None:
    table = Table(title=f"{RANKS} stages that sleep")
    for heading in ("schedule", "measured", "simulated", "ratio", "idle", "of 1f1b's", "torch", "ours / torch"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for name, row in rows.items():
        torch_seconds, over = row["torch_seconds"], row["over_torch"]
        table.add_row(
            name,
            f"{row['seconds']:.3f} s",
            f"{row['simulated']:.3f} s",
            f"{row['over_simulated']:.3f}",
            f"{row['idle']:.1%}",
            f"{row['idle_over_1f1b']:.2f}" if "idle_over_1f1b" in row else "",
            "" if torch_seconds is None else f"{torch_seconds:.3f} s",
            "" if over is None else f"{over:.3f}",
        )
    Console(width=120).print(table)


def run_ranks(meeting: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 found.

    Args:
        meeting: path of a file, not there yet, by which the ranks find each other.
        arguments: of the program.
    """
    # Ranks are forked from a process that has imported everything and computed nothing: five imports would take a
    # busy machine minutes.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["lightning_megapar.step", "torch.distributed.pipelining"])
    results = context.Queue()
    ranks = [context.Process(target=work, args=(rank, meeting, arguments, results)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    found: dict[str, Any] | None = None
    while found is None:
        try:
            found = results.get(timeout=1.0)
        except Empty:
            if any(process.exitcode for process in ranks):
                for process in ranks:
                    process.terminate()
                raise SystemExit("a rank failed; its traceback stands above") from None
    for process in ranks:
        process.join()
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.05, help="of each third of a stage's work")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="without torch's pipelining")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(str(Path(folder) / "meeting"), arguments)
    rows = summary(found, arguments)
    show(rows)
    if arguments.out:
        figures = {"ranks": RANKS, "microbatches": arguments.microbatches, "schedules": rows, "aims": AIMS}
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
