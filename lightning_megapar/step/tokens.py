"""How many valid tokens a microbatch has, for losses that are means over them: read off the batch.

The loss of one big batch is the sum of token losses over the number of valid tokens of *all* microbatches, data ranks
and accumulated batches. A mean of their means is another number as soon as they have different numbers of tokens. A
step says how many its mean is over: in what it returns (``{"loss": ..., "num_valid_tokens": n}``), by an entry
``num_valid_tokens`` of its batch (one count per sample), or by labels that are counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lightning_megapar.config import ConfigError, refuse_unknown
from lightning_megapar.step.outcome import StepContractError

ENTRY = "num_valid_tokens"
TokenCounter = Callable[[Any], "Tensor | int | None"]
"""Microbatch -> number of its valid tokens."""


@dataclass(frozen=True)
class LabelCount:
    """Counts the labels that a loss does not leave out.

    Args:
        labels: their key in the batch; a number, from 0, for batches that are tuples or lists.
        ignore_index: value of labels that do not count, as in torch's ``cross_entropy``.
        shift: the model shifts labels itself, so that the first of each sequence is no target (transformers' causal
            language models do).

    Raises:
        ConfigError: for options of other types.
    """

    labels: str | int = "labels"
    ignore_index: int = -100
    shift: bool = False

    def __post_init__(self) -> None:
        named = isinstance(self.labels, str) and self.labels != ""
        numbered = isinstance(self.labels, int) and not isinstance(self.labels, bool) and self.labels >= 0
        if not named and not numbered:
            raise ConfigError(f"count_tokens: labels={self.labels!r}: expected the key or the position in the batch")
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            raise ConfigError(f"count_tokens: ignore_index={self.ignore_index!r}: expected an integer")
        if not isinstance(self.shift, bool):
            raise ConfigError(f"count_tokens: shift={self.shift!r}: expected true or false")

    def __call__(self, piece: Any) -> Tensor:
        """0-dim int64: the valid labels of a microbatch.

        Raises:
            StepContractError: for a batch without these labels.
        """
        try:
            labels = piece[self.labels]
        except (KeyError, IndexError, TypeError):
            labels = None
        if not isinstance(labels, Tensor):
            has = (
                f"the keys {', '.join(map(str, piece))}" if isinstance(piece, Mapping) else f"a {type(piece).__name__}"
            )
            raise StepContractError(f"count_tokens: the batch has no tensor {self.labels!r} (it has {has})")
        return (labels[..., 1:] if self.shift else labels).ne(self.ignore_index).sum()


def given_token_counter(value: Any) -> TokenCounter | None:
    """What ``count_tokens`` means: nothing, a key, options of :class:`LabelCount`, or a function of the microbatch.

    Raises:
        ConfigError: for anything else, and for unknown options.
    """
    if value is None or isinstance(value, LabelCount):
        return value
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return LabelCount(value)
    if isinstance(value, Mapping):
        refuse_unknown("count_tokens", [str(name) for name in value], [field.name for field in fields(LabelCount)])
        return LabelCount(**value)
    if callable(value):
        return value  # type: ignore[no-any-return]
    raise ConfigError(
        f"count_tokens={value!r}: expected the key of the labels, options of LabelCount, or a function of the batch"
    )


def tokens_in(piece: Any, samples: int, counter: TokenCounter | None) -> Any:
    """Valid tokens of a microbatch whose step has not told them: a number, or ``None`` where nothing says so.

    Args:
        piece: the microbatch.
        samples: that it has.
        counter: of the user's.

    Raises:
        StepContractError: for a count in the batch that is not one per sample.
    """
    if counter is not None:
        return counter(piece)
    if not isinstance(piece, Mapping) or ENTRY not in piece:
        return None
    counts = torch.as_tensor(piece[ENTRY])
    if counts.ndim == 0 or len(counts) != samples:
        raise StepContractError(
            f"{ENTRY} of a batch must have one count for each of its {samples} samples, so that it can be cut into "
            f"microbatches with them; its shape is {tuple(counts.shape)}"
        )
    return counts.sum()
