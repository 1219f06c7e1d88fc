"""Two tensor-parallel ranks: our layers against ``parallelize_module`` and Lightning's ``ModelParallelStrategy``.

All contenders run on the same two ranks (gloo, CPU), from the same weights, in turns, so that a busy machine is busy
for all of them; outputs and gradients are compared before anything is timed.

1. One transformer block, forward and backward: :class:`~lightning_megapar.models.gpt.GPTBlock` against the same block
   made of ``nn.Linear`` and ``nn.LayerNorm`` under ``ColwiseParallel``/``RowwiseParallel``, plain and with sequence
   parallelism.
2. A training step of a stack of such blocks in Lightning: ``MegaParStrategy`` against ``ModelParallelStrategy`` whose
   ``configure_model`` calls ``parallelize_module``.

    python recipes/benchmarks/tensor_parallel.py --tokens 128 --width 256 --out tensor_parallel.json

A ratio is the other's time over ours: above 1 we are faster. It is the median over pairs of neighbouring measurements.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing as mp
import os
import platform
import socket
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_megapar.models.gpt import GPTBlock, GPTConfig
from lightning_megapar.sharding import initialise_by_name, shard_module

RANKS = 2
SIZES = ((32, 64), (128, 256), (256, 512), (512, 1024))
AIM: dict[str, Any] = {"size": (128, 256), "ratio": 1.4}


class TorchAttention(nn.Module):
    def __init__(self, width: int, head_size: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.head_size = head_size

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class TorchMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class TorchBlock(nn.Module):
    """The block of torch's own layers, with the names of :class:`GPTBlock`."""

    def __init__(self, width: int, head_size: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = TorchAttention(width, head_size), TorchMLP(width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


def torch_plan(sequence_parallel: bool) -> dict[str, Any]:
    """The plan of torch's tensor-parallel tutorial for this block."""
    rows: dict[str, Any] = {"output_layouts": Shard(1)} if sequence_parallel else {}
    plan: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.output": RowwiseParallel(**rows),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(**rows),
    }
    if sequence_parallel:
        enter = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan |= {
            "attention_norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            "attention": PrepareModuleInput(**enter),
            "mlp": PrepareModuleInput(**enter),
        }
    return plan


def block_config(tokens: int, width: int, layers: int = 1) -> GPTConfig:
    return GPTConfig.gpt2(
        vocab_size=64, num_layers=layers, num_heads=max(2, width // 64), hidden_size=width, max_sequence_length=tokens
    )


def our_block(config: GPTConfig) -> GPTBlock:
    with torch.device("meta"):
        block = GPTBlock(config, None)
    initialise_by_name(block, seed=0)
    return block


def torch_block(config: GPTConfig) -> TorchBlock:
    block = TorchBlock(config.hidden_size, config.head_dim)
    block.load_state_dict(our_block(config).state_dict())
    return block


# ---- one block ----


class BlockPair:
    """Both blocks on the mesh, and one input for each."""

    def __init__(self, config: GPTConfig, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        tokens, width = config.max_sequence_length, config.hidden_size
        generator = torch.Generator().manual_seed(0)
        hidden, self.upstream = (torch.randn(1, tokens, width, generator=generator) for _ in range(2))
        if sequence_parallel:
            rank = mesh.get_local_rank()
            hidden, self.upstream = hidden.chunk(RANKS, 1)[rank], self.upstream.chunk(RANKS, 1)[rank]
        self.hidden = hidden.contiguous().requires_grad_()
        self.upstream = self.upstream.contiguous()
        self.ours: nn.Module = our_block(config)
        shard_module(self.ours, mesh, sequence_parallel)
        self.torch: nn.Module = parallelize_module(torch_block(config), mesh, torch_plan(sequence_parallel))

    def step(self, block: nn.Module) -> Tensor:
        """Forward and backward; gradients are fresh tensors each time."""
        self.hidden.grad = None
        for parameter in block.parameters():
            parameter.grad = None
        result = block(self.hidden)
        result.backward(self.upstream)
        return result

    def check(self) -> float:
        """Largest relative difference between the contenders in output, input and weight gradients."""
        found = []
        for block in (self.ours, self.torch):
            result = self.step(block)
            grads = [p.grad.to_local() for n, p in block.named_parameters() if "norm" not in n and "bias" not in n]
            found.append([result.detach(), self.hidden.grad, *grads])
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found))


def alternate(contenders: dict[str, Callable[[], Any]], seconds: float) -> dict[str, dict[str, list[float]]]:
    """Run the contenders in turns; wall and CPU seconds of each call, the ranks in step."""
    times: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in contenders}
    for call in contenders.values():
        for _ in range(5):
            call()
    start, rounds = time.perf_counter(), 0
    while True:
        for name, call in contenders.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            times[name]["cpu"].append(time.process_time() - cpu)
            times[name]["wall"].append(time.perf_counter() - wall)
        rounds += 1
        if rounds % 20 == 0:
            done = torch.tensor(float(time.perf_counter() - start > seconds))
            dist.all_reduce(done)  # all ranks stop in the same round
            if done and rounds >= 40:
                return times


