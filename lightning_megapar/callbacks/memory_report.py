"""What every rank holds during one training step, measured and predicted: a table, a file and a picture."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megapar.callbacks.file_names import checked_name
from lightning_megapar.callbacks.memory_facts import RankFacts
from lightning_megapar.config import ConfigError
from lightning_megapar.memory.block_costs import BlockCostsWatch
from lightning_megapar.memory.recorder import StepRecorder
from lightning_megapar.memory.report import RankMemory, table
from lightning_megapar.memory.timeline import GRADIENTS
from lightning_megapar.pipeline.cutting.state import state_kept
from lightning_megapar.pipeline.picture.drawing import FORMATS
from lightning_megapar.pipeline.picture.memory import draw_memory

FIRST = 2
"""The optimizer has its state, and the step before could be measured."""
FORMAT = "lightning_megapar memory report 1"


class MemoryReport(Callback):
    """Measures one step and, in the step before it, what each kind of block costs, from which that step is predicted.

    Rank 0 prints a table with a column per rank (of many ranks one per stage): the most bytes at once of parameters,
    gradients, optimizer state, activations by block, communication buffers and the rest; see
    :mod:`~lightning_megapar.memory.timeline` for what counts as what. It writes the same as JSON, with the bytes over
    time, and draws them. On the CPU tensors are what torch's profiler sees; the process holds more (torch itself, what
    malloc keeps).

    Predictions: parameters, gradients and optimizer state from shapes and layout
    (:func:`~lightning_megapar.data_parallel.formulas.state_bytes`); activations from the blocks' measured costs under
    what they recompute, times the microbatches that the schedule keeps in flight, and outside of blocks what autograd
    kept in the step before.

    The numbers of the training stay what they are. Both steps take longer (seconds for large blocks); the others run as
    without the callback.

    Args:
        at_step: value of ``trainer.global_step`` during the measured step; ``None`` takes the first one from
            :data:`FIRST` on with a settled plan of recomputation. Where a plan is made later than asked for, the step
            is the first one behind it.
        path: name of the JSON file; a relative one is put into ``trainer.log_dir``, which is ``default_root_dir``
            without a logger. ``None`` writes none.
        picture: name of an ``.svg`` or ``.png``, or ``None``.

    Raises:
        ConfigError: on a step before the second one, or a name with another ending.
    """

    def __init__(
        self,
        at_step: int | None = None,
        path: str | os.PathLike[str] | None = "memory.json",
        picture: str | os.PathLike[str] | None = "memory.svg",
    ) -> None:
        if at_step is not None and (isinstance(at_step, bool) or not isinstance(at_step, int) or at_step < 1):
            raise ConfigError(
                f"MemoryReport at_step={at_step!r}: expected a step from 1 on (the step before it is measured as well; "
                f"nearest valid: 1), or None for the first one with everything in it"
            )
        self.at_step = at_step
        self.path = None if path is None else checked_name("MemoryReport path", path, (".json",), "memory")
        self.picture = None if picture is None else checked_name("MemoryReport picture", picture, FORMATS, "memory")
        if self.picture is not None and self.picture.suffix.lower() == ".png" and not _has_matplotlib():
            raise ConfigError(
                f"MemoryReport picture={str(picture)!r}: PNG needs matplotlib (lightning_megapar[plot]); "
                f"{str(self.picture.with_suffix('.svg'))!r} needs nothing"
            )
        self.ranks: list[RankMemory] = []
        """On rank 0, once the step has been measured: all ranks, in order."""
        self._folder = Path()
        self._forget()

    @property
    def block_costs(self) -> BlockCostsWatch | None:
        """What this rank's blocks cost, once it has been measured; asked when a step runs out of memory."""
        return None if self._stage in ("waiting", "measuring blocks") else self._costs

    def _forget(self) -> None:
        self._costs: BlockCostsWatch | None = None
        self._recorder: StepRecorder | None = None
        self._facts: RankFacts | None = None
        self._window = -1
        self._stage = "waiting"  # measuring blocks, ready, recording, done

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._forget()
            self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # broadcast by rank 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if self._stage == "done" or step == self._window:  # or within an accumulation window
            return
        self._window = step
        first = FIRST if self.at_step is None else self.at_step
        if step < first - 1:
            return
        facts = RankFacts(trainer, pl_module)
        if not facts.is_settled():
            return
        if torch.autograd._profiler_enabled() or _profiles_by_torch(trainer):
            self._stage = "done"
            rank_zero_warn(
                "MemoryReport: memory is measured with torch's profiler, and there is another one "
                "(Trainer(profiler='pytorch')): no report; leave one of the two out"
            )
        elif self._stage == "waiting":
            self._stage = "measuring blocks"
            self._costs = BlockCostsWatch(
                pl_module, facts.blocks(), facts.device, state_kept, facts.deferral, facts.planned_measures
            )
            self._costs.begin()
        elif self._stage == "ready":
            self._stage, self._facts = "recording", facts
            shown = [] if facts.is_sharded else list(pl_module.parameters())
            self._recorder = StepRecorder(facts.device, facts.blocks(), facts.tensors(), facts.leaves(), shown)
            self._recorder.start()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._recorder is not None:
            self._recorder.note(GRADIENTS, [p.grad for p in pl_module.parameters() if p.grad is not None])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._window:
            return
        if self._stage == "measuring blocks":
            assert self._costs is not None
            self._costs.end()
            self._stage = "ready"
        elif self._stage == "recording":
            assert self._recorder is not None and self._facts is not None and self._costs is not None
            timeline = self._recorder.stop().thinned(1000)
            self._recorder, self._stage = None, "done"
            self._gather(self._facts.memory(self._window, timeline, self._costs))
            self._facts = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._stage != "done":
            self._stop()
            asked = "" if self.at_step is None else f" at_step={self.at_step}"
            rank_zero_warn(
                f"MemoryReport{asked}: training ended at step {trainer.global_step} before a step could be measured "
                "(two in a row are needed, from the second one on, with a settled plan of recomputation): no report"
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._recorder is not None:
            self._recorder.abandon()
            self._recorder = None
        if self._costs is not None:
            self._costs.end()
        self._stage = "done"

    def _gather(self, own: RankMemory) -> None:
        """Collective over all ranks."""
        everyone: list[Any] = [own]
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, own)
        if everyone and (not dist.is_initialized() or dist.get_rank() == 0):
            self.ranks = everyone
            self._write()

    def _write(self) -> None:
        from rich.console import Console

        Console().print(table(self.ranks))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self.path is not None:
                path = self._folder / self.path
                temporary = path.with_name(f".{path.name}.{os.getpid()}")
                temporary.write_text(json.dumps({"format": FORMAT, "ranks": [one.to_json() for one in self.ranks]}))
                os.replace(temporary, path)
                rank_zero_info(f"memory of step {self.ranks[0].step}: {path}")
            if self.picture is not None:
                picture = self._folder / self.picture
                draw_memory(self.ranks).save(picture)
                rank_zero_info(f"memory of step {self.ranks[0].step}, as a picture: {picture}")
        except (OSError, ConfigError) as error:  # no reason to end a training run
            rank_zero_warn(f"MemoryReport: the report could not be written: {error}")


def read_report(path: str | os.PathLike[str]) -> list[RankMemory]:
    """The ranks of a file that the callback has written.

    Raises:
        ConfigError: another kind of file.
    """
    try:
        read = json.loads(Path(path).read_text())
        if read["format"] != FORMAT:
            raise KeyError(read["format"])
        return [RankMemory.from_json(one) for one in read["ranks"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no memory report (format {FORMAT!r}): {error!r}") from error


def _profiles_by_torch(trainer: Any) -> bool:
    """Whether the Trainer's profiler is torch's, which begins and ends within steps and takes no other beside it."""
    profiler = trainer.profiler
    profiler = getattr(profiler, "inner", profiler)  # of the callbacks that time steps
    return any(kind.__name__ == "PyTorchProfiler" for kind in type(profiler).__mro__)


def _has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None
