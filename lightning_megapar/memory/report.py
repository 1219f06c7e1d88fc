"""What each rank holds in a training step, measured and predicted, as data and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch

from lightning_megapar.config import ConfigError
from lightning_megapar.memory.arena import ArenaStats
from lightning_megapar.memory.room import machine, process
from lightning_megapar.memory.timeline import (
    ACTIVATIONS,
    CATEGORIES,
    GRADIENTS,
    MESSAGES,
    OPTIMIZER,
    OUTSIDE,
    PARAMETERS,
    TEMPORARY,
    Timeline,
)

if TYPE_CHECKING:
    from rich.table import Table

MANY_RANKS = 8
"""With more of them the table has a column per pipeline stage: its rank with the highest peak."""
MANY_LAYERS = 16
LABELS = {
    PARAMETERS: "parameters",
    OPTIMIZER: "optimizer state",
    GRADIENTS: "gradients",
    ACTIVATIONS: "activations kept",
    MESSAGES: "communication buffers",
    TEMPORARY: "recomputation, temporary",
}


@dataclass(frozen=True)
class DeviceBytes:
    """What a device and its allocator say.

    Args:
        total, free: of the device; of the machine where the device is the CPU. ``None`` where nobody tells.
        allocated, reserved: of torch's allocator on a GPU now; ``None`` on the CPU, whose allocator keeps nothing.
        fragmented: reserved, and in pieces too small for the largest requests: reserved bytes that are not in use.
        resident: of the process on the CPU, ``None`` on a GPU.
    """

    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    fragmented: int | None = None
    resident: int | None = None


@dataclass(frozen=True)
class RankMemory:
    """One rank in one step.

    Args:
        rank: global.
        place: coordinates that matter, such as ``"pipeline 1"``.
        stage: pipeline coordinate.
        step: of the optimizer, counted from 0.
        measured: most bytes at once of each of :data:`~lightning_megapar.memory.timeline.CATEGORIES`.
        measured_peak: most bytes of all together, which is less than the sum: not all are at their most at once.
        predicted: of the same categories, those that can be.
        predicted_peak: ``None`` where a part is not known.
        layers: activations by block at their most; ``""`` is outside of blocks.
        predicted_layers: likewise.
        microbatches: in flight of each chunk, as the schedule says.
        device: what it says behind the step.
        arena: of the rank, if it has one.
        timeline: of the step.
    """

    rank: int
    place: str
    stage: int
    step: int
    measured: Mapping[str, int]
    measured_peak: int
    predicted: Mapping[str, int] = field(default_factory=dict)
    predicted_peak: int | None = None
    layers: Mapping[str, int] = field(default_factory=dict)
    predicted_layers: Mapping[str, int] = field(default_factory=dict)
    microbatches: tuple[int, ...] = (1,)
    device: DeviceBytes = DeviceBytes()
    arena: ArenaStats | None = None
    timeline: Timeline | None = None

    def to_json(self) -> dict[str, Any]:
        """Numbers and names alone."""
        return asdict(self)

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> RankMemory:
        """What :meth:`to_json` gives, also when it has been a file meanwhile."""
        known = {one.name: read[one.name] for one in fields(cls) if one.name in read}
        known["device"] = DeviceBytes(**read["device"])
        known["arena"] = None if read["arena"] is None else ArenaStats(**read["arena"])
        known["microbatches"] = tuple(read["microbatches"])
        if read["timeline"] is not None:
            line = dict(read["timeline"])
            for name in ("seconds", "held", "phases"):
                line[name] = tuple(tuple(one) if isinstance(one, list) else one for one in line[name])
            known["timeline"] = Timeline(**line)
        return cls(**known)


def device_bytes(device: torch.device) -> DeviceBytes:
    """What a device says now. On the CPU from ``/proc``, where there is one."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        split = torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0)
        return DeviceBytes(total, free, allocated, reserved, int(split))
    try:
        (total, free), (resident, _) = machine(), process()
    except (ConfigError, OSError):  # a system that does not tell
        return DeviceBytes()
    return DeviceBytes(total, free, resident=resident)


