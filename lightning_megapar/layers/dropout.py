"""Dropout whose mask does not depend on how the sequence is cut."""

from __future__ import annotations

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
        mask = x.new_empty((*lead, size, width)).bernoulli_(1.0 - self.p).div_(1.0 - self.p)
        return x * (mask if ranks is None else mask.narrow(-2, ranks.rank * length, length))

    def extra_repr(self) -> str:
        return f"p={self.p}"
