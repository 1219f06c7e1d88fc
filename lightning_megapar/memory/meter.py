"""How many bytes a piece of work takes on a device: at most, and what is left of it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_megapar.config import ConfigError
from lightning_megapar.memory.trace import allocations

_MARK = "lightning_megapar memory mark"


@dataclass(frozen=True)
class Usage:
    """Bytes beyond those that were allocated when a section began.

    Args:
        peak_bytes: most at once.
        kept_bytes: at its end; negative where more was freed than allocated.
    """

    peak_bytes: int
    kept_bytes: int


class Meter:
    """Divides work into sections, see :func:`metered`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._usages: list[Usage] = []
        self._begin = 0

    @property
    def usages(self) -> list[Usage]:
        """Of the sections, in order; complete when the meter has stopped."""
        return self._usages

    def next_section(self) -> None:
        """End a section and begin another one."""
        if self._is_cuda:
            self._end_section()
            self._begin_section()
        else:
            with torch.profiler.record_function(_MARK):
                pass

    def _begin_section(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._begin = torch.cuda.memory_allocated(self._device)

    def _end_section(self) -> None:
        peak = torch.cuda.max_memory_allocated(self._device) - self._begin
        self._usages.append(Usage(peak, torch.cuda.memory_allocated(self._device) - self._begin))


@contextmanager
def metered(device: torch.device) -> Iterator[Meter]:
    """Count what is allocated while the body runs.

    On CUDA by the allocator's statistics (whose peak is reset), elsewhere by the memory events of torch's profiler,
    which knows the CPU alone and counts every thread.

    Raises:
        ConfigError: a profiler is running already, and there can be one alone.
    """
    meter = Meter(device)
    if device.type == "cuda":
        meter._begin_section()
        yield meter
        meter._end_section()
        return
    if torch.autograd._profiler_enabled():
        raise ConfigError(
            "memory is measured with torch's profiler, and another one is running (Trainer(profiler=...), "
            "torch.profiler.profile); let it begin after the first step"
        )
    recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with quiet_profiler():
        recorded.start()
    try:
        yield meter
    finally:
        with quiet_profiler():
            recorded.stop()
    meter._usages.extend(_sections(recorded))


_CHATTER = (b"USDT:", b"Memory block of unknown size was allocated before the profiling started")


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep lines off the terminal that torch 2.13's profiler writes at each start and stop, and one of its warnings."""
    sys.stderr.flush()
    try:
        outside = os.dup(2)
    except OSError:  # closed
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(outside, 2)
            os.close(outside)
            caught.seek(0)
            for line in caught:
                if not any(words in line for words in _CHATTER):
                    os.write(2, line)


def _sections(recorded: profile) -> list[Usage]:
    """The usage of each section of a profile."""
    found: list[Usage] = []
    peak = level = 0
    for change in allocations(recorded, "cpu", _MARK):
        if change is None:
            found.append(Usage(peak, level))
            peak = level = 0
        else:
            level += change[1]
            peak = max(peak, level)
    return [*found, Usage(peak, level)]


def usage_of(work: Callable[[], object], device: torch.device) -> Usage:
    """What a piece of work takes; its result is let go of."""
    with metered(device) as meter:
        work()
    return meter.usages[0]
