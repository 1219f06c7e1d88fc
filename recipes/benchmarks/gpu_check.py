"""What a machine with one GPU has to show in a few minutes: training with all that saves memory, in one table.

A GPT trains for a few steps on random tokens under each way of recomputing, with and without an arena, in bfloat16 and
with 8-bit products; then come checks on blocks alone. Each row stands for itself: what fails is a row with the message,
and what time does not suffice for is named. Losses are compared with those of the first case of the same precision
(*equal*: to the last bit; else the largest relative difference; kernels that add up in any order part even two runs of
one case). Without a GPU the same runs on the CPU with small sizes.

    python recipes/benchmarks/gpu_check.py --out gpu_check.json
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning
import torch
from chains import mib
from gpu_cases import Case, Size, model_utilisation, parted, release, strategy_takes_arena, train, training_cases
from gpu_direct import CHECKS
from rich.console import Console
from rich.table import Table

QUICK = Size(2, 32, 2, 64, 32, 2, 2)
ON_CPU = Size(4, 128, 4, 256, 128, 4, 5)
ON_CUDA = Size(24, 1024, 16, 32768, 2048, 16, 10)
"""335 million parameters; everything kept, about 60 GiB."""
_ENOUGH = 100 << 30


def size_for(device: torch.device, is_quick: bool) -> Size:
    """What trains on a device; smaller batches where its memory is smaller."""
    if is_quick:
        return QUICK
    if device.type != "cuda":
        return ON_CPU
    total = torch.cuda.mem_get_info(device)[1]
    return ON_CUDA if total >= _ENOUGH else replace(ON_CUDA, batch=max(1, ON_CUDA.batch * total // (2 * _ENOUGH)))


class Runner:
    """Runs rows one after the other while there is time.

    Args:
        args: the command line.
        device: where.
        now: clock in seconds.
    """

    def __init__(
        self, args: argparse.Namespace, device: torch.device, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.args, self.device, self.now = args, device, now
        self.size = size_for(device, args.quick)
        self.deadline = now() + 60 * args.minutes
        self.longest = 0.0
        self.rows: list[dict[str, Any]] = []

    def row(self, name: str, work: Callable[[], dict[str, Any]], skipped: str = "") -> None:
        """One row of the table.

        Args:
            name: its first cell.
            work: gives its figures.
            skipped: why it cannot be.
        """
        row: dict[str, Any] = {"name": name, "status": "skipped", "note": skipped}
        if not skipped and self.now() + self.longest > self.deadline:
            row |= {"status": "left out", "note": "no time left"}
        elif not skipped:
            began = self.now()
            try:
                row |= {"status": "done", **work()}
            except Exception as error:  # a row of its own, out of memory included
                row |= {"status": "failed", "note": f"{type(error).__name__}: {str(error).strip()}"}
            row["took_seconds"] = self.now() - began
            self.longest = max(self.longest, row["took_seconds"])
            release(self.device)
        self.rows.append(row)
        self.write()

    def trained(self, case: Case) -> dict[str, Any]:
        """A case's figures, beside those of the first one of its kind, or of all."""
        found = train(case, self.size, self.device)
        done = [row for row in self.rows if row["status"] == "done" and "losses" in row]
        first = next((row for row in done if row["precision_and_fp8"] == list(case.kind)), done[0] if done else None)
        found["precision_and_fp8"] = list(case.kind)
        found["model_utilisation"] = model_utilisation(found["flops_per_second"], self.device)
        found["compared_with"] = None if first is None else first["name"]
        found["losses_part"] = None if first is None else parted(found["losses"], first["losses"])
        return found

    def run(self) -> None:
        """All rows: ways of recomputing, checks on blocks, other precisions; last, what changes the process."""
        cases, checks = training_cases(), list(CHECKS)
        first = [case for case in cases if case.kind == cases[0].kind and case.arena is None]
        self._train(first)
        self._check(checks[:-1])
        self._train([case for case in cases if case not in first])
        if not strategy_takes_arena():
            self.row("arena on and off", dict, "MegaParStrategy has no argument arena here; see the arena of gradients")
        self._check(checks[-1:])

    def _train(self, cases: Sequence[Case]) -> None:
        for case in cases:
            self.row(case.name, partial(self.trained, case), self._why_not(case))

    def _check(self, names: Sequence[str]) -> None:
        for name in names:
            self.row(name, partial(CHECKS[name], self.size, self.device))

    def _why_not(self, case: Case) -> str:
        if case.fp8 and find_spec("torchao") is None:
            return "torchao is not installed"
        if case.precision.startswith("bf16") and self.device.type == "cuda" and not torch.cuda.is_bf16_supported():
            return "this GPU has no bfloat16"
        return ""

    def result(self) -> dict[str, Any]:
        """What is known so far."""
        is_cuda = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if is_cuda else platform.machine(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "lightning": lightning.__version__,
            },
            "size": vars(self.size),
            "minutes": self.args.minutes,
            "rows": self.rows,
            "left_out": [row["name"] for row in self.rows if row["status"] == "left out"],
        }

    def write(self) -> None:
        """To the file of figures, after each row: a run that is killed leaves what it has found."""
        if self.args.out is not None:
            self.args.out.write_text(json.dumps(self.result(), indent=1) + "\n")


