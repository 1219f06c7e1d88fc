"""Traces of allocations: who was alive when, recorded from a step or read from a file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import profile

from lightning_megapar.config import ConfigError

_FORMAT = "lightning_megapar memory trace 1"


@dataclass(frozen=True)
class Lifetime:
    """A buffer.

    Args:
        size: bytes, at least 1.
        start: number of the event that allocated it.
        end: number of the event that freed it, exclusive; the trace's length if nothing did.
    """

    size: int
    start: int
    end: int


@dataclass(frozen=True)
class Event:
    """One allocation or release.

    Args:
        buffer: number of the buffer, in the order of allocations.
        size: bytes; negative for a release.
    """

    buffer: int
    size: int


class Trace:
    """Allocations and releases in the order in which they happened.

    Args:
        events: of class :class:`Event`; every buffer is allocated once, and released at most once, with its size.

    Raises:
        ConfigError: events that no run could have.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = tuple(events)
        sizes: dict[int, int] = {}
        spans: dict[int, list[int]] = {}
        live = most = 0
        for number, event in enumerate(self.events):
            if event.size > 0:
                if event.buffer in sizes:
                    raise ConfigError(f"trace event {number}: buffer {event.buffer} is allocated twice")
                sizes[event.buffer] = event.size
                spans[event.buffer] = [number, len(self.events)]
            elif event.size == 0 or sizes.get(event.buffer) != -event.size or spans[event.buffer][1] < len(self.events):
                raise ConfigError(
                    f"trace event {number}: {-event.size} bytes of buffer {event.buffer} released, which has "
                    f"{sizes.get(event.buffer, 0)} and is {'released already' if event.buffer in sizes else 'unknown'}"
                )
            else:
                spans[event.buffer][1] = number
            live += event.size
            most = max(most, live)
        self.lifetimes: tuple[Lifetime, ...] = tuple(Lifetime(sizes[b], *spans[b]) for b in sizes)
        """In the order of allocations."""
        self.max_live_bytes: int = most
        """Most bytes that are alive at once: no arena can be smaller."""

    def __len__(self) -> int:
        return len(self.events)

    def aligned(self, alignment: int) -> Trace:
        """The same with sizes rounded up to multiples."""

        def rounded(size: int) -> int:
            whole = -(-abs(size) // alignment) * alignment
            return whole if size > 0 else -whole

        return Trace(Event(event.buffer, rounded(event.size)) for event in self.events)

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        pairs = [[event.buffer, event.size] for event in self.events]
        Path(path).write_text(json.dumps({"format": _FORMAT, "events": pairs}, separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what :meth:`save` wrote.

        Raises:
            ConfigError: another kind of file.
        """
        try:
            read = json.loads(Path(path).read_text())
            if read["format"] != _FORMAT:
                raise KeyError(read["format"])
            events = [Event(int(buffer), int(size)) for buffer, size in read["events"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no memory trace (format {_FORMAT!r}): {error!r}") from error
        return cls(events)

    @classmethod
    def of_profile(cls, recorded: profile, device: torch.device | None = None) -> Trace:
        """What a profiler with ``profile_memory=True`` has seen on a device (by default the CPU).

        Releases of what was allocated before are left out: it is not known when.

        Args:
            recorded: stopped.
            device: whose events.

        Raises:
            ConfigError: a profiler that is not stopped, or has recorded no memory.
        """
        wanted = (device or torch.device("cpu")).type
        alive: dict[int, tuple[int, int]] = {}
        events: list[Event] = []
        count = 0
        for change in allocations(recorded, wanted):
            assert change is not None
            pointer, size = change
            if size > 0:
                alive[pointer] = count, size
                events.append(Event(count, size))
                count += 1
            elif pointer in alive:
                buffer, held = alive.pop(pointer)
                events.append(Event(buffer, -held))
        return cls(events)


def allocations(recorded: profile, kind: str, mark: str = "") -> list[tuple[int, int] | None]:
    """(address, bytes) of a profile's allocations and, negative, releases on a kind of device, in their order.

    Args:
        recorded: stopped.
        kind: of device, such as ``"cpu"``.
        mark: name of ``record_function`` ranges, each of which gives a ``None``.

    Raises:
        ConfigError: see :meth:`Trace.of_profile`.
    """
    results: Any = getattr(recorded.profiler, "kineto_results", None)
    if results is None or not recorded.profile_memory:
        raise ConfigError(
            "Trace.of_profile: the profiler has no memory events; run it with profile_memory=True, and stop it first"
        )
    found: list[tuple[int, tuple[int, int] | None]] = []
    waiting = list(results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == kind:
            found.append((event.start_time_ns, (event.extra_fields.ptr, event.extra_fields.alloc_size)))
        elif mark and event.name == mark:
            found.append((event.start_time_ns, None))
    return [change for _, change in sorted(found, key=lambda one: one[0])]
