"""A rank that becomes slow: when it is found, what moves, and how much of the lost time comes back.

Blocks sleep (forward, and twice as long backward), so that two cores stand for four ranks and a slow rank is one whose
blocks sleep longer from a step on. What is trained is real: the losses of the balanced run are compared with those of
the same run without balancing.

* ``layers``: four stages, 32 blocks, one stage at half speed.
* ``replicas``: four replicas, one at half speed.
* ``noise``: four stages whose blocks scatter by 20 %, nobody slow: nothing may be found or moved in 100 steps.

The time that could come back is what the best split costs less than the one before (simulated), and, harder to reach,
what layers would cost less that could be divided at will. Aim: found within 5 steps, at least 85 % of the possible
gain.

    python recipes/benchmarks/rebalance.py --out rebalance.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import socket
import statistics
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megapar import MegaParStrategy
from lightning_megapar.pipeline import StageCosts, build_schedule, simulate
from lightning_megapar.pipeline.planning.partition import partition
from lightning_megapar.pipeline.schedules import loop_placement

RANKS = 4
BLOCKS = 32
SLOW_RANK = 1
AIMS = {"found_after": 5, "recovered": 0.85}


class Pace:
    """How much slower than usual this rank's blocks are, and how much they scatter."""

    factor = 1.0
    noise = 0.0
    source = random.Random(0)

    @classmethod
    def sleep(cls, seconds: float) -> None:
        time.sleep(seconds * cls.factor * (cls.source.lognormvariate(0, cls.noise) if cls.noise else 1.0))


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        Pace.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        Pace.sleep(2 * ctx.seconds)
        return gradients[0], None


class Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.linear(_Sleep.apply(x, self.seconds)))
        return out


