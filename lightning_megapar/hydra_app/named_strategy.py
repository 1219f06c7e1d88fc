"""``Trainer(strategy="megapar")`` under ``@hydra.main``: the degrees of the chosen ``parallel`` option are not lost."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_megapar.strategy import MegaParStrategy


def parallel_settings_of_task() -> dict[str, Any]:
    """The strategy's options in the running Hydra task's node ``parallel``; empty outside of a task or without one."""
    from hydra import compose
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    from lightning_megapar.config import ParallelConfig

    if not HydraConfig.initialized() or not GlobalHydra.instance().is_initialized():
        return {}
    task = HydraConfig.get()
    if "parallel" not in task.runtime.choices:
        return {}
    # The Trainer was given a bare name, so what the name stands for is read from where the user wrote it.
    composed = compose(config_name=task.job.config_name, overrides=list(task.overrides.task))
    node = OmegaConf.to_container(composed.parallel, resolve=True)
    names = {entry.name for entry in fields(ParallelConfig)}
    return {str(key): value for key, value in node.items() if key in names} if isinstance(node, dict) else {}


def strategy_from_task(**arguments: Any) -> MegaParStrategy:
    """The strategy that the name ``"megapar"`` stands for; ``arguments`` count more than the task's group."""
    from lightning_megapar.strategy import MegaParStrategy

    return MegaParStrategy(**{**parallel_settings_of_task(), **arguments})
