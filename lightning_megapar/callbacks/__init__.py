"""Callbacks that report a run; all of them work in plain Lightning too. Names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_megapar.callbacks.grad_norm import GradNorm
    from lightning_megapar.callbacks.memory_report import MemoryReport
    from lightning_megapar.callbacks.metrics_csv import MetricsCSV
    from lightning_megapar.callbacks.pipeline_trace import PipelineTrace
    from lightning_megapar.callbacks.run_line import RunLine
    from lightning_megapar.callbacks.sample_text import SampleText

_HOMES = {
    "GradNorm": "grad_norm",
    "MemoryReport": "memory_report",
    "MetricsCSV": "metrics_csv",
    "PipelineTrace": "pipeline_trace",
    "RunLine": "run_line",
    "SampleText": "sample_text",
}

__all__ = ["GradNorm", "MemoryReport", "MetricsCSV", "PipelineTrace", "RunLine", "SampleText"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
