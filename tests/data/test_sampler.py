from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from lightning_megapar.config import ConfigError
from lightning_megapar.data.sampler import ResumableSampler, epoch_seed

quick = settings(max_examples=60, deadline=None)


def samplers(data_size: int, global_batch: int, n: int, **options) -> list[ResumableSampler]:
    return [
        ResumableSampler(n, global_batch // data_size, data_rank=r, data_size=data_size, **options)
        for r in range(data_size)
    ]


def global_batches(ranks: list[ResumableSampler]) -> list[list[int]]:
    """The samples of all ranks' k-th batches, in rank order."""
    batches = [list(BatchSampler(sampler, sampler.batch_size, drop_last=False)) for sampler in ranks]
    assert len({len(b) for b in batches}) == 1, "ranks yield different numbers of batches: a hang"
    return [[i for batch in step for i in batch] for step in zip(*batches)]


@quick
@given(n=st.integers(0, 90), batch=st.integers(1, 4), seed=st.integers(0, 9), shuffle=st.booleans(), drop=st.booleans())
def test_global_batches_do_not_depend_on_the_data_size(
    n: int, batch: int, seed: int, shuffle: bool, drop: bool
) -> None:
    size = 12 * batch
    for epoch in (0, 3):
        seen = []
        for data_size in (1, 2, 3, 4, 6):
            ranks = samplers(data_size, size, n, seed=seed, shuffle=shuffle, drop_last=drop)
            for sampler in ranks:
                sampler.set_epoch(epoch)
            batches = global_batches(ranks)
            whole = n // size
            assert all(len(b) == size for b in batches[:whole])
            seen.append(batches[:whole])
            # every sample at most once; what is missing is the documented drop
            flat = [i for b in batches for i in b]
            assert len(set(flat)) == len(flat)
            assert n - len(flat) == ranks[0].dropped_samples == (n % size if drop else n % size % data_size)
            assert all(len(s) * data_size == len(flat) for s in ranks)
            order = ranks[0].order().tolist()
            assert sorted(order) == list(range(n))
            if not shuffle:
                assert order == list(range(n))
            # the dropped samples are the last of the order
            assert set(flat) == set(order[: len(flat)])
        assert all(batches == seen[0] for batches in seen)


@quick
@given(
    n=st.integers(1, 90), share=st.floats(0, 1), before=st.sampled_from([1, 2, 3]), after=st.sampled_from([1, 2, 4]),
    drop=st.booleans(),
)  # fmt: skip
def test_resuming_continues_exactly_on_any_layout(n: int, share: float, before: int, after: int, drop: bool) -> None:
    consumed = int(share * n)
    order = samplers(before, 12, n, seed=5)[0].order().tolist()
    ranks = samplers(after, 8, n, seed=5, drop_last=drop, consumed=consumed)
    lengths = [len(sampler) for sampler in ranks]
    flat = [i for batch in global_batches(ranks) for i in batch]
    left = order[consumed:]
    # exactly what comes next, in order: nothing repeated, nothing skipped but the tail
    assert sorted(flat) == sorted(left[: len(flat)])
    assert len(left) - len(flat) == (len(left) % 8 if drop else len(left) % 8 % after)
    for k in range(len(flat) // 8):
        assert flat[8 * k : 8 * (k + 1)] == left[8 * k : 8 * (k + 1)]
    assert [len(sampler) for sampler in ranks] == lengths, "the length of a full epoch does not depend on consumed"
    # the next epoch is whole again
    for sampler in ranks:
        sampler.set_epoch(1)
    again = [i for batch in global_batches(ranks) for i in batch]
    assert len(again) == n - ranks[0].dropped_samples


def test_resuming_at_every_global_batch_equals_the_uninterrupted_run() -> None:
    whole = global_batches(samplers(2, 8, 100, seed=3))
    for done in range(len(whole) + 1):
        for data_size in (1, 2, 4):
            assert global_batches(samplers(data_size, 8, 100, seed=3, consumed=8 * done)) == whole[done:]


@quick
@given(n=st.integers(1, 50), data_size=st.integers(1, 7), batch=st.integers(1, 3))
def test_padding_gives_equal_counts_and_says_how_many(n: int, data_size: int, batch: int) -> None:
    ranks = samplers(data_size, batch * data_size, n, shuffle=False, drop_last=False, pad=True)
    flat = [i for b in global_batches(ranks) for i in b]
    assert set(flat) == set(range(n))
    assert len(flat) - n == ranks[0].padded_samples < data_size
    assert sum(len(s) for s in ranks) == len(flat)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return ResumableSampler(50, 1, seed=seed).order(epoch).tolist()

    orders = [order(seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len({tuple(o) for o in orders}) == 16
    assert order(2, 3) == order(2, 3)
    assert epoch_seed(1, 2) != epoch_seed(2, 1)


def test_two_epochs_of_an_interrupted_run_cover_everything_once_each() -> None:
    first = samplers(2, 10, 100, seed=1)
    used = [i for batch in global_batches(first)[:4] for i in batch]
    resumed = samplers(1, 10, 100, seed=1, consumed=40)
    used += [i for batch in global_batches(resumed) for i in batch]
    assert sorted(used) == list(range(100))
    resumed[0].set_epoch(1)
    assert sorted(i for batch in global_batches(resumed) for i in batch) == list(range(100))


@pytest.mark.parametrize(("consumed", "epoch", "rest"), [(8, 2, 12), (16, 2, 4), (17, 3, 20), (20, 3, 20)])
@pytest.mark.parametrize("announced", [2, 3])
def test_resume_goes_on_in_its_epoch_or_starts_the_next(consumed: int, epoch: int, rest: int, announced: int) -> None:
    (sampler,) = samplers(1, 4, 20, seed=1)
    sampler.resume(consumed=consumed, epoch=2)
    sampler.set_epoch(announced)  # Lightning's number: the epoch of the checkpoint, or one more when it was cut short
    left = sampler.order(epoch).tolist()[20 - rest :]
    assert list(sampler) == left
    assert list(sampler) == left, "a first iterator may be thrown away"
    sampler.started()
    sampler.set_epoch(announced + 1)
    assert list(sampler) == sampler.order(epoch + 1).tolist()


def test_consumed_is_used_up_by_an_iterator_that_is_never_advanced() -> None:
    (sampler,) = samplers(1, 4, 20, shuffle=False, consumed=8)
    iterator = iter(sampler)
    assert sampler.consumed == 0
    assert list(iterator) == list(range(8, 20))
    assert list(sampler) == list(range(20))


def test_seek_in_ten_million_samples_costs_no_replay() -> None:
    n = 10_000_000
    began = time.perf_counter()
    torch.randperm(n, generator=torch.Generator().manual_seed(0))
    permutation = time.perf_counter() - began
    ranks = samplers(4, 32, n, seed=1, consumed=n // 2 // 32 * 32)
    began = time.perf_counter()
    first = next(iter(ranks[3]))
    seek = time.perf_counter() - began
    assert first == int(ranks[3].order()[n // 2 // 32 * 32 + 24])
    # A replay of 5e6 Python steps takes many permutations' time; slices of one tensor take about one.
    assert seek < 6 * permutation + 0.5, (seek, permutation)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"data_size": 0}, "data_size=0"),
        ({"data_rank": 2, "data_size": 2}, "data_rank=2"),
        ({"consumed": 11}, "consumed=11"),
    ],
)
def test_wrong_settings_are_named(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ResumableSampler(**{"num_samples": 10, "batch_size": 2, **options})
