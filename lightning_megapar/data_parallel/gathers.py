"""When the units of ZeRO gather their parameters.

Every gather is a collective: data ranks have to start the same ones in the same order. At stages 1 and 2 a unit is
gathered once in an accumulation window, and the order is one that they agree about, whatever each of them calls. At
stage 3 a gather is part of a call, so they must call the same units in the same order; whether they did is compared at
a step's end.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Protocol

from torch.distributed.fsdp import FSDPModule

from lightning_megapar.data_parallel.unit_hooks import Together


def groups_of(unit: FSDPModule) -> list[Any]:
    """FSDP2's groups of parameters of a unit; torch 2.11 knows one alone."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [state._fsdp_param_group] if groups is None else groups


def _is_pending(unit: FSDPModule) -> bool:
    return any(group._all_gather_result is not None for group in groups_of(unit))


def is_gathered(unit: FSDPModule) -> bool:
    """Whether a unit's parameters are whole now, and no gather of them is still running."""
    return all(group.is_unsharded for group in groups_of(unit)) and not _is_pending(unit)


def drop_pending(units: Sequence[FSDPModule]) -> None:
    """Drop what is being gathered and has not been called for."""
    for unit in units:
        if _is_pending(unit):
            unit.unshard()  # waits for the gather that runs, and starts none
            unit.reshard()


class Gathers(Protocol):
    """What :class:`~lightning_megapar.data_parallel.zero.ZeroUnits` asks of a stage's gathers."""

    def begin_forward(self) -> None:
        """A microbatch is about to run through a chunk."""

    def before_call(self, unit: FSDPModule) -> None:
        """A unit is about to be called, and not to be recomputed."""

    def begin_step(self, ahead: bool) -> None:
        """Before a step of any kind; ``ahead``: units are gathered before they are called.

        Only in steps of a schedule: between calls of his own somebody may change weights, of which a gather that has
        been started knows nothing.
        """

    def end_step(self) -> None:
        """From here on nothing is gathered ahead."""

    def complete(self) -> None:
        """Every unit that this rank calls in the step has been called."""

    def restart(self, order: Sequence[FSDPModule]) -> None:
        """Every unit has let go of its parameters; ``order`` is the one in which they are called."""

    @property
    def digest(self) -> int:
        """Of what has to be the same on all data ranks, since the step began: at most 20 bits."""


class GatherOnce:
    """Stages 1 and 2: each unit once in a window, in one order that all data ranks follow.

    A unit that is called gathers those before it as well, and ahead the one behind it, which then runs meanwhile.

    Args:
        order: in which units are called, as far as is known; the same on all data ranks.
    """

    digest = 0

    def __init__(self, order: Sequence[FSDPModule]) -> None:
        self._ahead = 0
        self.restart(order)

    def begin_forward(self) -> None:
        """See :class:`Gathers`."""

    def before_call(self, unit: FSDPModule) -> None:
        """See :class:`Gathers`."""
        self._start(self._position[unit] + 1 + self._ahead)

    def begin_step(self, ahead: bool) -> None:
        """See :class:`Gathers`."""
        self._ahead = int(ahead)

    def end_step(self) -> None:
        """See :class:`Gathers`."""
        self._ahead = 0

    def complete(self) -> None:
        """See :class:`Gathers`."""
        self._start(len(self._order))
        for unit in self._order:
            if _is_pending(unit):
                unit.unshard()  # waits

    def restart(self, order: Sequence[FSDPModule]) -> None:
        """See :class:`Gathers`."""
        self._order = list(order)
        self._position = {unit: position for position, unit in enumerate(order)}
        self._started = 0

    def _start(self, stop: int) -> None:
        for unit in self._order[self._started : stop]:
            for group in groups_of(unit):
                group._prefetch_unshard(group, "forward")
            self._started += 1


class GatherEach:
    """Stage 3: with each call, and for each backward.

    Which unit is called after which within a chunk is noted, and the next one gathered while the one before computes.

    Args:
        order: the units, in an order that is the same on all data ranks.
    """

    def __init__(self, order: Sequence[FSDPModule]) -> None:
        self._units = list(order)
        self._numbers = {unit: str(number).encode() for number, unit in enumerate(order)}
        self._previous: FSDPModule | None = None
        self._next: dict[FSDPModule, FSDPModule | None] = {}
        self._is_ahead = False
        self._sum = 0

    @property
    def digest(self) -> int:
        """See :class:`Gathers`."""
        return self._sum & 0xFFFFF

    def begin_forward(self) -> None:
        """What a microbatch calls first is not prefetched by what ran before."""
        self._previous = None

    def before_call(self, unit: FSDPModule) -> None:
        """See :class:`Gathers`."""
        if isinstance(unit, Together):
            self._previous = unit
            return  # it stays gathered
        self._sum = zlib.crc32(self._numbers[unit], self._sum)
        before, self._previous = self._previous, unit
        if before is None or isinstance(before, Together) or self._next.get(before, before) in (unit, None):
            return
        # A unit with several successors, or one of several before the same, has none that could be counted on.
        taken = any(after is unit for after in self._next.values())
        self._next[before] = None if before in self._next or taken or unit is before else unit

    def begin_step(self, ahead: bool) -> None:
        """See :class:`Gathers`."""
        self._sum = 0
        drop_pending(self._units)
        if ahead:
            self._is_ahead = True
            for unit, after in self._next.items():
                unit.set_modules_to_forward_prefetch([] if after is None else [after])
                if after is not None:
                    after.set_modules_to_backward_prefetch([unit])

    def end_step(self) -> None:
        """See :class:`Gathers`. What was gathered ahead and never called for is dropped."""
        if self._is_ahead:
            self._is_ahead = False
            for unit in self._next:
                unit.set_modules_to_forward_prefetch([])
            drop_pending(self._units)

    def complete(self) -> None:
        """See :class:`Gathers`."""

    def restart(self, order: Sequence[FSDPModule]) -> None:
        """See :class:`Gathers`."""
