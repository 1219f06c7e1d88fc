"""The batch arithmetic: how a global batch is divided over data ranks, accumulation and microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_megapar.config import ConfigError, nearest

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class BatchPlan:
    """One optimizer step's samples, counted.

    ``micro_batch x microbatches = batch_per_rank`` (what a data rank's loader yields), and
    ``batch_per_rank x data_size x accumulate = global_batch_size`` (what one optimizer step sees).

    Args:
        global_batch_size: samples per optimizer step over all ranks; the same on every layout.
        data_size: data-parallel ranks (those that see different samples).
        accumulate: Lightning's ``accumulate_grad_batches``.
        microbatches: pieces that the pipeline cuts a data rank's batch into.

    Raises:
        ConfigError: when a value is not a positive integer, or the global batch size cannot be divided evenly; the
            nearest valid global batch sizes are named.
    """

    global_batch_size: int
    data_size: int = 1
    accumulate: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "data_size", "accumulate", "microbatches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}: expected a positive integer (nearest valid: 1)")
        unit = self.data_size * self.accumulate * self.microbatches
        if self.global_batch_size % unit:
            below = self.global_batch_size // unit * unit
            valid = nearest(self.global_batch_size, [size for size in (below, below + unit, below + 2 * unit) if size])
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} is not divisible by {self.data_size} data ranks x "
                f"{self.accumulate} accumulated batches (accumulate_grad_batches) x {self.microbatches} microbatches "
                f"(num_microbatches) = {unit}. Nearest valid global batch sizes: {', '.join(map(str, valid))}"
            )

    @property
    def batch_per_rank(self) -> int:
        """Samples in one batch of one data rank's loader."""
        return self.global_batch_size // (self.data_size * self.accumulate)

    @property
    def micro_batch(self) -> int:
        """Samples in one forward."""
        return self.batch_per_rank // self.microbatches

    def describe(self) -> str:
        """One line, such as ``micro batch 2 x 4 microbatches = batch 8 per data rank; x 2 data ranks x 1 accumulation
        = global batch 16``."""
        return (
            f"micro batch {self.micro_batch} x {_count(self.microbatches, 'microbatch', 'microbatches')} = "
            f"batch {self.batch_per_rank} per data rank; x {_count(self.data_size, 'data rank', 'data ranks')} x "
            f"{_count(self.accumulate, 'accumulation', 'accumulations')} = global batch {self.global_batch_size}"
        )

    def table(self) -> Table:
        """The same numbers as a rich table, one factor a row."""
        from rich.table import Table

        table = Table(title="batch arithmetic", title_justify="left")
        table.add_column("factor")
        table.add_column("value", justify="right")
        table.add_column("gives")
        table.add_column("samples", justify="right")
        per_rank, micro = self.batch_per_rank, self.micro_batch
        table.add_row("micro batch", str(micro), "one forward", str(micro))
        table.add_row("x microbatches", str(self.microbatches), "batch per data rank", str(per_rank))
        table.add_row("x data ranks", str(self.data_size), "batch of all ranks", str(per_rank * self.data_size))
        table.add_row("x accumulation", str(self.accumulate), "global batch", str(self.global_batch_size))
        return table


class WindowLength(int):
    """``accumulate_grad_batches`` of one window that begins after ``origin`` batches of the epoch.

    Lightning asks ``batches % accumulate_grad_batches == 0`` to know whether a window begins or ends, which is right
    only if all windows of an epoch have one length. It divides the loss by the same number. This is an ordinary
    integer, the window's length, of which the remainder alone is counted from where the window begins.

    Args:
        length: batches in the window.
        origin: batches of the epoch before it.
    """

    origin: int

    def __new__(cls, length: int, origin: int = 0) -> WindowLength:
        made = super().__new__(cls, length)
        made.origin = origin
        return made

    def __rmod__(self, batches: int) -> int:
        return (int(batches) - self.origin) % int(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return WindowLength, (int(self), self.origin)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
