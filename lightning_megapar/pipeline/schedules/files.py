"""Schedules as CSV files, so that anybody can bring one. No torch.

One line per rank, one cell per action in order: the virtual stage, a letter (``F`` forward, ``B`` whole backward, ``I``
backward of inputs, ``W`` backward of weights) and the microbatch, such as ``0F3``. This is the compute-only form that
``torch.distributed.pipelining`` writes and reads as well. Empty cells and lines that start with ``#`` are skipped, so
that a file may show idle slots.

Which rank holds which virtual stages follows from where they appear; a rank's chunks are numbered in the order of the
model.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

from lightning_megapar.config import ConfigError, unknown_schedule
from lightning_megapar.pipeline.schedules.data import LETTERS, Action, Kind, Schedule

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_SIDE_BY_SIDE = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")
_KIND_OF: dict[str, Kind] = {letter: kind for kind, letter in LETTERS.items()}


def to_csv(schedule: Schedule) -> str:
    """The schedule as text: a line per rank, a cell such as ``0F3`` per action."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row, placement in zip(schedule.ranks, schedule.placement):
        writer.writerow([f"{placement[a.chunk]}{LETTERS[a.kind]}{a.microbatch}" for a in row])
    return text.getvalue()


def from_csv(text: str, name: str = "custom") -> Schedule:
    """The schedule that a text describes, checked for completeness, dependencies and deadlock.

    ``(0F5;7B2)OVERLAP_F_B``, torch's notation for a forward and a backward side by side, is read as one after the
    other.

    Args:
        text: see the top of this module.
        name: name of the schedule.

    Raises:
        ConfigError: on a cell that is no action (its line and column are named), a virtual stage on two ranks, and
            whatever :class:`~lightning_megapar.pipeline.schedules.data.Schedule` refuses.
    """
    rows: list[list[tuple[int, Kind, int]]] = []
    owner: dict[int, int] = {}
    reader = csv.reader(io.StringIO(text))
    for cells in reader:
        if not any(cell.strip() for cell in cells) or cells[0].lstrip().startswith("#"):
            continue
        row: list[tuple[int, Kind, int]] = []
        for column, cell in enumerate(cells, 1):
            pair = _SIDE_BY_SIDE.fullmatch(cell.strip())
            for part in pair.groups() if pair else (cell,):
                if not part.strip():
                    continue
                found = _CELL.fullmatch(part.strip())
                where = f"schedule {name!r}, line {reader.line_num}, column {column}"
                if found is None:
                    raise ConfigError(f"{where}: {cell!r} is no action; expected one such as 0F3, 0B3, 0I3, 0W3")
                k, kind, microbatch = int(found[1]), _KIND_OF[found[2]], int(found[3])
                if owner.setdefault(k, len(rows)) != len(rows):
                    raise ConfigError(f"{where}: virtual stage {k} is on rank {owner[k]} and on rank {len(rows)}")
                row.append((k, kind, microbatch))
        rows.append(row)
    if not rows:
        raise ConfigError(f"schedule {name!r}: the file has no actions")
    placement = tuple(tuple(sorted({k for k, _, _ in row})) for row in rows)
    ranks = tuple(
        tuple(Action(kind, microbatch, chunks.index(k)) for k, kind, microbatch in row)
        for row, chunks in zip(rows, placement)
    )
    return Schedule(name, 1 + max(microbatch for row in rows for _, _, microbatch in row), ranks, placement)


def save_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a file that :func:`load_schedule` reads."""
    Path(path).write_text(to_csv(schedule), encoding="utf-8")


def load_schedule(path: str | Path, name: str | None = None) -> Schedule:
    """Read a schedule from a CSV file.

    Args:
        path: the file.
        name: name of the schedule; by default that of the file without its ending.

    Raises:
        ConfigError: when the file cannot be read, and as :func:`from_csv` does.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"schedule file {path} cannot be read: {error}") from error
    return from_csv(text, name or Path(path).stem)


def given_schedule(setting: Any) -> Any:
    """A strategy's ``pipeline_schedule`` with the path of a CSV file replaced by its schedule.

    Names, ``"auto"`` and schedules come back as they are.

    Args:
        setting: a name, ``"auto"``, a schedule, or a path that ends in ``.csv``.

    Raises:
        ConfigError: when there is no such file (the nearest name and file are named), and as :func:`load_schedule`.
    """
    if not isinstance(setting, str | Path) or not str(setting).lower().endswith(".csv"):
        return str(setting) if isinstance(setting, Path) else setting
    path = Path(setting)
    if not path.is_file():
        beside = path.parent.glob("*.csv") if path.parent.is_dir() else ()
        raise unknown_schedule(setting, sorted(str(one) for one in beside))
    try:
        return load_schedule(path)
    except ConfigError as error:
        raise ConfigError(f"pipeline_schedule={str(setting)!r}: {error}") from error
