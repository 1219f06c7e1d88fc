"""Lightning exists twice: ``lightning.pytorch`` and ``pytorch_lightning`` hold the same classes, unrelated in Python.

The strategy is written against the first. A script that imports the second works as well: its name registry learns
``"megapar"``, its abstract strategy accepts ours as a subclass, and wherever Lightning's own objects are made or told
apart, the module's tree decides. Neither package is imported from here for the other's sake.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

TREES = ("lightning.pytorch", "pytorch_lightning")
_FABRICS = ("lightning.fabric", "lightning_fabric")
PREFIXES = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
"""What the names of Lightning's own modules begin with."""


def tree_of(thing: object) -> str:
    """The tree of an object's class or one of its ancestors: ``"lightning.pytorch"`` unless it is the other one."""
    own = any(kind.__module__.startswith(f"{TREES[1]}.") for kind in type(thing).__mro__)
    return TREES[1] if own else TREES[0]


def of_tree(tree: str, module: str, name: str) -> Any:
    """What ``from <tree>.<module> import <name>`` gives."""
    return getattr(importlib.import_module(f"{tree}.{module}"), name)


def in_any_tree(module: str, *names: str) -> tuple[type, ...]:
    """The classes of these names in every tree that is loaded (an older tree may lack one), for ``isinstance``."""
    found = [
        getattr(importlib.import_module(f"{tree}.{module}"), name, None)
        for tree in TREES
        if tree in sys.modules
        for name in names
    ]
    return tuple(kind for kind in found if kind is not None)


def own_environment(environment: Any) -> Any:
    """A cluster environment of ``lightning_fabric`` as the same one of ``lightning.fabric``; others as they are."""
    kind = type(environment)
    if not kind.__module__.startswith(f"{_FABRICS[1]}.plugins.environments"):
        return environment
    twin = of_tree(_FABRICS[0], "plugins.environments", kind.__name__)
    made = twin.__new__(twin)
    made.__dict__.update(vars(environment))
    return made


def register_strategy(name: str, strategy: type, description: str) -> None:
    """Make ``Trainer(strategy=name)`` and ``Trainer(strategy=<instance>)`` work in both trees, now or once loaded.

    Calling it again changes nothing; a name that is taken stays what it is.
    """

    def known(strategies: ModuleType) -> None:
        if not issubclass(strategy, strategies.ParallelStrategy):
            strategies.ParallelStrategy.register(strategy)
        if name not in strategies.StrategyRegistry.available_strategies():
            strategies.StrategyRegistry.register(name, strategy, description=description)

    for tree in TREES:
        once_loaded(f"{tree}.strategies", known)


def once_loaded(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call ``act`` with a module: at once when it is loaded, else at the end of its first import."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        act(module)
    elif not any(isinstance(finder, _Awaited) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaited(name, act))


class _Awaited(importlib.abc.MetaPathFinder):
    """Waits for one import, then leaves ``sys.meta_path``."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenAct(spec.loader, self.act)
        return spec


class _ThenAct(importlib.abc.Loader):
    """Runs the real loader, then the act."""

    def __init__(self, real: Any, act: Callable[[ModuleType], None]) -> None:
        self._real = real
        self._act = act

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._real.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        module.__loader__ = self._real
        self._real.exec_module(module)
        self._act(module)
