"""Fused and foreach optimizers on what a rank holds.

Such an optimizer updates lists of tensors, which torch has by device and type. A rank's list may hold plain tensors,
DTensors on the tensor mesh and FSDP2's on the data mesh: two kinds in one list are an error, and some fused kernels
(SGD's) take no DTensors at all. Their updates go element by element, though: here lists are of every rank's own pieces,
as plain tensors that share the DTensors' memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megapar.config import ConfigError
from lightning_megapar.data_parallel.parameters import laid_out_like, local_tensor

_GROUPING = "_group_tensors_by_device_and_dtype"


def lists_pieces(optimizer: Optimizer) -> bool:
    """Whether DTensors are updated in lists (fused, foreach)."""
    in_lists = [group for group in optimizer.param_groups if group.get("fused") or group.get("foreach")]
    return any(isinstance(p, DTensor) for group in in_lists for p in group["params"])


@contextmanager
def pieces_in_lists(optimizer: Optimizer) -> Iterator[None]:
    """While active, an optimizer's lists hold this rank's pieces as plain tensors."""
    if not lists_pieces(optimizer):
        yield
        return
    kept = Optimizer.__dict__[_GROUPING]
    inner = getattr(Optimizer, _GROUPING)

    def grouped(lists: Any, with_indices: bool = False) -> Any:
        pieces = [[local_tensor(one) if isinstance(one, Tensor) else one for one in tensors] for tensors in lists]
        return inner(pieces, with_indices)

    setattr(Optimizer, _GROUPING, staticmethod(grouped))
    try:
        yield
    finally:
        setattr(Optimizer, _GROUPING, kept)
        _lay_out_state(optimizer)


def _lay_out_state(optimizer: Optimizer) -> None:
    """State that a step has made from a plain piece (SGD's momentum) gets its parameter's layout, for checkpoints."""
    for parameter, state in optimizer.state.items():
        local = local_tensor(parameter)
        if not isinstance(parameter, DTensor) or local is None:
            continue
        for key, value in state.items():
            if (
                isinstance(value, Tensor)
                and not isinstance(value, DTensor)
                and value.shape == local.shape
                and local.ndim
            ):
                state[key] = laid_out_like(value, parameter)


def refuse_lists(optimizers: Iterable[Optimizer]) -> None:
    """Refuse fused and foreach optimizers of DTensors where torch makes its lists by other means.

    Raises:
        ConfigError: naming the optimizer.
    """
    for optimizer in optimizers:
        if lists_pieces(optimizer) and not callable(getattr(Optimizer, _GROUPING, None)):
            raise ConfigError(
                f"{type(optimizer).__name__}, fused or foreach, holds sharded parameters; torch {torch.__version__} "
                f"has no Optimizer.{_GROUPING}, by which they are updated piece by piece; valid values: fused=False, "
                "foreach=False"
            )
