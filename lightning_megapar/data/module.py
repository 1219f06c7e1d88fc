"""Text as a :class:`~lightning.pytorch.LightningDataModule` whose global batch size is the same on every layout."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from lightning_megapar.config import ConfigError
from lightning_megapar.data.batch import BatchPlan, WindowLength
from lightning_megapar.data.text import (
    VOCAB_SIZE,
    Corpus,
    CorpusOptions,
    CorpusStatistics,
    PackedSequences,
    load_corpus,
)

Batch = dict[str, torch.Tensor]


class TextDataModule(LightningDataModule):
    """Packed byte-level text, by default the Python standard library's own sources.

    Batches are ``{"tokens": (b, s) int64, "labels": (b, s) int64}`` with ``labels[:, t] = tokens[:, t + 1]``. ``b`` is
    the batch of ONE data rank, ``global_batch_size / (data_parallel_size * accumulate_grad_batches)``: the samples of
    an optimizer step do not depend on the layout. The validation loader is not shuffled; its sequences are cut to a
    multiple of the global batch size (when there are that many), so that no data rank has to repeat one.
    ``test_dataloader`` and ``predict_dataloader`` read the validation split too.

    Args:
        source: ``"stdlib"``, or a text file or folder; see :class:`~lightning_megapar.data.files.CorpusOptions`.
        global_batch_size: sequences per optimizer step, over all ranks and accumulated batches.
        sequence_length: tokens per sequence.
        max_bytes, validation_fraction, split_seed, suffixes: see
            :class:`~lightning_megapar.data.files.CorpusOptions`.
        validation_limit: at most so many validation sequences (``None``: all).
        seed: of the order in which sequences are drawn.
        num_workers: loader processes per rank.
        cache_dir: where tokenised text is kept; ``None`` is ``~/.cache/lightning_megapar``.

    Raises:
        ConfigError: on a value outside its range, an unreadable or empty source (when the data is prepared), or a
            global batch size that cannot be divided (when a loader is asked for).
    """

    def __init__(
        self,
        source: str | os.PathLike[str] = "stdlib",
        global_batch_size: int = 16,
        sequence_length: int = 128,
        max_bytes: int | None = None,
        validation_fraction: float = 0.05,
        validation_limit: int | None = None,
        split_seed: int = 0,
        suffixes: Sequence[str] | None = None,
        seed: int = 1234,
        num_workers: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.options = CorpusOptions(
            source=os.fspath(source),
            max_bytes=max_bytes,
            validation_fraction=validation_fraction,
            split_seed=split_seed,
            suffixes=None if suffixes is None else tuple(suffixes),
        )
        for name, value, least in (
            ("sequence_length", sequence_length, 1),
            ("num_workers", num_workers, 0),
            ("validation_limit", 1 if validation_limit is None else validation_limit, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}={value!r}: expected an integer >= {least} (nearest valid: {least})")
        BatchPlan(global_batch_size)
        self.global_batch_size = global_batch_size
        self.sequence_length = sequence_length
        self.validation_limit = validation_limit
        self.seed = seed
        self.num_workers = num_workers
        self.cache_dir = cache_dir
        self._corpus: Corpus | None = None

    @property
    def vocab_size(self) -> int:
        """257: the bytes and a document separator."""
        return VOCAB_SIZE

    @property
    def corpus(self) -> Corpus:
        """The tokenised corpus; built on first use when ``prepare_data`` has not run."""
        if self._corpus is None:
            self._corpus = load_corpus(self.options, self.cache_dir)
        return self._corpus

    @property
    def statistics(self) -> CorpusStatistics:
        """Document and token counts, byte-unigram entropies."""
        return self.corpus.statistics

    @property
    def entropy(self) -> float:
        """Byte-unigram entropy of the corpus in nats per token: what a model must beat to have learnt anything."""
        return self.statistics.unigram_entropy

    @property
    def batch_plan(self) -> BatchPlan:
        """The batch arithmetic under the attached trainer (one device without accumulation when there is none)."""
        trainer = self.trainer
        if trainer is None:
            return BatchPlan(self.global_batch_size)
        accumulate = trainer.accumulate_grad_batches
        if isinstance(accumulate, WindowLength):  # of one window, while a batch size ramp is at work
            accumulate = 1
        return BatchPlan(self.global_batch_size, data_size(trainer), accumulate, microbatches(trainer))

    def describe(self) -> str:
        """What is read, in one line."""
        return self.corpus.describe()

    def prepare_data(self) -> None:
        load_corpus(self.options, self.cache_dir)

    def setup(self, stage: str | None = None) -> None:
        """Open the corpus, and make sure that every rank sees the same.

        Raises:
            ConfigError: when this rank's tokens differ from rank 0's, such as on nodes with different Pythons.
        """
        digest = self.corpus.digest
        if self.trainer is None:
            return
        expected = self.trainer.strategy.broadcast(digest)
        if digest != expected:
            raise ConfigError(
                f"data source {self.options.source!r}: rank {self.trainer.global_rank} reads other text than rank 0 "
                f"(digest {digest[:12]} against {expected[:12]}); expected the same files on every node"
            )

    def train_dataloader(self) -> DataLoader[Batch]:
        dataset = self.corpus.dataset("train", self.sequence_length)
        plan = self.batch_plan
        if len(dataset) < plan.global_batch_size:
            raise ConfigError(
                f"global_batch_size={plan.global_batch_size}: {self.options.source!r} gives only {len(dataset)} "
                f"training sequences of {self.sequence_length} tokens; expected at most {len(dataset)}"
            )
        # Without a strategy that brings its own sampler, the order follows the seed and nothing else.
        generator = torch.Generator().manual_seed(self.seed)
        return self._loader(dataset, plan, shuffle=True, drop_last=True, generator=generator)

    def val_dataloader(self) -> DataLoader[Batch]:
        dataset = self.corpus.dataset("validation", self.sequence_length)
        plan = self.batch_plan
        count = len(dataset) if self.validation_limit is None else min(len(dataset), self.validation_limit)
        if count >= plan.global_batch_size:
            count -= count % plan.global_batch_size
        return self._loader(dataset.limited(count), plan, shuffle=False)

    def test_dataloader(self) -> DataLoader[Batch]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self.val_dataloader()

    def _loader(self, dataset: PackedSequences, plan: BatchPlan, **options: Any) -> DataLoader[Batch]:
        trainer = self.trainer
        return DataLoader(
            dataset,
            batch_size=plan.batch_per_rank,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=trainer is not None and trainer.strategy.root_device.type == "cuda",
            **options,
        )

    def state_dict(self) -> dict[str, Any]:
        """What the position in the data is relative to; stored in Lightning's checkpoints."""
        return {"digest": self.corpus.digest, "sequence_length": self.sequence_length, "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        changed = {
            name: (value, self.state_dict()[name])
            for name, value in state_dict.items()
            if name in self.state_dict() and value != self.state_dict()[name]
        }
        if changed:
            listed = ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items())
            warnings.warn(
                f"the checkpoint was made on other data ({listed}): samples already used may be drawn again",
                stacklevel=2,
            )


def data_size(trainer: Trainer) -> int:
    """Ranks that see different samples: the layout's data ranks when the strategy has one, else every rank."""
    layout = getattr(trainer.strategy, "layout", None)
    return trainer.world_size if layout is None else int(layout.data)


def microbatches(trainer: Trainer) -> int:
    """Pieces that the strategy cuts a batch into (1 when it has no pipeline)."""
    number = getattr(trainer.strategy, "num_microbatches", 1)
    return number if isinstance(number, int) else 1
