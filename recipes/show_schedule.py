"""Draw pipeline schedules, or a measured step beside what it should have taken.

    python recipes/show_schedule.py schedule=zbv stages=4 microbatches=8 out=schedule.svg
    python recipes/show_schedule.py schedule=1f1b,interleaved_1f1b:3,zb_h1,zbv communication=0.1 out=compared.png
    python recipes/show_schedule.py schedule=auto memory_limit=4 stages=8 microbatches=24
    python recipes/show_schedule.py schedule=mine.csv grid=true
    python recipes/show_schedule.py trace=runs/my_run/trace.json step=20 out=measured.svg

Settings (key=value):

    schedule        names separated by commas, each with chunks after a colon where it has a choice; files of your own
                    (rank per line, cells such as 0F3); or auto, which takes the fastest that fits
    stages, microbatches
    forward, backward_input, backward_weight
                    time of a rank's whole share per microbatch: a number, or a list with one per rank
    communication   time of a message between ranks; occupies=true makes it keep both of them busy
    activation      memory of a rank's whole share per microbatch; kept_for_weight is the part of it that waits for
                    the backward of the weights
    memory_limit    for auto: the most that a rank's activations may take
    trace, step     a Chrome/Perfetto file with the events of a run, and which of its steps (default: the last)
    grid            also print each schedule, a line per rank
    save            write the (one) schedule to a CSV file
    out, width      the picture: .svg, or .png (needs matplotlib); pixels

Exit status: 0 drawn, 2 refused.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_megapar.pipeline import Schedule, StageCosts
    from lightning_megapar.pipeline.picture import Panel


@dataclass(frozen=True)
class Settings:
    """See the top of this file."""

    schedule: str = "1f1b"
    stages: int = 4
    microbatches: int = 8
    forward: Any = 1.0
    backward_input: Any = 1.0
    backward_weight: Any = 1.0
    communication: Any = 0.0
    occupies: bool = False
    activation: Any = 1.0
    kept_for_weight: float = 1.0
    memory_limit: Any = None
    trace: str | None = None
    step: int | None = None
    grid: bool = False
    save: str | None = None
    out: str = "schedule.svg"
    width: float = 900

    def costs(self) -> StageCosts:
        from lightning_megapar.pipeline import StageCosts

        return StageCosts(**{field.name: getattr(self, field.name) for field in fields(StageCosts)})


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0

    from lightning_megapar.config import ConfigError

    try:
        show(_settings(words))
    except ConfigError as error:
        print(f"show_schedule: {error}", file=sys.stderr)
        return 2
    return 0


def show(settings: Settings) -> None:
    """Draw, print and write what the settings ask for."""
    from lightning_megapar.config import ConfigError
    from lightning_megapar.pipeline import save_schedule, simulate
    from lightning_megapar.pipeline.picture import draw, simulated_panel

    if settings.trace is None:
        schedules = _schedules(settings)
        panels = [simulated_panel(simulate(schedule, settings.costs())) for schedule in schedules]
    else:
        panels, measured = _measured(settings)
        schedules = [measured]
    if settings.save is not None and len(schedules) != 1:
        raise ConfigError(f"save={settings.save!r} takes one schedule, not {len(schedules)}")
    draw(panels, settings.width, seconds=settings.trace is not None).save(settings.out)
    if settings.save is not None:
        save_schedule(schedules[0], settings.save)
    for schedule in schedules if settings.grid else []:
        print(f"{schedule.name}\n{schedule.grid()}\n")
    for panel in panels:
        print(f"{panel.title}: {panel.subtitle}")
    print(f"drawn in {settings.out}")


def _schedules(settings: Settings) -> list[Schedule]:
    from rich.console import Console

    from lightning_megapar.config import ConfigError
    from lightning_megapar.pipeline import build_schedule, choose_schedule, load_schedule

    found = []
    for word in filter(None, (word.strip() for word in str(settings.schedule).split(","))):
        if word.endswith(".csv"):
            found.append(load_schedule(word))
        elif word == "auto":
            choice = choose_schedule(settings.stages, settings.microbatches, settings.costs(), settings.memory_limit)
            Console().print(choice.table())
            found.append(choice.timeline.schedule)
        else:
            name, _, chunks = word.partition(":")
            if chunks and not chunks.isdigit():
                raise ConfigError(f"schedule={word!r}: expected chunks after the colon, such as interleaved_1f1b:3")
            number = int(chunks) if chunks else None
            found.append(build_schedule(name, settings.stages, settings.microbatches, number))
    if not found:
        raise ConfigError(f"schedule={settings.schedule!r} names no schedule")
    return found


def _measured(settings: Settings) -> tuple[list[Panel], Schedule]:
    from lightning_megapar.pipeline.picture import beside_simulated
    from lightning_megapar.pipeline.planning.trace import read_trace

    panels, schedule, ratio = beside_simulated(read_trace(settings.trace or ""), settings.step)
    print(f"measured over simulated: {ratio:.3f}")
    return panels, schedule


def _settings(words: list[str]) -> Settings:
    import yaml

    from lightning_megapar.config import ConfigError, nearest_name

    known = {field.name: field for field in fields(Settings)}
    given: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r}: expected key=value")
        if key not in known:
            near = nearest_name(key, known)
            hint = f"; did you mean {near!r}?" if near in known else ""
            raise ConfigError(f"unknown setting {key!r}{hint} Settings: {', '.join(known)}")
        try:
            given[key] = text if known[key].type.startswith("str") else yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{key}={text!r} cannot be read: {error}") from error
    for key, types in (("grid", bool), ("occupies", bool), ("width", (int, float)), ("step", (int, type(None)))):
        if key in given and (not isinstance(given[key], types) or (types is not bool and given[key] is True)):
            raise ConfigError(f"{key}={given[key]!r}: expected {'true or false' if types is bool else 'a number'}")
    for key in ("out", "save"):
        if key in given and not Path(given[key]).parent.is_dir():
            raise ConfigError(f"{key}={given[key]!r}: there is no directory {str(Path(given[key]).parent)!r}")
    return Settings(**given)


if __name__ == "__main__":
    sys.exit(main())
