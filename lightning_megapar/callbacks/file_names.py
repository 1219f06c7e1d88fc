"""Names of files that callbacks write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning_megapar.config import ConfigError


def checked_name(setting: str, name: Any, endings: tuple[str, ...], usual: str) -> Path:
    """The path that a name says.

    Args:
        setting: of whom, such as ``"MemoryReport path"``.
        name: what was given.
        endings: one of which it has.
        usual: a name without an ending, to be shown.

    Raises:
        ConfigError: for what is no name, or has another ending.
    """
    path = Path(name) if isinstance(name, str | os.PathLike) else None
    if path is not None and path.suffix.lower() in endings:
        return path
    near = " or ".join(repr(f"{Path(path.name).stem if path and path.name else usual}{end}") for end in endings)
    raise ConfigError(
        f"{setting}={name!r}: expected the name of a file that ends with {' or '.join(endings)}, such as {near}"
    )
