"""Activation memory on one rank: planned recomputation, its rivals, and what keeps activations in another way.

Chains of decoder blocks get budgets from the smallest possible to everything. For each budget stand the planned and the
measured peak (the most bytes at once in a step beyond weights and gradients) and the time of a step to that of
keeping all. Beside rules that people use (some first blocks recomputed; torch's selective policy, Megatron's) stands
the plan with the rule's own peak for a budget, and beside all of it torch's ``activation_memory_budget``. Then the cost
of recomputation through the strategy, and of lossy codecs and host memory. What is compared takes turns; a ratio is the
median over the turns, by the clock and by CPU time.

    python recipes/benchmarks/memory.py --out memory.json
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from budgets import CLOSE, compare, is_monotone
from chains import Chain, ChainShape, mib
from kept_otherwise import ALL_WAYS, measure_ways
from recompute_overhead import Overhead
from rich.console import Console
from rich.table import Table
from torch_budgets import BACKEND, measure_budgets

from lightning_megapar.models.gpt import GPTConfig

SHAPES = (
    ChainShape("GPT-2, fused attention, heads of 32", "gpt2", 8, 128, 4, 256, 2),
    ChainShape("GPT-2, math attention, heads of 16", "gpt2", 8, 64, 4, 256, 2, is_math=True),
    ChainShape("Llama, fused, 3 microbatches in flight", "llama", 6, 128, 4, 128, 2, in_flight=3),
    ChainShape("Llama, math, heads of 8, dropout", "llama", 6, 64, 8, 128, 4, is_math=True, dropout=0.1),
)
SMALL = (
    ChainShape("GPT-2, fused", "gpt2", 2, 32, 2, 32, 2, in_flight=2),
    ChainShape("GPT-2, math", "gpt2", 2, 32, 4, 64, 2, is_math=True),
)
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
TORCH_BUDGETS = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
NO_LONGER = 1.05
"""By plan it is never longer; times of equal choices scatter by as much as this."""
WIDEST = 24
"""Characters of the longest bar."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    shapes, rounds = (SMALL, 1) if args.quick else (SHAPES, args.rounds)
    device = torch.device("cpu")
    chains: dict[str, Any] = {}
    for number, shape in enumerate(shapes):
        torch.manual_seed(0)
        chain = Chain(shape, device)
        found = chains[shape.name] = compare(chain, SHARES, rounds)
        found["shape"] = vars(shape)
        if args.torch and number < (1 if args.quick else 2):  # each budget is compiled, which takes long
            compiled = Chain(replace(shape, layers=1), device) if args.quick else chain
            found["torch"] = measure_budgets(compiled, (0.0, 1.0) if args.quick else TORCH_BUDGETS, min(rounds, 3))
            found["torch_is_monotone"] = is_monotone([one["measured_bytes"] for one in found["torch"]])
    torch.manual_seed(0)
    ways = {shape.name: measure_ways(Chain(shape, device), ALL_WAYS, rounds) for shape in shapes[:2]}
    points = [point for one in chains.values() for point in one["points"]]
    rivals = [rival for one in chains.values() for rival in one["rivals"]]
    return {
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "torch": torch.__version__,
        "chains": chains,
        "ways": ways,
        "overhead": Overhead(args, _trained(args)).measure(),
        "targets": {
            "measured peak within the budget": [sum(p["is_within"] for p in points), len(points)],
            f"planned within {CLOSE:.0%} of measured": [sum(p["is_close"] for p in points), len(points)],
            "peak rises with the budget": [sum(one["is_monotone"] for one in chains.values()), len(chains)],
            f"at a rule's peak at most {NO_LONGER} of its CPU time": [
                sum(r["ours_to_rival"]["cpu"] <= NO_LONGER for r in rivals),
                len(rivals),
            ],
        },
    }


def _trained(args: argparse.Namespace) -> GPTConfig:
    width, layers, sequence = (32, 2, 32) if args.quick else (128, 4, 128)
    return GPTConfig.gpt2(
        vocab_size=257, num_layers=layers, num_heads=4, hidden_size=width, max_sequence_length=sequence
    )


