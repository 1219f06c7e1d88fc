"""Schedules as data and their simulation, the split into stages, cut and inject, and the runtime."""

from lightning_megapar.pipeline.planning.choose import choose_schedule
from lightning_megapar.pipeline.planning.partition import split_blocks
from lightning_megapar.pipeline.planning.simulate import StageCosts, Timeline, simulate
from lightning_megapar.pipeline.schedules import Action, Schedule, build_schedule, load_schedule, save_schedule

__all__ = [
    "Action",
    "Schedule",
    "StageCosts",
    "Timeline",
    "build_schedule",
    "choose_schedule",
    "load_schedule",
    "save_schedule",
    "simulate",
    "split_blocks",
]
