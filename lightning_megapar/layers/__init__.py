"""Sharded layers: ordinary layers until ``shard(mesh, sequence_parallel)`` splits them over the tensor ranks."""

from lightning_megapar.layers.attention import ParallelAttention, RotaryPositions
from lightning_megapar.layers.base import ParallelLayer
from lightning_megapar.layers.collectives import TensorRanks
from lightning_megapar.layers.cross_entropy import vocab_parallel_cross_entropy
from lightning_megapar.layers.dropout import SequenceDropout
from lightning_megapar.layers.embedding import LearnedPositions, VocabParallelEmbedding, VocabParallelHead
from lightning_megapar.layers.linear import ColumnParallelLinear, RowParallelLinear, column_linears
from lightning_megapar.layers.mlp import GeluMLP, SwiGLU
from lightning_megapar.layers.norm import LayerNorm, RMSNorm

__all__ = [
    "ColumnParallelLinear",
    "GeluMLP",
    "LayerNorm",
    "LearnedPositions",
    "ParallelAttention",
    "ParallelLayer",
    "RMSNorm",
    "RotaryPositions",
    "RowParallelLinear",
    "SequenceDropout",
    "SwiGLU",
    "TensorRanks",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "column_linears",
    "vocab_parallel_cross_entropy",
]
