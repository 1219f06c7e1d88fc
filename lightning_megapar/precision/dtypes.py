"""What a run computes in, by the names of Lightning's precisions."""

from __future__ import annotations

from typing import Any

import torch


def working_dtype(plugin: Any) -> torch.dtype | None:
    """Of a step's products, ``None`` where it is that of the parameters."""
    name = product_dtype(str(getattr(plugin, "precision", "32-true")))
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)


def product_dtype(precision: str) -> str:
    """In what matrix products run under a Lightning precision."""
    starts = {"bf16": "bf16", "16": "fp16", "64": "fp64"}
    return next((name for start, name in starts.items() if precision.startswith(start)), "fp32")
