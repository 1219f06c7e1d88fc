"""Recipes as modules of the tests: they are scripts, in no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

RECIPES = Path(__file__).parents[1] / "recipes"


def load_recipe(path: str) -> ModuleType:
    """The recipe at ``recipes/<path>``, executed as a module named ``recipe_<stem>``.

    As for a script that is run, its own folder can be imported from, but only meanwhile and last: modules there have
    names (``pipeline``) that packages of the tests have too.
    """
    script = RECIPES / path
    spec = importlib.util.spec_from_file_location(f"recipe_{script.stem}", script)
    if spec is None or spec.loader is None:
        raise ImportError(f"no recipe at {script}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look themselves up
    sys.path.append(str(script.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(script.parent))
    return module