def show(result: dict[str, Any], device: torch.device) -> Table:
    """The one table."""
    size = result["size"]
    memory = "of torch's allocator" if device.type == "cuda" else "beyond what there is between steps"
    caption = (
        f"peak: {memory}, in a step; utilisation: operations of the model (6 for each token and weight, attention; no "
        "recomputation) to what the device does in bfloat16"
    )
    if result["left_out"]:
        caption += f". No time was left for: {'; '.join(result['left_out'])} (--minutes={result['minutes']:g})"
    table = Table(
        title=f"{result['device']}, torch {result['versions']['torch']}: {size['layers']} layers x {size['width']} "
        f"wide, batch {size['batch']} x {size['sequence']} tokens",
        caption=caption,
    )
    table.add_column("case")
    for name in ("step, ms", "tokens/s", "utilisation", "peak MiB", "reserved", "losses"):
        table.add_column(name, justify="right")
    table.add_column("note", overflow="fold")
    for row in result["rows"]:
        table.add_row(row["name"], *_cells(row), _note(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    if "step_seconds" not in row:
        return [""] * 6
    share, part = row["model_utilisation"], row["losses_part"]
    return [
        f"{1e3 * row['step_seconds']:.1f}",
        f"{row['tokens_per_second']:,.0f}",
        "-" if share is None else f"{share:.1%}",
        mib(row["peak_bytes"]),
        mib(row["reserved_bytes"]) if row["reserved_bytes"] else "-",
        "first" if part is None else "equal" if part == 0 else f"{part:.1e}",
    ]


def _note(row: dict[str, Any]) -> str:
    said = {"done": "", "failed": "FAILED: ", "skipped": "skipped: ", "left out": "left out: "}[row["status"]]
    if "is_ok" in row:
        said = "ok: " if row["is_ok"] else "NOT OK: "
    note = row["note"].splitlines()[0] if row["note"] else ""
    return said + (note if len(note) <= 300 else note[:297] + "...")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--quick", action="store_true", help="sizes that mean nothing, to see that it runs")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which nothing new is begun")
    parser.add_argument("--out", type=Path, default=None, help="write the figures to this JSON file")
    args = parser.parse_args(arguments)
    if not args.minutes > 0:
        parser.error(f"--minutes={args.minutes:g}: expected a number above 0, such as 8")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda: torch sees no GPU here; valid: auto, cpu")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every row that was run is as it should be."""
    args = parse(arguments)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    runner = Runner(args, device)
    runner.run()
    Console(width=160).print(show(runner.result(), device))
    return int(any(row["status"] == "failed" or not row.get("is_ok", True) for row in runner.rows))


if __name__ == "__main__":
    raise SystemExit(main())
