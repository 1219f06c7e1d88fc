"""Run a module's forward a second time, in the backward, as if it were the first and as if it had not been run.

``torch.utils.checkpoint`` (without reentrance) drops what a forward would keep for the backward and runs it again when
that is needed. The second run has to see what the first one saw, and must leave nothing behind:

* **Random numbers.** All generators of the process, and those that the module owns, start where they started, and go on
  afterwards as if nothing had been drawn.
* **Attention kernels** that were allowed around the first run (``sdpa_kernel``) are allowed in the second.
* **Buffers** that a forward changes (running statistics, spectral norms) are those of the first run's beginning.
* **Attributes** that a forward sets (counters, a tensor that somebody looks at later), and what lists, dicts and
  objects of the module's own hold, are put back.
* **Arguments**: tensors that a forward writes into are handed over as copies; lists, dicts and objects (a cache of keys
  and values, a dict that all blocks share) are those very objects, with what they held at first.

Which of these a module needs is found out in its first call; what it does not need costs nothing afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lightning_megapar.generators import generator_states, own_generators, set_generator_states, set_state_of, state_of
from lightning_megapar.memory.arena import Arena
from lightning_megapar.memory.contents import Contents
from lightning_megapar.memory.kernels import allowed_kernels, attention_kernels

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Rerun:
    """Calls a forward whose intermediate results are recomputed in the backward.

    Args:
        module: whose forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._is_known = False
        """Whether a first call has shown what follows."""
        self._writes: frozenset[int] = frozenset()
        """Numbers of the tensors among the arguments that the forward writes into."""
        self._changing: list[tuple[nn.Module, str]] = []
        """Buffers that the forward changes: owner and name."""
        self._generators: list[tuple[nn.Module, str]] = []
        """Generators that the module owns."""

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
        """
        tensors: list[Tensor] = []
        shape = _taken_out((args, tuple(kwargs.values())), tensors)
        objects = [value for value in _leaves(shape) if not isinstance(value, _Place)]
        if not self._is_known:
            self._generators = own_generators(self.module)
        beginning: list[_Beginning] = []
        copied = self._writes if self._is_known else range(len(tensors))

        def run(*tensors: Tensor) -> Any:
            given = [tensor.clone() if number in copied else tensor for number, tensor in enumerate(tensors)]
            here, values = _put_in(shape, given)
            named = dict(zip(kwargs, values))
            if beginning:
                with allowed_kernels(beginning[0].kernels), beginning[0].again():
                    return forward(*here, **named)
            beginning.append(_Beginning(self, objects))
            versions = [_version(tensor) for tensor in given]
            output = forward(*here, **named)
            now = [_version(tensor) for tensor in given]
            self._writes |= frozenset(number for number, pair in enumerate(zip(versions, now)) if pair[0] != pair[1])
            self._changing = beginning[0].settle()
            self._is_known = True
            return output

        with nullcontext() if arena is None else saved_tensors_hooks(partial(_copied_to, arena), _as_it_is):
            return checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _copied_to(arena: Arena, tensor: Tensor) -> Tensor:
    # What needs no gradient (a mask, a table) is mostly shared by all blocks.
    return arena.clone(tensor) if tensor.requires_grad else tensor


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Beginning:
    """What surrounds a forward at its beginning.

    Args:
        rerun: whose.
        objects: arguments that are no tensors.
    """

    def __init__(self, rerun: Rerun, objects: Sequence[Any]) -> None:
        self._module = module = rerun.module
        changing = rerun._changing if rerun._is_known else None
        self._looks = changing is None
        named = [(child, name) for child in module.modules() for name in child._buffers]
        self._versions = [(child, name, _version(child._buffers[name])) for child, name in named]
        kept = named if changing is None else changing
        self._buffers = [(child, name, _copy(child._buffers.get(name))) for child, name in kept]
        self._arguments: Contents | None = Contents(objects)
        self._attributes = [(vars(child), dict(vars(child))) for child in module.modules()]
        self._contents: Contents | None = _contents_of(attributes for _, attributes in self._attributes)
        self.kernels = attention_kernels()
        self._states: Any = generator_states()
        self._own = [(child, name, state_of(vars(child)[name])) for child, name in rerun._generators]

    def settle(self) -> list[tuple[nn.Module, str]]:
        """The first run is over: let go of what it did not use.

        Returns:
            the buffers that it has changed, or that lie beside one that it has, and those that were known already.
        """
        if generator_states() == self._states:
            self._states = None
        if self._arguments is not None and not self._arguments.have_changed():
            self._arguments = None
        if self._contents is not None and not self._contents.have_changed():
            self._contents = None
        self._attributes = [(now, before) for now, before in self._attributes if _differing(now, before)]
        self._own = [one for one in self._own if state_of(vars(one[0])[one[1]]) != one[2]]
        bumped = {id(child) for child, name, version in self._versions if _version(child._buffers.get(name)) != version}
        changing = [(child, name) for child, name, _ in self._versions if id(child) in bumped]
        if self._looks:
            # Kernels change running statistics without counting it as a version.
            self._buffers = [
                (child, name, copy)
                for child, name, copy in self._buffers
                if id(child) in bumped or _differ(copy, child._buffers.get(name))
            ]
        known = {(id(child), name) for child, name, _ in self._buffers}
        self._versions = []
        return [
            *((child, name) for child, name, _ in self._buffers),
            *((child, name) for child, name in changing if (id(child), name) not in known),
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around the second run."""
        children = [(child, dict(vars(child)), dict(child._buffers)) for child in self._module.modules()]
        contents = _contents_of(attributes for _, attributes, _ in children)
        arguments = None if self._arguments is None else self._arguments.now()
        outside = None if self._states is None else generator_states()
        own = [(generator := vars(child)[name], state_of(generator), state) for child, name, state in self._own]
        try:
            if self._states is not None:
                set_generator_states(self._states)
            for generator, _, state in own:
                set_state_of(generator, state)
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


def _taken_out(nest: Any, tensors: list[Tensor]) -> Any:
    """The nest without its tensors, which are appended. Lists and dicts are objects that may be shared: left alone."""
    if isinstance(nest, Tensor):
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
