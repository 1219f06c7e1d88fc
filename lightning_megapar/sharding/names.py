"""Names of layers that are alike: the numbers of blocks replaced by ``*``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from lightning_megapar.layers.foreign import is_linear


def starred(name: str) -> str:
    """A dotted name with all its numbers replaced by ``*``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


class BlockNames:
    """Replaces numbers only where they count blocks: layers 0 and 2 of a feed-forward ``nn.Sequential`` are not alike.

    Args:
        held: dotted name -> module of a whole module.
    """

    def __init__(self, held: Mapping[str, nn.Module]) -> None:
        self._held = held
        self._alike: dict[str, bool] = {}

    def star(self, name: str) -> str:
        """The pattern for what is like ``name`` (of a module or a parameter) in other blocks."""
        parts = name.split(".")
        shown = []
        for position, part in enumerate(parts):
            path = ".".join(parts[:position])
            shown.append("*" if part.isdigit() and self._are_alike(path) else part)
        return ".".join(shown)

    def address(self, name: str) -> tuple[tuple[str, str], ...]:
        """In which blocks a name lies: the lists of blocks around it, each with its number there."""
        parts = name.split(".")
        paths = [(".".join(parts[:position]), part) for position, part in enumerate(parts)]
        return tuple((path, part) for path, part in paths if part.isdigit() and self._are_alike(path))

    def _are_alike(self, path: str) -> bool:
        if path not in self._alike:
            self._alike[path] = _are_alike(self._held[path])
        return self._alike[path]


def _are_alike(container: nn.Module) -> bool:
    children = list(container.children())
    kinds = {(type(child), tuple(_shapes(child))) for child in children}
    if isinstance(container, nn.Sequential) or any(is_linear(child) for child in children):
        return len(kinds) == 1
    return True  # a list of blocks, which may differ in what they hold


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in module.parameters()]
