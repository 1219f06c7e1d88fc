"""Microbatches that another replica works on: whole pieces of a batch, with their place in it.

Every data rank loads its own batch. When one is slow, some of its microbatches are sent to others before the step, and
count there for what they are: losses are weighted by samples (or tokens) over all ranks, so that the gradient stays the
one of the whole global batch. Random numbers go by where a piece comes from.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_megapar.mesh import ParallelMesh, all_gather_single

Origin = tuple[int, int]
"""(data rank, number in its batch)."""


@dataclass(frozen=True)
class Transfer:
    """A microbatch that changes its data rank.

    Args:
        source: data rank whose batch it is of.
        microbatch: number in that batch.
        target: data rank that works on it.
    """

    source: int
    microbatch: int
    target: int


def transfers(shares: Sequence[int], per_rank: int) -> list[Transfer]:
    """Who gives what to whom: the last microbatches of each rank that has too many, in order.

    Args:
        shares: microbatches that each data rank is to work on; their sum is ``per_rank x len(shares)``.
        per_rank: microbatches of each rank's batch.
    """
    given = [(data, number) for data, share in enumerate(shares) for number in range(share, per_rank)]
    wanted = [data for data, share in enumerate(shares) for _ in range(per_rank, share)]
    if len(given) != len(wanted):
        raise ValueError(f"shares {tuple(shares)} do not add up to {len(shares)} x {per_rank}")
    return [Transfer(source, number, target) for (source, number), target in zip(given, wanted)]


class ReplicaSharing:
    """Spreads a step's microbatches over the data ranks.

    Args:
        mesh: the ranks.
        device: where batches live.
        per_rank: microbatches of a whole batch.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device, per_rank: int) -> None:
        self._device = device
        self._group = mesh.group("data")
        self._data_rank = mesh.coordinate("data")
        self._size = mesh.size("data")
        self.per_rank = per_rank
        self.shares: tuple[int, ...] = (per_rank,) * self._size
        """Microbatches that each data rank works on, of a whole batch."""

    @property
    def is_even(self) -> bool:
        return len(set(self.shares)) == 1

    def spread(self, pieces: list[tuple[Any, int]]) -> tuple[list[tuple[Any, int]], list[Origin]]:
        """This rank's work in place of its batch; collective over the data ranks unless the shares are even.

        A batch that is not whole on every rank (the last one of an epoch) stays where it is.

        Args:
            pieces: ``(piece, samples)`` of this rank's batch.

        Returns:
            ``(piece, samples)`` to work on, and where each comes from.
        """
        own = [(self._data_rank, number) for number in range(len(pieces))]
        if self.is_even or self._group is None:
            return pieces, own
        counts = torch.zeros(self._size, dtype=torch.int64, device=self._device)
        mine = torch.tensor([len(pieces)], dtype=torch.int64, device=self._device)
        all_gather_single(counts, mine, group=self._group)
        if set(counts.tolist()) != {self.per_rank}:
            return pieces, own
        kept = min(self.shares[self._data_rank], self.per_rank)
        work, origins = pieces[:kept], own[:kept]
        sends: list[tuple[Any, Tensor]] = []
        for one in transfers(self.shares, self.per_rank):
            if one.source == self._data_rank:
                for tensor in _written(pieces[one.microbatch], self._device):
                    sends.append((dist.isend(tensor, self._peer(one.target), group=self._group), tensor))
            elif one.target == self._data_rank:
                work.append(_read(self._peer(one.source), self._group, self._device))
                origins.append((one.source, one.microbatch))
        for sent, _ in sends:
            sent.wait()
        return work, origins

    def collect(self, outputs: list[Any], origins: Sequence[Origin]) -> list[Any]:
        """What the microbatches of this rank's own batch returned, wherever they ran; collective over the data ranks.

        Args:
            outputs: of the microbatches that ran here.
            origins: of the same.
        """
        if self.is_even or self._group is None:
            return outputs
        elsewhere = {origin: out for origin, out in zip(origins, outputs) if origin[0] != self._data_rank}
        everyone: list[Any] = [None] * self._size
        host = tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, elsewhere)
        dist.all_gather_object(everyone, host, group=self._group)
        found = {number: out for (data, number), out in zip(origins, outputs) if data == self._data_rank}
        for other in everyone:
            for (data, number), out in other.items():
                if data == self._data_rank:
                    found[number] = tree_map(lambda x: x.to(self._device) if isinstance(x, Tensor) else x, out)
        return [found[number] for number in sorted(found)]

    def _peer(self, data_rank: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, data_rank)


def _written(piece: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Length and bytes of a piece. Tensors are copied: a view would bring the whole batch along."""
    buffer = io.BytesIO()
    torch.save(tree_map(lambda x: x.detach().cpu().clone() if isinstance(x, Tensor) else x, piece), buffer)
    data = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8).to(device)
    return torch.tensor([data.numel()], dtype=torch.int64, device=device), data


def _read(peer: int, group: Any, device: torch.device) -> Any:
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, peer, group=group)
    data = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.recv(data, peer, group=group)
    # Bytes of a peer of this very job, over the job's own group.
    piece = torch.load(io.BytesIO(data.cpu().numpy().tobytes()), weights_only=False)
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, piece)