def summary(times: dict[str, dict[str, list[float]]], other: str) -> dict[str, float]:
    """Medians in ms and the ratios other / ours."""
    ours, theirs = times["ours"], times[other]
    return {
        "ours_ms": 1e3 * statistics.median(ours["wall"]),
        "other_ms": 1e3 * statistics.median(theirs["wall"]),
        "ratio": statistics.median(b / a for a, b in zip(ours["wall"], theirs["wall"])),
        "ratio_of_minima": min(theirs["wall"]) / min(ours["wall"]),
        "cpu_ratio": statistics.median(theirs["cpu"]) / statistics.median(ours["cpu"]),
        "measurements": len(ours["wall"]),
    }


def compare_blocks(tokens: int, width: int, seconds: float, mesh: DeviceMesh) -> list[dict[str, Any]]:
    rows = []
    for sequence_parallel in (False, True):
        pair = BlockPair(block_config(tokens, width), mesh, sequence_parallel)
        difference = pair.check()
        if difference > 1e-4:
            raise RuntimeError(f"the contenders differ by {difference:.2g} at {tokens} x {width}: nothing to compare")
        times = alternate({"ours": lambda p=pair: p.step(p.ours), "torch": lambda p=pair: p.step(p.torch)}, seconds)
        rows.append(
            {
                "what": "block, forward + backward",
                "other": "parallelize_module",
                "tokens": tokens,
                "width": width,
                "sequence_parallel": sequence_parallel,
                "difference": difference,
                **summary(times, "torch"),
            }
        )
    return rows


# ---- a training step in Lightning ----


def compare_strategies(tokens: int, width: int, layers: int, steps: int, rounds: int, threads: int) -> dict[str, Any]:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
    from strategy_overhead import StepEnds, Turns  # the benchmark beside this one
    from torch.utils.data import DataLoader

    from lightning_megapar.strategy import MegaParStrategy

    config = block_config(tokens, width, layers)

    class Stack(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks: nn.ModuleList | None = None

        def training_step(self, hidden: Tensor, batch_idx: int) -> Tensor:
            assert self.blocks is not None
            for block in self.blocks:
                hidden = block(hidden)
            return hidden.pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Ours(Stack):
        def configure_model(self) -> None:
            if self.blocks is None:
                self.blocks = nn.ModuleList(our_block(config) for _ in range(layers))

    class Theirs(Stack):
        def configure_model(self) -> None:
            if self.blocks is None:
                self.blocks = nn.ModuleList(
                    parallelize_module(torch_block(config), self.device_mesh["tensor_parallel"], torch_plan(False))
                    for _ in range(layers)
                )

    generator = torch.Generator().manual_seed(1)
    count = (rounds + 1) * steps
    data = [torch.randn(tokens, width, generator=generator) for _ in range(count)]
    turns = Turns(["ours", "Lightning"], steps, time.perf_counter)
    losses: dict[str, list[float]] = {}

    def fit(name: str) -> None:
        """In a thread of its own: the two take turns of a few steps, in the same order on both ranks."""
        torch.set_num_threads(threads)
        turns.enter(name)
        try:
            ends = StepEnds(turns, name)
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=RANKS,
                strategy=MegaParStrategy(tensor_parallel_size=RANKS)
                if name == "ours"
                else ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=RANKS),
                max_epochs=1,
                logger=False,
                use_distributed_sampler=False,  # Lightning's would shuffle a loader that asks for no shuffling
                callbacks=[ends],
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(Ours() if name == "ours" else Theirs(), DataLoader(data, batch_size=1))
            losses[name] = [float(loss) for loss in ends.losses]
        finally:
            turns.leave(name)

    contenders = [threading.Thread(target=fit, args=(name,)) for name in turns.gates]
    for thread in contenders:
        thread.start()
    turns.gates["ours"].release()
    for thread in contenders:
        thread.join()
    if [len(found) for found in losses.values()] != [count, count]:
        raise RuntimeError(f"a contender did not finish its {count} steps")
    difference = max(abs(a / b - 1) for a, b in zip(losses["ours"], losses["Lightning"]))
    if difference > 1e-4:
        raise RuntimeError(f"losses differ by {difference:.2g}: nothing to compare")
    times = {
        name: {"wall": turns.medians(turns.seconds[name]), "cpu": turns.medians(turns.cpu_seconds[name])}
        for name in losses
    }
    return {
        "what": f"Lightning training step, {layers} blocks",
        "other": "ModelParallelStrategy",
        "tokens": tokens,
        "width": width,
        "sequence_parallel": False,
        "difference": difference,
        **summary(times, "Lightning"),
    }


