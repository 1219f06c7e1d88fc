"""Token embedding and output head split along the vocabulary, and learned positions."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from lightning_megapar.config import ConfigError, nearest
from lightning_megapar.layers.base import ParallelLayer
from lightning_megapar.layers.collectives import (
    TensorRanks,
    check_sequence,
    gather_last,
    start_all_reduce,
    start_sequence_gather,
    start_sequence_scatter,
)
from lightning_megapar.layers.cross_entropy import check_ids, vocab_parallel_cross_entropy
from lightning_megapar.layers.deferral import Deferral, linear
from lightning_megapar.layers.linear import _ColumnLinear, autocast_dtype
from lightning_megapar.layers.local import like_parameter, local, local_value
from lightning_megapar.layers.products import PLAIN, Products


def padded_vocabulary(vocab_size: int, multiple: int) -> int:
    """Rows of the table: ``vocab_size`` rounded up to a multiple."""
    return -(-vocab_size // multiple) * multiple


class _VocabEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, ranks: TensorRanks) -> Tensor:
        table = local_value(weight)
        index = tokens - ranks.rank * table.shape[0]
        outside = (index < 0) | (index >= table.shape[0])
        index = index.masked_fill_(outside, 0)
        ctx.ranks = ranks
        ctx.save_for_backward(index, outside, weight)
        rows = F.embedding(index, table).masked_fill_(outside[..., None], 0.0)
        start = start_sequence_scatter if ranks.sequence_parallel else start_all_reduce
        return start(rows, ranks)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        index, outside, weight = ctx.saved_tensors
        if ctx.ranks.sequence_parallel:
            gradient = start_sequence_gather(gradient, ctx.ranks)()
        gradient = gradient.masked_fill(outside[..., None], 0.0)
        rows = torch.ops.aten.embedding_dense_backward(gradient, index, local_value(weight).shape[0], -1, False)
        return None, like_parameter(weight, rows), None


class _VocabTable(ParallelLayer):
    """A (padded vocabulary, hidden) table split by rows; the rows beyond ``vocab_size`` are zero."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        vocab_multiple: int,
        init_std: float,
        weight: nn.Parameter | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if vocab_size < 1 or vocab_multiple < 1:
            raise ConfigError(f"vocab_size={vocab_size} and vocab_multiple={vocab_multiple} must be at least 1")
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.vocab_multiple, self.init_std = vocab_multiple, init_std
        shape = (padded_vocabulary(vocab_size, vocab_multiple), hidden_size)
        if weight is not None and tuple(weight.shape) != shape:
            raise ConfigError(f"a tied weight must have shape {shape}, got {tuple(weight.shape)}")
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if weight is None else weight
        if weight is None:
            self.reset_parameters()

    @property
    def padded_size(self) -> int:
        """Rows of the full table."""
        return padded_vocabulary(self.vocab_size, self.vocab_multiple)

    def placement(self, name: str, mesh: DeviceMesh) -> Placement:
        size = mesh.size()
        if self.padded_size % size:
            valid = nearest(self.vocab_multiple, range(size, self.vocab_multiple + 2 * size, size))
            raise ConfigError(
                f"vocab_multiple={self.vocab_multiple} pads vocab_size={self.vocab_size} to {self.padded_size} rows, "
                f"which tensor_parallel_size={size} does not divide; nearest valid vocab_multiple: "
                f"{', '.join(map(str, valid))}"
            )
        return Shard(0)

    def initial_value(self, name: str, generator: torch.Generator) -> Tensor:
        # Padding rows are not drawn, so that the values do not depend on how far the table is padded.
        rows = torch.empty(self.vocab_size, self.hidden_size, dtype=torch.float32, device="cpu")
        return self._pad(rows.normal_(0.0, self.init_std, generator=generator))

    def assign_full(self, name: str, full: Tensor) -> None:
        """As in :class:`ParallelLayer`; ``full`` may also come without its padding rows, (vocab_size, hidden)."""
        super().assign_full(name, self._pad(full) if full.shape[0] == self.vocab_size else full)

    def _pad(self, rows: Tensor) -> Tensor:
        return F.pad(rows, (0, 0, 0, self.padded_size - rows.shape[0]))

    def extra_repr(self) -> str:
        split = f", tensor_parallel_size={self.tensor_size}" if self.ranks is not None else ""
        return f"vocab_size={self.vocab_size}, hidden_size={self.hidden_size}, rows={self.padded_size}{split}"


