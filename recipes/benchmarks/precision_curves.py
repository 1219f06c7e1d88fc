"""Loss curves in each precision on the text corpus: does a number format train what float32 trains?

    python recipes/benchmarks/precision_curves.py --layouts dp2,tp2_pp2 --steps 200 --out curves.json

Runs ``recipes/pretrain.py`` once for each layout and precision with the same seed, weights and samples, and compares
``metrics.csv`` with the run in float32. Printed for each: the largest difference of the loss, smoothed over
``--window`` steps, relative to float32's; the difference of the means over the last window; skipped steps of fp16. The
exit code is 1 when a curve leaves the band.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[1] / "pretrain.py"
PRECISIONS = ("fp32", "bf16", "bf16_true", "fp16", "fp8")
BAND = 0.02
"""Relative difference of the smoothed loss that a curve may have from float32's at any step."""


def curve(layout: str, precision: str, steps: int, more: list[str]) -> dict[str, Any]:
    """One run.

    Returns:
        ``losses`` of all steps, ``skipped`` steps.
    """
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory, "run")
        settings = [f"parallel={layout}", f"precision={precision}", f"trainer.max_steps={steps}", f"run_dir={run}"]
        settings += ["callbacks=light", "trainer.enable_checkpointing=false", "trainer.limit_val_batches=0", "seed=1"]
        done = subprocess.run(
            [sys.executable, str(RECIPE), *settings, *more],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{layout} {precision} failed:\n{done.stdout}{done.stderr}")
        with open(run / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
    skipped = rows[-1].get("skipped_steps") or 0
    return {"losses": [float(row["train_loss"]) for row in rows], "skipped": int(float(skipped))}


def smoothed(losses: list[float], window: int) -> list[float]:
    """Means over ``window`` steps, one for each place where they fit."""
    return [sum(losses[start : start + window]) / window for start in range(len(losses) - window + 1)]


def compared(losses: list[float], reference: list[float], window: int) -> dict[str, float]:
    """Relative differences of two curves, smoothed: the largest one and the last one.

    Raises:
        ValueError: when the curves do not have as many steps as each other, or fewer than a window.
    """
    if len(losses) != len(reference) or len(losses) < window:
        raise ValueError(f"curves of {len(losses)} and {len(reference)} steps, window {window}")
    pairs = list(zip(smoothed(losses, window), smoothed(reference, window)))
    return {"largest": max(abs(a / b - 1) for a, b in pairs), "last": pairs[-1][0] / pairs[-1][1] - 1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="dp2,tp2_pp2")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--window", type=int, default=10)
    parser.add_argument("--band", type=float, default=BAND)
    parser.add_argument("--out", default=None, help="a JSON file for the curves")
    parser.add_argument("settings", nargs="*", default=["model=gpt_tiny"], help="of the recipe")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    inside = True
    print(f"{'layout':<10} {'precision':<10} {'last loss':>10} {'largest':>9} {'last':>9} {'skipped':>8}")
    for layout in options.layouts.split(","):
        names = dict.fromkeys(["fp32", *options.precisions.split(",")])
        reference: list[float] = []
        for precision in names:
            run = curve(layout, precision, options.steps, options.settings)
            reference = reference or run["losses"]
            difference = compared(run["losses"], reference, options.window)
            inside = inside and difference["largest"] <= options.band
            found[f"{layout} {precision}"] = {**run, **difference}
            last = smoothed(run["losses"], options.window)[-1]
            print(
                f"{layout:<10} {precision:<10} {last:>10.4f} {difference['largest']:>8.2%} {difference['last']:>+8.2%} "
                f"{run['skipped']:>8}",
                flush=True,
            )
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1))
    print(f"{'inside' if inside else 'OUTSIDE'} the band of {options.band:.1%}")
    return 0 if inside else 1


if __name__ == "__main__":
    raise SystemExit(main())
