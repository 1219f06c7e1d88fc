"""One line that tells the run: a bar on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar

from lightning_megapar.callbacks.meter import Meter, MeteredCallback, StepRecord, as_float
from lightning_megapar.config import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_REFRESH_SECONDS = 0.2
_NARROWEST_BAR = 8


class RunLine(MeteredCallback, ProgressBar):
    """Step, loss, gradient norm, tokens per second, peak memory, data wait and time left, in place of a progress bar.

    With a ``GradientNoiseScale`` or a ``BatchSizeRamp`` among the callbacks also the noise scale and the batch size.

    On a terminal the line is redrawn in place with a bar behind it. Elsewhere a plain line (no control characters) is
    printed on standard output every ``every_n_steps`` optimizer steps and after the last one. It waits for a
    validation that follows the step, so that it can tell the validation loss, as do the lines after it. The numbers
    are those of ``metrics.csv``, rounded. Rank 0 speaks.

    Args:
        every_n_steps: log interval of the plain lines; ``None`` is the Trainer's ``log_every_n_steps``.

    Raises:
        ConfigError: when ``every_n_steps`` is below 1.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        ProgressBar.__init__(self)
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(f"RunLine every_n_steps={every_n_steps}: expected an integer >= 1, or null")
        self.every_n_steps = every_n_steps
        self._enabled = True
        self._val_loss: float | None = None
        self._shown: tuple[int, float | None] | None = None
        self._activity = ""
        self._held: StepRecord | None = None
        self._record: StepRecord | None = None
        self._live: Live | None = None
        self._drawn_at = 0.0

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._enabled:
            print(*args, **kwargs)  # a live line has put itself behind standard output

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        ProgressBar.setup(self, trainer, pl_module, stage)
        MeteredCallback.setup(self, trainer, pl_module, stage)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()
        MeteredCallback.teardown(self, trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        MeteredCallback.on_train_start(self, trainer, pl_module)
        self._shown, self._held, self._record, self._activity = None, None, None, ""
        self._start()

    def step_ended(self, trainer: Trainer, pl_module: LightningModule, meter: Meter) -> None:
        if not self._enabled:
            return
        if self._live is not None:
            if time.perf_counter() - self._drawn_at >= _REFRESH_SECONDS:
                self._record = meter.record(trainer)
                self._draw()
            return
        every = self.every_n_steps or max(1, getattr(trainer, "log_every_n_steps", 1))
        if trainer.global_step % every == 0:
            self._held = meter.record(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        MeteredCallback.on_train_batch_start(self, trainer, pl_module, batch, batch_idx)
        self._say()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        MeteredCallback.on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        MeteredCallback.on_validation_start(self, trainer, pl_module)
        self._start()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        checking = trainer.sanity_checking
        total = trainer.num_sanity_val_batches if checking else trainer.num_val_batches
        self._busy("checking validation" if checking else "validating", batch_idx, total)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        MeteredCallback.on_validation_end(self, trainer, pl_module)
        if not trainer.sanity_checking:
            self._val_loss = as_float(trainer.callback_metrics.get("val_loss"))
            self._say()
        self._idle(trainer)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._start()
        self._busy("testing", batch_idx, trainer.num_test_batches)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._idle(trainer)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._start()
        self._busy("predicting", batch_idx, trainer.num_predict_batches)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._idle(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._enabled and self.meter is not None and self.meter.has_record:
            self._record = self.meter.record(trainer)
            if self._live is not None:
                self._draw()
            elif self._shown != (self._record.step, self._val_loss):
                self._held = self._record
                self._say()
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._say()
        self._stop()

    # The live line. Redrawn by us and not by a thread of rich: a loader may fork workers at any time.

    def _start(self) -> None:
        if self._live is not None or not self._enabled or not _may_be_terminal():
            return
        from rich.console import Console
        from rich.live import Live

        console = Console()
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, auto_refresh=False, get_renderable=lambda: self._render(console))
            self._live.start()

    def _stop(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _draw(self) -> None:
        if self._live is not None:
            self._live.refresh()
            self._drawn_at = time.perf_counter()

    def _busy(self, activity: str, batch_idx: int, totals: Sequence[int | float]) -> None:
        # One number per loader; an endless loader has none.
        end = f"/{totals[0]}" if len(totals) == 1 and isinstance(totals[0], int) else ""
        self._activity = f"{activity} {batch_idx + 1}{end}"
        if self._live is not None and time.perf_counter() - self._drawn_at >= _REFRESH_SECONDS:
            self._draw()

    def _idle(self, trainer: Trainer) -> None:
        self._activity = ""
        if trainer.state.fn != "fit":
            self._stop()
        elif not trainer.sanity_checking:
            self._draw()

    def _say(self) -> None:
        if self._held is not None:
            self._shown = (self._held.step, self._val_loss)
            print(line(self._held, self._val_loss), flush=True)
            self._held = None

    def _render(self, console: Console) -> RenderableType:
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table
        from rich.text import Text

        record = self._record
        text = self._activity or "starting"
        if record is not None:
            text = line(record, self._val_loss, self._activity, console.width - 1)
        room = console.width - len(text) - 1
        if record is None or record.total_steps is None or room < _NARROWEST_BAR:
            return Text(text, no_wrap=True, overflow="ellipsis")
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(width=room - 1)
        grid.add_row(Text(text), Bar(total=record.total_steps, completed=record.step, width=room - 1))
        return grid


def line(record: StepRecord, val_loss: float | None = None, activity: str = "", width: int | None = None) -> str:
    """A step in one line without control characters; unknown values are left out.

    Args:
        record: the step.
        val_loss: last known validation loss.
        activity: what goes on, put last.
        width: when the line would be longer, what matters least is left out.
    """
    parts: dict[str, str] = {}

    def say(name: str, value: float | None, text: Callable[[float], str]) -> None:
        if value is not None:
            parts[name] = text(value)

    total = "" if record.total_steps is None else f"/{record.total_steps}"
    say("step", record.step, lambda v: f"step {v}{total}")
    say("loss", record.train_loss, lambda v: f"loss {v:.4f}")
    say("val_loss", val_loss, lambda v: f"val_loss {v:.4f}")
    say("grad_norm", record.grad_norm, lambda v: f"grad_norm {v:.4g}")
    say("noise_scale", record.figures.get("noise_scale"), lambda v: f"noise_scale {v:.4g}")
    say("batch_size", record.figures.get("batch_size"), lambda v: f"batch_size {v:.0f}")
    say("tokens", record.tokens_per_second, lambda v: f"{v:,.0f} tokens/s")
    say("memory", record.peak_memory_bytes or None, lambda v: f"peak {v / 2**20:,.0f} MiB")
    say("wait", record.data_wait_share, lambda v: f"data wait {100 * v:.1f} %")
    say("eta", record.eta_seconds, lambda v: f"ETA {timedelta(seconds=round(v))}")
    if activity:
        parts["activity"] = activity
    for name in ("wait", "memory", "grad_norm", "noise_scale", "batch_size", "eta", "tokens"):
        if width is not None and len(" | ".join(parts.values())) > width:
            parts.pop(name, None)
    return " | ".join(parts.values())


def _may_be_terminal() -> bool:
    # Asked before rich is imported, so that a run in a pipe never pays for it.
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):
        return False
