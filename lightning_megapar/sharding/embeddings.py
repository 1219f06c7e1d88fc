"""Embeddings that a plan cuts: by vocabulary, or by features."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_megapar.config import ConfigError
from lightning_megapar.layers.collectives import TensorRanks
from lightning_megapar.sharding.primitives import gather, reduce_out
from lightning_megapar.sharding.styles import ModuleStyle, StyledModule, cut_parameter, restyle
from lightning_megapar.shards import deal_out


class VocabularyStyle(StyledModule):
    """Rows of the table are cut: each rank looks up what it holds, the rest is zero, and the results are summed."""

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        style = self._style
        low = style.options["start"]
        length = style.index.length(style.ranks.rank)
        inside = (ids >= low) & (ids < low + length)
        found = super().forward((ids - low).clamp(0, max(length - 1, 0)), *args, **kwargs)
        return reduce_out(found * inside.unsqueeze(-1).to(found.dtype), style.ranks)


class FeatureStyle(StyledModule):
    """Columns of the table are cut and gathered after the look-up."""

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        style = self._style
        return gather(super().forward(ids, *args, **kwargs), style.index, style.ranks)


def embedding_rows(module: nn.Embedding, ranks: TensorRanks) -> None:
    """Cut an embedding by vocabulary (each rank a stretch of it, the last one perhaps shorter).

    Raises:
        ConfigError: fewer rows than ranks, or options of the table that need every id: ``max_norm`` would shrink rows
            that nobody looked up (ids of other ranks stand at this rank's ends), ``scale_grad_by_freq`` would count
            those ids.
    """
    _refuse_options(module, "embedding_rowwise", ("max_norm", "scale_grad_by_freq", "sparse"))
    index = deal_out([module.num_embeddings], ranks.size, what="rows (num_embeddings)")
    start = index.ranks[ranks.rank][0][0]
    length = index.length(ranks.rank)
    padding = module.padding_idx
    if padding is not None:
        module.padding_idx = padding - start if start <= padding < start + length else None
    cut_parameter(module, "weight", 0, index, ranks.rank)
    restyle(module, VocabularyStyle, ModuleStyle(ranks, index, options={"start": start}))


def embedding_columns(module: nn.Embedding, ranks: TensorRanks) -> None:
    """Cut an embedding by features.

    Raises:
        ConfigError: fewer features than ranks, or ``max_norm``, which needs the norm of whole rows.
    """
    _refuse_options(module, "embedding_colwise", ("max_norm", "sparse"))
    index = deal_out([module.embedding_dim], ranks.size, what="features (embedding_dim)")
    cut_parameter(module, "weight", 1, index, ranks.rank)
    restyle(module, FeatureStyle, ModuleStyle(ranks, index))


def _refuse_options(module: nn.Embedding, style: str, options: tuple[str, ...]) -> None:
    for name in options:
        value = getattr(module, name, None)
        if value is not None and value is not False:
            valid = "None" if name == "max_norm" else "False"
            other = ", or embedding_colwise" if name == "scale_grad_by_freq" else ""
            raise ConfigError(
                f"{style} of a {type(module).__name__} with {name}={value}: a rank's piece of the table cannot give "
                f"what the whole one does; valid: {name}={valid}, or leave the table whole (no rule){other}"
            )
