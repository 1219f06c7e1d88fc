"""The recipes' settings outside what is instantiated: what ``conf/pretrain.yaml`` and ``conf/finetune.yaml`` hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_megapar.config import ParallelConfig
from lightning_megapar.hydra_app.signatures import CsvFile, Target
from lightning_megapar.memory.options import RecomputeConfig
from lightning_megapar.schedule_names import ScheduleName


@dataclass(frozen=True)
class ParallelSettings(ParallelConfig):
    """The group ``parallel``: the strategy's options and how many processes there are.

    Args:
        devices: processes on each node, or ``"auto"``.
    """

    devices: int | Literal["auto"] = "auto"
    recompute: Any = field(default="none", init=False)  # has a group of its own
    arena: bool = field(default=False, init=False)  # trainer.strategy.arena


@dataclass(frozen=True)
class ScheduleSettings:
    """The group ``schedule``.

    Args:
        name: of a schedule, ``"auto"``, or the path of a file with one.
    """

    name: ScheduleName | Literal["auto"] | CsvFile


@dataclass(frozen=True)
class PrecisionSettings:
    """The group ``precision``.

    Args:
        mode: Lightning's flag, ``None`` where a plugin says it.
        plugins: Lightning's.
        loss_scale, fp8: the strategy's arguments of these names.
    """

    mode: str | None
    plugins: list[Target] | None = None
    loss_scale: Any = None
    fp8: Any = None


@dataclass(frozen=True)
class PretrainSettings:
    """The root. ``Target`` is a node that is instantiated: its class's signature says what it may hold.

    Args:
        seed: fixes weights, data order and dropout.
        run_dir: where the run writes.
        resume: a run directory or a checkpoint.
    """

    seed: int
    run_dir: str
    model: Target
    data: Target
    optimizer: Target
    trainer: Target
    parallel: ParallelSettings
    schedule: ScheduleSettings
    precision: PrecisionSettings
    recompute: RecomputeConfig
    callbacks: dict[str, Target] = field(default_factory=dict)
    logger: dict[str, Target] = field(default_factory=dict)
    resume: str | None = None


@dataclass(frozen=True)
class FinetuneSettings(PretrainSettings):
    """The root of ``recipes/finetune.py``; ``model`` is a transformers configuration.

    Args:
        model_path: a Hugging Face directory that is taken instead of ``model``.
        max_file_bytes: of the weight files written at the end.
    """

    model_path: str | None = None
    max_file_bytes: int = 5_000_000_000
