"""Cross entropy over logits whose vocabulary is split over the tensor ranks; the logits are never gathered."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megapar.layers.collectives import TensorRanks, all_gather_stacked


def check_ids(ids: Tensor, limit: int, name: str, ignore_index: int | None = None) -> None:
    """Refuse ids outside [0, limit) that are not ``ignore_index``.

    On an accelerator the check runs there without waiting for it: the run ends with an assertion of the device.

    Raises:
        ValueError: on the CPU, with the smallest and largest offending id.
    """
    bad = (ids < 0) | (ids >= limit)
    if ignore_index is not None:
        bad &= ids != ignore_index
    message = f"{name} outside the vocabulary: valid values are 0 to {limit - 1}"
    if ignore_index is not None:
        message += f" and ignore_index={ignore_index}"
    if ids.device.type == "cpu":
        if bool(bad.any()):
            wrong = ids[bad]
            raise ValueError(f"{message}; found values from {int(wrong.min())} to {int(wrong.max())}")
    elif not ids.is_meta:
        torch._assert_async(~bad.any(), message)


def _wide(x: Tensor) -> Tensor:
    """At least float32: half precision cannot hold a sum over a vocabulary."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, ranks: TensorRanks | None, first: int, columns: int, ignore_index: int
    ) -> Tensor:
        valid = labels != ignore_index
        index = labels - first
        inside = valid & (index >= 0) & (index < columns)
        index = index.masked_fill(~inside, 0)
        values = _wide(logits[:, :columns])
        if columns:
            log_sum = torch.logsumexp(values, dim=-1)
            predicted = values.gather(1, index[:, None])[:, 0].masked_fill(~inside, 0.0)
        else:  # this rank holds nothing but padding
            log_sum = values.new_full(labels.shape, -torch.inf)
            predicted = values.new_zeros(labels.shape)
        if ranks is not None:
            # One collective of two numbers per token instead of Megatron-LM's three (maximum, label's logit, sum).
            pieces = all_gather_stacked(torch.stack((log_sum, predicted)), ranks)
            log_sum = torch.logsumexp(pieces[:, 0], dim=0)
            predicted = pieces[:, 1].sum(dim=0)
        ctx.columns = columns
        ctx.save_for_backward(logits, log_sum, index, inside, valid)
        return (log_sum - predicted).masked_fill(~valid, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum, index, inside, valid = ctx.saved_tensors
        columns = ctx.columns
        result = torch.zeros_like(logits) if columns < logits.shape[1] else torch.empty_like(logits)
        if columns:
            softmax = (_wide(logits[:, :columns]) - log_sum[:, None]).exp_()
            softmax.scatter_add_(1, index[:, None], -inside[:, None].to(softmax.dtype))
            # masked_fill and not a product alone: 0 * inf of an ignored token's logits would be NaN
            softmax.mul_(gradient[:, None]).masked_fill_(~valid[:, None], 0.0)
            result[:, :columns] = softmax
        return result, None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits_local: Tensor,
    labels: Tensor,
    ranks: TensorRanks | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    *,
    vocab_size: int | None = None,
) -> Tensor:
    """Cross entropy of logits that are split along the vocabulary.

    Each rank takes the logarithm of the sum of exponentials over its own columns; one all-gather of two numbers per
    token combines them. Half-precision logits are summed in float32.

    Args:
        logits_local: (..., columns): this rank's columns, the same number on every rank, in rank order.
        labels: (...) int64, alike on every rank, in [0, vocab_size) or ``ignore_index``.
        ranks: the tensor ranks; ``None`` when ``logits_local`` holds all columns.
        ignore_index: label of tokens without loss and gradient.
        reduction: ``"mean"`` over the tokens that count (0 when there are none), ``"sum"`` or ``"none"``.
        vocab_size: columns from here on are padding, whatever they hold: they take no part and get zero gradient.

    Returns:
        a scalar, or losses of the shape of ``labels`` for ``"none"``; float32, or float64 for float64 logits; alike
        on every rank.

    Raises:
        ValueError: for labels outside the vocabulary, shapes that do not fit, or another ``reduction``.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is not one of mean, sum, none")
    if labels.shape != logits_local.shape[:-1]:
        raise ValueError(f"labels of shape {tuple(labels.shape)} do not fit logits of {tuple(logits_local.shape)}")
    width = logits_local.shape[-1]
    first, total = (0, width) if ranks is None else (ranks.rank * width, ranks.size * width)
    if vocab_size is None:
        vocab_size = total
    elif not 0 < vocab_size <= total:
        raise ValueError(f"vocab_size={vocab_size} is not in 1 to {total}, the columns that there are")
    flat = labels.reshape(-1)
    check_ids(flat, vocab_size, "labels", ignore_index)
    columns = min(max(vocab_size - first, 0), width)
    losses = _VocabParallelCrossEntropy.apply(
        logits_local.reshape(-1, width), flat, ranks, first, columns, ignore_index
    )
    if reduction == "none":
        return losses.view(labels.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (flat != ignore_index).sum().clamp(min=1)
