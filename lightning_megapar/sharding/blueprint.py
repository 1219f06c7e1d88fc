"""The transformers models inside somebody's module, kept whole on the meta device.

A pipeline cut and sharding take a model apart; its own rules speak of it whole. A :class:`Blueprint` is a copy without
memory, made before anything is cut. It answers what transformers' ``_init_weights`` gives a tensor (one real tensor
at a time, whatever this rank holds), and carries configuration, tied names and conversions for reading and writing
Hugging Face directories.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
        unfilled: names, in the user's module, of real tensors that hold nothing yet: made by a constructor that heeds
            no device (``torch.Tensor(size)``) in a model that was built on the meta device.
    """

    path: str
    model: Any
    unfilled: frozenset[str] = frozenset()
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
        slots = self._all_slots().get(local) if local is not None else None
        if slots is None:
            return None
        module, attribute = slots[0]
        placeholder = _registered(module, attribute)
        is_parameter = attribute in module._parameters
        dtype = torch.float32 if is_parameter and placeholder.is_floating_point() else placeholder.dtype
        written_by = self._all_writers().get(id(placeholder))
        value: Tensor = torch.empty(placeholder.shape, dtype=dtype, device="cpu")
        for slot in slots:
            own = next(path for path, child in self.model.named_modules() if child is slot[0])
            for alone in (True, False):
                if self._run(written_by or [own], slot, value, seed, {} if alone else _whole(slot[0])):
                    return value
            written_by = None
        return _constructed(module, attribute, value, seed)

    def _run(self, writers: list[str], slot: Slot, value: Tensor, seed: int, beside: dict[str, Tensor]) -> bool:
        """Initialise ``value`` in the place of a tensor; whether it is filled afterwards.

        Args:
            writers: modules to initialise.
            slot: where the tensor is registered.
            value: real; its contents are lost.
            seed: of torch's global generator.
            beside: more real tensors for the module (rules that look at the device of another tensor need them).
        """
        module, attribute = slot
        placeholder = _registered(module, attribute)
        others = {name: _registered(module, name) for name in beside if name != attribute}
        with torch.no_grad():
            value.fill_(float("nan")) if value.is_floating_point() else value.zero_()
            untouched = value._version
            _register(slot, value)
            for name in others:
                _register((module, name), beside[name])
            try:
                with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                    torch.manual_seed(seed)
                    for path in writers:
                        self._initialise(path)
            except Exception:  # it is refused by name, or tried again
                return False
            finally:
                _register(slot, placeholder)
                for name, other in others.items():
                    _register((module, name), other)
            if value.is_floating_point() and value.numel():
                return not bool(torch.isnan(value.min()))  # min passes not-a-number on, without a copy
        return value._version != untouched

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
        """Name of a tensor -> every slot that registers it; of tied ones the slot that gives them their values first.

        transformers initialises before it ties: what it would write into the others is lost.
        """
        if self._slots is None:
            derived = set(getattr(self.model, "all_tied_weights_keys", None) or {})
            named: dict[int, dict[str, Slot]] = {}
            for path, module in self.model.named_modules(remove_duplicate=False):
                for attribute, tensor in _own_tensors(module):
                    named.setdefault(id(tensor), {})[f"{path}.{attribute}" if path else attribute] = (module, attribute)
            self._slots = {}
            for slots in named.values():
                source_first = sorted(slots, key=lambda name: name in derived)
                distinct = list(dict.fromkeys(slots[name] for name in source_first))
                self._slots.update(dict.fromkeys(slots, distinct))
        return self._slots

    def _all_writers(self) -> dict[int, list[str]]:
        """``id`` of a tensor -> modules whose initialisation writes into it, children before parents.

        Found by running it on the meta device, where writing costs nothing and still counts versions. A parent that
        gives some of its children's tensors other values (GPT-2's residual projections) comes after them.
        """
        if self._writers is None:
            self._writers = {}
            tied = [(slot, _registered(*slot)) for slots in self._all_slots().values() for slot in slots[1:]]
            for slot, tensor in tied:
                _register(slot, nn.Parameter(torch.empty_like(tensor)) if slot[1] in slot[0]._parameters else tensor)
            with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"), _writing_shows():
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
            for slot, tensor in tied:
                _register(slot, tensor)
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
            found.append(Blueprint(path, on_meta(child), frozenset(_unfilled(child, path))))
    return tuple(found)


def blueprint_at(blueprints: Sequence[Blueprint], path: str) -> Blueprint | None:
    """The transformers model of that name, outermost or inside of another one; ``None`` when there is none."""
    for blueprint in blueprints:
        local = "" if path == blueprint.path else blueprint.local_name(path)
        if local == "":
            return blueprint
        try:
            part = blueprint.model.get_submodule(local) if local is not None else None
        except AttributeError:
            continue
        if part is not None and isinstance(part, sys.modules["transformers.modeling_utils"].PreTrainedModel):
            return Blueprint(path, part)
    return None


def _unfilled(model: nn.Module, path: str) -> Iterator[str]:
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    for name, child in model.named_modules():
        # transformers marks modules that it has initialised, and parameters that it has read.
        if getattr(child, "_is_hf_initialized", False) or not type(child).__module__.startswith("transformers."):
            continue
        for attribute, tensor in child._parameters.items():
            if tensor is not None and not tensor.is_meta and not getattr(tensor, "_is_hf_initialized", False):
                yield ".".join(part for part in (path, name, attribute) if part)


def on_meta(module: nn.Module, kept: Iterable[Any] = ()) -> Any:
    """A copy of ``module`` whose tensors are on the meta device, tied ones still tied.

    Args:
        module: real or not.
        kept: objects that the copy shares with it.
    """
    memo: dict[int, Any] = {id(one): one for one in kept}
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


def _register(slot: Slot, tensor: Tensor) -> None:
    module, name = slot
    if name not in module._parameters:
        module._buffers[name] = tensor
    elif isinstance(tensor, nn.Parameter):
        module._parameters[name] = tensor
    else:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)  # shares memory and version


def _whole(module: nn.Module) -> dict[str, Tensor]:
    """A real tensor for every one that a module owns."""
    return {name: torch.zeros(t.shape, dtype=t.dtype, device="cpu") for name, t in _own_tensors(module)}


def _constructed(module: nn.Module, name: str, value: Tensor, seed: int) -> Tensor | None:
    """What only the constructor of transformers' ``Conv1D`` gives; ``None`` for other classes."""
    if not isinstance(module, sys.modules["transformers.pytorch_utils"].Conv1D):
        return None
    generator = torch.Generator("cpu").manual_seed(seed)
    return value.normal_(std=0.02, generator=generator) if name == "weight" else value.zero_()


@contextmanager
def _writing_shows() -> Iterator[None]:
    """A few of torch's functions return at once on the meta device; let them count as writing there too."""
    from transformers import initialization

    functions = initialization.TORCH_INIT_FUNCTIONS
    originals: dict[str, Any] = dict(functions)

    def shown(function: Callable[..., Any]) -> Callable[..., Any]:
        def write(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            return tensor.zero_() if tensor.is_meta else function(tensor, *args, **kwargs)

        return write

    functions.update({name: shown(function) for name, function in originals.items()})
    try:
        with initialization.guard_torch_init_functions():
            yield
    finally:
        functions.update(originals)


def _children_first(module: nn.Module, path: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path
