"""What autograd keeps for the backward, and what every hook on saved tensors has to know about it.

:class:`SavedBytes` measures it, storage by storage. :class:`Weights` tells parameters and buffers from activations,
:class:`Version` finds a change in place where hooks have taken autograd's own check away, and :func:`outer_hooks` lets
one pair of hooks stand inside another.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeGuard
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_megapar.layers.attention import RotaryPositions

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]
Hooks = tuple[Pack, Unpack]

# Nodes that show the same values in another shape or dtype.
_SAME_VALUES = frozenset(
    (
        "T", "View", "UnsafeView", "Transpose", "Permute", "Alias", "AsStrided", "ToCopy", "Expand", "Squeeze",
        "Unsqueeze", "Slice", "Select", "Split", "Unbind", "_Local", "_ToTorchTensor", "_FromTorchTensor",
    )
)  # fmt: skip
_MOST_STEPS = 8


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory behind a tensor: itself, or the parts of a wrapper such as a DTensor; no sparse ones."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor] if tensor.layout == torch.strided else []
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]  # a DTensor names its mesh, too
    return [part for one in inner if isinstance(one, Tensor) for part in plain_tensors(one)]


class Weights:
    """Tells whether a saved tensor is a parameter or a buffer, a view of one, or the copy of one that autocast made.

    A weight that needs a gradient is known by the graph behind the tensor; buffers and frozen weights by their storage,
    and casts of frozen weights by their shape.

    Args:
        modules: whose buffers, frozen parameters and tables of rotary positions are meant.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self.refresh()

    def refresh(self) -> None:
        """Look again: what shards parameters puts other tensors in their places."""
        self._storages: dict[int, StorageWeakRef] = {}
        self._frozen: dict[tuple[int, ...], torch.dtype] = {}
        self._moving = False
        for module in self._modules:
            rotary = {value for child in module.modules() for value in vars(child).values() if _is_rotary(value)}
            tables = (table for each in rotary for pair in each.computed() for table in pair)
            for tensor in (*module.parameters(), *module.buffers(), *tables):
                self._moving |= isinstance(tensor, DTensor)
                for part in plain_tensors(tensor):
                    # A weak reference keeps the address from being given to another storage.
                    weak = StorageWeakRef(part.untyped_storage())
                    self._storages[weak.cdata] = weak
                    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad and part.dim() > 1:
                        self._frozen[tuple(part.shape)] = part.dtype

    def __contains__(self, tensor: Tensor) -> bool:
        if isinstance(tensor, nn.Parameter) or self.has_storage(tensor):
            return True
        if tensor.requires_grad:
            return parameter_behind(tensor) is not None
        if self._moving:
            self.refresh()
            if self.has_storage(tensor):
                return True
        shape = tuple(tensor.shape)
        frozen = self._frozen.get(shape) or self._frozen.get(shape[::-1])
        return frozen is not None and frozen != tensor.dtype and tensor.is_floating_point()

    def has_storage(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in a parameter's or a buffer's own memory."""
        return any(part.untyped_storage()._cdata in self._storages for part in plain_tensors(tensor))


def _is_rotary(value: Any) -> TypeGuard[RotaryPositions]:
    return isinstance(value, RotaryPositions)


def parameter_behind(tensor: Tensor) -> nn.Parameter | None:
    """The parameter whose values a tensor shows: the graph behind it has nothing but views and casts; else ``None``."""
    node: Any = tensor.grad_fn
    for _ in range(_MOST_STEPS):
        if node is None:
            return None
        name = node.name().rpartition("::")[2]
        if name == "AccumulateGrad":
            return node.variable if isinstance(node.variable, nn.Parameter) else None
        if name.rstrip("0123456789").removesuffix("Backward") not in _SAME_VALUES:
            return None
        node = node.next_functions[0][0]
    return None


class Version:
    """Notices a change in place of a tensor, without keeping its memory.

    Autograd compares versions itself only where no hooks are, so hooks that keep a tensor or a copy have to.

    Args:
        tensor: plain, as a pack hook gets it.
    """

    __slots__ = ("_expected", "_kind", "_probe", "_shape")

    def __init__(self, tensor: Tensor) -> None:
        self._expected, self._kind, self._shape = tensor._version, tensor.type(), list(tensor.shape)
        self._probe = tensor.detach()  # shares the counter,
        self._probe.data = tensor.new_empty(0)  # and keeps it when it lets go of the values

    def check(self) -> None:
        """Raise what autograd raises.

        Raises:
            RuntimeError: the tensor was changed in place since.
        """
        found = self._probe._version
        if found != self._expected:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._kind} {self._shape}] is at version {found}; expected version {self._expected} instead"
            )


class Left:
    """A saved tensor that hooks leave as it is: handed on to the hooks outside of them, or kept."""

    __slots__ = ("_kept", "_unpack", "_version")

    def __init__(self, tensor: Tensor, outer: Hooks | None) -> None:
        self._version: Version | None = None
        self._unpack: Unpack | None = None
        if outer is not None:
            self._kept: Any = outer[0](tensor)
            self._unpack = outer[1]
            return
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided:
            self._version = Version(tensor)
        # With its graph, an output would keep the node that saved it, which keeps the output.
        self._kept = tensor if tensor.grad_fn is None else tensor.detach()

    def tensor(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place.
        """
        if self._version is not None:
            self._version.check()
        return self._kept if self._unpack is None else self._unpack(self._kept)


def outer_hooks() -> Hooks | None:
    """The hooks on saved tensors that are in force, ``None`` without any."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if found is None else (found[0], found[1])


def is_recomputed() -> bool:
    """Whether ``torch.utils.checkpoint`` (non-reentrant) decides what is saved here: it keeps nothing of it."""
    found = outer_hooks()
    return found is not None and found[0].__module__ == "torch.utils.checkpoint"


@dataclass(frozen=True)
class SavedStorage:
    """A piece of memory that autograd keeps.

    Args:
        bytes: its size, whatever part of it the saved tensors show.
        shape, dtype: of the tensor that was saved first.
        module: dotted name of the innermost module that was running, ``""`` for the outermost one or none.
        kind: class name of that module.
        tensors: how many saved tensors lie in it.
        is_weight_copy: it holds a weight in another dtype (autocast).
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    module: str
    kind: str
    tensors: int
    is_weight_copy: bool


class _Storage:
    """One storage while saved tensors keep it."""

    def __init__(self, storage: torch.UntypedStorage, first: SavedStorage) -> None:
        self.storage, self.first, self.tensors = storage, first, 0


class SavedBytes:
    """Counts what autograd keeps while it is entered, each storage once, parameters and buffers not at all.

    The counts go on after it is left: they fall when graphs are released. What a ``torch.autograd.Function`` keeps as
    an attribute of its ``ctx`` is not seen, and what ``torch.utils.checkpoint`` will compute again is not counted. To
    see what :mod:`compression` and :mod:`offload` leave, enter this one before them. ::

        with SavedBytes(model) as saved:
            loss = model(batch)
        saved.bytes, saved.by_module()

    Args:
        module: whose parameters and buffers are left out, and whose submodules' names are told; ``None`` leaves out
            what needs a gradient and is a parameter.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = module
        self._weights = Weights(() if module is None else (module,))
        self._storages: WeakValueDictionary[int, _Storage] = WeakValueDictionary()
        self._running = threading.local()
        self._handles: list[Any] = []
        self._hooks: AbstractContextManager[Any] | None = None
        self.bytes = 0
        """Kept now."""
        self.peak_bytes = 0
        """The most that were kept at once."""

    def __enter__(self) -> SavedBytes:
        if self._hooks is not None:
            raise RuntimeError("SavedBytes is entered already")
        self._weights.refresh()
        for name, module in () if self._module is None else self._module.named_modules():
            self._handles.append(module.register_forward_pre_hook(_Entering(self, name)))
            self._handles.append(module.register_forward_hook(_Leaving(self), always_call=True))
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._hooks is not None
        self._hooks.__exit__(*error)  # type: ignore[arg-type]
        self._hooks = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def storages(self) -> tuple[SavedStorage, ...]:
        """What is kept now, in the order in which it was saved."""
        kept = list(self._storages.values())
        return tuple(SavedStorage(**{**vars(one.first), "tensors": one.tensors}) for one in kept)

    def by_module(self) -> dict[str, int]:
        """Bytes that are kept now by the name of the module that saved them first."""
        found: Counter[str] = Counter()
        for one in self.storages():
            found[one.module] += one.bytes
        return dict(found)

    def by_kind(self) -> dict[str, int]:
        """Bytes that are kept now by the class of the module that saved them first."""
        found: Counter[str] = Counter()
        for one in self.storages():
            found[one.kind] += one.bytes
        return dict(found)

    def describe(self) -> str:
        """A line per storage: bytes, dtype, shape, module."""
        lines = []
        for one in self.storages():
            dtype, note = str(one.dtype).removeprefix("torch."), " (copy of a weight)" if one.is_weight_copy else ""
            lines.append(f"{one.bytes:>12} {dtype:>9} {one.shape!s:<24} {one.module or '(outermost)'}{note}")
        return "\n".join([*lines, f"{self.bytes:>12} in all"])

    def stack(self) -> list[tuple[str, str]]:
        """Names and classes of the modules that are running in this thread."""
        if not hasattr(self._running, "stack"):
            self._running.stack = []
        return self._running.stack

    def _pack(self, tensor: Tensor) -> tuple[Left, list[_Storage]]:
        if isinstance(tensor, nn.Parameter) or self._weights.has_storage(tensor):
            return Left(tensor, None), []
        own = parameter_behind(tensor)
        behind = {part.untyped_storage()._cdata for part in plain_tensors(own)} if own is not None else set()
        copied = own is not None or tensor in self._weights
        parts = [part for part in plain_tensors(tensor) if part.untyped_storage()._cdata not in behind]
        return Left(tensor, None), [self._storage(part, copied) for part in parts]

    def _storage(self, tensor: Tensor, is_weight_copy: bool) -> _Storage:
        storage = tensor.untyped_storage()
        key = storage._cdata  # the entry keeps the storage, so that nothing else gets this address
        found = self._storages.get(key)
        if found is None:
            module, kind = self.stack()[-1] if self.stack() else ("", "")
            size = storage.nbytes()
            first = SavedStorage(size, tuple(tensor.shape), tensor.dtype, module, kind, 1, is_weight_copy)
            found = self._storages[key] = _Storage(storage, first)
            finalize(found, self._released, size).atexit = False
            self.bytes += size
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        found.tensors += 1
        return found

    def _released(self, size: int) -> None:
        self.bytes -= size


def _unpack(packed: tuple[Left, list[_Storage]]) -> Tensor:
    return packed[0].tensor()


class _Entering:
    def __init__(self, saved: SavedBytes, name: str) -> None:
        self._saved, self._name = saved, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._saved.stack().append((self._name, type(module).__name__))


class _Leaving:
    def __init__(self, saved: SavedBytes) -> None:
        self._saved = saved

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._saved.stack().pop()
