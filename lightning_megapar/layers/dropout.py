"""Dropout whose mask does not depend on how the sequence is cut."""

from __future__ import annotations

import torch
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
        if not self.training or self.p == 0.0:
            return x
        # F.dropout draws by other kernels for a tensor that requires a gradient than for one that does not.
        ranks = self.sequence_ranks
        *lead, length, width = x.shape
        size = length if ranks is None else length * ranks.size
        drawn = x.new_empty((*lead, size, width)).bernoulli_(1.0 - self.p)
        # One byte an element is kept, and of this rank's part alone; a product with the drawn values would keep them.
        keep = (drawn if ranks is None else drawn.narrow(-2, ranks.rank * length, length)).bool()
        scale = x.new_ones(()).div_(1.0 - self.p)  # rounded as an activation is
        return torch.where(keep, x * scale, 0.0)

    def extra_repr(self) -> str:
        return f"p={self.p}"
