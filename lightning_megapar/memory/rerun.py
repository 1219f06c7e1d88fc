"""Run a module's forward a second time, in the backward, as if it were the first and as if it had not been run.

``torch.utils.checkpoint`` (without reentrance) drops what a forward would keep for the backward and runs it again when
that is needed. The second run has to see what the first one saw, and must leave nothing behind:

* **Random numbers.** All generators of the process, and those that the module owns, start where they started, and go on
  afterwards as if nothing had been drawn.
* **Attention kernels** that were allowed around the first run (``sdpa_kernel``) are allowed in the second.
* **Buffers** that a forward changes (running statistics, spectral norms) are those of the first run's beginning.
* **Attributes** that a forward sets (counters, a tensor that somebody looks at later), and what lists, dicts and
  objects of the module's own hold, are put back.
* **Arguments** are those very tensors and objects; the second run writes into copies of tensors as they were, and
  finds lists, dicts and objects (a cache of keys and values, a dict that blocks share) with what they held at first.

Of buffers and arguments it is found out before a module's first call, by a run that does not count, which ones change;
small buffers are kept in any case, since statistics that are frozen at first may be gathered later on, and kernels
change them without counting it. What a call has not used (no random number drawn, no attribute set) is let go of behind
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lightning_megapar.config import ConfigError
from lightning_megapar.generators import generator_states, own_generators, set_generator_states, set_state_of, state_of
from lightning_megapar.memory.arena import Arena
from lightning_megapar.memory.contents import Contents
from lightning_megapar.memory.kernels import allowed_kernels, attention_kernels

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_SMALL = 1 << 14
"""Elements of a buffer up to which it is kept for the second run whether or not it has been seen to change."""


class Rerun:
    """Calls a forward whose intermediate results are recomputed in the backward.

    Args:
        module: whose forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._is_known = False
        """Whether a call has shown what follows."""
        self._writes: frozenset[int] = frozenset()
        """Numbers of the tensors among the arguments that the forward writes into."""
        self._changing: list[tuple[nn.Module, str]] = []
        """Buffers that the forward changes: owner and name."""
        self.has_generators = False
        """Whether the module owns generators."""

    def __call__(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        contexts: Callable[[], tuple[Any, Any]] = noop_context_fn,
        arena: Arena | None = None,
    ) -> Any:
        """What ``forward(*args, **kwargs)`` returns, with a graph that runs it again.

        Args:
            forward: the module's.
            args, kwargs: any nest; tensors in it get gradients as ever.
            contexts: around the first and the second run.
            arena: where copies of the arguments that get gradients are kept; without one they are kept themselves.

        Raises:
            ConfigError: see :meth:`learn`.
        """
        if not self._is_known:
            self.learn(forward, args, kwargs)
        tensors: list[Tensor] = []
        shape = _taken_out((args, tuple(kwargs.values())), tensors)
        objects = [value for value in _leaves(shape) if not isinstance(value, _Place)]
        # What the forward writes into is seen by the caller; the second run writes into a copy of what was there.
        written = {number: tensors[number] for number in self._writes if number < len(tensors)}
        kept = {number: (tensor.detach().clone(), tensor.requires_grad) for number, tensor in written.items()}
        passed = [tensor for number, tensor in enumerate(tensors) if number not in written]
        count, names = len(tensors), tuple(kwargs)
        del tensors
        beginning: list[_Beginning] = []

        def run(*passed: Tensor) -> Any:
            others = iter(passed)
            if beginning:
                given = [_apart(*kept[n]) if n in kept else next(others) for n in range(count)]
            else:
                given = [written.pop(n) if n in kept else next(others) for n in range(count)]
            here, values = _put_in(shape, given)
            if beginning:
                with allowed_kernels(beginning[0].kernels), beginning[0].again():
                    return forward(*here, **dict(zip(names, values)))
            beginning.append(_Beginning(self, objects, self._changing))
            versions = [_version(tensor) for tensor in given]
            output = forward(*here, **dict(zip(names, values)))
            self._writes |= _changed(versions, given)
            beginning[0].settle()
            return output

        with nullcontext() if arena is None else saved_tensors_hooks(partial(_copied_to, arena), _as_it_is):
            return checkpoint(run, *passed, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    def learn(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Find out by a run that does not count what the forward changes.

        Args:
            forward, args, kwargs: of a call.
            within: made and entered around the run.

        Raises:
            ConfigError: it changes in place what could not be set back: a tensor or array among the module's
                attributes, or a tensor inside of a list, dict or object among the arguments.
        """
        tensors: list[Tensor] = []
        shape = _taken_out((args, tuple(kwargs.values())), tensors)
        objects = [value for value in _leaves(shape) if not isinstance(value, _Place)]
        self.has_generators = bool(own_generators(self.module))
        every = [(child, name) for child in self.module.modules() for name in child._buffers]
        begin = _Beginning(self, objects, every)
        fixed = _Fixed(self.module, objects)
        with torch.enable_grad(), begin.again():
            given = [_apart(tensor.detach().clone(), tensor.requires_grad) for tensor in tensors]
            versions = [_version(tensor) for tensor in given]
            swapped = [(child, name, child._buffers.get(name)) for child, name in every]
            counted = [_version(buffer) for _, _, buffer in swapped]
            here, values = _put_in(shape, given)
            with within():
                forward(*here, **dict(zip(kwargs, values)))
            self._writes |= _changed(versions, given)
            touched = {
                id(child)
                for (child, name, buffer), version, copy in zip(swapped, counted, begin.copies())
                if child._buffers.get(name) is not buffer or _version(buffer) != version or _differ(copy, buffer)
            }
            self._changing = [
                (child, name)
                for child, name, buffer in swapped
                if id(child) in touched or (buffer is not None and buffer.numel() <= _SMALL)
            ]
        fixed.refuse()
        self._is_known = True


def _copied_to(arena: Arena, tensor: Tensor) -> Tensor:
    # What needs no gradient (a mask, a table) is mostly shared by all blocks.
    # With gaps a copy would lie otherwise, and other kernels be taken.
    return arena.clone(tensor) if tensor.requires_grad and tensor.is_contiguous() else tensor


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Beginning:
    """What surrounds a forward at its beginning.

    Args:
        rerun: whose.
        objects: arguments that are no tensors.
        changing: buffers that it changes: owner and name.
    """

    def __init__(self, rerun: Rerun, objects: Sequence[Any], changing: Sequence[tuple[nn.Module, str]]) -> None:
        self._module = module = rerun.module
        known = {(id(child), name) for child, name in changing}
        self._others = [
            (child, name, buffer, _version(buffer))
            for child in module.modules()
            for name, buffer in child._buffers.items()
            if (id(child), name) not in known
        ]
        self._buffers = [(child, name, _copy(child._buffers.get(name))) for child, name in changing]
        self._held = [(child._buffers, dict(child._buffers)) for child in module.modules() if child._buffers]
        self._arguments: Contents | None = Contents(objects)
        self._attributes = [(vars(child), dict(vars(child))) for child in module.modules()]
        self._contents: Contents | None = _contents_of(attributes for _, attributes in self._attributes)
        self.kernels = attention_kernels()
        self._states: Any = generator_states()
        self._own = [(one, state_of(one)) for one in own_generators(module)] if rerun.has_generators else []

    def copies(self) -> list[Tensor | None]:
        """Of the buffers that are changed, in their order."""
        return [copy for _, _, copy in self._buffers]

    def settle(self) -> None:
        """The first run is over: let go of what it did not use.

        Raises:
            RuntimeError: a large buffer was changed in place that the first call has not changed.
        """
        if generator_states() == self._states:
            self._states = None
        if self._arguments is not None and not self._arguments.have_changed():
            self._arguments = None
        if self._contents is not None and not self._contents.have_changed():
            self._contents = None
        self._attributes = [(now, before) for now, before in self._attributes if _differing(now, before)]
        self._own = [(one, state) for one, state in self._own if state_of(one) != state]
        self._held = [(now, before) for now, before in self._held if _differing(now, before)]
        for child, name, buffer, version in self._others:
            if child._buffers.get(name) is buffer and _version(buffer) != version:
                raise RuntimeError(
                    f"recompute: the buffer {name!r} of a {type(child).__name__} is changed in place by this call and "
                    "was not by the first one, so that what it was is lost for the backward. Change it in every call "
                    "(by zero, if need be), bind a new tensor to it, or use recompute='none'"
                )
        self._others = []

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around the second run."""
        children = [(child, dict(vars(child)), dict(child._buffers)) for child in self._module.modules()]
        contents = _contents_of(attributes for _, attributes, _ in children)
        arguments = None if self._arguments is None else self._arguments.now()
        outside = None if self._states is None else generator_states()
        own = [(generator, state_of(generator), state) for generator, state in self._own]
        try:
            if self._states is not None:
                set_generator_states(self._states)
            for generator, _, state in own:
                set_state_of(generator, state)
            for now, before in self._held:
                _put_back(now, before)
            for child, name, copy in self._buffers:
                child._buffers[name] = _copy(copy)
            for now, before in self._attributes:
                _put_back(now, before)
            for changed in (self._contents, self._arguments):
                if changed is not None:
                    changed.put_back()
            yield
        finally:  # torch leaves by an exception as soon as it has what it needs
            if outside is not None:
                set_generator_states(outside)
            for generator, state, _ in own:
                set_state_of(generator, state)
            for child, attributes, buffers in children:
                _put_back(vars(child), attributes)
                _put_back(child._buffers, buffers)
            contents.put_back()
            if arguments is not None:
                arguments.put_back()


class _Place:
    """Stands for a tensor among arguments."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Fixed:
    """Tensors and arrays that can only be looked at: those of a module's attributes, and those inside of arguments.

    Args:
        module: whose attributes.
        objects: arguments that are no tensors.
    """

    def __init__(self, module: nn.Module, objects: Sequence[Any]) -> None:
        self._name = type(module).__name__
        found = [
            (f"its attribute {name!r}", value)
            for child in module.modules()
            for name, value in vars(child).items()
            if name not in _OF_EVERY_MODULE
        ]
        found += [("a tensor inside of its arguments", leaf) for leaf in tree_leaves(list(objects))]
        self._tensors = [(where, one, _version(one)) for where, one in found if isinstance(one, Tensor)]
        self._arrays = [(where, one, one.copy()) for where, one in found if isinstance(one, numpy.ndarray)]

    def refuse(self) -> None:
        """Raise :class:`ConfigError` if one of them has been changed in place since."""
        changed = [where for where, one, version in self._tensors if _version(one) != version]
        changed += [where for where, one, copy in self._arrays if not numpy.array_equal(one, copy)]
        if changed:
            raise ConfigError(
                f"recompute: the forward of a {self._name} changes {changed[0]} in place, which could not be set back "
                "for a second run; let it be a buffer (register_buffer) or an argument of its own, or use "
                "recompute='none'"
            )


def _changed(versions: list[int], tensors: list[Tensor]) -> frozenset[int]:
    return frozenset(n for n, (version, one) in enumerate(zip(versions, tensors)) if _version(one) != version)


def _apart(copy: Tensor, requires_grad: bool) -> Tensor:
    """A copy that may be written into, and gets a gradient like the tensor that it is of."""
    if not requires_grad:
        return copy.clone()
    result: Tensor = AsResult.apply(torch.zeros((), device=copy.device, requires_grad=True), copy.clone())
    return result


class AsResult(torch.autograd.Function):
    """Makes a tensor the result of an operation, whose gradient goes nowhere: no leaf, which nobody may write into."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        ctx.anchor = anchor.dtype, anchor.device
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        dtype, device = ctx.anchor
        return torch.zeros((), dtype=dtype, device=device), None


def _taken_out(nest: Any, tensors: list[Tensor]) -> Any:
    """The nest without its tensors, which are appended, each once. Lists and dicts may be shared: left alone."""
    if isinstance(nest, Tensor):
        for number, known in enumerate(tensors):
            if known is nest:
                return _Place(number)
        tensors.append(nest)
        return _Place(len(tensors) - 1)
    if type(nest) is tuple:
        return tuple(_taken_out(value, tensors) for value in nest)
    return nest


def _put_in(nest: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(nest, _Place):
        return tensors[nest.number]
    return tuple(_put_in(value, tensors) for value in nest) if type(nest) is tuple else nest


def _leaves(nest: Any) -> Iterator[Any]:
    if type(nest) is tuple:
        for value in nest:
            yield from _leaves(value)
    else:
        yield nest


def _contents_of(modules: Iterable[dict[str, Any]]) -> Contents:
    """What containers and objects of somebody's own among the attributes of modules hold."""
    held = (
        value
        for attributes in modules
        for name, value in attributes.items()
        if name not in _OF_EVERY_MODULE and name != "forward"
    )
    return Contents(held, libraries=False)


def _differing(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return now.keys() != before.keys() or any(now[name] is not value for name, value in before.items())


def _put_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in [name for name in now if name not in before]:
        del now[name]
    for name, value in before.items():
        if now.get(name, now) is not value:
            now[name] = value


def _version(tensor: Any) -> int:
    return tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else -1


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _differ(copy: Tensor | None, now: Tensor | None) -> bool:
    if copy is None or now is None:
        return copy is not now
    if copy.shape != now.shape or copy.dtype != now.dtype:
        return True
    return not bool(((copy == now) | ((copy != copy) & (now != now))).all())
