"""LOSSY compression of what autograd keeps of chosen layers; off unless a codec is named.

The forward computes as ever; only the copies that the backward reads are coarser, and so the gradients. See
:data:`~lightning_megapar.memory.compression_options.GRADIENT_COSINES` for how much, measured.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_megapar.config import ConfigError
from lightning_megapar.layers.linear import ColumnParallelLinear
from lightning_megapar.memory.codecs import CODECS, Codec, Encoded, codec_named
from lightning_megapar.memory.compression_options import CompressionConfig, check_kinds, kind_names
from lightning_megapar.memory.saved import Hooks, Left, Version, Weights, is_recomputed, outer_hooks


class _Compressed:
    """One saved piece of memory in fewer bytes; all saved tensors that show it hold it together."""

    def __init__(self, weak: StorageWeakRef, encoded: Encoded, outer: Hooks | None) -> None:
        self.weak = weak  # while it lives, no other storage gets the address that this one is known by
        self._encoded, self._parts = encoded, None
        if outer is not None:
            self._encoded = replace(encoded, codes=encoded.codes.new_empty(0), tops=encoded.tops.new_empty(0))
            self._parts = Left(encoded.codes, outer), Left(encoded.tops, outer)

    def encoded(self) -> Encoded:
        if self._parts is None:
            return self._encoded
        codes, tops = self._parts
        return replace(self._encoded, codes=codes.tensor(), tops=tops.tensor())


@dataclass(frozen=True)
class _Packed:
    """A saved tensor: what holds its values, and how it lies in them."""

    compressed: _Compressed
    size: tuple[int, ...]
    stride: tuple[int, ...] | None
    version: Version

    def unpack(self, codec: Codec) -> Tensor:
        self.version.check()
        values = codec.decode(self.compressed.encoded()).view(-1)
        return values.view(self.size) if self.stride is None else values.as_strided(self.size, self.stride)


@dataclass
class CompressedBytes:
    """What was compressed so far.

    Args:
        before, after: bytes of the tensors, and of what is kept in their place; what is saved again counts once.
        tensors: how many of them.
    """

    before: int = 0
    after: int = 0
    tensors: int = 0


class Compressor:
    """Compresses saved tensors, those that several operations save once. Copies of it know of nothing that was saved.

    Args:
        config: with a codec.

    Raises:
        ConfigError: a configuration without one.
    """

    def __init__(self, config: CompressionConfig) -> None:
        if config.codec == "none":
            raise ConfigError(
                f"codec='none' compresses nothing; expected one of {', '.join(CODECS)} (all of them lossy)"
            )
        self.config = config
        self.codec = codec_named(config.codec)
        self.total = CompressedBytes()
        self._known: WeakValueDictionary[tuple[Any, ...], _Compressed] = WeakValueDictionary()

    def __getstate__(self) -> CompressionConfig:
        return self.config

    def __setstate__(self, config: CompressionConfig) -> None:
        self.__init__(config)  # type: ignore[misc]

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is large enough and of a kind that can be compressed; weights are not looked for."""
        config = self.config
        return (
            type(tensor) is Tensor
            and tensor.is_floating_point()
            and tensor.layout == torch.strided
            and tensor.element_size() > 1
            and tensor.numel() >= config.minimum_elements
            # An expanded tensor has less memory than elements.
            and tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
            and _rows_of(tensor)[1] >= config.minimum_row
        )

    def pack(self, tensor: Tensor, outer: Hooks | None) -> _Packed:
        """Compress; what is compressed already is looked up by its memory."""
        order, length = _rows_of(tensor)
        weak = StorageWeakRef(tensor.untyped_storage())
        where = (weak.cdata, tensor._version, tensor.storage_offset(), tensor.dtype, tensor.numel())
        size, stride = tuple(tensor.shape), tensor.stride()
        key = where if order is not None else (*where, size, stride)
        found = self._known.get(key)
        if found is None:
            group = self.config.group
            length = length if group is None or length % group else group
            with torch.no_grad():
                values = tensor.detach()
                rows = (values if order is None else values.permute(order)).reshape(-1, length)
                encoded = self.codec.encode(rows)
            found = self._known[key] = _Compressed(weak, encoded, outer)
            self.total.before += tensor.nbytes
            self.total.after += encoded.bytes
            self.total.tensors += 1
        return _Packed(found, size, None if order is None else stride, Version(tensor))


def _rows_of(tensor: Tensor) -> tuple[list[int] | None, int]:
    """The dimensions in the order of memory and the length of a row there.

    Views of one piece of memory without gaps (an attention's heads, the hidden states that they lie in) are then the
    same rows. ``None`` and the last dimension where memory has gaps.
    """
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], tensor.shape[dim] == 1))
    expected, length = 1, 1
    for dim in reversed(order):
        if tensor.shape[dim] == 1:
            continue
        if strides[dim] != expected:
            return None, tensor.shape[-1]
        length = tensor.shape[dim] if expected == 1 else length
        expected *= tensor.shape[dim]
    return order, length


