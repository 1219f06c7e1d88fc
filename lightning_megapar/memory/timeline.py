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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_megapar.config import ConfigError
from lightning_megapar.memory.meter import quiet_profiler
from lightning_megapar.memory.saved import plain_tensors
from lightning_megapar.memory.trace import COMMUNICATION

PARAMETERS, OPTIMIZER, GRADIENTS = "parameters", "optimizer", "gradients"
ACTIVATIONS, MESSAGES, TEMPORARY = "activations", "communication", "temporary"
CATEGORIES = (PARAMETERS, OPTIMIZER, GRADIENTS, ACTIVATIONS, MESSAGES, TEMPORARY)
"""In the order in which they are stacked."""
OUTSIDE = ""
"""The layer of what is in no block."""
FORWARD, BACKWARD, UPDATE = "forward", "backward", "optimizer step"

_MARK = "lightning_megapar memory: "
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


def storages(tensors: Iterable[Tensor], device: torch.device) -> dict[int, int]:
    """Address -> bytes of the memory behind tensors on a device; of a DTensor its local part. Shared memory is there
    once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        for part in plain_tensors(tensor):
            storage = part.untyped_storage()
            if part.device.type == device.type and storage.nbytes() and storage.data_ptr():
                found[storage.data_ptr()] = storage.nbytes()
    return found


class StepRecorder:
    """Records one step of a rank, from :meth:`start` to :meth:`stop`.

    Args:
        device: whose memory.
        blocks: name -> block, for activations by layer. Compiled ones are left alone, and count as outside.
        known: tensors that are there, by category.
        leaves: tensors whose gradients are noted as they arrive.
        shown: parameters that may show another memory within a step than between two (``bf16-true``).

    Raises:
        ConfigError: on :meth:`start`, when another profiler is running.
    """

    def __init__(
        self,
        device: torch.device,
        blocks: Mapping[str, nn.Module],
        known: Mapping[str, Sequence[Tensor]],
        leaves: Iterable[Tensor] = (),
        shown: Iterable[Tensor] = (),
    ) -> None:
        self._device = device
        self._blocks, self._leaves, self._shown = blocks, tuple(leaves), tuple(shown)
        self._first = next(iter(blocks), "")
        self._held = {
            pointer: (size, category)
            for category, tensors in known.items()
            for pointer, size in storages(tensors, device).items()
        }
        # The profiler does not see the end of what was there before it.
        self._going = {
            part.untyped_storage().data_ptr(): StorageWeakRef(part.untyped_storage())
            for tensor in known.get(GRADIENTS, ())
            for part in plain_tensors(tensor)
        }
        self._handles: list[Any] = []
        self._profile: profile | None = None
        self._quiet = ExitStack()

    def start(self) -> None:
        """Begin."""
        if torch.autograd._profiler_enabled():
            raise ConfigError(
                "memory is recorded with torch's profiler, and another one is running (Trainer(profiler=...), "
                "torch.profiler.profile); let it end before, or leave one of the two out"
            )
        for name, block in self._blocks.items():
            if block._compiled_call_impl is None:
                self._handles.append(block.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
                self._handles.append(block.register_forward_hook(self._leave, always_call=True))
        for leaf in self._leaves:
            if leaf.requires_grad and leaf.is_leaf:
                self._handles.append(leaf.register_post_accumulate_grad_hook(self._arrived))
        # It warns within the step as well.
        self._quiet.enter_context(quiet_profiler())
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()

    def note(self, category: str, tensors: Iterable[Tensor]) -> None:
        """These tensors, which are there now, are of a category."""
        self._mark("known", category, storages(tensors, self._device))

    def stop(self) -> Timeline:
        """End, and say what was held."""
        recorded = self.abandon()
        assert recorded is not None
        return timeline_of(recorded, self._held, self._device.type)

    def abandon(self) -> profile | None:
        """End without a word."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        recorded, self._profile = self._profile, None
        if recorded is not None:
            recorded.stop()
        self._quiet.close()
        return recorded

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if name == self._first:
            self.note(PARAMETERS, self._shown)
        self._mark("enter", name, self._with_gradients((*args, *kwargs.values())))

    def _leave(self, _: nn.Module, args: Any, output: Any) -> None:
        self._mark("leave", "", self._with_gradients(output if isinstance(output, list | tuple) else (output,)))

    def _with_gradients(self, values: Iterable[Any]) -> dict[int, int]:
        tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
        return storages(tensors, self._device)

    def _arrived(self, leaf: Tensor) -> None:
        if leaf.grad is not None:
            self.note(GRADIENTS, [leaf.grad])

    def _mark(self, kind: str, name: str = "", pointers: Iterable[int] = ()) -> None:
        gone = [pointer for pointer, storage in self._going.items() if storage.expired()]
        if gone:
            for pointer in gone:
                del self._going[pointer]
            self._mark("gone", "", gone)
        with record_function(f"{_MARK}{kind}\t{name}\t{' '.join(map(str, pointers))}"):
            pass


