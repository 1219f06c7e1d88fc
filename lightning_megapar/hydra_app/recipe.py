"""What a training recipe does before its Trainer: settings of a resumed run, devices, a claimed directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lightning_megapar.config import ConfigError
from lightning_megapar.hydra_app.plan import RunPlan, checkpoint_to_resume, plan_run
from lightning_megapar.hydra_app.run_directory import (
    CONFIG,
    OVERRIDES,
    RunDirectory,
    is_first_process,
    merged_overrides,
    overrides_of,
    state_of,
)
from lightning_megapar.hydra_app.settings import SettingsCheck, UnknownSettings

if TYPE_CHECKING:
    from lightning_megapar.models.gpt import GPTConfig


@dataclass(frozen=True)
class Resume:
    """What a run starts from.

    Attributes:
        directory: the run to go on with in place; ``None`` for a new run.
        checkpoint: for ``Trainer.fit(ckpt_path=...)``; ``None`` starts from the beginning.
        step: optimizer steps that the checkpoint has behind it.
        overrides: what the run's settings are made of.
    """

    directory: Path | None = None
    checkpoint: str | None = None
    step: int = 0
    overrides: tuple[str, ...] = ()


def resumed_settings(cfg: DictConfig, schema: type | None = None) -> tuple[DictConfig, Resume]:
    """``resume=RUN`` goes on in that run's directory, ``resume=CHECKPOINT`` starts a new run from it.

    Either way the settings are those that the run was started with, changed by what stands on this command line.

    Args:
        cfg: the task's configuration.
        schema: as for :func:`~lightning_megapar.hydra_app.app.hydra_main`.

    Raises:
        ConfigError: nothing there to resume, the run still lives, or nothing is left to do.
    """
    task = HydraConfig.get()
    given = list(task.overrides.task)
    if cfg.resume is None:
        return cfg, Resume(overrides=tuple(given))
    owner, checkpoint, step = checkpoint_to_resume(cfg.resume)
    in_place = owner is not None and owner == Path(os.path.abspath(cfg.resume))
    own = ("resume", "run_dir")
    if in_place and any(override.lstrip("+").startswith("run_dir=") for override in given):
        raise ConfigError(
            f"resume={cfg.resume} goes on in its own directory: leave out run_dir, or resume a checkpoint"
        )
    if in_place and owner is not None and state_of(owner) == "live":
        raise ConfigError(f"resume={cfg.resume}: the run is still going on")
    if owner is not None:
        overrides = merged_overrides(overrides_of(owner), given, dropped=own)
        search_path = GlobalHydra.instance().config_loader().get_search_path()
        if found := SettingsCheck(search_path, task.job.config_name, schema).run(overrides):
            raise UnknownSettings(found)
        cfg = compose(config_name=task.job.config_name, overrides=overrides)
    else:
        overrides = given
    if in_place:
        cfg.run_dir = str(owner)
    if 0 <= cfg.trainer.max_steps <= step:
        raise ConfigError(
            f"resume={cfg.resume} is at step {step} and trainer.max_steps={cfg.trainer.max_steps}: nothing is left to "
            f"do; give a larger trainer.max_steps"
        )
    if is_first_process():
        print(f"resuming {checkpoint} at step {step}" + (", in the same directory" if in_place else ", as a new run"))
    kept = tuple(override for override in overrides if override.lstrip("+").split("=")[0] not in own)
    return cfg, Resume(owner if in_place else None, str(checkpoint), step, kept)


def settle_devices(cfg: DictConfig, model: GPTConfig | None = None) -> RunPlan:
    """Check devices, layout, batch and model against each other; write the chosen devices into ``cfg`` and say them.

    Args:
        cfg: the task's configuration.
        model: a decoder of this package; ``None`` for a module of another kind, see
            :func:`~lightning_megapar.strategy.prepare.check_module`.

    Raises:
        ConfigError: what cannot work, naming the nearest valid values.
    """
    parallel = OmegaConf.to_container(cfg.parallel, resolve=True)
    assert isinstance(parallel, dict)
    plan = plan_run(
        {str(key): value for key, value in parallel.items()},
        global_batch_size=cfg.data.global_batch_size,
        accumulate=cfg.trainer.accumulate_grad_batches,
        num_nodes=cfg.trainer.num_nodes,
        accelerator=cfg.trainer.accelerator,
        model=model,
        sequence_length=cfg.data.sequence_length,
    )
    cfg.parallel.devices = plan.devices.count
    cfg.trainer.accelerator = plan.devices.accelerator
    if is_first_process():
        print(plan.describe(), flush=True)
    return plan


def open_run(cfg: DictConfig, resume: Resume) -> RunDirectory:
    """Claim the run's directory, write its settings there and put its path into ``cfg.run_dir``.

    Raises:
        ConfigError: when a directory that was asked for by name is taken.
    """
    if resume.directory is not None:
        run = RunDirectory.reopen(resume.directory)
        run.keep_older(CONFIG)
    else:
        automatic = "${now:" in str(OmegaConf.to_container(cfg, resolve=False)["run_dir"])  # type: ignore[index,call-overload]
        hydra = HydraConfig.get()
        wanted = hydra.runtime.output_dir if automatic and hydra.mode == RunMode.MULTIRUN else cfg.run_dir
        run = RunDirectory.claim(wanted, automatic)
    cfg.run_dir = str(run.path)
    run.write(CONFIG, OmegaConf.to_yaml(cfg, resolve=True))
    run.write(OVERRIDES, OmegaConf.to_yaml(OmegaConf.create(list(resume.overrides))))
    return run
