"""The global random generators of a process: torch's, the CUDA device's, Python's and numpy's, always together.

A user's step may draw from any of them. Whatever runs it for a trial, in turns, or on several ranks must treat all
alike. numpy's and the device's take part only where they are in use.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn


class GeneratorStates(NamedTuple):
    """States of the generators; two of them compare equal when every generator would go on alike. Picklable.

    Args:
        cpu: torch's CPU generator, as bytes.
        cuda: the current CUDA device's, ``None`` while CUDA is not in use.
        python: of :mod:`random`.
        numpy: of ``numpy.random``, its array as bytes; ``None`` while numpy is not imported.
    """

    cpu: bytes
    cuda: bytes | None
    python: Any
    numpy: tuple[Any, ...] | None


def generator_states() -> GeneratorStates:
    """The states as they are now."""
    numpy = sys.modules.get("numpy")
    drawn = None
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        drawn = (kind, keys.tobytes(), *rest)
    cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else None
    return GeneratorStates(torch.get_rng_state().numpy().tobytes(), cuda, random.getstate(), drawn)


def set_generator_states(states: GeneratorStates) -> None:
    """Go on from ``states``; a generator that was not in use when they were taken is left alone."""
    torch.set_rng_state(_tensor(states.cpu))
    if states.cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(states.cuda))
    random.setstate(states.python)
    numpy = sys.modules.get("numpy")
    if numpy is not None and states.numpy is not None:
        kind, keys, *rest = states.numpy
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def seed_generators(seed: int) -> None:
    """Seed all of them.

    Args:
        seed: from 0 to 2**32 - 1 (numpy's range).
    """
    # torch.manual_seed takes a traceback for every kind of device that is not in use: 0.8 ms, for each block of a step.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the generators as they were."""
    states = generator_states()
    try:
        yield
    finally:
        set_generator_states(states)


def own_generators(module: nn.Module) -> list[Any]:
    """Generators that a module and its parts hold, also in lists and dicts: torch's, Python's and numpy's."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    found: dict[int, Any] = {}
    for child in module.modules():
        for value in vars(child).values():
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            found |= {id(one): one for one in (value, *inside) if isinstance(one, kinds)}
    return list(found.values())


def state_of(generator: Any) -> Any:
    """The state of one of :func:`own_generators`, as a value that can be compared."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps(generator.get_state())


def set_state_of(generator: Any, state: Any) -> None:
    """Let a generator go on from what :func:`state_of` gave."""
    if isinstance(generator, torch.Generator):
        generator.set_state(_tensor(state))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = pickle.loads(state)  # of this very process
    else:
        generator.set_state(pickle.loads(state))