@contextmanager
def recorded_step(
    device: torch.device,
    blocks: Mapping[str, nn.Module],
    known: Mapping[str, Sequence[Tensor]],
    leaves: Iterable[Tensor] = (),
) -> Iterator[list[Timeline]]:
    """Record what the body does; the list has the timeline behind it. Arguments as for :class:`StepRecorder`."""
    recorder, found = StepRecorder(device, blocks, known, leaves), list[Timeline]()
    del known  # or gradients would live on
    recorder.start()
    try:
        yield found
        found.append(recorder.stop())
    finally:
        recorder.abandon()


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
        """Of buffers that were there before, some are not any more."""
        for pointer in map(int, what.split("\t")[2].split()):
            if pointer in self.alive and self.alive[pointer].born < 0:
                self.free(pointer)


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
    for nanoseconds, what, label, in_backward in _events(recorded, kind):
        if isinstance(what, tuple):
            pointer, size = what
            times.append(nanoseconds)
            if size > 0:
                reading.allocate(pointer, size, label, in_backward)
            else:
                reading.free(pointer)
            reading.moment += 1
        elif what.startswith(_MARK + "gone"):
            times.append(nanoseconds)
            reading.gone(what)
            reading.moment += 1
        elif what.startswith(_MARK):
            reading.marked(what.removeprefix(_MARK))
        else:
            kind_of_span, _, end = what.rpartition(" ")
            reading.backwards += kind_of_span == BACKWARD
            spans.append((nanoseconds, int(end), kind_of_span))
    for buffer in reading.alive.values():
        reading.settle(buffer)
    return _summed(reading.buffers, times, spans)


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
        if name.startswith(_MARK):
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


def _summed(buffers: Sequence[_Buffer], times: Sequence[int], spans: Sequence[tuple[int, int, str]]) -> Timeline:
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
        _phases(spans, start, end),
        dict(zip(CATEGORIES, peak)),
        dict(zip(CATEGORIES, most)),
        at_peak,
        (end - start) / 1e9,
    )


def _phases(spans: Sequence[tuple[int, int, str]], start: int, end: int) -> tuple[tuple[str, float, float], ...]:
    """What is neither a backward nor an optimizer's step counts as forward; marks of backwards follow closely."""
    joined: list[tuple[int, int, str]] = []
    gap = (end - start) / 300
    for first, last, kind in spans:
        if joined and joined[-1][2] == kind and first - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]), kind)
        else:
            joined.append((first, last, kind))
    found, at = [], start
    for first, last, kind in joined:
        if first > at:
            found.append((FORWARD, (at - start) / 1e9, (first - start) / 1e9))
        found.append((kind, (first - start) / 1e9, (last - start) / 1e9))
        at = last
    if at < end:
        found.append((FORWARD, (at - start) / 1e9, (end - start) / 1e9))
    return tuple(found)