class Sleeper(LightningModule):
    """A stack of blocks that sleep."""

    def __init__(self, blocks: int, seconds: float) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.Sequential(*[Block(seconds) for _ in range(blocks)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(self.blocks(self.inp(batch[0]))), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Clock(Callback):
    """Seconds and losses of every step; slows this rank down from a step on."""

    def __init__(self, slow_from: int, factor: float) -> None:
        self.slow_from, self.factor = slow_from, factor
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        if batch_idx >= self.slow_from and strategy.global_rank == SLOW_RANK:
            Pace.factor = self.factor
        strategy.barrier()
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


def train(rank: int, token: str, port: int, task: dict[str, Any], out: Any) -> None:
    """One rank of one run."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID=token,
        TORCHELASTIC_RESTART_COUNT="0",
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    Pace.noise, Pace.source = task["noise"], random.Random(rank)
    data = TensorDataset(torch.randn(4096, 8), torch.randint(0, 4, (4096,)))
    loader = DataLoader(data, batch_size=task["microbatches"])  # one sample in each; of each replica
    size = {"layers": "pipeline_parallel_size", "replicas": "data_parallel_size"}[task["layout"]]
    strategy = MegaParStrategy(
        **{size: RANKS}, num_microbatches=task["microbatches"], rebalance=task["rebalance"], timeout_seconds=120
    )
    clock = Clock(task["slow_from"], task["factor"])
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=RANKS,
        max_steps=task["steps"],
        max_epochs=1,
        precision="64-true",
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Sleeper(task["blocks"], task["seconds"]).double(), loader)
    events = [(event.step, event.kind, event.text, event.seconds) for event in strategy.balance_events]
    balance = strategy._rebalancer
    found = {"seconds": clock.seconds, "losses": clock.losses, "events": events}
    found |= {"ranges": balance.ranges, "shares": balance.shares} if balance is not None else {}
    out.put((rank, found))


def run(**task: Any) -> dict[str, Any]:
    """All ranks of one run; what the first one saw."""
    context = mp.get_context("spawn")
    out = context.Queue()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    token = uuid.uuid4().hex
    ranks = [context.Process(target=train, args=(rank, token, port, task, out)) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    found = dict(out.get(timeout=900) for _ in ranks)
    for one in ranks:
        one.join()
    return found[0]  # type: ignore[no-any-return]


def simulated(ranges: Any, shares: Any, seconds: float, factor: float, layout: str) -> float:
    """Seconds of a step: the slowest replica's makespan, or the pipeline's."""
    if layout == "replicas":
        return max(
            3 * seconds * BLOCKS_OF_REPLICA * n * (factor if d == SLOW_RANK else 1) for d, n in enumerate(shares)
        )
    loads = [(stop - start) * seconds * (factor if r == SLOW_RANK else 1) for r, (start, stop) in enumerate(ranges)]
    schedule = build_schedule("1f1b", RANKS, shares[0])
    return simulate(schedule, StageCosts(loads, [2 * load for load in loads], 0.0)).makespan


BLOCKS_OF_REPLICA = 4


def scenario(layout: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A run that is balanced, the same one that is not, and what would be best."""
    factor, slow_from, steps = 2.0, 8, arguments.steps
    blocks = BLOCKS if layout == "layers" else BLOCKS_OF_REPLICA
    common = {
        "layout": layout,
        "blocks": blocks,
        "seconds": arguments.seconds,
        "microbatches": arguments.microbatches,
        "slow_from": slow_from,
        "factor": factor,
        "noise": 0.0,
    }
    balanced = run(**common, steps=steps, rebalance=layout)
    still = run(**common, steps=steps, rebalance=None)
    slow_at = next((step for step, kind, *_ in balanced["events"] if kind == "slow"), None)
    moved_at = next((step for step, kind, *_ in balanced["events"] if kind == layout), None)
    even = tuple((blocks // RANKS * r, blocks // RANKS * (r + 1)) for r in range(RANKS))
    shares = (arguments.microbatches,) * RANKS
    unbalanced = statistics.median(still["seconds"][slow_from + 1 :])
    after = statistics.median(balanced["seconds"][(moved_at or steps) + 1 :] or still["seconds"])
    if layout == "layers":
        speeds = [1 / factor if rank == SLOW_RANK else 1.0 for rank in range(RANKS)]
        best = partition([1.0] * blocks, loop_placement(RANKS, 1), speeds=speeds).ranges
        least = simulated(best, shares, arguments.seconds, factor, layout)
        divisible = 3 * arguments.seconds * blocks / sum(speeds) * (arguments.microbatches + RANKS - 1)
    else:
        whole = arguments.microbatches * RANKS
        rates = [1 / factor if rank == SLOW_RANK else 1.0 for rank in range(RANKS)]
        divisible = 3 * arguments.seconds * blocks * whole / sum(rates)
        least = simulated(even, balanced["shares"], arguments.seconds, factor, layout)
    now = simulated(even, shares, arguments.seconds, factor, layout)
    overhead = unbalanced / now  # what a step takes besides sleeping
    losses = max(abs(a - b) / abs(b) for a, b in zip(balanced["losses"], still["losses"]))
    return {
        "before": statistics.median(balanced["seconds"][1:slow_from]),
        "unbalanced": unbalanced,
        "balanced": after,
        "best": least * overhead,
        "recovered": (unbalanced - after) / (unbalanced - least * overhead),
        "recovered_of_divisible": (unbalanced - after) / (unbalanced - divisible * overhead),
        "found_after": None if slow_at is None else slow_at - slow_from,
        "moved_after": None if moved_at is None else moved_at - slow_from,
        "seconds_of_move": next((s for _, kind, _, s in balanced["events"] if kind == layout), None),
        "losses_differ": losses,
        "events": [text for _, _, text, _ in balanced["events"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.004, help="a block's forward")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--noisy-steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.steps < 20:
        parser.error("--steps must be 20 or more: eight before a rank becomes slow, five to find it, some to measure")
    found: dict[str, Any] = {layout: scenario(layout, arguments) for layout in ("layers", "replicas")}
    noisy = run(
        layout="layers",
        blocks=BLOCKS // 2,
        seconds=arguments.seconds,
        microbatches=4,
        slow_from=arguments.noisy_steps,
        factor=1.0,
        noise=0.2,
        steps=arguments.noisy_steps,
        rebalance=True,
    )
    found["noise"] = {"steps": arguments.noisy_steps, "events": [text for _, _, text, _ in noisy["events"]]}
    table = Table("", "layers", "replicas", title="one of four ranks at half speed; seconds per step")
    for row in (
        "before",
        "unbalanced",
        "balanced",
        "best",
        "recovered",
        "recovered_of_divisible",
        "found_after",
        "moved_after",
        "seconds_of_move",
        "losses_differ",
    ):
        values = (found[layout][row] for layout in ("layers", "replicas"))
        table.add_row(row.replace("_", " "), *(f"{v:.3g}" if isinstance(v, float) else str(v) for v in values))
    console = Console()
    console.print(table)
    console.print(f"{arguments.noisy_steps} noisy steps: {len(noisy['events'])} events {found['noise']['events']}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"aims": AIMS, **found}, indent=2))


if __name__ == "__main__":
    sys.exit(main())
