"""Weights that data ranks gather for each forward are no activations: not counted, not compressed, not moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import RankPool
from sharded_cases import tensor_mesh
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from lightning_megapar.memory.compression import compress_saved
from lightning_megapar.memory.compression_options import CompressionConfig
from lightning_megapar.memory.offload import OffloadSaved
from lightning_megapar.memory.saved import SavedBytes
from lightning_megapar.models.gpt import GPT, GPTConfig


def blocks_of(frozen: bool) -> Any:
    torch.manual_seed(0)
    model = GPT(GPTConfig.gpt2(vocab_size=64, num_layers=2, num_heads=4, hidden_size=64, max_sequence_length=32))
    if frozen:
        for name, parameter in model.blocks.named_parameters():
            parameter.requires_grad_("bias" in name)
    return model.blocks


def run(blocks: Any, offload: OffloadSaved | None = None) -> tuple[int, Tensor]:
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with SavedBytes(blocks) as saved:
        y = x
        for index, block in enumerate(blocks):
            if offload is None:
                y = block(y)
            else:
                with offload.block(index, module=block):
                    y = block(y)
    kept = saved.bytes + (offload.moved_bytes if offload else 0)
    y.square().sum().backward()
    assert saved.bytes == 0 and x.grad is not None
    return kept, x.grad


def on_ranks(frozen: bool) -> None:
    whole, sharded = blocks_of(frozen), blocks_of(frozen)
    mesh = tensor_mesh()
    for block in sharded:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    kept, grad = run(whole)
    for offload in (None, OffloadSaved(sharded, minimum_bytes=1024)):
        got, same = run(sharded, offload)
        assert got == kept and torch.equal(same, grad)
    totals = []
    for blocks in (whole, sharded):
        compressor = compress_saved(blocks, CompressionConfig("int8", ("GPTBlock",), minimum_elements=1024))
        assert compressor is not None
        grad = run(blocks)[1]
        totals.append((compressor.total, grad))
    assert totals[0][0] == totals[1][0] and torch.equal(totals[0][1], totals[1][1])


@pytest.mark.parametrize("frozen", [False, True])
def test_gathered_weights(pool: RankPool, frozen: bool) -> None:
    pool.run(on_ranks, 2, frozen)
