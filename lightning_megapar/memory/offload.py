"""Saved activations in host memory between forward and backward, and back in time. Lossless: results are bit-equal.

Each block's forward runs in :meth:`OffloadSaved.block`. What autograd saves there is copied to the host while the next
block computes, and the device's memory is free once nothing else holds it. When the backward reaches a block, its
copies back and those of the blocks before it are started, so that they arrive while it computes. ::

    offload = OffloadSaved(model)
    for index, block in enumerate(blocks):
        with offload.block(index):
            x = block(x)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, WeakValueDictionary, finalize, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_megapar.config import ConfigError
from lightning_megapar.memory.copiers import Copier, copier_for
from lightning_megapar.memory.saved import Hooks, Left, Version, Weights, is_recomputed, outer_hooks

_MOST_UNUSED = 4


class _Group:
    """One run of a block's forward."""

    def __init__(self, index: int, previous: _Group | None) -> None:
        self.index, self.previous = index, previous
        self.moved: list[ref[_Moved]] = []  # in the order of saving
        self.is_reached = False

    def fetch(self) -> None:
        """Start the copies back of what the backward has not used yet, what it needs first at first."""
        for found in reversed(self.moved):
            moved = found()
            if moved is not None and moved.is_needed:
                moved.fetch()


class _Moved:
    """A storage on the host, and on the device again for as long as the backward needs it."""

    def __init__(self, copier: Copier, storage: torch.UntypedStorage, weak: StorageWeakRef) -> None:
        self.weak = weak  # while it lives, no other storage gets the address that this one is known by
        self.bytes, self.device = storage.nbytes(), storage.device
        self._copier = copier
        values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
        stored = self._stored = copier.store(values)
        finalize(self, copier.release, stored).atexit = False
        self._arriving: Any = None
        self._values: Tensor | None = None
        self._waiting: WeakSet[_Packed] = WeakSet()

    @property
    def is_needed(self) -> bool:
        """Whether a saved tensor in it has not been asked for yet."""
        return bool(self._waiting)

    def add(self, packed: _Packed) -> None:
        self._waiting.add(packed)

    def fetch(self) -> None:
        """Start the copy back, if it is not on its way."""
        if self._arriving is None and self._values is None:
            self._arriving = self._copier.fetch(self._stored)

    def values(self, packed: _Packed) -> Tensor:
        """The bytes on the device, for one of the saved tensors in them; the last one takes them along."""
        self.fetch()
        if self._values is None:
            self._values, self._arriving = self._copier.wait(self._arriving), None
        values = self._values
        self._waiting.discard(packed)
        if not self._waiting:
            self._values = None  # a graph that is kept fetches them again
        return values


class _Packed:
    """A saved tensor that was moved."""

    def __init__(self, tensor: Tensor, moved: _Moved, group: _Group) -> None:
        self.moved, self.group, self.version = moved, group, Version(tensor)
        self.dtype, self.place = tensor.dtype, (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        moved.add(self)


class OffloadSaved:
    """Moves what autograd saves of blocks to host memory.

    Parameters, buffers and small tensors stay. A storage that several tensors share is moved once, and is one again
    when it is back. A change in place is refused as autograd refuses it. What ``torch.utils.checkpoint`` around a block
    will compute again is not moved; its inputs inside a block are. Enter it within
    :class:`~lightning_megapar.memory.saved.SavedBytes` to count what stays, and around
    :class:`~lightning_megapar.memory.compression.CompressSaved` to move what was compressed.

    Several runs of a block may be in flight, and their backwards come in any order. Host memory is released with the
    graph, whether or not its backward ran.

    Args:
        module: whose buffers and frozen parameters stay.
        prefetch: blocks whose copies back are started before the backward reaches them; 0 starts a block's copies when
            it is reached.
        minimum_bytes: smaller storages stay.
        copier: by default the one of the first tensor's device.

    Raises:
        ConfigError: values out of their range.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        prefetch: int = 1,
        minimum_bytes: int = 1 << 16,
        copier: Copier | None = None,
    ) -> None:
        for name, value in (("prefetch", prefetch), ("minimum_bytes", minimum_bytes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name}={value!r}: expected a whole number, at least 0 (nearest valid: 0)")
        self.prefetch, self.minimum_bytes = prefetch, minimum_bytes
        self._module = module
        self._copier, self._copiers = copier, dict[str, Copier]()
        self._known: WeakValueDictionary[tuple[Any, ...], _Moved] = WeakValueDictionary()
        self._last: dict[Hashable, _Group] = {}
        self._group: _Group | None = None
        self._weights: Weights | None = None
        self._outer: Hooks | None = None
        self.moved_bytes = 0
        """On the host now."""

    @contextmanager
    def block(self, index: int, key: Hashable = None, module: nn.Module | None = None) -> Iterator[None]:
        """Move what is saved while this is entered.

        Args:
            index: place of the block in the forward's order. The backward of a block fetches for those that were
                entered before it with smaller numbers.
            key: tells runs apart whose blocks' forwards alternate, such as microbatches; not needed where each run's
                blocks follow each other.
            module: the block, when only its own buffers and frozen parameters are to be looked for: the whole model has
                many.
        """
        if is_recomputed() or torch.compiler.is_compiling():
            yield
            return
        before = self._last.get(key)
        group = _Group(index, before if before is not None and before.index < index else None)
        around = self._group, self._weights, self._outer
        chosen = module if module is not None else self._module
        self._group, self._outer = group, outer_hooks()
        self._weights = Weights(() if chosen is None else (chosen,))
        self._last[key] = group
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._group, self._weights, self._outer = around

    def _pack(self, tensor: Tensor) -> Left | _Packed:
        assert self._weights is not None and self._group is not None
        if not self._takes(tensor) or tensor in self._weights:
            return Left(tensor, self._outer)
        storage = tensor.untyped_storage()
        weak = StorageWeakRef(storage)
        key = weak.cdata, tensor._version
        moved = self._known.get(key)
        if moved is None:
            moved = self._known[key] = _Moved(self._copier_of(tensor.device), storage, weak)
            self.moved_bytes += moved.bytes
            finalize(moved, self._left, moved.bytes).atexit = False
        self._group.moved.append(ref(moved))
        return _Packed(tensor, moved, self._group)

    def _takes(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device.type == "meta":
            return False
        size = tensor.untyped_storage().nbytes()
        # A small part of something large would bring all of it along.
        shown = tensor.numel() * tensor.element_size()
        return size >= max(1, self.minimum_bytes) and size <= _MOST_UNUSED * max(shown, _span(tensor))

    def _unpack(self, packed: Left | _Packed) -> Tensor:
        if isinstance(packed, Left):
            return packed.tensor()
        packed.version.check()
        packed.moved.fetch()  # it is needed first
        if not packed.group.is_reached:
            packed.group.is_reached = True
            group: _Group | None = packed.group
            for _ in range(self.prefetch + 1):
                if group is not None:
                    group.fetch()
                    group = group.previous
        values = packed.moved.values(packed)
        result = torch.empty(0, dtype=packed.dtype, device=packed.moved.device)
        return result.set_(values.untyped_storage(), *packed.place)  # type: ignore[call-overload]

    def _copier_of(self, device: torch.device) -> Copier:
        if self._copier is not None:
            return self._copier
        if device.type not in self._copiers:
            self._copiers[device.type] = copier_for(device)
        return self._copiers[device.type]

    def _left(self, size: int) -> None:
        self.moved_bytes -= size


def _span(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0
