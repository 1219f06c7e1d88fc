"""Pipeline schedules as data: what each rank does, in order."""

from lightning_megapar.pipeline.schedules.build import SCHEDULE_NAMES, build_schedule, forward_schedule, placement_of
from lightning_megapar.pipeline.schedules.data import (
    KINDS,
    Action,
    Kind,
    Schedule,
    loop_placement,
    v_placement,
)
from lightning_megapar.pipeline.schedules.files import from_csv, given_schedule, load_schedule, save_schedule, to_csv

__all__ = [
    "KINDS",
    "SCHEDULE_NAMES",
    "Action",
    "Kind",
    "Schedule",
    "build_schedule",
    "forward_schedule",
    "from_csv",
    "given_schedule",
    "load_schedule",
    "loop_placement",
    "placement_of",
    "save_schedule",
    "to_csv",
    "v_placement",
]