class VocabParallelEmbedding(_VocabTable):
    """``nn.Embedding`` whose vocabulary is split over the tensor ranks.

    Tokens (..., s) int64, alike on every rank, become (..., s, hidden), summed over the ranks (each token's row is on
    one of them); under sequence parallelism this rank's (..., s / ranks, hidden). Without a mesh: ``nn.Embedding``.
    The rows that pad the vocabulary are zero, cannot be looked up, and get zero gradient.

    Args:
        vocab_size, hidden_size: of the table.
        vocab_multiple: the table is padded to a multiple of this many rows.
        init_std: standard deviation of the initial values.
        weight: a Parameter of the padded shape to share instead of an own one.
        device, dtype: of the parameter.

    Raises:
        ConfigError: from :meth:`shard`, when the ranks do not divide the padded vocabulary.
        ValueError: from the forward on the CPU, for tokens outside [0, vocab_size).
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        vocab_multiple: int = 64,
        init_std: float = 0.02,
        weight: nn.Parameter | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(vocab_size, hidden_size, vocab_multiple, init_std, weight, device, dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        check_ids(tokens, self.vocab_size, "tokens")
        if self.ranks is None:
            return F.embedding(tokens, self.weight)
        if self.ranks.sequence_parallel:
            check_sequence(tokens.shape[-1], self.ranks)
        return _VocabEmbedding.apply(tokens, self.weight, self.ranks)


class VocabParallelHead(_VocabTable):
    """Hidden states to logits, or straight to the loss, with the vocabulary split over the tensor ranks.

    Hidden (..., s, hidden), replicated, or (..., s / ranks, hidden) under sequence parallelism. The padded columns take
    no part in any softmax.

    Args:
        vocab_size, hidden_size, vocab_multiple, init_std, device, dtype: as in :class:`VocabParallelEmbedding`.
        weight: the embedding's Parameter, for a tied head.
        ignore_index: label of tokens without loss.

    Raises:
        ConfigError: from :meth:`shard`, when the ranks do not divide the padded vocabulary.
    """

    deferral: Deferral | None = None
    products: Products = PLAIN
    """Where weight gradients wait under a schedule that splits the backward."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        vocab_multiple: int = 64,
        init_std: float = 0.02,
        weight: nn.Parameter | None = None,
        ignore_index: int = -100,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(vocab_size, hidden_size, vocab_multiple, init_std, weight, device, dtype)
        self.ignore_index = ignore_index

    def local_logits(self, hidden: Tensor) -> Tensor:
        """(..., s, padded vocabulary / ranks): this rank's columns, padding included."""
        if self.ranks is None:
            return linear(hidden, self.weight, None, self.deferral, products=self.products)
        ranks, dtype = self.ranks, autocast_dtype(hidden)
        products = (self.products,)
        return _ColumnLinear.apply(hidden, ranks, (None,), dtype, self.deferral, products, self.weight, None)[0]

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, reduction: Literal["mean", "sum", "none"] = "mean"
    ) -> Tensor:
        """With ``labels`` (..., s) int64 their cross entropy; without, all logits (..., s, vocab_size), gathered."""
        logits = self.local_logits(hidden)
        if labels is None:
            return gather_last(logits, self.ranks)[..., : self.vocab_size]
        return vocab_parallel_cross_entropy(
            logits, labels, self.ranks, self.ignore_index, reduction, vocab_size=self.vocab_size
        )


class LearnedPositions(ParallelLayer):
    """A learned vector per position, replicated over the tensor ranks.

    ``forward(length)`` gives (length, hidden) for the whole sequence's ``length``; under sequence parallelism this
    rank's (length / ranks, hidden), and the gradient is then an addend on each rank.

    Args:
        max_length, hidden_size: of the table.
        init_std: standard deviation of the initial values.
        device, dtype: of the parameter.

    Raises:
        ConfigError: from the forward, for a longer sequence or one that the ranks do not divide.
    """

    def __init__(
        self,
        max_length: int,
        hidden_size: int,
        *,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.max_length, self.init_std = max_length, init_std
        self.weight = nn.Parameter(torch.empty(max_length, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def initial_value(self, name: str, generator: torch.Generator) -> Tensor:
        rows = torch.empty(self.full_shape(name), dtype=torch.float32, device="cpu")
        return rows.normal_(0.0, self.init_std, generator=generator)

    def partial_gradients(self) -> tuple[str, ...]:
        return () if self.sequence_ranks is None else ("weight",)

    def forward(self, length: int) -> Tensor:
        if length > self.max_length:
            raise ConfigError(
                f"sequence length {length} is above max_sequence_length={self.max_length}; nearest valid length: "
                f"{self.max_length}"
            )
        table = local(self.weight)
        ranks = self.sequence_ranks
        if ranks is None:
            return table[:length]
        check_sequence(length, ranks)
        step = length // ranks.size
        return table[ranks.rank * step : (ranks.rank + 1) * step]

    def extra_repr(self) -> str:
        return f"{self.max_length}, {self.full_shape('weight')[1]}"
