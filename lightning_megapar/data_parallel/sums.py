"""Sums of units' gradients over the data ranks, in one order that all of them follow.

Left alone FSDP2 reduces a unit behind a backward that it sees, and sends what has a gradient. Data ranks that call
different modules, or give gradients to different parameters of one (experts, layers that are dropped), would then sum
one thing with another, or wait for ever. So FSDP2's hooks only tell that a unit is through a backward; here

* a unit is reduced when its turn comes in the agreed order, within the backward if it can be;
* every unit that had gradients on any rank the last time takes part, with zeros for what has none here;
* in the end the ranks tell each other which parameters have a gradient on any of them (others keep none, which is what
  optimizers see without sharding), and which units got some after their turn: those are reduced once more.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_megapar.data_parallel.gathers import groups_of

_END = "_root_post_backward_final_callback"
_OF_GROUPS = (
    "pre_backward",
    "post_backward",
    "fsdp_params",
    "is_unsharded",
    "_prefetch_unshard",
    "_training_state",
    "_all_gather_result",
)

Whole = tuple[nn.Parameter, Tensor | None]
"""A parameter (this rank's shard), and this rank's addend to its gradient: whole, or ``None`` if frozen."""


class UnitSums:
    """The sums of a rank's units.

    Args:
        units: in one order on all data ranks.
        group: all data ranks.
        device: for what they tell each other.
    """

    def __init__(self, units: Sequence[FSDPModule], group: dist.ProcessGroup, device: torch.device) -> None:
        self.order = list(units)
        """In which backwards come to the units, as data rank 0 has seen it."""
        self._units = list(units)
        self._group = group
        self._device = device
        self._active: set[FSDPModule] | None = None
        """Units that had gradients on any data rank the last time; ``None`` before it is known."""
        self._last: set[FSDPModule] = set()
        """Units that one backward on any data rank has come to more than once: none says when they are complete."""
        self._is_first = False
        """Whether no backward has shown anything yet: which units it comes to more than once is known at its end."""
        self._turns: list[FSDPModule] = []
        self._ready: set[FSDPModule] = set()
        self._completed: dict[FSDPModule, None] = {}
        """In the order in which backwards came to them first in this step."""
        self._inner: dict[FSDPModule, Any] = {}
        self._parameters = {unit: [p for g in groups_of(unit) for p in g.fsdp_params] for unit in units}
        self._present: dict[FSDPModule, list[bool]] = {}
        self._repeated: set[FSDPModule] = set()
        """Those of this rank: a forward has called them more than once, and the gradients are of all its calls."""
        self._backward = -1
        self._came: set[FSDPModule] = set()
        """Units that the backward of this number has come through."""
        self._backwards = 0
        """Digest of the units whose parameters backwards have asked for, in their order."""
        self.observe: Callable[[list[Whole]], None] | None = None
        """Called with a unit's gradients on this rank alone, before they are summed."""
        for unit in units:
            (group_of_unit,) = groups_of(unit)
            self._inner[unit] = group_of_unit.post_backward
            group_of_unit.post_backward = partial(self._through, unit)
            group_of_unit.pre_backward = partial(
                self._begins, len(self._inner), group_of_unit, group_of_unit.pre_backward
            )
            unit.set_requires_gradient_sync(False, recurse=False)

    def begin_step(self, resharded: Collection[FSDPModule]) -> None:
        """Before a step; ``resharded`` let go of their parameters behind each backward."""
        self._turns.clear()
        self._ready.clear()
        self._completed.clear()
        self._backwards = 0
        self._present = {unit: [False] * len(parameters) for unit, parameters in self._parameters.items()}
        for unit in self._units:
            unit.set_requires_gradient_sync(False, recurse=False)
            unit.set_reshard_after_backward(unit in resharded, recurse=False)
            unit.set_is_last_backward(False)  # sums that are started are waited for in the end

    def open(self, first: Collection[FSDPModule], then: Collection[FSDPModule] = ()) -> None:
        """The coming backward completes gradients of these: reduce each within it, as soon as its turn comes."""
        active = self._look_around() if self._active is None else self._active
        turns = [unit for some in (first, then) for unit in self.order if unit in some and unit in active]
        self._turns = sorted(turns, key=lambda unit: unit in self._last)
        self._ready.clear()

    def close(self) -> None:
        """The backward is over: reduce those whose turn has not come."""
        for unit in self._turns:
            self.reduce(unit)
        self._turns, self._is_first = [], False

    def _begins(self, number: int, group: Any, inner: Callable[..., None], *args: Any) -> None:
        """A backward comes to a unit, and gathers its parameters if they are not there."""
        if group._training_state.name != "PRE_BACKWARD":  # else it has come here by another output
            self._backwards = zlib.crc32(str(number).encode(), self._backwards)
        inner(*args)

    def _through(self, unit: FSDPModule, *_: Any) -> None:
        """FSDP2 is through a unit's backward."""
        self._completed.setdefault(unit)
        self._note(unit)
        waits = self._is_first or unit in self._repeated or unit in self._last
        if self._turns[:1] != [unit] or waits:
            self._inner[unit]()
            if unit in self._turns and not waits:
                self._ready.add(unit)
            return
        self.reduce(self._turns.pop(0))
        while self._turns and self._turns[0] in self._ready:
            self.reduce(self._turns.pop(0))

    def _note(self, unit: FSDPModule) -> None:
        """Whether this backward comes to the unit for the first time. (If not, what is summed already was too early:
        what comes now is late, and summed once more.)
        """
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            self._came.clear()
        if unit in self._came:
            self._repeated.add(unit)
        self._came.add(unit)

    def reduce(self, unit: FSDPModule) -> None:
        """Start the sum of a unit's gradients, with zeros for those that this rank has not."""
        present = self._present[unit]
        for number, one in enumerate(self._parameters[unit]):
            whole = getattr(one, "_unsharded_param", None)
            if whole is None or not whole.requires_grad:
                continue
            if _gradient_of(one) is not None:
                present[number] = True
            else:
                whole.grad = torch.zeros_like(whole, dtype=getattr(whole, "grad_dtype", None) or whole.dtype)
        if self.observe is not None:
            self.observe([(one.sharded_param, _gradient_of(one)) for one in self._parameters[unit]])
        unit.set_requires_gradient_sync(True, recurse=False)
        self._inner[unit]()
        unit.set_requires_gradient_sync(False, recurse=False)

    @property
    def digest(self) -> int:
        """Of the backwards of this step: a number of at most 20 bits."""
        return self._backwards & 0xFFFFF

    def agree(self, digest: int) -> bool:
        """At the end of a step's sums; collective over the data ranks.

        Gradients that came after a unit's turn are summed as well, and what is zero because no rank has a gradient is
        dropped.

        Args:
            digest: a number of at most 20 bits.

        Returns:
            whether it is the same on all data ranks.
        """
        present = [here for unit in self._units for here in self._present[unit]]
        told = [digest, digest * digest, *self._shown(), *present]
        (total, squares, *numbers), count = _summed(told, self._group, self._device), len(self._units)
        again = self._marked(numbers[count : 2 * count])
        if again:
            for unit in again:
                self.reduce(unit)
            return self.agree(digest)
        self._active = set()
        flags = iter(numbers[3 * count :])
        for unit in self._units:
            for one in self._parameters[unit]:
                if next(flags):
                    self._active.add(unit)
                else:
                    one.sharded_param.grad = None
        self._learn(numbers)
        return _are_alike(total, squares, self._group)

    def forget(self) -> None:
        """Drop gradients that wait to be reduced."""
        for parameters in self._parameters.values():
            for one in parameters:
                one.unsharded_accumulated_grad = None
                if hasattr(one, "_unsharded_param"):
                    one._unsharded_param.grad = None

    def _look_around(self) -> set[FSDPModule]:
        """Before the first sum of all: what earlier microbatches have shown, if there were any; collective."""
        told, count = _summed(self._shown(), self._group, self._device), len(self._units)
        self._is_first = not any(told[:count])
        self._learn(told)
        self._active = set(self._marked(told[count : 2 * count]) or self._units)
        return self._active

    def _shown(self) -> list[int]:
        """For each unit its place in the order of backwards (from 1 on; 0 where it has none, and on all ranks but one),
        whether it has gradients that wait to be summed, and whether backwards come to it more than once.
        """
        seen = self._completed if self._group.rank() == 0 else ()
        place = {unit: number for number, unit in enumerate(seen, 1)}
        waiting = [any(_gradient_of(one) is not None for one in self._parameters[unit]) for unit in self._units]
        repeated = [unit in self._repeated for unit in self._units]
        return [*(place.get(unit, 0) for unit in self._units), *waiting, *repeated]

    def _marked(self, flags: Sequence[int]) -> list[FSDPModule]:
        """The units with a flag that is not zero."""
        return [unit for unit, flag in zip(self._units, flags) if flag]

    def _learn(self, told: Sequence[int]) -> None:
        """Follow the order of data rank 0, where it is another than the one so far; see :meth:`_shown`."""
        count = len(self._units)
        seen = sorted((place, number) for number, place in enumerate(told[:count]) if place)
        units = [self._units[number] for _, number in seen]
        if units != [unit for unit in self.order if unit in set(units)]:
            self.order = [*units, *(unit for unit in self.order if unit not in set(units))]
        self._last = set(self._marked(told[2 * count : 3 * count]))


def _gradient_of(one: Any) -> Tensor | None:
    whole = getattr(one, "_unsharded_param", None)
    return one.unsharded_accumulated_grad if whole is None or whole.grad is None else whole.grad


def are_alike(digest: int, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a number of at most 20 bits is the same on all ranks of a group; collective over them."""
    total, squares = _summed([digest, digest * digest], group, device)
    return _are_alike(total, squares, group)


def _are_alike(total: int, squares: int, group: dist.ProcessGroup) -> bool:
    return group.size() * squares == total * total  # Cauchy and Schwarz


def _summed(numbers: list[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    told = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(told, group=group)
    return told.tolist()


def end_backward(units: Iterable[FSDPModule]) -> None:
    """The last backward of a step is over: wait for the sums.

    Each unit is a root of its own. The callback, which torch's own pipelining calls as well
    (``torch.distributed.pipelining.stage``), is what FSDP2 does at the end of a backward.
    """
    for unit in units:
        unit.set_is_last_backward(True)
        getattr(unit._get_fsdp_state(), _END)()


def missing(unit: FSDPModule) -> list[str]:
    """What FSDP2 has for itself in torch 2.11 to 2.13, is used here, and is not there."""
    state: Any = getattr(unit, "_get_fsdp_state", lambda: None)()
    lacking = [f"FSDPState.{name}" for name in (_END, "_comm_ctx", "_lazy_init") if not hasattr(state, name)]
    groups = groups_of(unit) if not lacking else []
    return lacking + [f"FSDPParamGroup.{name}" for group in groups for name in _OF_GROUPS if not hasattr(group, name)]
