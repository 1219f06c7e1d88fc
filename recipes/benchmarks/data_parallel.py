"""Data parallelism on two ranks: ``MegaParStrategy`` at every stage of ZeRO, Lightning's DDP, and raw FSDP2.

All train the same GPT from the same weights on the same batches, in the same two processes: threads that take turns of
a few steps, so that a busy machine is busy for all of them. A step's time is that of one whole pass through the loop.
The first step of a turn (cold caches) is not counted. A ratio is the median over the turns of the ratio of the turn's
median step times on rank 0. Memory is measured apart, one contender at a time: the most bytes of tensors that are alive
at once in three steps, activations included, from the profiler's memory events.

    python recipes/benchmarks/data_parallel.py --out data_parallel.json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from turns import StepEnds, Turns, add_sizes, gpt_of, ratio_of, refuse_sizes, train_by_hand

from lightning_megapar.models.language_model import LanguageModel, OptimizerConfig
from lightning_megapar.strategy import MegaParStrategy

DDP, FSDP = "Lightning, DDPStrategy()", "FSDP2 by hand"
STAGES = {f"MegaParStrategy(zero_stage={stage})": stage for stage in range(4)}
AIMS = {(next(iter(STAGES)), DDP): 1.0, (list(STAGES)[3], FSDP): 1.05}
"""Largest ratio of step times to aim at."""
RANKS = 2


class Contenders:
    """One rank's common model, data and clock.

    Args:
        args: the command line.
        names: who takes part.
    """

    def __init__(self, args: argparse.Namespace, names: list[str], rounds: int) -> None:
        self.args = args
        self.config = gpt_of(args)
        self.optimizer = OptimizerConfig(lr=1e-3, schedule="constant")
        self.steps = (rounds + 1) * args.steps
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(0, 257, (self.steps * args.batch * RANKS, args.sequence + 1), generator=generator)
        # The same samples for a rank whoever trains: those that a sampler without shuffling gives it.
        own = rows[dist.get_rank() :: RANKS]
        self.rows = [{"tokens": row[:-1], "labels": row[1:]} for row in own]
        self.turns = Turns(names, args.steps, time.perf_counter)
        self.losses: dict[str, list[torch.Tensor]] = {}
        self.failures: list[BaseException] = []

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, batch_size=self.args.batch)  # type: ignore[arg-type]

    def by_hand(self) -> list[torch.Tensor]:
        """FSDP2 as its tutorial shows it: every block, then the root."""
        module = LanguageModel(self.config, self.optimizer)
        module.configure_model()
        model: Any = module.model
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return train_by_hand(module, self.loader(), self.turns, FSDP)

    def lightning(self, name: str) -> list[torch.Tensor]:
        ends = StepEnds(self.turns, name)
        strategy: Any = DDPStrategy() if name == DDP else MegaParStrategy(zero_stage=STAGES[name])
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=RANKS,
            max_epochs=1,
            callbacks=[ends],
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(LanguageModel(self.config, self.optimizer), self.loader())
        return ends.losses

    def train(self, name: str) -> None:
        self.losses[name] = self.by_hand() if name == FSDP else self.lightning(name)

    def contend(self, name: str) -> None:
        torch.set_num_threads(1)  # a thread's own setting
        self.turns.enter(name)
        try:
            self.train(name)
        except BaseException as error:
            self.failures.append(error)
        finally:
            self.turns.leave(name)

    def run(self) -> None:
        threads = [threading.Thread(target=self.contend, args=(name,)) for name in self.turns.gates]
        for thread in threads:
            thread.start()
        self.turns.gates[next(iter(self.turns.gates))].release()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]


def means(losses: list[torch.Tensor]) -> list[float]:
    """Over the data ranks, whether or not they are so already."""
    own = torch.stack([loss.detach().double() for loss in losses])
    dist.all_reduce(own)
    return (own / RANKS).tolist()


def names_of(args: argparse.Namespace) -> list[str]:
    """Who takes part, in the order of their turns."""
    return [DDP, FSDP, *(name for name, stage in STAGES.items() if stage in args.stages)]


def time_rank(args: argparse.Namespace) -> dict[str, Any]:
    """Step times of all contenders on this rank."""
    names = names_of(args)
    contenders = Contenders(args, names, args.rounds)
    contenders.run()
    seconds = {name: contenders.turns.medians(values) for name, values in contenders.turns.seconds.items()}
    losses = {name: means(contenders.losses[name]) for name in names}
    for name in names:
        parted = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses[DDP]))
        if len(losses[name]) != contenders.steps or parted > 1e-3:
            raise RuntimeError(f"{name} did not train as DDP: {len(losses[name])} steps, losses differ by {parted:.1e}")
    return {"turns": seconds, "last_losses": {name: values[-1] for name, values in losses.items()}}


def weigh_rank(args: argparse.Namespace, name: str) -> int:
    """The most bytes of tensors alive at once on this rank, while ``name`` trains for three steps."""
    args = argparse.Namespace(**{**vars(args), "steps": 3})
    contender = Contenders(args, [name], 0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        contender.train(name)
    alive = most = 0
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def rank_main(rank: int, args: argparse.Namespace, store: str, port: int, name: str, out: str) -> None:
    """One process of a run: of all contenders by turns, or of one that is weighed."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - each contender would print the table of ranks
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.update(GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="benchmark")
    os.environ.update(TORCHELASTIC_RESTART_COUNT="0")
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    made = dist.FileStore(store, RANKS)
    dist.init_process_group("gloo", store=made, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    result: Any = weigh_rank(args, name) if name else time_rank(args)
    if rank == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # contenders' groups are of several makers: none of them takes down the others'


def on_ranks(args: argparse.Namespace, name: str = "") -> Any:
    """Start two processes; what rank 0 found."""
    import socket

    with tempfile.TemporaryDirectory() as directory:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        out = str(Path(directory) / "result.json")
        store = str(Path(directory) / "store")
        mp.spawn(rank_main, args=(args, store, port, name, out), nprocs=RANKS)  # type: ignore[no-untyped-call]
        return json.loads(Path(out).read_text())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Median step times, their ratios to DDP and to raw FSDP2, and memory."""
    found = on_ranks(args)
    turns, names = found["turns"], names_of(args)

    return {
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "torch": torch.__version__,
        "median_step_seconds": {name: statistics.median(turns[name]) for name in names},
        "ratios": {name: {peer: ratio_of(turns[name], turns[peer]) for peer in (DDP, FSDP)} for name in names},
        "last_losses": found["last_losses"],
        "peak_bytes": {name: on_ranks(args, name) for name in names} if args.memory else {},
        "aims": [[name, peer, aim] for (name, peer), aim in AIMS.items() if name in names],
    }


def show(result: dict[str, Any]) -> Table:
    """The result as a table."""
    settings = result["settings"]
    aims = "; ".join(
        f"{name} against {peer}: {result['ratios'][name][peer]['median']:.3f} (aim: at most {aim})"
        for name, peer, aim in result["aims"]
    )
    table = Table(
        title=f"{RANKS} ranks, {settings['layers']} layers x {settings['width']} wide, batch {settings['batch']} x "
        f"{settings['sequence']} tokens each, {settings['rounds']} turns of {settings['steps']} steps",
        caption=aims,
    )
    table.add_column("contender")
    for name in ("median step, ms", "to DDP", "to raw FSDP2", "peak MiB"):
        table.add_column(name, justify="right")
    for name in result["median_step_seconds"]:
        memory = result["peak_bytes"].get(name)
        table.add_row(
            name,
            f"{1e3 * result['median_step_seconds'][name]:.1f}",
            *(f"{result['ratios'][name][peer]['median']:.3f}" for peer in (DDP, FSDP)),
            "" if memory is None else f"{memory / 2**20:.1f}",
        )
    return table


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add_sizes(parser, width=192, steps=5, rounds=12)
    parser.add_argument("--stages", type=int, nargs="*", choices=range(4), default=[0, 1, 2, 3], help="of ZeRO")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="times only")
    parser.add_argument("--out", type=Path, default=None, help="write the figures to this JSON file")
    args = parser.parse_args(arguments)
    refuse_sizes(parser, args)
    return args


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = parse(arguments)
    result = measure(args)
    Console(width=120).print(show(result))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
