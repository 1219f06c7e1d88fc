"""What Hydra imports from this package in every Hydra application: a search path and a deferred registration.

Neither torch nor Lightning nor ``lightning_megapar`` itself is imported here, so that an application that does not
train pays nothing for the package being installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

PROVIDER = "lightning_megapar"
NAME = "megapar"
REGISTRY_MODULES = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")


def config_directory() -> Path | None:
    """The package's ``conf/``: inside the package in a wheel, beside it in a source checkout or editable install."""
    spec = importlib.util.find_spec("lightning_megapar")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for candidate in (Path(place) / "conf", Path(place).parent / "conf"):
            if (candidate / "strategy" / "megapar.yaml").is_file():
                return candidate
    return None


class MegaParSearchPath(SearchPathPlugin):
    """Appends the package's groups (``parallel``, ``model``, ...) behind the application's own configuration."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        directory = config_directory()
        if directory is None:
            return
        present = {str(item.path).removeprefix("file://") for item in search_path.get_path()}
        if str(directory) not in {str(Path(path).resolve()) for path in present} | present:
            # A directory, not pkg://, because listing a pkg:// source imports the package and Lightning with it.
            search_path.append(provider=PROVIDER, path=f"file://{directory}")


def register(strategies: ModuleType) -> None:
    """Give one of :data:`REGISTRY_MODULES` the name ``"megapar"``, built from the task's group ``parallel``."""
    description = "Tensor, sequence, pipeline and data parallelism in one strategy."
    strategies.StrategyRegistry.register(NAME, _build, description=description, override=True)


def _build(**arguments: Any) -> Any:
    from lightning_megapar.hydra_app.named_strategy import strategy_from_task

    return strategy_from_task(**arguments)


class _ThenRegister(importlib.abc.Loader):
    """Runs the real loader, then registers the name in the module that it filled."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        module.__loader__ = self._real
        self._real.exec_module(module)
        register(module)


class _WaitForStrategies(importlib.abc.MetaPathFinder):
    """Waits for one import of Lightning's strategies, then leaves ``sys.meta_path``."""

    def __init__(self, awaited: str) -> None:
        self.awaited = awaited

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.awaited:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


def _install() -> None:
    for name in REGISTRY_MODULES:
        loaded = sys.modules.get(name)
        if loaded is not None and hasattr(loaded, "StrategyRegistry"):
            register(loaded)
        # Hydra executes a plugin module again in each application of a process: one finder for each name is enough.
        elif not any(getattr(finder, "awaited", None) == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _WaitForStrategies(name))


_install()
