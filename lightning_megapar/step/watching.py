"""What others look at while steps run: pieces of sharded layers, gradients before they are summed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_megapar.data_parallel.parameters import LogicalParameter, local_tensor
from lightning_megapar.data_parallel.zero import ZeroUnits

Pair = tuple[LogicalParameter, Tensor | None]
"""A parameter and this rank's piece of a gradient of it."""


class Watch(Protocol):
    """What a step does with pieces of sharded layers: a :class:`~lightning_megapar.sharding.watch.PartsWatch`."""

    def looking(self) -> AbstractContextManager[None]:
        """Around the forwards of a step that is watched."""

    def news(self) -> Mapping[str, str]:
        """Functions that pieces met since the last call and not before, each with the layer whose piece it was."""


class GradientObserver(Protocol):
    """Sees gradients before they are summed over the data ranks, as ``optim.observer.NoiseObserver`` does.

    Called on all ranks alike; see that class for the arguments.
    """

    def begin_batch(self, parameters: Sequence[LogicalParameter], is_first: bool, samples: int) -> None: ...

    def before_backward(self, microbatch: int) -> None: ...

    def before_unit(self, gradients: Iterable[Pair]) -> None: ...

    def end_batch(
        self,
        gradients: Sequence[Pair],
        weights: Mapping[int, Tensor],
        microbatches: int,
        per_weight: float,
        per_batch: float,
    ) -> None: ...

    def before_sum(self, parameters: Sequence[LogicalParameter], names: Collection[str]) -> None: ...

    def end_window(self, parameters: Sequence[LogicalParameter], factor: float) -> None: ...


class UnitGradients:
    """The gradients that FSDP2's units hold before they are reduced, by logical parameter.

    Args:
        zero: the units; they let go of gathered parameters here.
        parameters: this rank's logical parameters.
    """

    def __init__(self, zero: ZeroUnits, parameters: Sequence[LogicalParameter]) -> None:
        zero.reshard()
        by_id = {id(record.parameter): record for record in parameters}
        self._records = {
            unit: [by_id[id(p)] for p in unit.parameters()]  # type: ignore[attr-defined]
            for unit in zero.units
        }

    def of(self, unit: FSDPModule) -> Iterator[Pair]:
        """Of a unit whose parameters are gathered; whole over the data ranks, zeros where a backward left none."""
        for record, whole in zip(self._records[unit], unit.parameters()):  # type: ignore[attr-defined]
            if whole.requires_grad:
                gradient = whole.grad if whole.grad is not None else torch.zeros_like(whole)
                yield record, local_tensor(gradient.detach())
