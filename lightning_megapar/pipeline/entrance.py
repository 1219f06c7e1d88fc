"""How results enter and leave the user's step on a stage."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from lightning_megapar.pipeline.away import StageError
from lightning_megapar.pipeline.nest import tensors_of


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
