"""What takes the place of modules that another pipeline stage holds. They own no parameters.

A stand-in answers whatever a step reads off a module without running it: plain attributes (``layer_type``, a
configuration), and while a step runs also submodules and theirs, sizes and dtypes of parameters, methods and
``isinstance``. A step that walks over ``module.parameters()`` meets them there too, without their numbers: one that
wants the numbers (a penalty on all weights) is stopped instead of getting less. Calling a stand-in asks the cut for
the module's result.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_megapar.pipeline.cutting.away import OWNED, Away, Ledger, Source, StageError

Answer = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _is_plain(value: Any) -> bool:
    """Whether an attribute can be kept without keeping somebody's parameters alive."""
    return not any(isinstance(leaf, (nn.Module, Tensor)) or _may_hold(leaf) for leaf in tree_leaves(value))


def _may_hold(leaf: Any) -> bool:
    """Bound methods, closures and callable objects may hold modules; functions and types do not."""
    if isinstance(leaf, types.FunctionType):
        return leaf.__closure__ is not None
    return callable(leaf) and not isinstance(leaf, (type, types.BuiltinFunctionType))


class _Elsewhere(dict[str, Any]):
    """An empty dict of parameters or buffers; who walks over it while a step runs meets those of another stage."""

    def __init__(self, keys: Sequence[str], owner: StandIn) -> None:
        super().__init__()
        self._away_keys, self._away_owner = tuple(keys), owner

    def items(self) -> Any:
        if not self._away_keys or not self._away_owner._away_running():
            return super().items()
        return [(key, self._away_owner._shape_of(key)) for key in self._away_keys]

    def values(self) -> Any:
        return [value for _, value in self.items()]


class StandIn(nn.Module):
    """Stands for a module of another stage.

    Args:
        name: dotted name of the original.
        original: the module; nothing of it is kept but plain attributes and shapes.
        ledger: this stage's.
        answer: what a call returns, from its arguments; may raise. ``None`` for a part of a stand-in, which cannot be
            called.
        is_running: whether a step of the user is running.
        unit: of a part, the name of the module that is placed on a stage; by default it is ``name``.
    """

    def __init__(
        self,
        name: str,
        original: nn.Module,
        ledger: Ledger,
        answer: Answer | None,
        is_running: Callable[[], bool] = lambda: False,
        unit: str = "",
    ) -> None:
        super().__init__()
        mine = vars(self)
        for attribute, value in vars(original).items():
            if attribute not in _OF_EVERY_MODULE and _is_plain(value):
                mine[attribute] = value
        tensors = {**original._parameters, **original._buffers}
        mine["_away_name"], mine["_away_kind"], mine["_away_unit"] = name, type(original), unit or name
        mine["_away_ledger"], mine["_away_answer"], mine["_away_running"] = ledger, answer, is_running
        mine["_away_tensors"] = {
            key: None if value is None else torch.empty_like(value, device="meta") for key, value in tensors.items()
        }
        mine["_away_dtypes"] = {}
        mine["_away_trained"] = {
            key: value.requires_grad for key, value in original._parameters.items() if value is not None
        }
        mine["_parameters"] = _Elsewhere(tuple(original._parameters), self)
        mine["_buffers"] = _Elsewhere(tuple(original._buffers), self)
        for key, child in original._modules.items():
            # Registered, so that whoever walks over the modules (to put hooks on them) finds what he would elsewhere.
            self._modules[key] = (
                None if child is None else _part(f"{name}.{key}", child, ledger, is_running, unit or name)
            )

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # type: ignore[override]
        # Loops over mixed stacks ask what a block is; everybody else must see that nothing can be done to this one.
        mine = object.__getattribute__(self, "__dict__")
        running = mine.get("_away_running")
        return mine["_away_kind"] if running is not None and running() else type(self)

    def __getattr__(self, name: str) -> Any:
        mine = vars(self)
        if name.startswith("__") or "_away_running" not in mine or not mine["_away_running"]():
            return super().__getattr__(name)
        if name in mine["_away_tensors"]:
            return self._shape_of(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = inspect.getattr_static(mine["_away_kind"], name, None)
            if isinstance(found, property) and found.fget is not None:
                return found.fget(self)
            if isinstance(found, types.FunctionType):
                return types.MethodType(found, self)
            if found is not None and _is_plain(found):
                return found
            raise

    def _shape_of(self, name: str) -> Tensor | None:
        shape = self._away_tensors[name]
        if shape is None:
            return None
        ledger: Ledger = self._away_ledger
        dtype = self._away_dtypes.get(shape.dtype, shape.dtype)
        owner = self._away_name
        made = Away.make(shape.to(dtype), ledger.device, ledger, frozenset([Source(owner, 0, OWNED)]))
        if name in self._away_trained:
            made._is_param = True  # what isinstance(..., nn.Parameter) asks
            made.requires_grad_(self._away_trained[name])
        return made

    def __len__(self) -> int:
        return len(self._modules)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(self._modules.values())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self._modules[index]
        return list(self._modules.values())[index]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # ``module.half()`` and the like: what the parameters would be afterwards.
        for dtype in {shape.dtype for shape in self._away_tensors.values() if shape is not None}:
            now = self._away_dtypes.get(dtype, dtype)
            self._away_dtypes[dtype] = fn(torch.empty(0, dtype=now, device=self._away_ledger.device)).dtype
        for part in self.children():
            part._apply(fn)
        return self

    def replay(self, result: Any) -> None:
        """Call this part of a stand-in with what the original returned, for the hooks that wait for it."""
        mine = vars(self)
        mine["_away_answer"] = lambda args, kwargs: result
        try:
            self()
        finally:
            mine["_away_answer"] = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._away_answer is None:
            raise StageError(
                f"module {self._away_name!r} is called on a pipeline stage that does not hold it, other than by the "
                "module that it belongs to. Call the outer module instead, or keep it on every stage: "
                f"pipeline_keep={{{self._away_unit!r}: 'all'}}"
            )
        return self._away_answer(args, kwargs)


def _part(name: str, original: nn.Module, ledger: Ledger, is_running: Callable[[], bool], unit: str) -> nn.Module:
    """A submodule of the stand-in for ``unit``, for reading only."""
    if type(original) is nn.ModuleList:
        return nn.ModuleList([_part(f"{name}.{i}", c, ledger, is_running, unit) for i, c in enumerate(original)])
    if type(original) is nn.ModuleDict:
        return nn.ModuleDict({k: _part(f"{name}.{k}", c, ledger, is_running, unit) for k, c in original.items()})
    return StandIn(name, original, ledger, None, is_running, unit)


def put(owner: nn.Module, name: str, stand_in: StandIn, training: bool) -> None:
    """Put a stand-in in the place of a registered child (also of a ModuleList or Sequential), in the same mode."""
    if stand_in.training != training:
        stand_in.train(training)
    owner._modules[name] = stand_in
