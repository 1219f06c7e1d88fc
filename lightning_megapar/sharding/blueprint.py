"""The transformers models inside somebody's module, kept whole on the meta device.

A pipeline cut and sharding take a model apart; its own rules speak of it whole. A :class:`Blueprint` is a copy without
memory, made before anything is cut. It answers what transformers' ``_init_weights`` gives a tensor (one real tensor
at a time, whatever this rank holds), and carries configuration, tied names and conversions for reading and writing
Hugging Face directories.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Slot = tuple[nn.Module, str]
"""A module and the name under which it registers a tensor."""


@dataclass
class Blueprint:
    """One outermost ``PreTrainedModel``.

    Args:
        path: its dotted name in the user's module; ``""`` for the module itself.
        model: the model, whole, every tensor on the meta device.
    """

    path: str
    model: Any
    _slots: dict[str, list[Slot]] | None = field(default=None, repr=False)
    _writers: dict[int, list[str]] | None = field(default=None, repr=False)

    def local_name(self, name: str) -> str | None:
        """A name of the user's module as the model's own; ``None`` for what lies outside of it."""
        if not self.path:
            return name
        return name[len(self.path) + 1 :] if name.startswith(f"{self.path}.") else None

    def full_name(self, name: str) -> str:
        """The inverse of :meth:`local_name`."""
        return f"{self.path}.{name}" if self.path else name

    def draw(self, name: str, seed: int) -> Tensor | None:
        """The initial value that transformers gives a parameter or buffer.

        Only this tensor is made, full-size on the CPU; every other one stays on the meta device.

        Args:
            name: in the user's module.
            seed: of torch's global generator during the draw (restored afterwards).

        Returns:
            the value (parameters in float32, buffers in their dtype); ``None`` when nothing fills the whole of it.
        """
        local = self.local_name(name)
        slots = self._all_slots().get(local, []) if local is not None else []
        if not slots:
            return None
        module, attribute = slots[0]
        placeholder = _registered(module, attribute)
        is_parameter = attribute in module._parameters
        dtype = torch.float32 if is_parameter and placeholder.is_floating_point() else placeholder.dtype
        value: Tensor = torch.empty(placeholder.shape, dtype=dtype, device="cpu")
        if value.is_floating_point():
            value.fill_(float("nan"))
        untouched = value._version
        real = nn.Parameter(value, requires_grad=False) if is_parameter else value
        own = next(path for path, child in self.model.named_modules() if child is module)
        writers = self._all_writers().get(id(placeholder)) or [own]
        _register(slots, real)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
                torch.manual_seed(seed)
                for path in writers:
                    self._initialise(path)
        finally:
            _register(slots, placeholder)
        if value.is_floating_point() and value.numel():
            return None if bool(torch.isnan(value.min())) else value  # min passes not-a-number on, without a copy
        return value if value._version != untouched else None

    def _initialise(self, path: str) -> None:
        """transformers' rule: the nearest model around a module initialises it."""
        owner = self.model
        base = sys.modules["transformers.modeling_utils"].PreTrainedModel
        current: nn.Module = self.model
        for name in path.split(".") if path else []:
            current = getattr(current, name)
            if isinstance(current, base):
                owner = current
        owner._init_weights(current)

    def _all_slots(self) -> dict[str, list[Slot]]:
        """Name of a tensor -> every slot that registers it (tied tensors have several)."""
        if self._slots is None:
            by_id: dict[int, list[Slot]] = {}
            names: dict[str, int] = {}
            for path, module in self.model.named_modules(remove_duplicate=False):
                for attribute, tensor in _own_tensors(module):
                    slots = by_id.setdefault(id(tensor), [])
                    if (module, attribute) not in slots:
                        slots.append((module, attribute))
                    names[f"{path}.{attribute}" if path else attribute] = id(tensor)
            self._slots = {name: by_id[key] for name, key in names.items()}
        return self._slots

    def _all_writers(self) -> dict[int, list[str]]:
        """``id`` of a tensor -> modules whose initialisation writes into it, children before parents.

        Found by running it on the meta device, where writing costs nothing and still counts versions. A parent that
        gives some of its children's tensors other values (GPT-2's residual projections) comes after them.
        """
        if self._writers is None:
            self._writers = {}
            with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
                for path in _children_first(self.model):
                    module = self.model.get_submodule(path) if path else self.model
                    tensors = [tensor for child in module.modules() for _, tensor in _own_tensors(child)]
                    before = [tensor._version for tensor in tensors]
                    try:
                        self._initialise(path)
                    except Exception:  # some rule needs values: it is tried again with the tensor it is asked for
                        continue
                    for tensor, version in zip(tensors, before):
                        found = self._writers.setdefault(id(tensor), [])
                        if tensor._version != version and path not in found:
                            found.append(path)
        return self._writers


def record_blueprints(module: nn.Module) -> tuple[Blueprint, ...]:
    """The outermost transformers models in ``module``, real or on the meta device; no tensor is copied."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return ()
    found: list[Blueprint] = []
    for path, child in module.named_modules():
        inside = any(not b.path or path == b.path or path.startswith(f"{b.path}.") for b in found)
        if isinstance(child, library.PreTrainedModel) and not inside:
            found.append(Blueprint(path, on_meta(child)))
    return tuple(found)


def on_meta(module: nn.Module) -> Any:
    """A copy of ``module`` whose tensors are on the meta device, tied ones still tied."""
    memo: dict[int, Any] = {}
    for child in module.modules():
        for _, tensor in _own_tensors(child):
            if id(tensor) not in memo:
                empty: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                if isinstance(tensor, nn.Parameter):
                    empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                memo[id(tensor)] = empty
    return copy.deepcopy(module, memo)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            if tensor is not None:
                yield name, tensor


def _registered(module: nn.Module, name: str) -> Tensor:
    tensor: Tensor | None = module._parameters.get(name)
    if tensor is None:
        tensor = module._buffers.get(name)
    assert tensor is not None
    return tensor


def _register(slots: list[Slot], tensor: Tensor) -> None:
    for module, name in slots:
        held: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        held[name] = tensor


def _children_first(module: nn.Module, path: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path
