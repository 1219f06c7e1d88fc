"""What benchmarks of training loops share: contenders that take turns in one process, and the model they train."""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_megapar.config import ConfigError
from lightning_megapar.models.gpt import GPTConfig

SIZES = ("layers", "width", "heads", "sequence", "batch", "steps", "rounds")


class Turns:
    """Lets one contender run at a time, ``length`` steps each, and times their steps.

    Args:
        names: who takes part, in the order of their turns.
        length: steps in a turn.
        now: clock in seconds.
    """

    def __init__(self, names: list[str], length: int, now: Callable[[], float]) -> None:
        self.length, self.now = length, now
        self.alive = list(names)
        self.gates = {name: threading.Semaphore(0) for name in names}
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.cpu_seconds: dict[str, list[float]] = {name: [] for name in names}
        self.began = (0.0, 0.0)

    def enter(self, name: str) -> None:
        """Wait for the first turn."""
        self.gates[name].acquire()
        self.began = self.now(), time.process_time()

    def step_done(self, name: str) -> None:
        """Called at the end of each step; hands over at the end of a turn and returns at the start of the next."""
        self.seconds[name].append(self.now() - self.began[0])
        self.cpu_seconds[name].append(time.process_time() - self.began[1])
        if len(self.seconds[name]) % self.length == 0 and len(self.alive) > 1:
            self.gates[self._after(name)].release()
            self.gates[name].acquire()
        self.began = self.now(), time.process_time()

    def leave(self, name: str) -> None:
        """The contender has finished, or failed."""
        following = self._after(name)
        self.alive.remove(name)
        if self.alive:
            self.gates[following].release()

    def _after(self, name: str) -> str:
        return self.alive[(self.alive.index(name) + 1) % len(self.alive)]

    def medians(self, values: list[float]) -> list[float]:
        """Median of a step, turn by turn; the first turn and each turn's first step are left out."""
        turns = [values[start : start + self.length] for start in range(self.length, len(values), self.length)]
        return [statistics.median(turn[1:]) for turn in turns]


class StepEnds(Callback):
    """Tells :class:`Turns` when a step ended, and keeps the losses."""

    def __init__(self, turns: Turns, name: str) -> None:
        self.turns, self.name = turns, name
        self.losses: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"])
        self.turns.step_done(self.name)


def train_by_hand(
    module: Any, batches: Iterable[Any], turns: Turns, name: str, clip: float = 0.0
) -> list[torch.Tensor]:
    """The loop that anybody would write for a language model.

    Args:
        module: a :class:`~lightning_megapar.models.language_model.LanguageModel` whose model exists.
        batches: one for each step.
        turns, name: who is told of each step's end, and by whom.
        clip: gradient norm to clip at; 0 does not clip.

    Returns:
        the losses.
    """
    model, made = module.model, module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch["tokens"], batch["labels"])
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        turns.step_done(name)
    return losses


def ratio_of(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Turn by turn the ratio of two contenders' medians: its median, lowest and highest."""
    each = [a / b for a, b in zip(over, under)]
    return {"median": statistics.median(each), "lowest": min(each), "highest": max(each)}


def gpt_of(args: argparse.Namespace) -> GPTConfig:
    """The model in GPT-2 style that a command line's sizes say."""
    return GPTConfig.gpt2(
        vocab_size=257,
        num_layers=args.layers,
        num_heads=args.heads,
        hidden_size=args.width,
        max_sequence_length=args.sequence,
    )


def add_sizes(parser: argparse.ArgumentParser, *, width: int, steps: int, rounds: int) -> None:
    """The options that every such benchmark has, with defaults."""
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=width)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step and rank")
    parser.add_argument("--steps", type=int, default=steps, help="steps in a turn; the first is not counted")
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of each contender, after a first to warm up")


def refuse_sizes(parser: argparse.ArgumentParser, args: argparse.Namespace, *others: str) -> None:
    """Leave with a message for sizes that cannot be."""
    for name in (*SIZES, *others):
        least = 2 if name == "steps" else 1
        if getattr(args, name) < least:
            parser.error(f"--{name}={getattr(args, name)}: expected at least {least}")
    try:
        gpt_of(args)
    except ConfigError as error:
        parser.error(f"no such model: {error} (--width is the hidden size, --heads its num_heads)")
