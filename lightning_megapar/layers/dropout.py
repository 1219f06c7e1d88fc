"""Dropout whose mask does not depend on how the sequence is cut."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lightning_megapar.layers.base import ParallelLayer


class SequenceDropout(ParallelLayer):
    """``nn.Dropout`` on (..., s, hidden), or on this rank's (..., s / ranks, hidden) under sequence parallelism.

    A rank that holds a slice draws the mask of the whole sequence and uses its part. With one seed on all tensor ranks
    the result is that of one device; without it, two ranks would drop the same places of different tokens.

    Args:
        p: probability of dropping an element.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        ranks = self.sequence_ranks
        if not self.training or self.p == 0.0:
            return x
        if ranks is None:
            return F.dropout(x, self.p)
        *lead, length, width = x.shape
        mask = F.dropout(x.new_ones((*lead, length * ranks.size, width)), self.p)
        return x * mask.narrow(-2, ranks.rank * length, length)

    def extra_repr(self) -> str:
        return f"p={self.p}"
