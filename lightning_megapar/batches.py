"""Cut a batch of any nest into microbatches, and put the pieces of a result together again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_megapar.config import ConfigError


def batch_size_of(batch: Any) -> int | None:
    """Samples in a batch: the first dimension of its first tensor with at least one dimension, else ``None``."""
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return int(leaf.shape[0])
    return None


def split_batch(batch: Any, num_microbatches: int) -> list[tuple[Any, int]]:
    """Cut along the first dimension into at most ``num_microbatches`` pieces of nearly equal size.

    Tensors whose first dimension is the batch size are cut; so are lists of that length that hold no tensors (strings,
    ids). Everything else (masks shared by the batch, numbers) goes to every piece. A batch smaller than
    ``num_microbatches`` (a ragged last one) gives fewer pieces.

    Returns:
        ``(piece, samples)`` per microbatch. With one microbatch the batch itself is passed on, untouched.

    Raises:
        ConfigError: when the batch holds no tensor to cut.
    """
    size = batch_size_of(batch)
    if num_microbatches == 1:
        return [(batch, size or 1)]
    if not size:
        raise ConfigError(
            f"num_microbatches={num_microbatches}: the batch ({type(batch).__name__}) holds no tensor to cut along "
            "its first dimension; use num_microbatches=1"
        )
    pieces = min(num_microbatches, size)
    bounds = [size * i // pieces for i in range(pieces + 1)]

    def is_cut_list(leaf: Any) -> bool:
        return isinstance(leaf, list) and len(leaf) == size and not any(isinstance(x, (Tensor, list)) for x in leaf)

    leaves, spec = tree_flatten(batch, is_leaf=is_cut_list)
    result = []
    for start, stop in pairwise(bounds):
        cut = [
            leaf[start:stop]
            if (isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == size) or is_cut_list(leaf)
            else leaf
            for leaf in leaves
        ]
        result.append((tree_unflatten(cut, spec), stop - start))
    return result


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """One step's output from its microbatches' outputs.

    Tensors whose first dimension is the microbatch size are concatenated, 0-dim floating-point tensors averaged by
    samples; a nest is joined leaf by leaf; anything else becomes the list of the pieces.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [tree_flatten(output) for output in outputs]
    if any(spec != flat[0][1] for _, spec in flat):
        return list(outputs)
    joined: list[Any] = []
    for leaves in zip(*(leaves for leaves, _ in flat)):
        if all(isinstance(x, Tensor) and x.ndim > 0 and x.shape[0] == n for x, n in zip(leaves, sizes)):
            joined.append(torch.cat(list(leaves)))
        elif all(isinstance(x, Tensor) and x.ndim == 0 and x.is_floating_point() for x in leaves):
            joined.append(sum(x * n for x, n in zip(leaves, sizes)) / sum(sizes))
        elif all(x is leaves[0] or (not isinstance(x, Tensor) and x == leaves[0]) for x in leaves):
            joined.append(leaves[0])
        else:
            joined.append(list(leaves))
    return tree_unflatten(joined, flat[0][1])


def detach(output: Any) -> Any:
    """Detach every tensor of a nest, so that one kept output does not keep a microbatch's activations alive."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
