"""When gradients are reduced within a step: told by the schedule.

FSDP2 reduces a unit behind a backward that it sees, which with several chunks on a rank is not the last one, and weight
gradients that wait are computed without autograd. So a schedule's runtime tells a reduction of each action that
completes gradients: a whole backward, or the weight gradients of one whose inputs' gradients came before.

* Where that action is a whole backward, units are reduced within it, so that the sums run while it computes;
* whatever then still has gradients (weight gradients that waited, parts that the last microbatch left out, modules
  that are no unit of their own) is reduced after it, in the order of the units.

A step's sums are waited for at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch.distributed.fsdp import FSDPModule

from lightning_megapar.data_parallel.zero import ZeroUnits


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
        zero: the units.
        order: this rank's chunks in the order in which a whole batch completes them, the same on all data ranks.
        early: reduce within a chunk's last backward. Only for schedules of whole backwards: with others the kind of the
            last action may differ between data ranks, and with it the order of the sums.
    """

    def __init__(self, zero: ZeroUnits, order: Sequence[int], early: bool) -> None:
        self._zero = zero
        self._left = list(order)
        self._early = early
        self._opened: int | None = None
        """Chunk within whose backward units are reduced."""
        self._complete: set[int] = set()
        self._reduced: set[int] = set()
        """Chunks after which units have been reduced: a beginning of ``order``."""

    def before(self, chunk: int, is_last: bool) -> None:
        """See :class:`Reduction`."""
        if is_last and self._early and self._left[:1] == [chunk]:
            self._opened = chunk
            self._zero.open(self._due(chunk))

    def after(self, chunk: int, is_last: bool) -> bool:
        """See :class:`Reduction`."""
        if not is_last:
            return False
        self._complete.add(chunk)
        was = len(self._left)
        while self._left and self._left[0] in self._complete:
            done = self._left.pop(0)
            if done != self._opened:
                self._zero.open(self._due(done))
            self._zero.close()
            self._reduced.add(done)
        return len(self._left) < was and not self._early

    def finish(self) -> None:
        """See :class:`Reduction`."""
        self._zero.finish(reshards=True)

    def _due(self, chunk: int) -> list[FSDPModule]:
        """Units that have all gradients once this chunk is complete as well, and had not before."""
        complete = {*self._reduced, chunk}
        pairs = zip(self._zero.units, self._zero.users)
        return [unit for unit, users in pairs if users <= complete and not users <= self._reduced]


class ReduceEach:
    """Stages 2 and 3: each unit after each microbatch that has given it gradients. Data ranks run equally many.

    Args:
        zero: the units.
        early: reduce within backwards. Only for schedules of whole backwards: after the backward of the inputs alone
            the sum would lack what waits, and come twice.
        ends_window: whether stage 2 lets go of parameters at the step's end.
    """

    def __init__(self, zero: ZeroUnits, early: bool, ends_window: bool) -> None:
        self._zero = zero
        self._early = early
        self._ends_window = ends_window

    def before(self, chunk: int, is_last: bool) -> None:
        """See :class:`Reduction`."""
        if self._early:
            self._zero.open(list(self._zero.used_by(chunk)))

    def after(self, chunk: int, is_last: bool) -> bool:
        """See :class:`Reduction`."""
        if not self._early:
            self._zero.open(list(self._zero.used_by(chunk)))
        self._zero.close()
        return not self._early

    def finish(self) -> None:
        """See :class:`Reduction`."""
        self._zero.finish(reshards=self._zero.stage == 3 or self._ends_window)