def show(result: dict[str, Any], console: Console) -> None:
    """Tables, and a bar for each peak."""
    for name, found in result["chains"].items():
        console.print(_budgets(name, found))
        console.print(_rivals(found))
    for name, ways in result["ways"].items():
        console.print(_ways(name, ways))
    console.print(_overhead(result["overhead"]))
    table = Table(title="what was aimed at")
    table.add_column("aim")
    table.add_column("reached", justify="right")
    for aim, (reached, of) in result["targets"].items():
        table.add_row(aim, f"{reached} of {of}")
    console.print(table)


def _table(title: str, caption: str, first: str, *others: str) -> Table:
    table = Table(title=title, caption=caption)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _budgets(name: str, found: dict[str, Any]) -> Table:
    rises = "the measured peak rises with the budget" if found["is_monotone"] else "THE PEAK FALLS BETWEEN TWO BUDGETS"
    caption = rises
    if "torch" in found:
        falls = "rises with its budget, too" if found["torch_is_monotone"] else "does not rise with its budget"
        caption += f"; torch's ({BACKEND}, gradients of all parameters included) {falls}"
    table = _table(name, caption, "budget", "MiB", "planned", "measured", "within", "step to all", "keeps")
    table.add_column("measured")
    most = max(one["measured_bytes"] for one in (*found["points"], *found.get("torch", ())))
    for one in found["points"]:
        table.add_row(
            f"{one['share']:.0%}",
            mib(one["budget_bytes"]),
            mib(one["planned_bytes"]),
            mib(one["measured_bytes"]),
            "yes" if one["is_within"] and one["is_close"] else "NO",
            _ratio(one["step"]),
            one["keeps"],
            _bar(one["measured_bytes"], most),
        )
    table.add_section()
    for one in found.get("torch", ()):
        step, size = _ratio(one["step"]), one["measured_bytes"]
        table.add_row(f"torch's {one['budget']:g}", "", "", mib(size), "", step, "", _bar(size, most))
    return table


def _ratio(found: dict[str, float]) -> str:
    """Of wall-clock times, and of CPU times."""
    return f"{found['wall']:.2f} / {found['cpu']:.2f}"


def _bar(number: int, most: int) -> str:
    return "█" * max(1, round(WIDEST * number / most))


def _rivals(found: dict[str, Any]) -> Table:
    table = _table("at the peak of a rule", "", "rule", "MiB", "step to all", "planned: MiB", "step", "to the rule's")
    for one in found["rivals"]:
        table.add_row(
            one["name"],
            mib(one["rival"]["measured_bytes"]),
            _ratio(one["rival"]["step"]),
            mib(one["ours"]["measured_bytes"]),
            _ratio(one["ours"]["step"]),
            _ratio(one["ours_to_rival"]),
        )
    return table


def _ways(name: str, ways: dict[str, Any]) -> Table:
    table = _table(name, "", "activations", "kept MiB", "on the host", "peak", "step", "gradients, cosine")
    for way, one in ways.items():
        table.add_row(
            way,
            mib(one["kept_bytes"]),
            mib(one["host_bytes"]),
            mib(one["peak_bytes"]),
            _ratio(one["step"]),
            "equal" if one["gradients_are_equal"] else f"{one['cosine']:.6f}",
        )
    return table


def _overhead(found: dict[str, Any]) -> Table:
    table = _table("steps of training", "", "contender", "against", "ratio", "lowest", "highest", "CPU")
    for one in found["ratios"]:
        numbers = (one[name] for name in ("median", "lowest", "highest", "cpu"))
        table.add_row(one["over"], one["under"], *(f"{number:.3f}" for number in numbers))
    return table


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of what is compared, after a first to warm up")
    parser.add_argument("--steps", type=int, default=5, help="training steps in a turn; the first is not counted")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a training step")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave torch's budgets out")
    parser.add_argument("--quick", action="store_true", help="sizes that mean nothing, to see that it runs")
    parser.add_argument("--out", type=Path, default=None, help="write the figures to this JSON file")
    args = parser.parse_args(arguments)
    for name, least in (("rounds", 1), ("steps", 2), ("batch", 1), ("threads", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name}={getattr(args, name)}: expected at least {least}")
    if args.quick:
        args.rounds, args.steps = 1, 2
    return args


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(arguments)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(args.threads)
    result = measure(args)
    show(result, Console(width=140))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
