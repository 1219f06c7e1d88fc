"""What recomputation through the strategy costs beside loops by hand: one model, in turns of a few steps."""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from turns import StepEnds, Turns, ratio_of, train_by_hand

from lightning_megapar.models.gpt import GPTBlock, GPTConfig
from lightning_megapar.models.language_model import LanguageModel, OptimizerConfig
from lightning_megapar.strategy import MegaParStrategy

KEPT = "loop, everything kept"
FORWARDS = "loop, checkpoint around each block's forward"
CALLS = "loop, blocks that checkpoint their own call"
FULL = "MegaParStrategy(recompute='full')"
NONE = "MegaParStrategy()"
NAMES = (KEPT, FORWARDS, CALLS, FULL, NONE)
PAIRS = ((FULL, FORWARDS), (FULL, CALLS), (NONE, KEPT), (FULL, NONE), (FORWARDS, KEPT))


class CheckpointedBlock(GPTBlock):
    """As the layers of transformers do: the call, its hooks included, is what runs again."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        return checkpoint(partial(super().__call__, **kwargs), *args, use_reentrant=False)


class Overhead:
    """The common model, data and clock.

    Args:
        args: the command line: ``rounds``, ``steps``, ``batch``, ``threads``.
        config: of the model.
    """

    def __init__(self, args: argparse.Namespace, config: GPTConfig) -> None:
        self.args, self.config = args, config
        self.optimizer = OptimizerConfig(lr=1e-3, schedule="constant")
        self.steps = (args.rounds + 1) * args.steps
        generator = torch.Generator().manual_seed(0)
        size = (self.steps * args.batch, config.max_sequence_length + 1)
        rows = torch.randint(0, config.vocab_size, size, generator=generator)
        self.rows = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]
        self.turns = Turns(list(NAMES), args.steps, time.perf_counter)
        self.losses: dict[str, list[torch.Tensor]] = {}
        self.failures: list[BaseException] = []

    def _by_hand(self, name: str) -> list[torch.Tensor]:
        module = LanguageModel(self.config, self.optimizer)
        module.configure_model()
        model: Any = module.model
        for block in model.blocks:
            if name == FORWARDS:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            elif name == CALLS:
                block.__class__ = CheckpointedBlock
        return train_by_hand(module, DataLoader(self.rows, batch_size=self.args.batch), self.turns, name)  # type: ignore[arg-type]

    def _by_strategy(self, name: str) -> list[torch.Tensor]:
        ends = StepEnds(self.turns, name)
        trainer = Trainer(
            strategy=MegaParStrategy(recompute="full" if name == FULL else "none"),
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            callbacks=[ends],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader: DataLoader[Any] = DataLoader(self.rows, batch_size=self.args.batch)  # type: ignore[arg-type]
        trainer.fit(LanguageModel(self.config, self.optimizer), loader)
        return ends.losses

    def _contend(self, name: str) -> None:
        torch.set_num_threads(self.args.threads)  # a thread's own setting
        self.turns.enter(name)
        try:
            self.losses[name] = self._by_strategy(name) if name in (FULL, NONE) else self._by_hand(name)
        except BaseException as error:
            self.failures.append(error)
        finally:
            self.turns.leave(name)

    def measure(self) -> dict[str, Any]:
        """Median steps and their ratios.

        Raises:
            RuntimeError: somebody did not train as the loop that keeps everything.
        """
        threads = [threading.Thread(target=self._contend, args=(name,)) for name in NAMES]
        for thread in threads:
            thread.start()
        self.turns.gates[NAMES[0]].release()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]
        parted = {
            name: max(abs(float(a) - float(b)) for a, b in zip(losses, self.losses[KEPT], strict=True))
            for name, losses in self.losses.items()
        }
        if max(parted.values()) > 1e-3:
            raise RuntimeError(f"not all trained alike: losses differ by {parted}")
        seconds = {name: self.turns.medians(self.turns.seconds[name]) for name in NAMES}
        cpu = {name: self.turns.medians(self.turns.cpu_seconds[name]) for name in NAMES}
        return {
            "median_step_seconds": {name: statistics.median(each) for name, each in seconds.items()},
            "ratios": [
                {
                    "over": over,
                    "under": under,
                    **ratio_of(seconds[over], seconds[under]),
                    "cpu": statistics.median(a / b for a, b in zip(cpu[over], cpu[under])),
                }
                for over, under in PAIRS
            ],
            "largest_difference_of_losses": parted,
        }
