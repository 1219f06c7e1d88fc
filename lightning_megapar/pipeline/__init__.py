"""Schedules as data, the split into stages, cut and inject, and the runtime that executes a schedule."""

from lightning_megapar.pipeline.partition import split_blocks
from lightning_megapar.pipeline.schedules import Action, Schedule, build_schedule

__all__ = ["Action", "Schedule", "build_schedule", "split_blocks"]
