"""The schedules of the literature, built from their rules. Pure functions, no torch.

``S`` ranks, ``M`` microbatches, ``v`` chunks per rank, rank ``r``. Peaks are those of
:meth:`~lightning_megapar.pipeline.schedules.data.Schedule.peak_activations`, in microbatch-chunks (a chunk holds
``1/v`` of the rank's layers); ``g = ceil(M / max(1, floor(M / S)))``.

===================== =========== ================ ================================================================
name                  ``v``       placement        peak activations of rank ``r``
===================== =========== ================ ================================================================
``gpipe``             1 or more   loop             ``v M``
``1f1b``              1           one per rank     ``min(S - r, M)``
``interleaved_1f1b``  2 or more   loop             ``min((v - 1) g + 2 (S - 1 - r) + 1, v M)``
``zb_h1``             1           one per rank     ``min(S, M)``
``zb_h2``             1           one per rank     ``min(2 S - 1, M)``
``zbv``               2           V                ``min(2 S, 2 M, M + 1 + r)``
``dualpipe_v``        2           V                ``min(2 S + 1, 2 M, M + 1 + r)``
``forward``           1 or more   loop, or given   1: nothing is kept for a backward
===================== =========== ================ ================================================================

Sources: Huang et al., "GPipe" (2019), with several chunks the breadth-first order of Lamy-Poirier, "Breadth-First
Pipeline Parallelism" (2023); Narayanan et al., "PipeDream" (2019), its variant with a flush; Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021) for interleaving; Qi et al.,
"Zero Bubble Pipeline Parallelism" (2023) and "Pipeline Parallelism with Controllable Memory" (2024) for ZB-H1, ZB-H2
and ZB-V; DeepSeek-AI, "DeepSeek-V3" (2024) and its DualPipe code for DualPipeV.

**Bubble.** With equal stages, free messages and a whole backward, GPipe and 1F1B idle for ``(S - 1) / M`` of the
*ideal* time, which is ``(S - 1) / (M + S - 1)`` of the *total* time; the two are often mixed up (``S = M = 128``: 0.99
and 0.50). Interleaving divides the former by ``v`` for every ``M >= S``, divisible by ``S`` or not. ZB-H1 idles for
``(S - 1) (F + B - W)``, with ``B`` the backward of the inputs, when ``W <= F`` and ``M >= S``. Unequal stages, messages
that take time, and everything else are for the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_megapar.config import ConfigError, nearest_name
from lightning_megapar.pipeline.schedules.data import Action, Kind, Schedule, loop_placement, v_placement
from lightning_megapar.schedule_names import chunks_of

_KIND_OF: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


class _Row:
    """The actions of one rank, written in order. Each kind and chunk takes its microbatches in ascending order."""

    def __init__(self, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self.actions: list[Action] = []
        self.deferred: deque[Action] = deque()
        self._next: dict[tuple[str, int], int] = {}

    def left(self, step: str) -> int:
        """How many microbatches ``step`` (such as ``"F0"``: kind and chunk) has not taken yet."""
        return self.num_microbatches - self._taken(step)

    def _taken(self, step: str) -> int:
        backward = {"B": "I"}.get(step[0], step[0])  # one count for whole and halved backwards
        return self._next.get((backward, int(step[1:])), 0)

    def add(self, steps: str, times: int = 1) -> None:
        """Append the steps (``"F0 I1 W"``), ``times`` over. ``W`` takes the oldest deferred backward_weight."""
        for _ in range(times):
            for step in steps.split():
                if step == "W":
                    self.actions.append(self.deferred.popleft())
                    continue
                microbatch, chunk = self._taken(step), int(step[1:])
                self.actions.append(Action(_KIND_OF[step[0]], microbatch, chunk))
                self._next[{"B": "I"}.get(step[0], step[0]), chunk] = microbatch + 1
                if step[0] == "I":
                    self.deferred.append(Action("backward_weight", microbatch, chunk))


def _gpipe(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    row = _Row(num_microbatches)
    for chunk in range(num_chunks):
        row.add(f"F{chunk}", num_microbatches)
    for chunk in reversed(range(num_chunks)):
        row.add(f"B{chunk}", num_microbatches)
    ranks = (tuple(row.actions),) * num_stages
    return Schedule("gpipe", num_microbatches, ranks, loop_placement(num_stages, num_chunks))


def _one_forward_one_backward(name: str, num_microbatches: int, num_stages: int, zero_bubble: int) -> Schedule:
    """1F1B (``zero_bubble=0``), ZB-H1 (1) and ZB-H2 (2).

    A rank starts with ``warm_up`` forwards and then alternates one forward and one backward. When the backward is
    halved, the weights' half waits until more than ``lag`` inputs' halves are ahead of it: a rank further down the
    pipeline has fewer microbatches in flight, and ``lag`` uses up what the first rank holds anyway.
    """
    ranks = []
    for rank in range(num_stages):
        below = num_stages - rank - 1
        warm_up, lag = (2 * below, 2 * rank) if zero_bubble == 2 else (below, rank)
        row = _Row(num_microbatches)
        row.add("F0", min(warm_up, num_microbatches))
        for _ in range(num_microbatches):
            if row.left("F0"):
                row.add("F0")
            row.add("I0" if zero_bubble else "B0")
            if len(row.deferred) > lag:
                row.add("W")
        row.add("W", len(row.deferred))
        ranks.append(tuple(row.actions))
    return Schedule(name, num_microbatches, tuple(ranks))


def _groups(num_stages: int, num_microbatches: int) -> list[range]:
    """Microbatches that a rank takes through one chunk before it turns to the next.

    Groups as small as possible, none smaller than ``num_stages``: a smaller one next to a full one makes the first rank
    wait for the last, which waits for the first. Fewer microbatches than stages are one group.
    """
    count = max(1, num_microbatches // num_stages)
    base, extra = divmod(num_microbatches, count)
    starts = [index * base + min(index, extra) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    groups = _groups(num_stages, num_microbatches)
    forwards = [Action("forward", m, chunk) for group in groups for chunk in range(num_chunks) for m in group]
    chunks_back = range(num_chunks - 1, -1, -1)
    backwards = [Action("backward", m, chunk) for group in groups for chunk in chunks_back for m in group]
    ranks = []
    for rank in range(num_stages):
        # The last rank can begin a backward when one microbatch has gone through all of its chunks.
        warm_up = min((num_chunks - 1) * len(groups[0]) + 2 * (num_stages - rank - 1), len(forwards))
        row = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards):
            row += [forward, backward]
        ranks.append(tuple(row + backwards[len(forwards) - warm_up :]))
    return Schedule("interleaved_1f1b", num_microbatches, tuple(ranks), loop_placement(num_stages, num_chunks))


def _zbv(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """ZB-V, in the form for forward, backward_input and backward_weight of equal length."""
    full = max(num_microbatches, 2 * num_stages - 1)
    ranks = []
    for rank in range(num_stages):
        below = num_stages - rank
        row = _Row(full)
        row.add("F0", 2 * below - 1)
        row.add("F1 F0", rank)
        row.add("F1 I1 W", below)
        for _ in range(full - num_stages):
            row.add("F0 I0 W F1 I1 W" if row.left("F0") else "I0 W F1 I1 W")
        row.add("I0 I1", rank)
        row.add("I0 W", below)
        row.add("W", len(row.deferred))
        ranks.append(tuple(row.actions))
    return Schedule("zbv", full, tuple(ranks), v_placement(num_stages)).restricted(num_microbatches)


def _dualpipe_v(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """DualPipeV. What it runs side by side (a forward and a backward) stands here one after the other."""
    full = max(num_microbatches, 2 * num_stages)
    ranks = []
    for rank in range(num_stages):
        below = num_stages - rank - 1
        row = _Row(full)
        row.add("F0", 2 * below)
        row.add("F0 F1", rank + 1)
        row.add("I1 W F1", below)
        row.add("F0 B1 F1 B0", full - 2 * num_stages + rank + 1)
        row.add("B1 F1 B0", below)
        # Of these 2 (rank + 1) backwards the second half defers its weights' half, to fill the drain.
        ends = ["1", "0"] * (rank + 1)
        for index, chunk in enumerate(ends):
            row.add(("I" if index > rank else "B") + chunk)
        row.add("W I0", below)
        row.add("W", len(row.deferred))
        ranks.append(tuple(row.actions))
    return Schedule("dualpipe_v", full, tuple(ranks), v_placement(num_stages)).restricted(num_microbatches)


def forward_schedule(placement: Sequence[Sequence[int]], num_microbatches: int) -> Schedule:
    """Forwards only (validation, test, predict) on any placement.

    On a loop the order is that of ``interleaved_1f1b``. Elsewhere each rank takes, slot by slot, the oldest microbatch
    of those that have arrived.

    Args:
        placement: for each rank the virtual stage of each chunk; that of the training schedule, so that every rank
            finds its own layers.
        num_microbatches: microbatches per step.
    """
    shape = tuple(tuple(row) for row in placement)
    num_stages, num_chunks = len(shape), len(shape[0])
    if shape == loop_placement(num_stages, num_chunks):
        groups = _groups(num_stages, num_microbatches)
        row = tuple(Action("forward", m, chunk) for group in groups for chunk in range(num_chunks) for m in group)
        return Schedule("forward", num_microbatches, (row,) * num_stages, shape)
    places = {k: (rank, chunk) for rank, chunks in enumerate(shape) for chunk, k in enumerate(chunks)}
    last = len(places) - 1
    ranks: list[list[Action]] = [[] for _ in shape]
    arrived = {(microbatch, 0) for microbatch in range(num_microbatches)}
    while arrived:
        taken: dict[int, tuple[int, int]] = {}
        for microbatch, k in sorted(arrived):
            taken.setdefault(places[k][0], (microbatch, k))
        for rank, (microbatch, k) in taken.items():
            ranks[rank].append(Action("forward", microbatch, places[k][1]))
            arrived.remove((microbatch, k))
            if k < last:
                arrived.add((microbatch, k + 1))
    return Schedule("forward", num_microbatches, tuple(tuple(actions) for actions in ranks), shape)


@dataclass(frozen=True)
class _Recipe:
    build: Callable[[int, int, int], Schedule]
    instead: str = ""


_RECIPES: dict[str, _Recipe] = {
    "gpipe": _Recipe(_gpipe),
    "1f1b": _Recipe(
        lambda s, m, v: _one_forward_one_backward("1f1b", m, s, 0), "with more chunks it is interleaved_1f1b"
    ),
    "interleaved_1f1b": _Recipe(_interleaved, "with one chunk it is 1f1b"),
    "zb_h1": _Recipe(
        lambda s, m, v: _one_forward_one_backward("zb_h1", m, s, 1), "zbv has 2 chunks and halved backwards"
    ),
    "zb_h2": _Recipe(
        lambda s, m, v: _one_forward_one_backward("zb_h2", m, s, 2), "zbv has 2 chunks and halved backwards"
    ),
    "zbv": _Recipe(_zbv, "one on the way down the ranks, one on the way back"),
    "dualpipe_v": _Recipe(_dualpipe_v, "one on the way down the ranks, one on the way back"),
    "forward": _Recipe(lambda s, m, v: forward_schedule(loop_placement(s, v), m)),
}
SCHEDULE_NAMES: tuple[str, ...] = tuple(_RECIPES)
"""Every name that :func:`build_schedule` knows; the last one, ``forward``, has no backward."""


def placement_of(
    schedule: str | Schedule, num_stages: int, num_chunks: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """For each rank the virtual stage of each of its chunks under a (named) schedule; a single rank holds all in one.

    Raises:
        ConfigError: as :func:`build_schedule`.
    """
    if num_stages == 1:
        return ((0,),)
    if isinstance(schedule, Schedule):
        return schedule.placement
    return build_schedule(schedule, num_stages, 1, num_chunks).placement


def build_schedule(name: str, num_stages: int, num_microbatches: int, num_chunks: int | None = None) -> Schedule:
    """The named schedule (see the table above) for ``num_stages`` ranks.

    Any number of microbatches goes with any number of stages; with fewer than stages (a ragged last batch) the pipeline
    is never full.

    Args:
        name: one of :data:`SCHEDULE_NAMES`.
        num_stages: ranks of the pipeline.
        num_microbatches: microbatches per step.
        num_chunks: model chunks per rank; ``None`` takes the least that the schedule can have.

    Raises:
        ConfigError: on an unknown name, numbers below 1, or a number of chunks that the schedule cannot have.
    """
    for setting, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        _check_count(setting, value)
    if name not in _RECIPES:
        if name == "auto":
            raise ConfigError("schedule 'auto' needs costs to choose by: use choose_schedule(...)")
        near = nearest_name(str(name).lower(), SCHEDULE_NAMES)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"pipeline_schedule={name!r} is not one of {', '.join(SCHEDULE_NAMES)}{hint}")
    recipe, (least, most) = _RECIPES[name], chunks_of(name)
    chunks = least if num_chunks is None else num_chunks
    _check_count("num_chunks", chunks)
    if not least <= chunks <= (most or chunks):
        valid = f"{least} or more" if most is None else str(least)
        raise ConfigError(
            f"pipeline_schedule={name!r} cannot have num_chunks={chunks}; valid values: {valid} ({recipe.instead})"
        )
    return recipe.build(num_stages, num_microbatches, chunks)


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r}: expected a positive integer (nearest valid: 1)")
