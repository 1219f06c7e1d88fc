"""How results enter and leave the user's step on a stage."""

from __future__ import annotations

import sys
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megapar.pipeline.cutting.away import Away, Ledger, Source, StageError
from lightning_megapar.pipeline.nest import Shape, Unsent, flatten, is_plain, map_leaves, tensors_of

Key = tuple[str, int]
"""A module's dotted name and which call of it in this microbatch."""


def refuse_autograd_function(name: str) -> None:
    """A module called inside a custom autograd function has no graph of its own that gradients could travel along."""
    if torch.is_grad_enabled():
        return
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount > 0:
            context = frame.f_locals.get(code.co_varnames[0])
            if isinstance(context, torch.autograd.function.FunctionCtx):
                kind = type(context).__qualname__.removesuffix("Backward")
                raise StageError(
                    f"{name!r} is called inside the autograd function {kind}, whose gradients cannot be cut between "
                    "pipeline stages (for activation checkpointing use use_reentrant=False; reversible layers need "
                    "pipeline_parallel_size=1)"
                )
        frame = frame.f_back


_NEVER_DRAW = (
    *(nn.Embedding, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Flatten),
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict),
)


def may_draw(module: nn.Module) -> bool:
    """Whether a module may draw random numbers: whatever is not one of torch's plain layers, or has hooks."""
    return any(
        type(part) not in _NEVER_DRAW or part._forward_hooks or part._forward_pre_hooks for part in module.modules()
    )


def versions(nest: Any) -> list[int]:
    """Counters of in-place modifications of a nest's tensors."""
    return [leaf._version for leaf in tensors_of(nest) if not leaf.is_inference()]


def copy_of(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


class Entrance(torch.autograd.Function):
    """The same values as something that is not a leaf (and no view of one)."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class StageExit(BaseException):
    """Carries the boundary out of the user's step."""

    def __init__(self, boundary: Any) -> None:
        super().__init__()
        self.boundary = boundary


@dataclass
class Result:
    """What a module returned on this stage or an earlier one.

    Args:
        value: the nest.
        versions: counters of in-place modification of its tensors when it was returned.
    """

    value: Any
    versions: list[int]


Boundary = dict[str, Any]
"""``handed``: key of the result that is handed on whole; ``results``: key -> nest of tensors and :class:`Shape`;
``generators``: key -> the random generators' states after a module that drew numbers.

A block that is missing returned the same shapes as the one that is handed on.
"""


def presented(key: Key, result: Any, ledger: Ledger, *, copied: bool) -> Any:
    """A received result for the step: tensors as what a module returned, shapes as absent values.

    Args:
        key: whose result it is.
        result: the nest, as it travelled.
        ledger: of this stage.
        copied: whether the step modifies it in place although it travels on.
    """
    numbers = iter(range(len(flatten(result)[0])))

    def leaf(value: Any) -> Any:
        source = Source(*key, next(numbers))
        if isinstance(value, Shape):
            like = torch.empty(value.size, dtype=value.dtype, device="meta")
            return Away.make(like, ledger.device, ledger, frozenset([source]))
        if isinstance(value, Tensor):
            # In-place operations on a leaf are errors; they are fine on what a block returned.
            return copy_of(value) if copied else Entrance.apply(value)
        return value

    return map_leaves(leaf, result)


def outgoing(key: Key, value: Any, carried: Container[Source] | None) -> Any:
    """A result as it travels: shapes stand for tensors that nobody needs.

    Args:
        key: whose result it is.
        value: the nest.
        carried: the tensors that travel; ``None`` for all of them.
    """
    numbers = iter(range(len(flatten(value)[0])))

    def leaf(x: Any) -> Any:
        number = next(numbers)
        if not isinstance(x, Tensor):
            return x if is_plain(x) else Unsent(key[0], type(x).__qualname__)
        return x if carried is None or Source(*key, number) in carried else Shape.of(x)

    return map_leaves(leaf, value)
