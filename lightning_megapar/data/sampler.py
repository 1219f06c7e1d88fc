"""A sampler whose global order is the same on every layout and which resumes by seeking."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from lightning_megapar.config import ConfigError

_CHUNK = 1 << 14
"""Indices turned into Python integers at a time: an epoch of 1e7 samples as one list would take 360 MB."""


class ResumableSampler(Sampler[int]):
    """This data rank's sample indices, in batches that all layouts share.

    The global order of an epoch depends on ``(seed, epoch, num_samples)`` alone: a permutation, or ``0 .. n-1``
    without shuffling. It is cut into global batches of ``batch_size * data_size`` consecutive samples, and data rank
    ``r`` takes the ``r``-th contiguous slice of ``batch_size`` of each. The union over the ranks of the ``k``-th
    global batch is therefore the same for every ``data_size`` with the same product.

    The ragged rest at the end of an epoch (fewer samples than a global batch):

    * ``drop_last=True``: dropped on every rank.
    * ``drop_last=False, pad=False``: cut into equal slices of ``rest // data_size``; the last ``rest % data_size``
      samples of the order are dropped (never repeated, so that no sample trains twice in an epoch).
    * ``drop_last=False, pad=True``: samples from the start of the order are repeated until the slices are equal;
      :attr:`padded_samples` says how many. Meant for evaluation.

    Args:
        num_samples: length of the dataset.
        batch_size: samples per batch of ONE data rank.
        data_rank, data_size: this rank's place among the data-parallel ranks.
        shuffle: permute each epoch.
        seed: of the permutation.
        drop_last: drop the ragged rest.
        consumed: samples of the CURRENT epoch, over all ranks, that are already used. They are skipped at the next
            ``__iter__`` only; later epochs start at 0. Any count is allowed, on any ``data_size`` and ``batch_size``:
            the global batches are then cut from there on.
        pad: see above.

    Raises:
        ConfigError: when a value is out of its range.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        data_rank: int = 0,
        data_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        consumed: int = 0,
        pad: bool = False,
    ) -> None:
        for name, value, least in (
            ("num_samples", num_samples, 0),
            ("batch_size", batch_size, 1),
            ("data_size", data_size, 1),
        ):
            if value < least:
                raise ConfigError(f"{name}={value}: expected an integer >= {least}")
        if not 0 <= data_rank < data_size:
            raise ConfigError(f"data_rank={data_rank}: expected 0 <= data_rank < data_size={data_size}")
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.data_rank = data_rank
        self.data_size = data_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.pad = pad
        self.epoch = 0
        self._resume: tuple[int, int] | None = None
        self._offset = 0
        self.consumed = consumed

    @property
    def consumed(self) -> int:
        """Global samples of the current epoch that the next ``__iter__`` skips."""
        return self._consumed

    @consumed.setter
    def consumed(self, value: int) -> None:
        if not 0 <= value <= self.num_samples:
            raise ConfigError(f"consumed={value}: expected 0 <= consumed <= num_samples={self.num_samples}")
        self._consumed = value

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next ``__iter__`` gives; ``consumed`` stays.

        After :meth:`resume` the loop's own numbers are shifted so that they go on from the resumed epoch.
        """
        self.epoch = epoch + self._offset

    def resume(self, consumed: int, epoch: int) -> None:
        """Continue an interrupted run: ``consumed`` global samples of ``epoch`` are used.

        Until :meth:`started` is called every ``__iter__`` goes on right there, or with the following epoch when nothing
        is left for a full batch, whatever number the loop announces: Lightning counts an epoch that ``max_steps`` cut
        short as finished, announces the finished one again after an end-of-epoch checkpoint, and may throw away its
        first iterator.
        """
        least = self.global_batch_size if self.drop_last else 1 if self.pad else self.data_size
        if self.num_samples - consumed < least:
            epoch, consumed = epoch + 1, 0
        self._resume = (epoch, consumed)

    def started(self) -> None:
        """The first batch after :meth:`resume` has been trained: from now on the loop's epochs count."""
        self._resume = None

    @property
    def global_batch_size(self) -> int:
        """Samples that one batch of every data rank takes together."""
        return self.batch_size * self.data_size

    @property
    def padded_samples(self) -> int:
        """Samples that a full epoch repeats, over all ranks, to give the ranks equal counts (0 unless ``pad``)."""
        rest = self.num_samples % self.global_batch_size
        return -rest % self.data_size if self.pad and not self.drop_last else 0

    @property
    def dropped_samples(self) -> int:
        """Samples that a full epoch leaves out, over all ranks."""
        rest = self.num_samples % self.global_batch_size
        if self.drop_last:
            return rest
        return 0 if self.pad else rest % self.data_size

    def __len__(self) -> int:
        """This rank's samples in a FULL epoch, whatever was consumed."""
        return (self.num_samples - self.dropped_samples + self.padded_samples) // self.data_size

    def batches_after(self, consumed: int) -> int:
        """Batches of this rank that are left of an epoch of which ``consumed`` samples, over all ranks, are used."""
        full, rest = divmod(self.num_samples - consumed, self.global_batch_size)
        some = rest > 0 if self.pad else rest >= self.data_size
        return full + int(some and not self.drop_last)

    def order(self, epoch: int | None = None) -> Tensor:
        """The global order of an epoch: int64, shape ``(num_samples,)``."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(epoch_seed(self.seed, self.epoch if epoch is None else epoch))
        return torch.randperm(self.num_samples, generator=generator)

    def indices(self, consumed: int) -> Tensor:
        """This rank's indices of the current epoch after ``consumed`` global samples: int64, one-dimensional."""
        order = self.order()
        left = order[consumed:]
        full = left.numel() // self.global_batch_size * self.global_batch_size
        mine = left[:full].view(-1, self.data_size, self.batch_size)[:, self.data_rank].reshape(-1)
        rest = left[full:]
        if self.drop_last or rest.numel() == 0:
            return mine
        missing = -rest.numel() % self.data_size
        if self.pad and missing:
            # The order may be shorter than what is missing (one sample on four ranks), hence the repetition.
            source = order.repeat(-(-missing // order.numel()))
            rest = torch.cat([rest, source[:missing]])
        share = rest.numel() // self.data_size
        return torch.cat([mine, rest[self.data_rank * share : (self.data_rank + 1) * share]])

    def __iter__(self) -> Iterator[int]:
        # Not a generator function: `consumed` must be used up by the call, not by the first `next`.
        consumed = self._consumed
        if self._resume is not None:
            epoch, consumed = self._resume
            self._offset += epoch - self.epoch
            self.epoch = epoch
        self._consumed = 0
        return _integers(self.indices(consumed))


def epoch_seed(seed: int, epoch: int) -> int:
    """A 63-bit seed from ``(seed, epoch)``; neighbouring pairs share nothing, unlike ``seed + epoch``."""
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _integers(indices: Tensor) -> Iterator[int]:
    for start in range(0, indices.numel(), _CHUNK):
        yield from indices[start : start + _CHUNK].tolist()
