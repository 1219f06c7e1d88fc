"""When gradients are reduced within a step: told by the schedule, carried out by FSDP2.

FSDP2 reduces a unit behind a backward that it sees, which with several chunks on a rank is not the last one, and weight
gradients that wait are computed without autograd. So a schedule's runtime tells a reduction of each action that
completes gradients: a whole backward, or the weight gradients of one whose inputs' gradients came before.

* Where that action is a whole backward, FSDP2's hooks are switched on for it, so that the sums run while it computes;
* whatever then still has gradients (weight gradients that waited, parts that the last microbatch left out, modules
  that are no unit of their own) is reduced after it, in the order of the units.

A step's sums are waited for at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from torch.distributed.fsdp import FSDPModule

from lightning_megapar.data_parallel.zero import ZeroUnits, end_backward, switch


class Reduction(Protocol):
    """What a pipeline's runtime tells of gradients."""

    def before(self, chunk: int, is_last: bool) -> None:
        """A whole backward of a chunk comes next; ``is_last``: it is the last action on the chunk's gradients."""

    def after(self, chunk: int, is_last: bool) -> bool:
        """A microbatch's gradients of a chunk are complete, and if ``is_last`` those of the step.

        Returns:
            whether gradients were reduced just now, and not within that action.
        """

    def finish(self) -> None:
        """Every action has run: wait for the sums."""


class ReduceOnce:
    """Stage 1, in the last batch of an accumulation window: each unit once, when its gradients are complete.

    Data ranks may have different numbers of microbatches (a ragged last batch) and so finish their chunks in different
    orders; the order of the sums is that of a whole batch on all of them.

    Args:
        zero: the units; :meth:`ZeroUnits.hold` was called before the step.
        order: this rank's chunks in the order in which a whole batch completes them, the same on all data ranks.
        early: let FSDP2's hooks reduce within a chunk's last backward. Only for schedules of whole backwards: with
            others the kind of the last action may differ between data ranks, and with it the order of the sums.
        observe: called with a unit before it is reduced; only without ``early``.
    """

    def __init__(
        self,
        zero: ZeroUnits,
        order: Sequence[int],
        early: bool,
        observe: Callable[[FSDPModule], None] | None = None,
    ) -> None:
        self._zero = zero
        self._observe = observe
        self._left = list(order)
        self._early = early
        self._complete: set[int] = set()
        self._reduced: set[int] = set()
        """Chunks after which units have been reduced: a beginning of ``order``."""
        self._hooked: set[FSDPModule] = set()
        """Units whose hooks may reduce them within a backward."""

    def before(self, chunk: int, is_last: bool) -> None:
        """See :class:`Reduction`."""
        if is_last and self._early and self._left[:1] == [chunk]:
            for unit in self._due({*self._reduced, chunk}):
                switch(unit, True, True)
                if not self._zero.is_sharded(unit):
                    self._hooked.add(unit)

    def after(self, chunk: int, is_last: bool) -> bool:
        """See :class:`Reduction`."""
        if not is_last:
            return False
        self._complete.add(chunk)
        was = len(self._left)
        while self._left and self._left[0] in self._complete:
            reduced = {*self._reduced, self._left.pop(0)}
            for unit in self._due(reduced):
                if unit in self._hooked and self._zero.is_sharded(unit):
                    continue  # a hook has done it: FSDP2 would now wait for the sum, instead of at the end
                if self._observe is not None:
                    self._observe(unit)
                switch(unit, True, True)
                end_backward(unit)
            self._reduced = reduced
        return len(self._left) < was and not self._early

    def finish(self) -> None:
        """See :class:`Reduction`."""
        _wait(self._zero, reshards=True)

    def _due(self, complete: Collection[int]) -> Iterator[FSDPModule]:
        """Units that have all gradients once these chunks are complete, and had not before."""
        for unit, users in zip(self._zero.units, self._zero.users):
            if unit in self._zero.called and users.issubset(complete) and not users.issubset(self._reduced):
                yield unit


class ReduceEach:
    """Stages 2 and 3: each unit after each microbatch that has given it gradients. Data ranks run equally many.

    Args:
        zero: the units; :meth:`ZeroUnits.hold` was called before the step, with ``reduces=hooked``.
        hooked: FSDP2's hooks reduce within backwards. Only for schedules of whole backwards: after the backward of the
            inputs alone the sum would lack what waits, and come twice.
        ends_window: whether stage 2 lets go of parameters at the step's end.
    """

    def __init__(self, zero: ZeroUnits, hooked: bool, ends_window: bool) -> None:
        self._zero = zero
        self._hooked = hooked
        self._ends_window = ends_window
        self._complete: set[int] = set()

    def before(self, chunk: int, is_last: bool) -> None:
        """See :class:`Reduction`."""
        if is_last and self._hooked:
            for unit, users in self._zero.used_by(chunk):
                unit.set_reshard_after_backward(self._lets_go(unit, users, {*self._complete, chunk}))

    def after(self, chunk: int, is_last: bool) -> bool:
        """See :class:`Reduction`."""
        if is_last:
            self._complete.add(chunk)
        for unit, users in self._zero.used_by(chunk):
            goes = self._lets_go(unit, users, self._complete)
            if self._hooked and self._is_through(unit, goes):
                continue
            switch(unit, True, goes)
            end_backward(unit)
            unit.set_requires_gradient_sync(self._hooked)
        return not self._hooked

    def finish(self) -> None:
        """See :class:`Reduction`."""
        _wait(self._zero, reshards=self._zero.stage == 3 or self._ends_window)

    def _lets_go(self, unit: FSDPModule, users: frozenset[int], complete: Collection[int]) -> bool:
        """Whether a unit's parameters go after a backward, once these chunks are complete."""
        if unit in self._zero.regathered:
            return True
        return (self._ends_window or self._zero.stage == 3) and users.issubset(complete)

    def _is_through(self, unit: FSDPModule, goes: bool) -> bool:
        """Whether FSDP2's hooks have left nothing to do. Asking it once more would wait for the sum that runs."""
        if self._zero.is_sharded(unit):
            return True
        return not goes and all(p.grad is None for p in unit.parameters())  # type: ignore[attr-defined]


def _wait(zero: ZeroUnits, reshards: bool) -> None:
    for unit in zero.units:
        if unit in zero.called:
            unit.set_requires_gradient_sync(False)  # nothing is left to be reduced
            unit.set_reshard_after_backward(reshards)
            unit.set_is_last_backward(True)
            end_backward(unit)
