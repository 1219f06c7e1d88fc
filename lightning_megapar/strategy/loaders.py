"""Data loaders follow the data rank: samplers, worker seeds, and where an interrupted epoch goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities.data import _update_dataloader, has_iterable_dataset
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_megapar.batches import SPLIT_HINT
from lightning_megapar.config import ConfigError, divisors, nearest
from lightning_megapar.data.sampler import ResumableSampler
from lightning_megapar.mesh import all_gather_single
from lightning_megapar.trees import in_any_tree


def prepare_loader(
    loader: Any,
    *,
    data_rank: int,
    data_size: int,
    seed: int,
    training: bool,
    predicting: bool,
    num_microbatches: int,
    inject_sampler: bool,
    resume: tuple[int, int] | None = None,
    worker_init: Callable[[int], None] | None = None,
) -> Any:
    """What the strategy's ``process_dataloader`` returns.

    A plain ``DataLoader`` over a map-style dataset (sequential or random order) gets a :class:`ResumableSampler`: its
    order depends on the seed and the epoch only, its slice on the data rank, and an interrupted run goes on at
    ``resume = (global samples used of that epoch, epoch)``. A loader that does not shuffle stays unshuffled. Outside
    training the last samples are repeated where the data ranks would otherwise get unequal counts. A loader with a
    sampler of the user's own is left alone with one data rank, wrapped as Lightning does with several. Workers are
    seeded by data rank, so that tensor and pipeline peers, which must see the same batch, draw the same augmentations.

    Raises:
        ConfigError: when the training batch size is not divisible by the number of microbatches.
    """
    if not isinstance(loader, DataLoader):
        return loader
    if training and num_microbatches > 1 and loader.batch_size and loader.batch_size % num_microbatches:
        good = nearest(loader.batch_size, [num_microbatches * k for k in range(1, loader.batch_size + 2)])
        raise ConfigError(
            f"batch_size={loader.batch_size} (per data rank) is not divisible by num_microbatches={num_microbatches}; "
            f"nearest valid batch sizes: {', '.join(map(str, good))}; or num_microbatches in "
            f"{[d for d in divisors(loader.batch_size) if d > 1] or [1]}"
        )
    if inject_sampler:
        loader = _with_sampler(loader, data_rank, data_size, seed, training, predicting, resume)
    if loader.num_workers > 0 and data_size >= 1:
        seeded = partial(_init_worker, rank=data_rank, before=loader.worker_init_fn, also=worker_init)
        loader.worker_init_fn = seeded
    return loader


class AgreeingLoader:
    """A loader without a reliable length: all ranks go on to the next batch together, or stop together.

    Ranks whose datasets split themselves end at different batches; whoever went on would wait for the others forever.

    Args:
        loader: any iterable; its attributes are passed on.
        data_ranks: data rank of every global rank.
        device: for the collective.
    """

    def __init__(self, loader: Any, data_ranks: Sequence[int], device: torch.device) -> None:
        self._loader = loader
        self._data_ranks = list(data_ranks)
        self._device = device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        end = object()
        batches = iter(self._loader)
        while True:
            batch = next(batches, end)
            mine = torch.tensor([int(batch is not end)], device=self._device)
            votes = torch.empty(len(self._data_ranks), dtype=mine.dtype, device=self._device)
            all_gather_single(votes, mine)
            went_on = {rank for rank, vote in zip(self._data_ranks, votes.tolist()) if vote}
            ended = {rank for rank, vote in zip(self._data_ranks, votes.tolist()) if not vote}
            if went_on & ended:
                raise ConfigError(
                    f"the loader has more batches on some ranks of data rank {min(went_on & ended)} than on others: "
                    f"tensor and pipeline ranks must see the same data. {SPLIT_HINT}"
                )
            if ended:
                if went_on:
                    rank_zero_warn(
                        f"the loader ended on data ranks {sorted(ended)} but not on {sorted(went_on)}: the others' "
                        "remaining batches are dropped; give every data rank equally many batches"
                    )
                return
            yield batch


def same_on_all_ranks(loader: Any, data_ranks: Sequence[int], device: torch.device) -> Any:
    """Make sure that all ranks take equally many batches; collective over all ranks.

    Returns:
        the loader, in an :class:`AgreeingLoader` when its length is unknown or only an estimate.

    Raises:
        ConfigError: when lengths differ between ranks.
    """
    length: Any = None
    if not has_iterable_dataset(loader):
        with suppress(TypeError, NotImplementedError):
            length = (len(loader.dataset) if hasattr(loader, "dataset") else None, len(loader))
    lengths: list[Any] = [None] * len(data_ranks)
    dist.all_gather_object(lengths, length)
    if any(one is None for one in lengths):
        return AgreeingLoader(loader, data_ranks, device)
    if len(set(lengths)) > 1:
        shown = ", ".join(f"rank {r}: {n} samples in {b} batches" for r, (n, b) in enumerate(lengths))
        raise ConfigError(
            f"the ranks' datasets differ in length ({shown}); build the same whole dataset on every rank, the "
            "strategy splits it over the data ranks"
        )
    return loader


def _init_worker(
    worker_id: int,
    rank: int,
    before: Callable[[int], None] | None,
    also: Callable[[int], None] | None,
) -> None:
    if also is not None:
        also(worker_id)
    if before is None:
        pl_worker_init_function(worker_id, rank)
    else:
        before(worker_id)


def _with_sampler(
    loader: DataLoader,
    data_rank: int,
    data_size: int,
    seed: int,
    training: bool,
    predicting: bool,
    resume: tuple[int, int] | None,
) -> DataLoader:
    if has_iterable_dataset(loader):
        if data_size > 1:
            rank_zero_warn(
                f"an IterableDataset is not split over the {data_size} data ranks; split it in the dataset by "
                "trainer.strategy.distributed_sampler_kwargs (num_replicas, rank), or every rank sees the same rows"
            )
        return loader
    sampler = loader.sampler
    batches: Any = loader.batch_sampler
    if predicting and isinstance(batches, in_any_tree("overrides.distributed", "_IndexBatchSamplerWrapper")):
        # Lightning's wrapper, which keeps the indices of the predictions.
        batches = batches._batch_sampler  # type: ignore[attr-defined]
    if isinstance(sampler, DistributedSampler):
        return loader
    if type(batches) is BatchSampler and type(sampler) in (RandomSampler, SequentialSampler):
        shuffle = type(sampler) is RandomSampler
        if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(loader.dataset)):  # type: ignore[arg-type]
            return _wrapped(loader, data_rank, data_size, seed)
        resumable = ResumableSampler(
            num_samples=len(loader.dataset),  # type: ignore[arg-type]
            batch_size=batches.batch_size,
            data_rank=data_rank,
            data_size=data_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=batches.drop_last,
            pad=not training,
        )
        if training and len(resumable) == 0 < resumable.num_samples and len(loader) > 0:
            raise ConfigError(
                f"the training dataset has {resumable.num_samples} samples: too few for one batch on each of the "
                f"{data_size} data ranks (batch_size={batches.batch_size}, drop_last={batches.drop_last}); use a "
                "smaller data_parallel_size or batch_size"
            )
        if training and resume is not None:
            resumable.resume(*resume)
        if predicting:
            batches.sampler = resumable
            return loader
        return _update_dataloader(loader, resumable)
    return _wrapped(loader, data_rank, data_size, seed)


def _wrapped(loader: DataLoader, data_rank: int, data_size: int, seed: int) -> DataLoader:
    if data_size == 1:
        return loader
    if isinstance(loader.batch_sampler, in_any_tree("overrides.distributed", "_IndexBatchSamplerWrapper")):
        raise ConfigError(
            "predict with a sampler of your own and data_parallel_size > 1 cannot be split over the data ranks; use a "
            "sequential loader, or split in the sampler by trainer.strategy.distributed_sampler_kwargs"
        )
    wrapped = DistributedSamplerWrapper(
        loader.sampler, num_replicas=data_size, rank=data_rank, shuffle=False, seed=seed
    )
    return _update_dataloader(loader, wrapped)


def forget_fetched_batch(trainer: Any) -> None:
    """Have Lightning's loop in the state between two steps, for a checkpoint: the next batch is fetched, and not begun.

    Lightning saves after a step or a validation. It would count the fetched batch: validations would come a step early,
    and the last batch of an epoch would count as done. After a validation it counts a step for its loggers when it goes
    on, because its own checkpoints were made before that was counted.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    progress.total.ready, progress.current.ready = progress.total.started, progress.current.started
    progress.is_last_batch = False
    if loop._should_check_val_fx(trainer.fit_loop._data_fetcher) and not loop._should_accumulate():
        loop._batches_that_stepped -= 1


def rewind(checkpoint: dict[str, Any], batches: int) -> None:
    """Have a checkpoint's fit loop stand some batches back, where nothing of the batch that follows has begun.

    Args:
        checkpoint: Lightning's; changed.
        batches: that have been started since.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    progress["is_last_batch"] = False
    for counts in (progress["total"], progress["current"]):
        counts.update(dict.fromkeys(counts, counts["started"] - batches))
