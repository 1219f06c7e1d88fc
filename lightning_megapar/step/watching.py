"""What others look at while steps run: pieces of sharded layers, gradients before they are summed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from lightning_megapar.data_parallel.parameters import LogicalParameter, local_tensor
from lightning_megapar.data_parallel.sums import Whole

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


def observed_units(observer: GradientObserver, parameters: Sequence[LogicalParameter]) -> Callable[[list[Whole]], None]:
    """Shows an observer the gradients that FSDP2's units hold before they are reduced, by logical parameter.

    They are whole over the data ranks, with zeros where a backward left none.

    Args:
        observer: gets them.
        parameters: this rank's logical parameters.
    """
    by_id = {id(record.parameter): record for record in parameters}

    def observe(gradients: list[Whole]) -> None:
        observer.before_unit(
            (by_id[id(parameter)], local_tensor(gradient.detach()))
            for parameter, gradient in gradients
            if gradient is not None
        )

    return observe
