"""Whose class an object is of: of a library, or of the user's own."""

from __future__ import annotations

import sys

LIBRARIES = sys.stdlib_module_names | {
    "torch",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "torchmetrics",
    "lightning_megapar",
    "transformers",
    "omegaconf",
    "numpy",
}
"""Packages whose objects a step does not change, or that must not be set back (trainers, loggers, process groups)."""


def is_of_library(value: object) -> bool:
    """Whether an object's class is one of :data:`LIBRARIES`."""
    return type(value).__module__.partition(".")[0] in LIBRARIES
