"""The clocks of a pipeline's ranks brought together.

:func:`time.perf_counter` counts from an origin of the machine's own, so that times of ranks on several machines cannot
be compared. The first stage sends a message, another stage answers with what its clock shows: the answer was given
between the sending and the arrival, whatever the ways took. Each exchange bounds the difference of the two clocks from
both sides, and the bounds of several hold together (F. Cristian, Probabilistic clock synchronization, 1989).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_megapar.mesh import ParallelMesh

ROUNDS = 16
"""Exchanges with each stage: a few milliseconds over TCP on one machine."""


@dataclass(frozen=True)
class ClockOffset:
    """How far a clock is ahead.

    Args:
        seconds: to be subtracted from the other clock's times.
        error: seconds by which that can be wrong at most. It holds when it was measured; quartz clocks part by some
            tens of microseconds per second.
    """

    seconds: float
    error: float


SAME = ClockOffset(0.0, 0.0)


def offset_of(exchanges: Sequence[tuple[float, float, float]]) -> ClockOffset:
    """The offset that a few exchanges allow.

    Processes of one machine share its clock: an offset of exactly 0 is taken whenever it is allowed.

    Args:
        exchanges: ``(sent, answered, arrived)`` in seconds, ``answered`` by the other clock. At least one.
    """
    least = max(answered - arrived for _, answered, arrived in exchanges)
    most = min(answered - sent for sent, answered, _ in exchanges)
    least, most = min(least, most), max(least, most)  # clocks that drift can make the bounds miss each other
    offset = 0.0 if least <= 0.0 <= most else (least + most) / 2
    return ClockOffset(offset, max(most - offset, offset - least))


def clock_offsets(
    mesh: ParallelMesh, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> list[ClockOffset]:
    """How far each stage's clock is ahead of the first stage's; to be called by all stages of a pipeline at once.

    Args:
        mesh: the ranks; messages go through the group of its pipeline axis.
        device: of the messages (a GPU's for NCCL).
        clock: in seconds.

    Returns:
        one offset per stage, on the first stage; on the others an empty list.
    """
    group, own = mesh.group("pipeline"), mesh.coordinate("pipeline")
    message = torch.zeros(1, dtype=torch.float64, device=device)

    def send(stage: int, value: float) -> None:
        message.fill_(value)
        dist.send(message, mesh.stage_rank(stage), group=group)

    def receive(stage: int) -> float:
        dist.recv(message, mesh.stage_rank(stage), group=group)
        return float(message)  # waits for a GPU

    if own > 0:
        for _ in range(ROUNDS):
            receive(0)
            send(0, clock())
        return []
    offsets = [SAME]
    for stage in range(1, mesh.size("pipeline")):
        exchanges = []
        for _ in range(ROUNDS):
            sent = clock()
            send(stage, sent)
            answered = receive(stage)
            exchanges.append((sent, answered, clock()))
        offsets.append(offset_of(exchanges))
    return offsets