# ---- ranks ----


def work(rank: int, port: int, args: argparse.Namespace, results: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="bench", TORCHELASTIC_RESTART_COUNT="0",
    )  # fmt: skip
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    for tokens, width in args.sizes:
        rows = compare_blocks(tokens, width, args.seconds, mesh)
        if not args.skip_lightning:
            with contextlib.redirect_stdout(None), open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
                rows.append(compare_strategies(tokens, width, args.layers, args.steps, args.rounds, args.threads))
        if rank == 0:
            print(f"{tokens} x {width} measured", file=sys.stderr, flush=True)
            results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def show(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"tensor parallelism on {RANKS} ranks: time of the other / ours (above 1 we are faster)")
    for column in ("tokens x width", "what", "against", "ours ms", "other ms", "ratio", "of minima", "of CPU time"):
        table.add_column(column, justify="left" if column in ("what", "against") else "right")
    for row in rows:
        table.add_row(
            f"{row['tokens']} x {row['width']}",
            row["what"] + (", sequence parallel" if row["sequence_parallel"] else ""),
            row["other"],
            f"{row['ours_ms']:.2f}",
            f"{row['other_ms']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_of_minima']:.2f}",
            f"{row['cpu_ratio']:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="tokens of one sequence (with --width: this size alone)")
    parser.add_argument("--width", type=int, help="hidden size, a multiple of 4")
    parser.add_argument("--seconds", type=float, default=6.0, help="per block and size")
    parser.add_argument("--layers", type=int, default=2, help="blocks of the stack that Lightning trains")
    parser.add_argument("--steps", type=int, default=6, help="training steps of one turn; the first is not counted")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each strategy, after a first to warm up")
    parser.add_argument("--threads", type=int, default=1, help="threads of one rank")
    parser.add_argument("--skip-lightning", action="store_true", help="blocks only")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    if (args.tokens is None) != (args.width is None):
        parser.error("--tokens and --width go together")
    args.sizes = SIZES if args.tokens is None else ((args.tokens, args.width),)

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=work, args=(rank, port, args, results)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    rows: list[dict[str, Any]] = []
    try:
        waiting = len(args.sizes)
        while waiting:
            try:
                rows += results.get(timeout=1.0)
                waiting -= 1
            except Exception:  # queue.Empty: look whether the ranks still run
                if any(process.exitcode not in (None, 0) for process in ranks):
                    raise SystemExit("a rank failed; its traceback stands above") from None
        for process in ranks:
            process.join()
    finally:
        for process in ranks:
            if process.is_alive():
                process.terminate()
    Console(width=None if Console().is_terminal else 150).print(show(rows))
    for row in rows:
        if (row["tokens"], row["width"]) == AIM["size"] and row["other"] == "parallelize_module":
            reached = "reached" if row["ratio"] >= AIM["ratio"] else "missed"
            how = "with sequence parallelism" if row["sequence_parallel"] else "without sequence parallelism"
            print(f"aim at 128 x 256, {how}: {AIM['ratio']} times faster, {reached} with {row['ratio']:.2f}")
    if args.out:
        about = {"torch": torch.__version__, "python": platform.python_version(), "processors": os.cpu_count()}
        args.out.write_text(
            json.dumps({**about, "ranks": RANKS, "threads": args.threads, "rows": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
