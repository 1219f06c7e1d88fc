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
    if _readable(ids):
        if bool(bad.any()):
            wrong = ids[bad]
            raise ValueError(f"{message}; found values from {int(wrong.min())} to {int(wrong.max())}")
    elif ids.device.type not in ("cpu", "meta"):
        torch._assert_async(~bad.any(), message)


def _readable(x: Tensor) -> bool:
    """A value that can be looked at without waiting for a device, and that exists (no fake or meta tensor)."""
    return x.device.type == "cpu" and type(x) is Tensor


def _is_low(x: Tensor) -> bool:
    """Half precision cannot hold a sum over a vocabulary."""
    return x.dtype in (torch.float16, torch.bfloat16)


def _own_softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over this rank's columns (at least float32) and the logarithm of its denominator, row by row.

    The fused softmax takes half the time of ``logsumexp`` and an ``exp`` on a CPU. Its largest entry, at least
    1 / columns, gives the denominator back to full accuracy.
    """
    values = logits.float() if _is_low(logits) else logits
    softmax = torch.softmax(values, dim=-1)
    largest = values.amax(dim=-1)
    log_sum = largest - softmax.amax(dim=-1).log()
    nothing = largest == -torch.inf  # a row of nothing but masked columns: 0 / 0
    if not _readable(nothing) or bool(nothing.any()):
        softmax = softmax.masked_fill_(nothing[:, None], 0.0)
        log_sum = log_sum.masked_fill_(nothing, -torch.inf)
    return softmax, log_sum


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, ranks: TensorRanks | None, first: int, columns: int, ignore_index: int
    ) -> Tensor:
        valid = labels != ignore_index
        index = labels - first
        inside = valid & (index >= 0) & (index < columns)
        index = index.masked_fill(~inside, 0)
        used = logits[:, :columns]
        if columns:
            softmax, own_sum = _own_softmax(used)
            predicted = used.gather(1, index[:, None])[:, 0].to(own_sum.dtype).masked_fill(~inside, 0.0)
        else:  # this rank holds nothing but padding
            own_sum = torch.full(labels.shape, -torch.inf, device=logits.device, dtype=torch.float32)
            softmax, own_sum = used, own_sum if _is_low(logits) else own_sum.to(logits.dtype)
            predicted = torch.zeros_like(own_sum)
        log_sum = own_sum
        if ranks is not None:
            # One collective of two numbers per token instead of Megatron-LM's three (maximum, label's logit, sum).
            pieces = all_gather_stacked(torch.stack((own_sum, predicted)), ranks)
            log_sum = torch.logsumexp(pieces[:, 0], dim=0)
            predicted = pieces[:, 1].sum(dim=0)
        # This rank's share of the whole denominator: its softmax times the share is the whole softmax's columns.
        share = (own_sum - log_sum).exp()
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        # Half precision keeps the logits, which are half the size, and computes the softmax again.
        ctx.save_for_backward(used if _is_low(logits) else softmax, share, index, inside, valid)
        return (log_sum - predicted).masked_fill(~valid, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved, share, index, inside, valid = ctx.saved_tensors
        columns = saved.shape[1]
        make = torch.empty if columns == ctx.shape[1] else torch.zeros
        result = make(ctx.shape, dtype=ctx.dtype, device=saved.device)
        if columns:
            gradient = gradient.masked_fill(~valid, 0.0)
            softmax = _own_softmax(saved)[0] if _is_low(saved) else saved
            # The label's own entry in full precision before it is rounded: near 1 - 1 half precision has no digits.
            own = (softmax.gather(1, index[:, None])[:, 0] * share - inside.to(share.dtype)) * gradient
            target = result[:, :columns]
            if _is_low(saved):
                target.copy_(softmax.mul_((share * gradient)[:, None]))
            else:
                torch.mul(softmax, (share * gradient)[:, None], out=target)
            target.scatter_(1, index[:, None], own[:, None].to(target.dtype))
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
