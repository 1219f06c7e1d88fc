"""A step's bytes over time, by what they are for, from the memory events of torch's profiler.

What a buffer is for follows from who knows its address, and else from its life:

* *parameters* (with the module's buffers), *optimizer state* and *gradients* are known by their tensors;
* *communication* is allocated where something is sent or received: by FSDP2 (gathered parameters, what is reduced), by
  a pipeline's links, by sums of gradients. Collectives inside of layers are not told apart from their results;
* *activations* are allocated in a forward, and a backward has begun before they are freed: what autograd keeps, what
  recomputation starts from, what weight gradients wait for. A block's input belongs to it, its output does not;
* *temporary* is the rest: recomputation, gradients on their way, workspaces, what a forward needs for a moment.

The events are those of the device; what was allocated before the step and is none of the known tensors is not seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import profile

from lightning_megapar.marks import COMMUNICATION

PARAMETERS, OPTIMIZER, GRADIENTS = "parameters", "optimizer", "gradients"
ACTIVATIONS, MESSAGES, TEMPORARY = "activations", "communication", "temporary"
CATEGORIES = (PARAMETERS, OPTIMIZER, GRADIENTS, ACTIVATIONS, MESSAGES, TEMPORARY)
"""In the order in which they are stacked."""
OUTSIDE = ""
"""The layer of what is in no block."""
FORWARD, BACKWARD, UPDATE, OTHER = "forward", "backward", "optimizer step", "waits and sums"

MARK = "lightning_megapar memory: "
"""Begins the names of ranges of no length, by which a recording says what it knows (tabs between the parts): ``enter``,
block, addresses of its inputs; ``leave``, nothing, addresses of its results; ``known``, category, addresses; ``gone``,
nothing, addresses that were there before and are not any more."""
_ENGINE, _STEP, _FSDP = "autograd::engine::evaluate_function", "Optimizer.step#", "FSDP::"
_GATHERED = 2  # a label: communication that is none of a block's inputs; 1 may be one


@dataclass(frozen=True)
class Timeline:
    """What a rank held during a step.

    Args:
        seconds: moments, from 0.
        held: at each of them, from then on, bytes of each of :data:`CATEGORIES`.
        layers: activations by block, when there were most of them at once; :data:`OUTSIDE` is what belongs to none.
        phases: kind, start and end in seconds of what the rank did.
        peak: bytes of each category at the moment with most bytes in all.
        most: of each category by itself, the most bytes at once.
        seconds_of_peak: when the peak was.
        end: seconds.
    """

    seconds: tuple[float, ...]
    held: tuple[tuple[int, ...], ...]
    layers: Mapping[str, int]
    phases: tuple[tuple[str, float, float], ...]
    peak: Mapping[str, int]
    most: Mapping[str, int]
    seconds_of_peak: float
    end: float

    @property
    def peak_bytes(self) -> int:
        """Most bytes at once."""
        return sum(self.peak.values())

    def thinned(self, moments: int = 400) -> Timeline:
        """The same with at most so many moments: of each stretch of time that with most bytes."""
        if len(self.seconds) <= moments:
            return self
        best: dict[int, int] = {}
        for index, second in enumerate(self.seconds):
            stretch = min(moments - 1, int(moments * second / (self.end or 1.0)))
            if stretch not in best or sum(self.held[index]) > sum(self.held[best[stretch]]):
                best[stretch] = index
        kept = [best[stretch] for stretch in sorted(best)]
        return Timeline(
            tuple(self.seconds[one] for one in kept),
            tuple(self.held[one] for one in kept),
            self.layers,
            _thinned_phases(self.phases, self.end / moments),
            self.peak,
            self.most,
            self.seconds_of_peak,
            self.end,
        )


def _thinned_phases(phases: Sequence[tuple[str, float, float]], least: float) -> tuple[tuple[str, float, float], ...]:
    """Without the shortest ones; neighbours of a kind are one."""
    found: list[tuple[str, float, float]] = []
    for kind, start, end in phases:
        if end - start < least and found:
            kind = found[-1][0]
        if found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1], end)
        else:
            found.append((kind, start, end))
    return tuple(found)


@dataclass
class _Buffer:
    size: int
    category: str
    label: int = 0
    layer: str = OUTSIDE
    born: int = -1
    died: int = -1
    backwards: int = 0
    """Pieces of backwards that had begun when it was allocated."""
    in_backward: bool = False
    is_input: bool = False


@dataclass
class _Reading:
    """A profile, event by event."""

    alive: dict[int, _Buffer]
    buffers: list[_Buffer]
    moment: int = 0
    backwards: int = 0
    blocks: list[str] = field(default_factory=list)
    looked_before: int | None = None
    """The moment of the first backward since the last mark."""

    def allocate(self, pointer: int, size: int, label: int, in_backward: bool) -> None:
        self.free(pointer)  # seen by nobody, in another thread
        layer = self.blocks[-1] if self.blocks else OUTSIDE
        buffer = _Buffer(size, TEMPORARY, label, layer, self.moment, -1, self.backwards, in_backward)
        self.alive[pointer] = buffer
        self.buffers.append(buffer)

    def free(self, pointer: int) -> None:
        buffer = self.alive.pop(pointer, None)
        if buffer is not None:
            buffer.died = self.moment
            self.settle(buffer)

    def settle(self, buffer: _Buffer) -> None:
        """What a buffer is for, now that its life is known."""
        if buffer.category != TEMPORARY:
            return
        may_be = not buffer.label or (buffer.is_input and buffer.label != _GATHERED)
        if may_be and not buffer.in_backward and self.backwards > buffer.backwards:
            buffer.category = ACTIVATIONS
        elif buffer.label:
            buffer.category = MESSAGES

    def marked(self, what: str) -> None:
        kind, name, pointers = what.split("\t")
        found = [self.alive[int(one)] for one in pointers.split() if int(one) in self.alive]
        if kind == "enter":
            self.blocks.append(name)
            for buffer in found:
                if buffer.born >= 0:
                    buffer.layer, buffer.is_input = name, True
        elif kind == "leave":
            if self.blocks:
                self.blocks.pop()
            for buffer in found:  # the next block's, if it gets there
                if buffer.born >= 0 and not buffer.is_input:
                    buffer.layer = OUTSIDE
        else:
            for buffer in found:
                buffer.category = name

    def gone(self, what: str) -> None:
        """Of buffers that were there before, some are not any more. Nobody saw them go: it was before the first
        backward since the last look, if there was one, for gradients are set to zero ahead of it.
        """
        for pointer in map(int, what.split("\t")[2].split()):
            if pointer in self.alive and self.alive[pointer].born < 0:
                buffer = self.alive[pointer]
                self.free(pointer)
                buffer.died = self.moment if self.looked_before is None else self.looked_before


def timeline_of(recorded: profile, held: Mapping[int, tuple[int, str]], kind: str) -> Timeline:
    """What was held during a profile.

    Args:
        recorded: stopped, with ``profile_memory=True``.
        held: address -> bytes and category of what was there before.
        kind: of device, ``"cpu"`` or ``"cuda"``.
    """
    before = {pointer: _Buffer(size, category) for pointer, (size, category) in held.items()}
    reading = _Reading(dict(before), list(before.values()))
    times: list[int] = []
    spans: list[tuple[int, int, str]] = []
    entered: list[int] = []
    for nanoseconds, what, label, in_backward in _events(recorded, kind):
        if isinstance(what, tuple):
            pointer, size = what
            times.append(nanoseconds)
            if size > 0:
                reading.allocate(pointer, size, label, in_backward)
            else:
                reading.free(pointer)
            reading.moment += 1
        elif what.startswith(MARK + "gone"):
            times.append(nanoseconds)
            reading.gone(what)
            reading.moment += 1
            reading.looked_before = None
        elif what.startswith(MARK):
            reading.marked(what.removeprefix(MARK))
            reading.looked_before = None
            if what.startswith(MARK + "enter"):
                entered.append(nanoseconds)
        else:
            kind_of_span, _, end = what.rpartition(" ")
            reading.backwards += kind_of_span == BACKWARD
            if kind_of_span == BACKWARD and reading.looked_before is None:
                reading.looked_before = max(0, min(reading.moment, len(times) - 1))
            spans.append((nanoseconds, int(end), kind_of_span))
    for buffer in reading.alive.values():
        reading.settle(buffer)
    return _summed(reading.buffers, times, spans, entered)


def _events(recorded: profile, kind: str) -> list[tuple[int, Any, int, bool]]:
    """Nanoseconds, and (address, bytes) or a name, its label, and whether it is in a backward; in order of time."""
    results: Any = recorded.profiler.kineto_results  # type: ignore[union-attr]
    found: list[tuple[int, Any, int, bool]] = []
    waiting = [(event, 0, False) for event in results.experimental_event_tree()]
    while waiting:
        event, label, inside = waiting.pop()
        if event.tag == _EventType.Allocation:
            extra = event.extra_fields
            if extra.device.type == kind:
                found.append((event.start_time_ns, (extra.ptr, extra.alloc_size), label, inside))
            continue
        name = event.name
        if name.startswith(MARK):
            found.append((event.start_time_ns, name, 0, inside))
            continue
        if name.startswith(_ENGINE) and not inside:
            found.append((event.start_time_ns, f"{BACKWARD} {event.end_time_ns}", 0, True))
            inside = True
        elif name.startswith(_STEP):
            found.append((event.start_time_ns, f"{UPDATE} {event.end_time_ns}", 0, inside))
        label = _GATHERED if name.startswith(_FSDP) else 1 if name == COMMUNICATION else label
        waiting.extend((child, label, inside) for child in event.children)
    return sorted(found, key=lambda one: one[0])


def _summed(
    buffers: Sequence[_Buffer], times: Sequence[int], spans: Sequence[tuple[int, int, str]], entered: Sequence[int]
) -> Timeline:
    start = min([*times[:1], *(span[0] for span in spans[:1])], default=0)
    end = max([*times[-1:], *(span[1] for span in spans)], default=start)
    place = {category: number for number, category in enumerate(CATEGORIES)}
    changes: list[list[tuple[int, str, int]]] = [[] for _ in times]
    now = [0] * len(CATEGORIES)
    for buffer in buffers:
        number = place[buffer.category]
        if buffer.born < 0:
            now[number] += buffer.size
        else:
            changes[buffer.born].append((number, buffer.layer, buffer.size))
        if buffer.died >= 0:
            changes[buffer.died].append((number, buffer.layer, -buffer.size))
    layers: dict[str, int] = {}
    best, most_layers = 0, dict(layers)
    seconds, held, peak, at_peak = [0.0], [tuple(now)], tuple(now), 0.0
    most = list(now)
    for time, some in zip(times, changes):
        for number, layer, size in some:
            now[number] += size
            if CATEGORIES[number] == ACTIVATIONS:
                layers[layer] = layers.get(layer, 0) + size
        seconds.append((time - start) / 1e9)
        held.append(tuple(now))
        most = [max(pair) for pair in zip(most, now)]
        if sum(now) > sum(peak):
            peak, at_peak = tuple(now), seconds[-1]
        if now[place[ACTIVATIONS]] > best:
            best, most_layers = now[place[ACTIVATIONS]], dict(layers)
    return Timeline(
        tuple(seconds),
        tuple(held),
        {layer: size for layer, size in most_layers.items() if size},
        _phases(spans, entered, start, end),
        dict(zip(CATEGORIES, peak)),
        dict(zip(CATEGORIES, most)),
        at_peak,
        (end - start) / 1e9,
    )


def _phases(
    spans: Sequence[tuple[int, int, str]], entered: Sequence[int], start: int, end: int
) -> tuple[tuple[str, float, float], ...]:
    """Backwards are seen; what is between them is a forward if a block is entered in it (or none is ever). Lightning
    runs all of it within the optimizer's step, of which what is behind the last backward is left.
    """
    joined: list[tuple[int, int]] = []
    gap = (end - start) / 300
    for first, last, kind in spans:
        if kind != BACKWARD:
            continue
        if joined and first - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    updated = max((last for _, last, kind in spans if kind == UPDATE), default=start)
    found: list[tuple[str, int, int]] = []
    at = start
    for number, (first, last) in enumerate([*joined, (end, end)]):
        is_last = number == len(joined)
        kind = FORWARD if not is_last and any(at <= one <= first for one in entered or (at,)) else OTHER
        if is_last and updated > at:
            found.append((UPDATE, at, updated))
            at = updated
        if first > at:
            found.append((kind, at, first))
        if not is_last:
            found.append((BACKWARD, first, last))
        at = last
    return tuple((kind, (first - start) / 1e9, (last - start) / 1e9) for kind, first, last in found)
