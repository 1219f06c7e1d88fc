"""What takes the place of modules that another pipeline stage holds. They own no parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


class StageError(RuntimeError):
    """The user's step needs something that lives on another stage; the message says what to change."""


def _copy_plain_attributes(source: nn.Module, target: nn.Module) -> None:
    # Loops over blocks often read such attributes off a block (``block.attention_type``) before calling it.
    for name, value in vars(source).items():
        if not name.startswith("_") and isinstance(value, (int, float, str, bool, type(None))) and name != "training":
            setattr(target, name, value)


class SkippedBlock(nn.Module):
    """A block of another stage.

    Args:
        original: the block that it stands for.
        answer: what a call of it returns; may raise.
    """

    def __init__(self, original: nn.Module, answer: Callable[[], Any]) -> None:
        super().__init__()
        _copy_plain_attributes(original, self)
        self._answer = answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer()


class ShapeOnly(nn.Module):
    """A module that runs before the stack, on a stage that does not need its values.

    It runs on the meta device and returns poison: NaN tensors without storage (stride 0) of the right shape and
    dtype, zero for integers. The first local block's input replaces the hidden state; if the poison reaches anything
    else, the NaN shows and :class:`StageError` is raised with the module's name.
    """

    def __init__(self, name: str, original: nn.Module) -> None:
        super().__init__()
        _copy_plain_attributes(original, self)
        self._name = name
        self._shadow = [original.to("meta")]  # hidden from parameters(), modules() and state_dict()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            shadow = self.__dict__.get("_shadow")
            if shadow is not None and hasattr(shadow[0], name):
                return getattr(shadow[0], name)
            raise

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def to_meta(leaf: Any) -> Any:
            return leaf.to("meta") if isinstance(leaf, Tensor) else leaf

        devices = [leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = devices[0] if devices else torch.device("cpu")
        try:
            with torch.no_grad():
                shapes = self._shadow[0](*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
        except Exception as error:
            raise StageError(
                f"module {self._name!r} runs before the pipelined stack and could not be evaluated without data "
                f"({type(error).__name__}: {error}). Keep it on every stage: pipeline_keep={{{self._name!r}: 'all'}}"
            ) from error
        return tree_map(lambda leaf: poison(leaf, device) if isinstance(leaf, Tensor) else leaf, shapes)


class Absent(nn.Module):
    """A module that runs after the stack, on a stage that does not hold the stack's end."""

    def __init__(self, name: str, original: nn.Module) -> None:
        super().__init__()
        _copy_plain_attributes(original, self)
        self._name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StageError(
            f"module {self._name!r} is registered after the pipelined stack but was called before it. "
            f"Say where it is needed: pipeline_keep={{{self._name!r}: 'first'}} (or 'all')"
        )


def poison(leaf: Tensor, device: torch.device) -> Tensor:
    """NaN (0 for integers) in the shape and dtype of a tensor, without storage of that size."""
    fill = float("nan") if leaf.dtype.is_floating_point or leaf.dtype.is_complex else 0
    return torch.full((), fill, dtype=leaf.dtype, device=device).expand(leaf.shape)
