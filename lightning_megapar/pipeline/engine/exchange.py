"""What travels between virtual stages: boundaries (any nest of tensors, of any shape) forward, their gradients back.

A message is one flat buffer of bytes. That of a boundary starts with a header, which says how its tensors lie in it,
and a description of the nest when it is not the previous one. A receiver posts its next receive before it needs it, so
that the transport runs while it computes; for that it must know a size. Both ends therefore count the sizes of the
last messages and take the largest as the next one's: exact while shapes stay, a few bytes too many after a larger one,
and what does not fit follows in a second message, which is posted when the first has said so.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megapar.marks import communicating
from lightning_megapar.memory.arena import Arena
from lightning_megapar.pipeline.nest import flatten, map_leaves, unflatten

ALIGNMENT = 16
"""Bytes: every tensor of a message starts at a multiple, as views in other dtypes need."""
_HEADER = 24  # three int64: bytes in all, bytes of the description (0: the previous one), microbatch
_FIRST_CAPACITY = 4096
_REMEMBERED = 16

TensorShape = tuple[tuple[int, ...], torch.dtype, bool]
"""Size, dtype, and whether it requires a gradient."""


@dataclass(frozen=True)
class _Slot:
    """Place of tensor ``index`` in a described nest."""

    index: int


@dataclass(frozen=True)
class Link:
    """One direction to or from one neighbour.

    Args:
        peer: global rank of the neighbour.
        group: process group of this direction; no other link between the two ranks uses it.
        device: where tensors live (CPU for gloo, the rank's GPU for NCCL).
        arena: of the device; messages are made in it.
    """

    peer: int
    group: dist.ProcessGroup
    device: torch.device
    arena: Arena | None = None

    def buffer(self, size: int) -> Tensor:
        """Memory for a message, (size) bytes."""
        if self.arena is not None:
            return self.arena.empty((size,), torch.uint8)
        with communicating():
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def warm_up(self, send: bool) -> None:
        """Open the connection now, in an order that every rank agrees on, instead of inside the first step."""
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        if send:
            dist.send(token, self.peer, group=self.group)
        else:
            dist.recv(token, self.peer, group=self.group)


class _Sender:
    """Sends that are under way; a buffer lives until its send has finished."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._pending: list[tuple[Any, Tensor]] = []

    def _start(self, buffer: Tensor) -> None:
        self._pending.append((dist.isend(buffer, self.link.peer, group=self.link.group), buffer))

    def collect(self) -> None:
        """Let go of what has been sent."""
        if self._pending:
            self._pending = [(work, kept) for work, kept in self._pending if not work.is_completed()]

    def drain(self) -> None:
        """Wait for every started send."""
        for work, _ in self._pending:
            work.wait()
        self._pending = []


class _Capacity:
    """The size of the next message, from the sizes so far; both ends count alike."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque([_FIRST_CAPACITY], maxlen=_REMEMBERED)

    @property
    def bytes(self) -> int:
        return max(self._sizes)

    def note(self, size: int) -> None:
        self._sizes.append(size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=1024)  # lengths may change from step to step
def _layout(shapes: tuple[TensorShape, ...], start: int) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], int]:
    """Where tensors of these shapes lie in a message.

    Args:
        shapes: in order.
        start: bytes before them.

    Returns:
        for each its offset in elements of its dtype and its strides, and the bytes of the message.
    """
    places, end = [], _aligned(start)
    for size, dtype, _ in shapes:
        strides = [1] * len(size)
        for dim in range(len(size) - 1, 0, -1):
            strides[dim - 1] = strides[dim] * max(1, size[dim])
        places.append((end // dtype.itemsize, tuple(strides)))
        end += _aligned(math.prod(size) * dtype.itemsize)
    return tuple(places), end


def _read(buffer: Tensor, shapes: tuple[TensorShape, ...], start: int) -> list[Tensor]:
    # No views of one another: what the step writes into one of them must not look like a change of the others.
    memory = buffer.untyped_storage()
    return [
        torch.empty(0, dtype=dtype, device=buffer.device).set_(memory, offset, size, strides)
        for (size, dtype, _), (offset, strides) in zip(shapes, _layout(shapes, start)[0])
    ]


def _write(buffer: Tensor, tensors: Sequence[Tensor], shapes: tuple[TensorShape, ...], start: int) -> None:
    for place, tensor in zip(_read(buffer, shapes, start), tensors):
        place.copy_(tensor.detach())


def _shape_of(tensor: Tensor) -> TensorShape:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _shapes_of(tensors: Sequence[Tensor]) -> tuple[TensorShape, ...]:
    return tuple([_shape_of(tensor) for tensor in tensors])


class BoundarySender(_Sender):
    """Sends boundaries to the next virtual stage."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._capacity = _Capacity()
        self._description = b""
        self._known: Any = None

    def _described(self, leaves: list[Any], spec: Any, tensors: list[Tensor], shapes: tuple[TensorShape, ...]) -> bytes:
        """The description of a nest; nothing when the receiver has it from the last message."""
        # A nest of tensors alone is told from the last one without being written down: a stage waits meanwhile.
        known = (spec, shapes) if len(tensors) == len(leaves) else None
        if known is not None and known == self._known:
            return b""
        self._known = known
        slots = iter(range(len(tensors)))
        plain = unflatten([_Slot(next(slots)) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        last, self._description = self._description, pickle.dumps((plain, shapes))
        return b"" if self._description == last else self._description

    def send(self, nest: Any, microbatch: int) -> list[Tensor]:
        """Start sending a nest; returns its tensors in the order in which gradients will come back."""
        leaves, spec = flatten(nest)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        shapes = _shapes_of(tensors)
        said = self._described(leaves, spec, tensors, shapes)
        start = _HEADER + len(said)
        needed, capacity = _layout(shapes, start)[1], self._capacity.bytes
        buffer = self.link.buffer(max(needed, capacity))
        buffer[:_HEADER].view(torch.int64).copy_(torch.tensor([needed, len(said), microbatch]))
        if said:
            buffer[_HEADER:start].copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
        _write(buffer, tensors, shapes, start)
        self._start(buffer[:capacity])
        if needed > capacity:
            self._start(buffer[capacity:needed])
        self._capacity.note(needed)
        return tensors


class BoundaryReceiver:
    """Receives boundaries from the previous virtual stage."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._capacity = _Capacity()
        self._leaves: list[Any] = []
        self._spec: Any = None
        self._shapes: tuple[TensorShape, ...] = ()
        self._posted: tuple[Any, Tensor] | None = None
        self._early: dict[int, tuple[Any, list[Tensor]]] = {}

    def post(self) -> None:
        """Start receiving the next message, unless that has been done."""
        if self._posted is None:
            buffer = self.link.buffer(self._capacity.bytes)
            self._posted = dist.irecv(buffer, self.link.peer, group=self.link.group), buffer

    def take(self, microbatch: int) -> tuple[Any, list[Tensor]]:
        """The boundary of a microbatch; messages of others that come before it are kept.

        Returns:
            the nest with fresh leaf tensors, and those that require a gradient, in order.
        """
        while microbatch not in self._early:
            arrived, nest = self._next()
            self._early[arrived] = nest
        return self._early.pop(microbatch)

    def _next(self) -> tuple[int, tuple[Any, list[Tensor]]]:
        self.post()
        assert self._posted is not None
        work, buffer = self._posted
        work.wait()
        self._posted = None
        head = buffer[:_HEADER].cpu().view(torch.int64)
        needed, described, microbatch = head.tolist()
        if needed > len(buffer):
            whole = self.link.buffer(needed)
            dist.recv(whole[len(buffer) :], self.link.peer, group=self.link.group)
            whole[: len(buffer)].copy_(buffer)
            buffer = whole
        self._capacity.note(needed)
        if described:
            # Bytes of a peer of this very job, over the job's own group.
            text = buffer[_HEADER : _HEADER + described].cpu().numpy().tobytes()
            plain, self._shapes = pickle.loads(text)
            self._leaves, self._spec = flatten(plain)
        tensors = _read(buffer, self._shapes, _HEADER + described)
        grad = torch.is_grad_enabled()
        leaves = [t.requires_grad_(required and grad) for t, (_, _, required) in zip(tensors, self._shapes)]
        nest = unflatten([leaves[x.index] if isinstance(x, _Slot) else x for x in self._leaves], self._spec)
        return microbatch, (nest, [t for t in leaves if t.requires_grad])


def gradients_of(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of what was received; zeros where nothing depends on a tensor."""
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


class GradientSender(_Sender):
    """Sends the gradients of a boundary to the virtual stage that it came from."""

    def send(self, leaves: Sequence[Tensor], microbatch: int) -> None:
        """Start sending the gradients of what was received; nothing is sent for nothing."""
        if not leaves:
            return
        gradients = gradients_of(leaves)
        shapes = _shapes_of(gradients)
        size = _layout(shapes, 0)[1]
        only = gradients[0].detach()
        if len(gradients) == 1 and only.nbytes == size and only.is_contiguous() and not only.is_neg() | only.is_conj():
            self._start(only.view(-1).view(torch.uint8))  # it lies as the message does, and nobody else writes to it
            return
        buffer = self.link.buffer(size)
        _write(buffer, gradients, shapes, 0)
        self._start(buffer)


class GradientReceiver:
    """Receives the gradients of boundaries that were sent; their order is the sender's."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._posted: tuple[Any, Tensor] | None = None
        self._order: deque[int] = deque()
        self._early: dict[int, list[Tensor]] = {}

    def begin(self, order: Sequence[int]) -> None:
        """A step starts.

        Args:
            order: microbatches, as the next virtual stage goes backward.
        """
        self._order = deque(order)

    def post(self, sent: dict[int, list[Tensor]]) -> None:
        """Start receiving the next message, where its sizes are known already and that has not been done.

        Args:
            sent: for microbatches that have gone forward, the tensors that wait for gradients.
        """
        if self._posted is None and self._order and (tensors := sent.get(self._order[0])):
            size = _layout(_shapes_of(tensors), 0)[1]
            buffer = self.link.buffer(size)
            self._posted = dist.irecv(buffer, self.link.peer, group=self.link.group), buffer

    def take(self, microbatch: int, sent: dict[int, list[Tensor]]) -> list[Tensor]:
        """The gradients of a microbatch's boundary; messages of others that come before it are kept."""
        while microbatch not in self._early:
            self.post(sent)
            arriving = self._order.popleft()
            tensors = sent[arriving]
            if not tensors:  # nothing that could have a gradient: no message
                self._early[arriving] = []
                continue
            assert self._posted is not None
            work, buffer = self._posted
            work.wait()
            self._posted = None
            self._early[arriving] = _read(buffer, _shapes_of(tensors), 0)
        return self._early.pop(microbatch)


class LocalBoundaries:
    """Stands for a :class:`BoundarySender` and a :class:`BoundaryReceiver` where both ends are one rank.

    Args:
        arena: where the copies are made that the next chunk gets.
    """

    def __init__(self, arena: Arena | None = None) -> None:
        self._arena = arena
        self._waiting: dict[int, tuple[Any, list[Tensor]]] = {}

    def send(self, nest: Any, microbatch: int) -> list[Tensor]:
        """As :meth:`BoundarySender.send`."""
        tensors: list[Tensor] = []
        fresh: list[Tensor] = []

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            tensors.append(value)
            # Memory of its own: the next stage may write into it while this one needs it for its backward.
            copied = value.detach().clone() if self._arena is None else self._arena.clone(value.detach())
            fresh.append(copied.requires_grad_(value.requires_grad))
            return fresh[-1]

        self._waiting[microbatch] = map_leaves(leaf, nest), [t for t in fresh if t.requires_grad]
        return tensors

    def take(self, microbatch: int) -> tuple[Any, list[Tensor]]:
        """As :meth:`BoundaryReceiver.take`."""
        return self._waiting.pop(microbatch)

    def post(self) -> None:
        """Nothing travels."""

    def collect(self) -> None:
        """Nothing travels."""

    def drain(self) -> None:
        """Nothing travels."""


class LocalGradients:
    """Stands for a :class:`GradientSender` and a :class:`GradientReceiver` where both ends are one rank."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Tensor]] = {}

    def send(self, leaves: Sequence[Tensor], microbatch: int) -> None:
        """As :meth:`GradientSender.send`."""
        self._waiting[microbatch] = gradients_of(leaves)

    def take(self, microbatch: int, sent: dict[int, list[Tensor]]) -> list[Tensor]:
        """As :meth:`GradientReceiver.take`."""
        return self._waiting.pop(microbatch)

    def begin(self, order: Sequence[int]) -> None:
        """Nothing travels."""

    def post(self, sent: dict[int, list[Tensor]]) -> None:
        """Nothing travels."""

    def collect(self) -> None:
        """Nothing travels."""

    def drain(self) -> None:
        """Nothing travels."""
