"""Does a batch that grows pay? A tiny GPT on the standard library's sources: fixed batch, scheduled ramp, noise ramp.

Three arms train on the same samples in the same order, over several seeds:

* fixed: one batch size, the reference;
* schedule: a quarter of it at first, twice as much in the second half, at consumed samples that are written down;
* noise: the batch follows the measured gradient noise scale.

In the ramps AdamW's rate follows the batch (NoiseScaleLR, exponent 0.5, equal to the fixed arm's at its batch). The
table says how many samples and optimizer steps each arm needs to the fixed arm's final validation loss, seed by seed
against its own, whichever way it goes. The fixed batch is well above the noise scale of so short a run: what a ramp
saves in samples it pays in steps, and part of the gain is that of any smaller batch (--batch).

    python recipes/batch_ramp.py --out batch_ramp.svg
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lightning_megapar.config import ConfigError
from lightning_megapar.data import TextDataModule
from lightning_megapar.models.gpt import GPTConfig
from lightning_megapar.models.language_model import LanguageModel
from lightning_megapar.optim import BatchSizeRamp, GradientNoiseScale, NoiseScaleLR
from lightning_megapar.pipeline.picture.drawing import Box, Drawing, Line, Words
from lightning_megapar.strategy import MegaParStrategy

ARMS = ("fixed", "schedule", "noise")


@dataclass
class Curve:
    """One run, at each validation."""

    arm: str
    seed: int
    samples: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    noise: list[float | None] = field(default_factory=list)

    def reached(self, loss: float) -> tuple[float, float] | None:
        """Samples and steps at which the validation loss first falls to ``loss``, on the line between two points."""
        points = list(zip(self.samples, self.steps, self.losses))
        for before, after in pairwise(points):
            if after[2] <= loss < before[2]:
                part = (before[2] - loss) / (before[2] - after[2])
                return before[0] + part * (after[0] - before[0]), before[1] + part * (after[1] - before[1])
        return None


class Watch(Callback):
    """Fills a curve, and moves the bar."""

    def __init__(self, curve: Curve, advance: Any) -> None:
        self.curve, self.advance = curve, advance

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.advance()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ramp = next(one for one in trainer.callbacks if isinstance(one, BatchSizeRamp))
        noise = next(one for one in trainer.callbacks if isinstance(one, GradientNoiseScale))
        self.curve.samples.append(ramp.consumed)
        self.curve.steps.append(trainer.global_step)
        self.curve.losses.append(float(trainer.callback_metrics["val_loss"]))
        self.curve.batch_sizes.append(ramp.batch_size)
        self.curve.noise.append(noise.noise_scale)


def ramp_of(arm: str, args: argparse.Namespace) -> BatchSizeRamp:
    batch, total = args.batch, args.samples
    if arm == "fixed":
        return BatchSizeRamp(schedule=[(0, batch)])
    if arm == "schedule":
        return BatchSizeRamp(
            schedule=[(0, batch // 4), (total // 8, batch // 2), (total // 4, batch), (total // 2, 2 * batch)]
        )
    return BatchSizeRamp(noise_ratio=args.noise_ratio, start=batch // 4, max_batch_size=4 * batch, hold=10)


def run(arm: str, seed: int, args: argparse.Namespace, advance: Any) -> Curve:
    """Train one arm."""
    seed_everything(seed, verbose=False)
    unit = args.batch // 4
    data = TextDataModule(
        global_batch_size=unit,
        sequence_length=args.sequence,
        validation_limit=args.validation,
        seed=seed,
        max_bytes=args.max_bytes,
    )
    config = GPTConfig.gpt2(
        vocab_size=257, num_layers=2, num_heads=4, hidden_size=64, max_sequence_length=args.sequence, seed=seed
    )
    optimizer = {"lr": args.lr, "weight_decay": 0.1, "schedule": "constant"}
    curve = Curve(arm, seed)
    batches = args.samples // unit
    trainer = Trainer(
        strategy=MegaParStrategy(num_microbatches=2, seed=seed),
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=batches,
        val_check_interval=batches // args.points,
        callbacks=[
            GradientNoiseScale(every_n_steps=2, decay=0.95),
            ramp_of(arm, args),
            NoiseScaleLR(exponent=0.5, reference_batch_size=args.batch),
            Watch(curve, advance),
        ],
        num_sanity_val_steps=-1,  # the loss at no samples
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(config, optimizer), datamodule=data)
    return curve


def table(curves: list[Curve]) -> Table:
    """What each arm needs, as means and ranges over the seeds."""
    shown = Table(
        "arm", "validation loss at the end", "samples / fixed", "steps / fixed", "last batch", "last noise scale",
        title="to the fixed batch's final validation loss",
    )  # fmt: skip
    fixed = {curve.seed: curve for curve in curves if curve.arm == "fixed"}
    for arm in ARMS:
        own = [curve for curve in curves if curve.arm == arm]
        ratios = []
        for curve in own:
            reference = fixed[curve.seed]
            found = curve.reached(reference.losses[-1] + 1e-12)
            if found is not None:
                ratios.append((found[0] / reference.samples[-1], found[1] / reference.steps[-1]))
        missing = f" ({len(own) - len(ratios)} of {len(own)} do not)" if len(ratios) < len(own) else ""
        noise = [curve.noise[-1] for curve in own if curve.noise[-1] is not None]
        shown.add_row(
            arm,
            spread([curve.losses[-1] for curve in own], 3),
            spread([ratio[0] for ratio in ratios], 2) + missing,
            spread([ratio[1] for ratio in ratios], 2) + missing,
            spread([float(curve.batch_sizes[-1]) for curve in own], 0),
            spread([float(one) for one in noise if one is not None], 0),
        )
    return shown


def spread(values: list[float], digits: int) -> str:
    """``mean (least to largest)``."""
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


class Panel:
    """A frame with logarithmic heights, into which lines are drawn.

    Args:
        place: left, top, width, height in pixels.
        right: largest value of the horizontal axis, which begins at 0.
        heights: what the vertical axis has to hold.
        ticks: where it has lines.
        title: above it.
    """

    def __init__(
        self,
        place: tuple[float, float, float, float],
        right: float,
        heights: list[float],
        ticks: list[float],
        title: str,
    ) -> None:
        self.left, self.top, self.width, self.height = place
        self.right = right
        self.low, self.high = math.log(min(heights) * 0.97), math.log(max(heights) * 1.03)
        self.shapes: list[Box | Line | Words] = [Words(self.left, self.top - 8, title, 13, bold=True)]
        for tick in ticks:
            if self.low <= math.log(tick) <= self.high:
                y = self.at(0, tick)[1]
                self.shapes.append(Line(((self.left, y), (self.left + self.width, y)), "#dddddd"))
                self.shapes.append(Words(self.left - 6, y + 4, f"{tick:g}", 11, anchor="end"))
        bottom = self.top + self.height
        self.shapes.append(Line(((self.left, bottom), (self.left + self.width, bottom)), "#222222"))
        for part in range(5):
            x = self.left + self.width * part / 4
            self.shapes.append(Words(x, bottom + 16, f"{right * part / 4:.0f}", 11, anchor="middle"))

    def at(self, x: float, y: float) -> tuple[float, float]:
        share = (math.log(y) - self.low) / (self.high - self.low)
        return self.left + self.width * x / self.right, self.top + self.height * (1 - share)

    def line(self, xs: Sequence[float], ys: Sequence[float | None], colour: str, width: float) -> None:
        points = [self.at(x, y) for x, y in zip(xs, ys) if y is not None]
        if len(points) > 1:
            self.shapes.append(Line(tuple(points), colour, width))


def draw(curves: list[Curve], path: Path) -> None:
    """Loss against consumed samples, and what batch and noise were then."""
    colours = dict(zip(ARMS, ("#555555", "#1f77b4", "#d95f02")))
    pale = dict(zip(ARMS, ("#bbbbbb", "#a5cbe6", "#f5c199")))
    right = float(curves[0].samples[-1])
    losses = [loss for curve in curves for loss in curve.losses[1:]]
    sizes = [float(one) for curve in curves for one in (*curve.batch_sizes[1:], *curve.noise) if one is not None]
    above = Panel((60, 40, 700, 300), right, losses, [2.0, 2.2, 2.4, 2.6, 2.8, 3.0, 3.5, 4.0, 5.0],
                  "validation loss, nats per byte (thick: mean over the seeds)")  # fmt: skip
    below = Panel((60, 400, 700, 200), right, sizes, [float(2**i) for i in range(12)],
                  "batch size, in samples (thin and pale: the measured noise scale)")  # fmt: skip
    for arm in ARMS:
        own = [curve for curve in curves if curve.arm == arm]
        for curve in own:
            above.line(curve.samples[1:], curve.losses[1:], pale[arm], 1)
            below.line(curve.samples, curve.noise, pale[arm], 1)
            below.line(curve.samples[1:], [float(size) for size in curve.batch_sizes[1:]], colours[arm], 1.5)
        mean = [statistics.mean(at) for at in zip(*(curve.losses for curve in own))]
        above.line(own[0].samples[1 : len(mean)], mean[1:], colours[arm], 3)
    legend: list[Box | Line | Words] = [Words(410, 640, "consumed samples", 12, anchor="middle")]
    for number, arm in enumerate(ARMS):
        legend.append(Line(((640, 60 + 20 * number), (665, 60 + 20 * number)), colours[arm], 3))
        legend.append(Words(672, 64 + 20 * number, arm, 12))
    shapes = (*above.shapes, *below.shapes, *legend)
    Drawing(800, 660, shapes, "Fixed batch, scheduled ramp and ramp by the gradient noise scale").save(path)


def refuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Leave with a message for what cannot be, before the hours and not after them."""
    if args.batch % 16 or args.batch < 16:
        parser.error(f"--batch {args.batch} is no multiple of 16 (nearest: {max(16, round(args.batch / 16) * 16)})")
    for name in ("seeds", "sequence", "validation", "points", "max_bytes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least 1")
    for name in ("lr", "noise_ratio"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name):g}: expected a positive number")
    # A batch of the ramps before each validation; the scheduled ramp grows at an eighth of the samples.
    least = max(8, args.points * args.batch // 4)
    if args.samples < least:
        parser.error(f"--samples {args.samples}: expected at least {least} with --batch {args.batch} and {args.points} "
                     "validations (--points)")  # fmt: skip
    try:
        Drawing(1, 1, ()).save(args.out)
    except ConfigError as error:
        parser.error(f"--{error}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=6144, help="of each run")
    parser.add_argument("--batch", type=int, default=64, help="of the fixed arm, a multiple of 16")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3, help="AdamW's rate, of the fixed arm")
    parser.add_argument("--noise-ratio", type=float, default=1.0, help="of the batch to the noise scale")
    parser.add_argument("--sequence", type=int, default=64, help="tokens")
    parser.add_argument("--validation", type=int, default=96, help="sequences")
    parser.add_argument("--points", type=int, default=16, help="validations in a run")
    parser.add_argument("--max-bytes", type=int, default=2_000_000, help="of the corpus")
    parser.add_argument("--out", type=Path, default=Path("batch_ramp.svg"), help="picture, .svg or .png")
    parser.add_argument("--json", type=Path, default=None, help="the curves")
    args = parser.parse_args(arguments)
    refuse(parser, args)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    console = Console()
    curves: list[Curve] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        total = len(ARMS) * args.seeds * (args.samples // (args.batch // 4))
        task = progress.add_task("batches", total=total)
        for seed in range(1, args.seeds + 1):
            for arm in ARMS:
                progress.update(task, description=f"seed {seed}, {arm}")
                curves.append(run(arm, seed, args, lambda: progress.advance(task)))
    console.print(table(curves))
    draw(curves, args.out)
    console.print(f"picture: {args.out}")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(curve) for curve in curves]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