def shown_ranks(ranks: Sequence[RankMemory]) -> list[RankMemory]:
    """All of them, or of each pipeline stage the one with the highest peak when there are many."""
    if len(ranks) <= MANY_RANKS:
        return list(ranks)
    highest: dict[int, RankMemory] = {}
    for one in ranks:
        if one.stage not in highest or one.measured_peak > highest[one.stage].measured_peak:
            highest[one.stage] = one
    return [highest[stage] for stage in sorted(highest)]


def table(ranks: Sequence[RankMemory], title: str = "measured / predicted, each the most at once") -> Table:
    """A row per use and a column per rank; cells are "measured / predicted" in MiB, each the most at once.

    Args:
        ranks: at least one.
        title: what the numbers are.
    """
    from rich.table import Table

    shown = shown_ranks(ranks)
    title = f"memory of training step {shown[0].step}, MiB: {title}"
    found = Table("", *(_head(one) for one in shown), title=title)
    found.columns[0].no_wrap = True  # names of blocks differ in their ends
    for column in found.columns[1:]:
        column.justify = "right"

    def row(name: str, cells: Iterable[str], end_section: bool = False, style: str | None = None) -> None:
        cells = list(cells)
        if any(cell for cell in cells):
            found.add_row(name, *cells, end_section=end_section, style=style)

    for category in CATEGORIES:
        row(LABELS[category], (pair(one.measured.get(category), one.predicted.get(category)) for one in shown))
        if category == ACTIVATIONS:
            _add_layers(row, shown)
    row("all together, at the peak", (pair(one.measured_peak, one.predicted_peak) for one in shown), True, "bold")
    row("microbatches in flight", (" + ".join(map(str, one.microbatches)) for one in shown), True)
    row("arena, in use at most", (mib(one.arena.peak_bytes) if one.arena else "" for one in shown))
    row("arena, capacity", (mib(one.arena.capacity) if one.arena else "" for one in shown))
    row("allocator, allocated", (mib(one.device.allocated) for one in shown))
    row("allocator, reserved", (mib(one.device.reserved) for one in shown))
    row("allocator, fragmented", (mib(one.device.fragmented) for one in shown))
    row("process, resident", (mib(one.device.resident) for one in shown))
    row("device, free", (mib(one.device.free) for one in shown))
    row("device, in all", (mib(one.device.total) for one in shown))
    return found


def _add_layers(row: Any, shown: Sequence[RankMemory]) -> None:
    names = list(dict.fromkeys(name for one in shown for name in (*one.predicted_layers, *one.layers)))
    blocks = [name for name in names if name != OUTSIDE]
    if len(blocks) <= MANY_LAYERS:
        for name in blocks:
            cells = (pair(one.layers.get(name), one.predicted_layers.get(name)) for one in shown)
            row(f"  {name}", cells, style="dim")
    else:
        cells = (pair(_sum(one.layers), _sum(one.predicted_layers)) for one in shown)
        row(f"  in {len(blocks)} blocks", cells, style="dim")
    row("  outside of blocks", (pair(one.layers.get(OUTSIDE), one.predicted_layers.get(OUTSIDE)) for one in shown),
        style="dim")  # fmt: skip


def _sum(layers: Mapping[str, int]) -> int | None:
    return sum(size for name, size in layers.items() if name != OUTSIDE) if layers else None


def _head(one: RankMemory) -> str:
    return f"rank {one.rank}" + (f"\n{one.place}" if one.place else "")


def pair(measured: int | None, predicted: int | None) -> str:
    """``measured / predicted`` in MiB; what is not known is left out, or "?" beside a measured one."""
    if measured is None and predicted is None:
        return ""
    return f"{mib(measured) or '?'} / {mib(predicted) or '?'}"


def mib(number: int | None) -> str:
    """Bytes as MiB with three digits, ``""`` for ``None``."""
    if number is None:
        return ""
    value = number / 2**20
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
