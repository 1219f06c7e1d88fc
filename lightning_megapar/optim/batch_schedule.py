"""Batch sizes by consumed samples: plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_megapar.config import ConfigError, nearest


@dataclass(frozen=True)
class BatchSchedule:
    """Which batch size holds from how many consumed samples on.

    Args:
        points: ``(consumed samples, samples per optimizer step)``, from 0 on, both rising.

    Raises:
        ConfigError: points that do not begin at 0 or do not rise.
    """

    points: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        shown = [list(point) for point in self.points]
        if not self.points or any(len(point) != 2 for point in self.points):
            raise ConfigError(f"BatchSizeRamp schedule={shown}: expected pairs of consumed samples and a batch size")
        if any(not isinstance(one, int) or isinstance(one, bool) for point in self.points for one in point):
            raise ConfigError(f"BatchSizeRamp schedule={shown}: expected integers (samples)")
        if self.points[0][0] != 0:
            raise ConfigError(f"BatchSizeRamp schedule={shown}: the first pair must be of 0 consumed samples")
        if self.points[0][1] < 1:
            raise ConfigError(f"BatchSizeRamp schedule={shown}: a batch has at least 1 sample")
        for before, after in zip(self.points, self.points[1:]):
            if after[0] <= before[0] or after[1] <= before[1]:
                raise ConfigError(
                    f"BatchSizeRamp schedule={shown}: {list(after)} does not rise over {list(before)}; consumed "
                    "samples and batch sizes must both grow from pair to pair"
                )

    @classmethod
    def linear(cls, start: int, increment: int, samples: int, last: int) -> BatchSchedule:
        """Megatron-LM's ``--rampup-batch-size START INCREMENT SAMPLES``, up to ``last``.

        The batch grows by ``increment`` at equal distances, and reaches ``last`` when ``samples`` are consumed.

        Raises:
            ConfigError: when ``last`` is not reached by whole increments, with the nearest that are.
        """
        if start < 1 or increment < 1 or samples < 1 or last <= start:
            raise ConfigError(
                f"BatchSizeRamp rampup=[{start}, {increment}, {samples}], max_batch_size={last}: expected a start, an "
                "increment and samples of at least 1, and a maximum above the start"
            )
        steps, rest = divmod(last - start, increment)
        if rest:
            below = start + steps * increment
            raise ConfigError(
                f"BatchSizeRamp max_batch_size={last} is not start={start} plus increments of {increment}; nearest "
                f"valid: {', '.join(map(str, nearest(last, [below, below + increment])))}"
            )
        return cls(tuple((samples * i // steps, start + i * increment) for i in range(steps + 1)))

    def at(self, consumed: int) -> int:
        """The batch size when so many samples are consumed."""
        return max(size for since, size in self.points if since <= consumed)


def refuse_indivisible(sizes: Iterable[int], loader_batch: int, ranks: int) -> None:
    """Refuse batch sizes that whole batches of all data ranks do not make up.

    Args:
        sizes: samples per optimizer step.
        loader_batch: samples that one data rank's loader gives.
        ranks: data ranks.

    Raises:
        ConfigError: the first such size, with the nearest valid ones.
    """
    unit = loader_batch * ranks
    for size in sizes:
        if size % unit:
            below = size // unit * unit
            valid: Sequence[int] = [one for one in (below, below + unit, below + 2 * unit) if one]
            raise ConfigError(
                f"BatchSizeRamp: batch size {size} is not divisible by {ranks} data rank{'s' if ranks > 1 else ''} x "
                f"{loader_batch} samples of the loader's batch = {unit}; nearest valid batch sizes: "
                f"{', '.join(map(str, nearest(size, valid)))}, or a smaller batch_size of the loader"
            )
