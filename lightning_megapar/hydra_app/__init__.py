"""What a Hydra application around a Trainer needs: refusal of unknown settings, a claimed run directory, exit codes.

Names are imported on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_megapar.hydra_app.app import hydra_main
    from lightning_megapar.hydra_app.recipe import open_run, resumed_settings, settle_devices
    from lightning_megapar.hydra_app.run_directory import RunDirectory
    from lightning_megapar.hydra_app.settings import UnknownSettings, refuse_unknown_settings

_HOMES = {
    "RunDirectory": "run_directory",
    "UnknownSettings": "settings",
    "hydra_main": "app",
    "open_run": "recipe",
    "refuse_unknown_settings": "settings",
    "resumed_settings": "recipe",
    "settle_devices": "recipe",
}

__all__ = [
    "RunDirectory",
    "UnknownSettings",
    "hydra_main",
    "open_run",
    "refuse_unknown_settings",
    "resumed_settings",
    "settle_devices",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