class CompressSaved:
    """A context: what autograd saves while it is entered is kept compressed. LOSSY.

    Floating tensors of enough elements alone: no parameters, no buffers, no copies of them in autocast's dtype. What
    several operations save is compressed once. Hooks outside of it get the compressed tensors
    (:class:`~lightning_megapar.memory.saved.SavedBytes` counts them, an offload moves them). Under
    ``torch.utils.checkpoint`` (non-reentrant) it does nothing: what will be computed again is not kept. A change in
    place is refused as autograd refuses it. It may be entered again, also within itself.

    Tensors must own their memory: an arena that gives out a view of one storage again while a graph lives is not seen.
    A weight gradient that is put off (:mod:`lightning_megapar.layers.deferral`) holds its input in full until it is
    computed.

    Args:
        compressor: or the configuration of one.
        module: whose buffers and frozen parameters are left as they are.
    """

    def __init__(self, compressor: Compressor | CompressionConfig, module: nn.Module | None = None) -> None:
        self.compressor = Compressor(compressor) if isinstance(compressor, CompressionConfig) else compressor
        self.module = module
        self._reset()

    def _reset(self) -> None:
        self._entered: list[tuple[AbstractContextManager[Any] | None, Hooks | None, int]] = []
        self._outer: Hooks | None = None
        self._largest = 0
        self._weights: Weights | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"compressor": self.compressor, "module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def __enter__(self) -> CompressSaved:
        found = outer_hooks()
        around = getattr(found[0], "__self__", None) if found is not None else None
        inside = isinstance(around, CompressSaved) and around.compressor is self.compressor
        hooks: AbstractContextManager[Any] | None = None
        if not (inside or is_recomputed() or torch.compiler.is_compiling()):
            hooks = saved_tensors_hooks(self._pack, self._unpack)
            hooks.__enter__()
        self._entered.append((hooks, self._outer, self._largest))
        if hooks is not None:
            self._outer, self._largest = found, 0
            self._weights = Weights(() if self.module is None else (self.module,))
        return self

    def __exit__(self, *error: object) -> None:
        hooks, self._outer, self._largest = self._entered.pop()
        if hooks is not None:
            hooks.__exit__(*error)  # type: ignore[arg-type]

    def _pack(self, tensor: Tensor) -> Left | _Packed:
        assert self._weights is not None
        if not self.compressor.takes(tensor) or tensor in self._weights:
            return Left(tensor, self._outer)
        if tensor.numel() < self.compressor.config.minimum_share * self._largest:
            return Left(tensor, self._outer)
        self._largest = max(self._largest, tensor.numel())
        return self.compressor.pack(tensor, self._outer)

    def _unpack(self, packed: Left | _Packed) -> Tensor:
        return packed.tensor() if isinstance(packed, Left) else packed.unpack(self.compressor.codec)


class _Compressing:
    """The forward of a module, under its context. It finds the module by an attribute, which copying follows."""

    def __init__(self, module: nn.Module, saved: CompressSaved) -> None:
        self.module, self.saved = module, saved
        self.before: Any = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.saved:
            if self.before is not None:
                return self.before(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        forward = self.before if self.before is not None else type(self.module).forward.__get__(self.module)
        return inspect.signature(forward)


def compress_saved(module: nn.Module, config: CompressionConfig) -> Compressor | None:
    """Keep what the chosen layers of a module save compressed, from now on. LOSSY.

    Each gets a forward of its own, so this comes after whatever replaces forwards or looks at classes (sharding,
    waiting weight gradients); copies and pickles of the module are compressed as well. ``kinds="all"`` takes the module
    as one. What a layer of another kind saves too stays in full besides: ``("GeluMLP", "LayerNorm")`` reaches the input
    of GELU, which ``"Linear"`` does not.

    Args:
        module: trained.
        config: what and how.

    Returns:
        what counts the bytes; ``None`` for ``codec="none"``, which changes nothing.

    Raises:
        ConfigError: no layer is of a kind that is named.
        RuntimeError: it is compressed already.
    """
    if config.codec == "none":
        return None
    check_kinds(module, config)
    if any(_context_of(child) is not None for child in module.modules()):
        raise RuntimeError("the module's saved tensors are compressed already; remove_compression() first")
    compressor = Compressor(config)
    for child in module.modules():
        if child is module if config.kinds == "all" else config.matches(child):
            saved = CompressSaved(compressor, child)
            # Column layers that read one input are computed together, not by their own forwards.
            if isinstance(child, ColumnParallelLinear):
                child.keeping = saved
            else:
                vars(child)["forward"] = _Compressing(child, saved)
    return compressor


def compress_blocks(blocks: Mapping[str, nn.Module], config: CompressionConfig) -> None:
    """Keep what blocks save compressed, from now on, instead of what an earlier configuration says. LOSSY.

    Args:
        blocks: by name; those among which no layer is of a chosen kind are left as they are.
        config: what and how.

    Raises:
        ConfigError: no layer of any block is of a kind that is named.
    """
    for block in blocks.values():
        remove_compression(block)
    if config.codec == "none" or not blocks:
        return
    check_kinds(nn.ModuleList(blocks.values()), config)
    for block in blocks.values():
        if config.kinds == "all" or any(config.matches(child) for child in block.modules()):
            here = {name for child in block.modules() for name in kind_names(child)}
            kinds = config.kinds if config.kinds == "all" else tuple(one for one in config.kinds if one in here)
            compress_saved(block, replace(config, kinds=kinds))


def remove_compression(module: nn.Module) -> None:
    """Undo :func:`compress_saved`. Graphs that exist keep what they have."""
    for child in module.modules():
        forward = vars(child).get("forward")
        if isinstance(forward, _Compressing):
            del vars(child)["forward"]
            if forward.before is not None:
                vars(child)["forward"] = forward.before
        vars(child).pop("keeping", None)


def _context_of(module: nn.Module) -> CompressSaved | None:
    forward = vars(module).get("forward")
    return forward.saved if isinstance(forward, _Compressing) else vars(module).get("keeping")
