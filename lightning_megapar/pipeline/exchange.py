"""Boundary tensors between neighbouring stages: any nest of tensors, of a shape that may change every time.

A boundary travels as one small integer header and its tensors. The header says whether the structure is the previous
one (the common case: nothing more is sent) or how many bytes of description follow.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megapar.pipeline.nest import flatten, unflatten


@dataclass(frozen=True)
class _Slot:
    """Place of tensor ``index`` in a described nest."""

    index: int


@dataclass
class Channel:
    """One direction to or from one neighbour.

    Args:
        peer: global rank of the neighbour.
        group: process group of this direction.
        device: where tensors are received (CPU for gloo, the rank's GPU for NCCL).
    """

    peer: int
    group: dist.ProcessGroup
    device: torch.device
    _description: bytes = b""
    _nest: Any = None
    _shapes: list[tuple[tuple[int, ...], torch.dtype, bool]] = field(default_factory=list)
    _pending: list[tuple[Any, Tensor]] = field(default_factory=list)

    def warm_up(self, send: bool) -> None:
        """Open the connection now, in an order that every rank agrees on, instead of inside the first step."""
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        if send:
            dist.send(token, self.peer, group=self.group)
        else:
            dist.recv(token, self.peer, group=self.group)

    def send_tensor(self, tensor: Tensor) -> None:
        """Start sending; the tensor is kept alive until the send has finished."""
        self._pending = [(work, kept) for work, kept in self._pending if not work.is_completed()]
        tensor = tensor.detach().contiguous()
        self._pending.append((dist.isend(tensor, self.peer, group=self.group), tensor))

    def receive_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Receive one tensor into fresh memory (freed by its last user, so only live microbatches cost memory)."""
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(buffer, self.peer, group=self.group)
        return buffer

    def send(self, nest: Any) -> list[Tensor]:
        """Send a nest; returns its tensors in the order in which gradients will come back."""
        leaves, spec = flatten(nest)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        slots = iter(range(len(tensors)))
        plain = unflatten([_Slot(next(slots)) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        shapes = [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
        description = pickle.dumps((plain, shapes))
        changed = description != self._description
        header = torch.tensor([len(description) if changed else 0], dtype=torch.int64, device=self.device)
        self.send_tensor(header)
        if changed:
            self._description = description
            self.send_tensor(torch.frombuffer(bytearray(description), dtype=torch.uint8).to(self.device))
        for tensor in tensors:
            self.send_tensor(tensor)
        return tensors

    def receive(self) -> tuple[Any, list[Tensor]]:
        """Receive a nest.

        Returns:
            the nest with fresh leaf tensors, and those that require a gradient, in order.
        """
        size = int(self.receive_tensor((1,), torch.int64))
        if size:
            blob = self.receive_tensor((size,), torch.uint8)
            # Bytes of a peer of this very job, over the job's own group.
            self._nest, self._shapes = pickle.loads(blob.cpu().numpy().tobytes())
        tensors = []
        for shape, dtype, requires_grad in self._shapes:
            tensors.append(self.receive_tensor(shape, dtype).requires_grad_(requires_grad and torch.is_grad_enabled()))
        leaves, spec = flatten(self._nest)
        nest = unflatten([tensors[leaf.index] if isinstance(leaf, _Slot) else leaf for leaf in leaves], spec)
        return nest, [t for t in tensors if t.requires_grad]

    def drain(self) -> None:
        """Wait for every started send."""
        for work, _ in self._pending:
            work.wait()
        self._pending = []
