"""``metrics.csv``: every step's numbers at full precision, in one file that survives being resumed."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import IO, Any

from lightning.pytorch import LightningModule, Trainer

from lightning_megapar.callbacks.meter import SCALING, Meter, MeteredCallback, StepRecord, as_float, figures_of
from lightning_megapar.config import ConfigError

COLUMNS = (
    "step",
    "train_loss",
    "val_loss",
    "grad_norm",
    "tokens_per_second",
    "lr",
    "data_wait_seconds",
    "data_wait_share",
    "peak_memory_bytes",
    "consumed_samples",
    "epoch",
    "seconds",
)
"""In the file's order; meaning and units stand at :class:`~lightning_megapar.callbacks.meter.StepRecord`. ``seconds``
and ``consumed_samples`` (samples of all data ranks) count from the run's start and go on when it is resumed. Under
``precision="16-mixed"`` ``loss_scale`` and ``skipped_steps`` stand behind them, and behind these what other callbacks
tell of each step: ``noise_scale``, ``noise_scale/grad_sq``, ``noise_scale/trace``, ``batch_size``, ``lr_factor``,
``weight_decay``."""

TOTALS = ("consumed_samples", "seconds")
KEY = "lightning_megapar_totals"
"""Where a checkpoint has the totals of the run so far."""


class MetricsCSV(MeteredCallback):
    """Writes ``metrics.csv``, one row per optimizer step, on rank 0.

    Floats are written by ``repr``, so that they read back bit for bit; an unknown value is an empty cell. Each row
    reaches the file in one write. ``val_loss`` stands in the row of the step after which validation ran.

    A run that resumes at step N into an existing file drops the rows beyond N (and a torn last line) and goes on
    without a second header. A run that starts at step 0 never writes over an older file: that is renamed to
    ``metrics_1.csv`` (or the next free number) first. Checkpoints hold the totals, for a new run from one of them.

    Args:
        dirpath: folder of the file; ``None`` is the Trainer's ``default_root_dir``.
        every_n_steps: write each n-th step; steps with a validation are always written.

    Raises:
        ConfigError: when ``every_n_steps`` is below 1.
    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, every_n_steps: int = 1) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"MetricsCSV every_n_steps={every_n_steps}: expected an integer >= 1")
        self.dirpath = dirpath
        self.every_n_steps = every_n_steps
        self._file: IO[bytes] | None = None
        self._columns: tuple[str, ...] = COLUMNS
        self._last_row_at = 0
        self._last_step: int | None = None
        self._earlier: dict[str, float | None] = dict.fromkeys(TOTALS)
        self._restored: dict[str, float | None] = {}

    def path(self, trainer: Trainer) -> Path:
        """Where the file is."""
        return Path(trainer.default_root_dir if self.dirpath is None else self.dirpath) / "metrics.csv"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not trainer.is_global_zero:
            return
        self._close()
        path = self.path(trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        scaled = getattr(trainer.strategy, "loss_scale", None) is not None
        asked = (*COLUMNS, *(SCALING if scaled else ()), *figures_of(trainer))
        self._columns, last = _prepare(path, trainer.global_step, asked)
        self._earlier = self._totals(trainer.global_step, last)
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115 - lives until training ends
        self._last_row_at = self._file.seek(0, os.SEEK_END)
        self._last_step = None

    def _totals(self, step: int, last: dict[str, str] | None) -> dict[str, float | None]:
        """What the run had used up to ``step``; ``None`` where nobody knows.

        With rows at an interval the last one may be of an earlier step, and a new run from a checkpoint of another has
        no rows: then the checkpoint knows.
        """
        if step == 0:
            return dict.fromkeys(TOTALS, 0.0)
        row = last if last is not None and int(last["step"]) == step else {}
        kept = self._restored if self._restored.get("step") == step else {}
        return {name: _number(row.get(name, "")) if row.get(name) else kept.get(name) for name in TOTALS}

    # Not state_dict, of which Lightning allows one for a kind of callback: a run may write two files.

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.meter is not None and self.meter.has_record:
            values = self._values(self.meter.record(trainer), None)
        else:  # stopped before its first step
            values = {"step": trainer.global_step, **self._earlier}
        checkpoint[KEY] = {name: values[name] for name in ("step", *TOTALS)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._restored = dict(checkpoint.get(KEY) or {})

    def step_ended(self, trainer: Trainer, pl_module: LightningModule, meter: Meter) -> None:
        if self._file is not None and trainer.global_step % self.every_n_steps == 0:
            self._write(meter.record(trainer), None)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if self._file is None or self.meter is None or trainer.sanity_checking:
            return
        value = as_float(trainer.callback_metrics.get("val_loss"))
        if value is not None and self.meter.has_record:
            self._write(self.meter.record(trainer), value)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _write(self, record: StepRecord, val_loss: float | None) -> None:
        assert self._file is not None
        row = render(self._columns, self._values(record, val_loss))
        # A validation fills an empty cell of the row that stands last: the new text is longer than the old, so that one
        # write at the same place replaces it whole.
        if record.step != self._last_step:
            self._last_row_at = self._file.seek(0, os.SEEK_END)
        self._file.seek(self._last_row_at)
        self._file.write(row)
        self._file.truncate()
        self._last_step = record.step

    def _values(self, record: StepRecord, val_loss: float | None) -> dict[str, Any]:
        samples, seconds = self._earlier["consumed_samples"], self._earlier["seconds"]
        return {
            **record.figures,
            **vars(record),
            "val_loss": val_loss,
            "consumed_samples": None if samples is None else int(samples) + record.samples,
            "seconds": None if seconds is None else seconds + record.seconds,
        }

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def render(columns: tuple[str, ...], values: dict[str, Any]) -> bytes:
    """One CSV line in the order of ``columns``."""
    cells = ("" if values.get(name) is None else repr(values[name]) for name in columns)
    return (",".join(cells) + "\n").encode()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _prepare(path: Path, step: int, asked: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str] | None]:
    """Make ``path`` hold a header and only rows up to ``step``; returns its columns and its last row.

    Columns that are ``asked`` for stand behind those of an older file.
    """
    old_columns, rows = _read(path)
    if rows and step == 0:
        number = 1
        while (aside := path.with_name(f"{path.stem}_{number}{path.suffix}")).exists():
            number += 1
        path.rename(aside)
        old_columns, rows = (), []
    columns = old_columns + tuple(name for name in asked if name not in old_columns)
    kept = [row for row in rows if int(row["step"]) <= step]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(kept)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", newline="") as file:
        file.write(text.getvalue())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return columns, kept[-1] if kept else None


def _read(path: Path) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """Columns and whole rows of an existing file; a torn last line is left out."""
    if not path.exists():
        return (), []
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    reader = csv.reader(lines)
    columns = tuple(next(reader, ()))
    if "step" not in columns:
        if columns:
            raise ConfigError(f"{path} is no metrics file of ours (no column 'step'); expected another dirpath")
        return (), []
    rows = [dict(zip(columns, row)) for row in reader if len(row) == len(columns)]
    return columns, [row for row in rows if row["step"].isdigit()]
