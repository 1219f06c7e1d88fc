"""What the strategy costs on one device: a hand-written torch loop, plain Lightning and ``MegaParStrategy``, one model.

All three train the same GPT from the same weights on the same batches, at the same time in one process: three threads
that take turns of a few steps, so that a busy machine is busy for all of them. A step's time is that of one whole pass
through the loop. The first step of a turn (cold caches) is not counted. A ratio is the median over the turns of the
ratio of the turn's median step times; that of CPU times stands beside it, for machines that are busy with other things.

    python recipes/benchmarks/strategy_overhead.py --out overhead.json
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Trainer, seed_everything
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from turns import StepEnds, Turns, add_sizes, gpt_of, ratio_of, refuse_sizes, train_by_hand

from lightning_megapar.models.language_model import LanguageModel, OptimizerConfig
from lightning_megapar.strategy import MegaParStrategy

LOOP, PLAIN, MEGAPAR = "hand-written torch loop", "Lightning, strategy='auto'", "Lightning, MegaParStrategy()"
AIM = 1.03


class Bench:
    """The common model, data and clock.

    Args:
        args: the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.accelerator)
        self.config = gpt_of(args)
        self.optimizer = OptimizerConfig(lr=1e-3, schedule="constant")
        self.steps = (args.rounds + 1) * args.steps
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(0, 257, (self.steps * args.batch, args.sequence + 1), generator=generator)
        self.rows = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]
        self.turns = Turns([LOOP, PLAIN, MEGAPAR], args.steps, self.now)
        self.losses: dict[str, list[torch.Tensor]] = {}
        self.failures: list[BaseException] = []

    def loader(self) -> DataLoader:
        return DataLoader(self.rows, batch_size=self.args.batch)  # type: ignore[arg-type]

    def module(self) -> LanguageModel:
        return LanguageModel(self.config, self.optimizer)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def loop(self) -> list[torch.Tensor]:
        module = self.module()
        module.configure_model()
        module.to(self.device)
        batches = ({key: value.to(self.device) for key, value in batch.items()} for batch in self.loader())
        return train_by_hand(module, batches, self.turns, LOOP, self.args.clip)

    def lightning(self, name: str, strategy: Any) -> list[torch.Tensor]:
        ends = StepEnds(self.turns, name)
        trainer = Trainer(
            strategy=strategy,
            accelerator=self.args.accelerator,
            devices=1,
            max_epochs=1,
            callbacks=[ends],
            gradient_clip_val=self.args.clip or None,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(self.module(), self.loader())
        return ends.losses

    def contend(self, name: str) -> None:
        torch.set_num_threads(self.args.threads)  # a thread's own setting
        self.turns.enter(name)
        try:
            if name == LOOP:
                self.losses[name] = self.loop()
            else:
                self.losses[name] = self.lightning(name, MegaParStrategy() if name == MEGAPAR else "auto")
        except BaseException as error:
            self.failures.append(error)
        finally:
            self.turns.leave(name)

    def run(self) -> None:
        threads = [threading.Thread(target=self.contend, args=(name,)) for name in self.turns.gates]
        for thread in threads:
            thread.start()
        self.turns.gates[LOOP].release()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all turns; medians in seconds, ratios, and every turn's median."""
    bench = Bench(args)
    bench.run()
    seconds = {name: bench.turns.medians(values) for name, values in bench.turns.seconds.items()}
    cpu = {name: bench.turns.medians(values) for name, values in bench.turns.cpu_seconds.items()}
    for name, losses in bench.losses.items():
        parted = max(abs(float(a) - float(b)) / abs(float(b)) for a, b in zip(losses, bench.losses[LOOP]))
        if len(losses) != bench.steps or parted > 1e-3:
            raise RuntimeError(f"{name} did not train as the loop: {len(losses)} steps, losses differ by {parted:.1e}")

    def ratio(over: str, under: str) -> dict[str, float]:
        of_cpu = statistics.median(a / b for a, b in zip(cpu[over], cpu[under]))
        return {**ratio_of(seconds[over], seconds[under]), "cpu": of_cpu}

    return {
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
        },
        "threads": torch.get_num_threads(),
        "median_step_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "median_step_cpu_seconds": {name: statistics.median(values) for name, values in cpu.items()},
        "turns": seconds,
        "last_losses": {name: float(losses[-1]) for name, losses in bench.losses.items()},
        "ratios": {
            "megapar_to_lightning": ratio(MEGAPAR, PLAIN),
            "megapar_to_loop": ratio(MEGAPAR, LOOP),
            "lightning_to_loop": ratio(PLAIN, LOOP),
            "loop_to_lightning": ratio(LOOP, PLAIN),
        },
        "aim": AIM,
    }


def show(result: dict[str, Any]) -> Table:
    """The result as a table."""
    settings, ratios = result["settings"], result["ratios"]
    table = Table(
        title=f"{settings['layers']} layers x {settings['width']} wide, batch {settings['batch']} x "
        f"{settings['sequence']} tokens, {settings['rounds']} turns of {settings['steps']} steps",
        caption=f"MegaParStrategy against plain Lightning: {ratios['megapar_to_lightning']['median']:.3f} "
        f"(aim: at most {result['aim']})",
    )
    table.add_column("contender")
    table.add_column("median step, ms", justify="right")
    table.add_column("CPU, ms", justify="right")
    table.add_column("to plain Lightning", justify="right")
    table.add_column("to the loop", justify="right")

    def cell(name: str | None) -> str:
        if name is None:
            return "1"
        r = ratios[name]
        return f"{r['median']:.3f}, CPU {r['cpu']:.3f}"

    def row(name: str, to_lightning: str | None, to_loop: str | None) -> None:
        wall, cpu = result["median_step_seconds"][name], result["median_step_cpu_seconds"][name]
        table.add_row(name, f"{1e3 * wall:.2f}", f"{1e3 * cpu:.2f}", cell(to_lightning), cell(to_loop))

    row(LOOP, "loop_to_lightning", None)
    row(PLAIN, None, "lightning_to_loop")
    row(MEGAPAR, "megapar_to_lightning", "megapar_to_loop")
    return table


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add_sizes(parser, width=128, steps=6, rounds=30)
    parser.add_argument("--clip", type=float, default=0.0, help="gradient norm to clip at; 0 does not clip")
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--out", type=Path, default=None, help="write the figures to this JSON file")
    args = parser.parse_args(arguments)
    refuse_sizes(parser, args, "threads")
    return args


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = parse(arguments)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(args.threads)
    seed_everything(1, verbose=False)
    result = measure(args)
    Console(width=120).print(show(result))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
