"""torchmetrics objects under a pipeline: only the last stage updates them, every stage can log and compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

from lightning_megapar.mesh import ParallelMesh


class StageCompute:
    """Stands in for a metric's ``compute`` where the pipeline has several stages.

    Outside the steps (epoch ends, the user's hooks) it is collective over the pipeline: the last stage, whose state
    counts, computes (synchronised over the data ranks by torchmetrics) and sends the value to the others. Inside a
    step only the last stage gets that far, and computes for itself.

    Args:
        inner: the metric's own ``compute``.
        mesh: the ranks.
        in_step: whether a step is running.
        busy: shared by a module's metrics; keeps a metric inside another one (a wrapper) from sending as well.
    """

    def __init__(
        self, inner: Callable[[], Any], mesh: ParallelMesh, in_step: Callable[[], bool], busy: list[bool]
    ) -> None:
        self.inner = inner
        self._mesh = mesh
        self._in_step = in_step
        self._busy = busy

    def __call__(self) -> Any:
        if self._in_step() or self._busy[0]:
            return self.inner()
        value = None
        if self._mesh.has_loss:
            self._busy[0] = True
            try:
                value = self.inner()
            finally:
                self._busy[0] = False
        return from_last_stage(value, self._mesh)


def from_last_stage(value: Any, mesh: ParallelMesh, device: torch.device | None = None) -> Any:
    """The last stage's ``value`` on every stage, its tensors on ``device`` (CPU where none is given).

    Collective over the pipeline; the value must be picklable.
    """
    last = mesh.stage_rank(mesh.loss_stage)
    box = [tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, value)]
    dist.broadcast_object_list(box, src=last, group=mesh.group("pipeline"))
    if mesh.has_loss:
        return value
    return tree_map(lambda x: x.to(device or "cpu") if isinstance(x, Tensor) else x, box[0])


def _nobody_to_sync_with() -> bool:
    return False


def connect_metrics(module: nn.Module, mesh: ParallelMesh, in_step: Callable[[], bool]) -> dict[str, Metric]:
    """Point every metric of a module at the data ranks, and its ``compute`` at the last stage.

    Args:
        module: the user's module. Calling it again for another mesh is fine.
        mesh: the ranks.
        in_step: whether a step of the module is running.

    Returns:
        attribute name -> metric, for replaying logged metrics by name.
    """
    found = {name: m for name, m in module.named_modules() if isinstance(m, Metric)}
    if mesh.layout.world_size == 1:
        return found
    group = mesh.group("data")
    busy = [False]
    for metric in found.values():
        metric.process_group = group
        if group is None:
            # Alone on its data axis; torchmetrics would gather over the whole world.
            metric.distributed_available_fn = _nobody_to_sync_with
        elif metric.distributed_available_fn is _nobody_to_sync_with:
            metric.distributed_available_fn = jit_distributed_available
        if mesh.size("pipeline") > 1:
            compute: Any = metric.compute
            inner = compute.inner if isinstance(compute, StageCompute) else compute
            metric.compute = StageCompute(inner, mesh, in_step, busy)  # type: ignore[method-assign]
    return found
