"""Index runs: every index once, pieces that make up the whole, and their places in checkpoints."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megapar.checkpoint.full import gather_full_state_dict, load_full_into
from lightning_megapar.checkpoint.pieces import coverage_fault, local_pieces
from lightning_megapar.config import ConfigError
from lightning_megapar.shards import IndexedTensor, IndexRuns, ParameterShard

parts = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(lambda p: sum(p) > 0)


@given(parts=parts, size=st.integers(1, 5), unit=st.integers(1, 3))
def test_pieces_make_up_the_whole(parts: list[int], size: int, unit: int) -> None:
    parts = [part * unit for part in parts]
    index = IndexRuns.packed(parts, size, unit)
    whole = torch.arange(index.width * 2).view(index.width, 2)
    built = torch.full_like(whole, -1)
    for rank in range(size):
        piece = index.take(whole, 0, rank)
        assert piece.shape[0] == index.length(rank)
        index.place(built, piece, 0, rank)
        assert all(start % unit == 0 and length % unit == 0 for start, length in index.ranks[rank])
    assert torch.equal(built, whole)


@given(parts=parts, size=st.integers(1, 4), dim=st.integers(0, 1))
def test_checkpoint_boxes_cover_the_tensor(parts: list[int], size: int, dim: int) -> None:
    index = IndexRuns.packed(parts, size)
    shape = (index.width, 3) if dim == 0 else (3, index.width)
    whole = torch.randn(shape)
    boxes = []
    for rank in range(size):
        shard = ParameterShard(shape, dim, index, rank)
        held = IndexedTensor(shard.take(whole), shard)
        for piece in local_pieces("weight", held):
            boxes.append(piece.box)
            assert torch.equal(piece.view(held.local), whole[piece.box.slices()])
    assert coverage_fault(shape, boxes) is None


def test_a_whole_tensor_is_loaded_into_a_piece() -> None:
    whole = torch.randn(6, 4)
    shard = ParameterShard((6, 4), 0, IndexRuns.packed([4, 2], 2), 1)
    held = IndexedTensor(torch.zeros(3, 4), shard)
    load_full_into({"weight": held}, {"weight": whole})
    assert torch.equal(held.local, whole[[2, 3, 5]])


def test_a_piece_alone_is_no_whole() -> None:
    shard = ParameterShard((4, 4), 0, IndexRuns.contiguous(4, 2), 0)
    held = IndexedTensor(torch.zeros(2, 4), shard)
    with pytest.raises(Exception, match=r"8 of 16 elements are in no piece"):
        gather_full_state_dict(["weight"], {"weight": held})


@pytest.mark.parametrize("ranks", [(((0, 2),), ((1, 2),)), (((0, 2),),), (((0, 2),), ((3, 1),))])
def test_runs_that_overlap_or_leave_gaps_are_refused(ranks: tuple[tuple[tuple[int, int], ...], ...]) -> None:
    with pytest.raises(ConfigError):
        IndexRuns(3, ranks)
