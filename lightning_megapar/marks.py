"""Names of ranges in profiles by which a report tells what memory is for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

COMMUNICATION = "lightning_megapar: communication"
"""In profiles, the range in which memory is allocated for what is sent or received."""


def communicating() -> AbstractContextManager[Any]:
    """Around allocations for what is sent or received; costs nothing where no profiler runs."""
    return record_function(COMMUNICATION) if torch.autograd._profiler_enabled() else nullcontext()
