"""What a step does with the pieces that it meets inside sharded regions, and whether that changes during training.

A plan is proven on the first batch. A step that later begins to look across features that other ranks hold (the largest
of them, their mean) computes other numbers than one process, and neither the losses nor the gradients of the ranks
differ among themselves. Elementwise functions are right on pieces whenever they are called.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megapar.sharding.embeddings import FeatureStyle, VocabularyStyle
from lightning_megapar.sharding.regions import RegionStyle
from lightning_megapar.sharding.styles import ColumnStyle, RowsStyle, RowStyle, StyledModule
from lightning_megapar.shards import own_shards

_RIGHT_ON_PIECES = frozenset(
    name
    for names in (
        "add radd iadd sub rsub isub mul rmul imul div truediv rtruediv itruediv neg pow rpow abs sign lerp",
        "exp expm1 log log1p sqrt rsqrt reciprocal square sin cos tanh sigmoid erf clamp clip clamp_min clamp_max",
        "relu relu6 gelu silu mish elu celu selu leaky_relu softplus softsign hardtanh hardsigmoid hardswish",
        "addcmul addcdiv maximum minimum fmax fmin logaddexp logaddexp2 hypot prelu rrelu threshold",
        "cat concat chunk split tensor_split stack narrow select unbind index_select gather take_along_dim getitem",
        "matmul rmatmul mm bmm baddbmm addmm linear scaled_dot_product_attention",
        "where masked_fill nan_to_num isnan isinf isfinite lt gt le ge eq ne and or invert",
        "logsigmoid logical_and logical_or logical_not dropout alpha_dropout feature_dropout",
        "clone detach copy contiguous to type type_as float double half bfloat16 cpu cuda zero fill",
        "view reshape view_as reshape_as flatten unflatten transpose t permute unsqueeze squeeze expand expand_as",
        "zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full",
        "get size stride dim numel is_floating_point is_complex is_contiguous get_device data_ptr element_size",
        "storage untyped_storage sizeof requires_grad backward register_hook retain_grad hash repr len format",
    )
    for name in names.split()
)
"""Elementwise functions, those that move or copy, those that read no numbers, and products: a piece and something whole
have no shapes that fit."""


class PartsWatch:
    """Watches the forwards of some steps.

    Args:
        module: what this rank holds, sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: set[str] | None = None
        self._seen: dict[str, str] = {}
        self._parts: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Around a forward that is watched."""
        handles = []
        for path, child in self._module.named_modules():
            for name in own_shards(child):
                piece = child._parameters.get(name)
                if piece is not None:
                    self._mark(piece, path)
            if isinstance(child, StyledModule):
                handles.append(child.register_forward_hook(self._after(path)))
        try:
            with _Mode(self):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._parts.clear()

    def news(self) -> dict[str, str]:
        """Functions that pieces met since the last call and not before, each with the layer whose piece it was.

        The first call finds what the proven step does: nothing new.
        """
        seen, self._seen = self._seen, {}
        fresh = {} if self._known is None else {name: path for name, path in seen.items() if name not in self._known}
        self._known = (self._known or set()) | set(seen)
        return fresh

    def _after(self, path: str) -> Any:
        def after(module: Any, args: Any, output: Any) -> None:
            options = module._style.options
            if isinstance(module, RowsStyle) or (isinstance(module, ColumnStyle) and not options.get("gather")):
                for tensor in _tensors(output):
                    self._mark(tensor, path)
            elif isinstance(module, ColumnStyle | RegionStyle | VocabularyStyle | FeatureStyle) or (
                isinstance(module, RowStyle) and not options.get("scatter")
            ):
                for tensor in _tensors(output):
                    self._parts.pop(id(tensor), None)

        return after

    def _mark(self, tensor: Tensor, path: str) -> None:
        self._parts[id(tensor)] = (weakref.ref(tensor), path)

    def _owner(self, tensor: Tensor) -> str | None:
        kept, path = self._parts.get(id(tensor), (None, ""))
        return path if kept is not None and kept() is tensor else None

    def _met(self, function: Any, inputs: Any, output: Any) -> None:
        owner = next((path for tensor in _tensors(inputs) if (path := self._owner(tensor)) is not None), None)
        if owner is None:
            return
        for tensor in _tensors(output):
            self._mark(tensor, owner)
        name = str(getattr(function, "__name__", function)).strip("_")
        if name not in _RIGHT_ON_PIECES:
            self._seen.setdefault(name, owner)


class _Mode(TorchFunctionMode):
    def __init__(self, watch: PartsWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self._watch._met(func, (args, tuple(kwargs.values())), output)
        return output


def _tensors(nest: Any) -> Iterator[Tensor]:
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, dict):
        for value in nest.values():
            yield from _tensors(value)
    elif isinstance(nest, list | tuple):
        for value in nest:
            yield from _tensors(value)
