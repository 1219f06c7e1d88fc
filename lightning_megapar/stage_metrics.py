"""torchmetrics objects under a pipeline: only the last stage updates them, every stage can log and compute them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

from lightning_megapar.mesh import ParallelMesh


class StageMetric(Metric):
    """What is logged in place of a metric when the pipeline has several stages.

    ``compute`` runs the real metric on the last stage (synchronised over the data ranks by torchmetrics) and sends the
    value to the other stages. It is collective over the pipeline, as is every epoch end in Lightning.

    Args:
        inner: the user's metric; its state counts on the last stage only.
        mesh: the ranks.
    """

    def __init__(self, inner: Metric, mesh: ParallelMesh) -> None:
        super().__init__()
        self._inner = [inner]  # hidden: not a submodule, the user's module owns it
        self._mesh = mesh
        self.compute = self._compute_on_last_stage  # type: ignore[method-assign]
        self.reset = inner.reset  # type: ignore[method-assign]

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a StageMetric is only logged; update the module's own metric")

    def compute(self) -> Any:
        raise RuntimeError("replaced in __init__")

    def _compute_on_last_stage(self) -> Any:
        value = self._inner[0].compute() if self._mesh.is_last_stage else None
        box = [value.cpu() if isinstance(value, torch.Tensor) else value]
        last = self._mesh.stage_rank(self._mesh.size("pipeline") - 1)
        dist.broadcast_object_list(box, src=last, group=self._mesh.group("pipeline"))
        value = box[0]
        return value.to(self._inner[0].device) if isinstance(value, torch.Tensor) else value


def connect_metrics(module: nn.Module, mesh: ParallelMesh) -> dict[str, Metric]:
    """Point every metric of a module at the data ranks, and give what this rank should log for each.

    Returns:
        attribute name -> metric to log.
    """
    if mesh.layout.world_size == 1:
        return {name: m for name, m in module.named_modules() if isinstance(m, Metric)}
    found: dict[str, Metric] = {}
    for name, metric in module.named_modules():
        if not isinstance(metric, Metric):
            continue
        group = mesh.group("data")
        metric.process_group = group
        if group is None:
            # Alone on its data axis; torchmetrics would gather over the whole world.
            metric.sync_on_compute = False
        found[name] = StageMetric(metric, mesh) if mesh.size("pipeline") > 1 else metric
    return found
