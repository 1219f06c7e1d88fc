"""Cut a batch of any nest into microbatches, and put the pieces of a result together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_megapar.config import ConfigError

SPLIT_HINT = (
    "Split a dataset by trainer.strategy.distributed_sampler_kwargs (num_replicas, rank), never by the global rank or "
    "the world size, and do not seed augmentations by the global rank"
)


MARKS = 4
"""Numbers of a :func:`fingerprint`."""
_COMPARED = 32  # tensors of a nest


@torch.no_grad()
def fingerprint(nest: Any, device: torch.device) -> Tensor:
    """:data:`MARKS` float64 numbers that tell nests apart, from a sample of the elements of their first tensors.

    Each tensor counts alike, whatever its size and its numbers' size: where its elements lie between all negative and
    all positive, the logarithm of their mean size, and their number; each weighted by the tensor's place. Last comes
    what rounding may change in the first two.
    """
    leaves = _some_tensors(nest, _COMPARED)
    if not leaves:
        return torch.zeros(MARKS, dtype=torch.float64, device=device)
    sums, sizes = [], []
    for leaf in leaves:
        picked = leaf.detach().reshape(-1)
        picked = picked[:: max(1, picked.numel() // 256)].to(device, torch.float64).nan_to_num(1.0, 2.0, 3.0)
        weights = torch.linspace(1.0, 2.0, picked.numel(), dtype=torch.float64, device=device)
        sums.append(picked @ weights)
        sizes.append(picked.abs() @ weights)
    size = torch.stack(sizes).clamp_min(1e-300)
    places = torch.arange(1.0, len(leaves) + 1, dtype=torch.float64, device=device)
    marks = torch.stack([torch.stack(sums) / size, size.log()]) @ places
    elements = sum(place * leaf.numel() for place, leaf in enumerate(leaves, 1))
    return torch.cat([marks, marks.new_tensor([elements, max(_rounding(leaf.dtype) for leaf in leaves)])])


def _rounding(dtype: torch.dtype) -> float:
    """Relative error of a mean over elements: between one rounding and the sum of many; integers may be thresholds."""
    return torch.finfo(dtype).eps ** 0.75 if dtype.is_floating_point else 1e-3


def alike(a: Sequence[float], b: Sequence[float], tolerance: float | None = None) -> bool:
    """Whether two fingerprints are of nests that differ by no more than a relative ``tolerance`` of their elements.

    Args:
        a, b: of the nests; what follows the first two numbers must be equal.
        tolerance: by default what rounding may change.
    """
    tolerance = a[3] if tolerance is None else tolerance
    return list(a[2:]) == list(b[2:]) and all(abs(one - other) <= tolerance for one, other in zip(a[:2], b[:2]))


def _some_tensors(node: Any, limit: int) -> list[Tensor]:
    if isinstance(node, Tensor):
        usable = node.layout == torch.strided and not node.is_complex() and not node.is_nested and node.numel() > 0
        return [node] if usable else []
    found: list[Tensor] = []
    for child in _children(node) or ():
        found += _some_tensors(child, limit - len(found))
        if len(found) >= limit:
            break
    return found


def refuse_unlike_batches(fingerprints: Sequence[Sequence[float]], data_ranks: Sequence[int]) -> None:
    """Compare the ranks' fingerprints of their batches.

    Raises:
        RuntimeError: when ranks of one data rank differ, the same on every rank.
    """
    first: dict[int, Sequence[float]] = {}
    for rank, (marks, data_rank) in enumerate(zip(fingerprints, data_ranks)):
        # Not to the last bit: hosts of different make may round an augmentation differently.
        if not alike(marks, first.setdefault(data_rank, marks), 1e-6):
            raise RuntimeError(
                f"rank {rank} got another batch than rank {data_ranks.index(data_rank)}, which shares its data rank "
                f"{data_rank}: tensor and pipeline ranks must see the same data. {SPLIT_HINT}"
            )


def _children(node: Any) -> list[Any] | None:
    """The parts of a container, in order; ``None`` for a leaf (Lightning moves the same containers to a device)."""
    if isinstance(node, Mapping):
        return list(node.values())
    if is_dataclass(node) and not isinstance(node, type):
        return [getattr(node, field.name) for field in fields(node)]
    return list(node) if isinstance(node, (list, tuple)) else None


def _rebuilt(node: Any, children: list[Any]) -> Any:
    if isinstance(node, Mapping):
        made: Any = copy(node)
        for key, child in zip(node, children):
            made[key] = child
        return made
    if is_dataclass(node) and not isinstance(node, type):
        made = copy(node)
        for field, child in zip(fields(node), children):
            object.__setattr__(made, field.name, child)
        return made
    return type(node)(*children) if hasattr(node, "_fields") else type(node)(children)


def batch_size_of(batch: Any) -> int | None:
    """Samples in a batch: the first dimension of its first tensor with at least one dimension, else ``None``."""
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.ndim > 0 else None
    sizes = (batch_size_of(child) for child in _children(batch) or ())
    return next((size for size in sizes if size is not None), None)


def _is_per_sample(node: Any, size: int) -> bool:
    """Whether a list or tuple has one entry per sample: strings, numbers, dicts of a sample's things."""
    if not isinstance(node, (list, tuple)) or hasattr(node, "_fields") or len(node) != size:
        return False
    return not any(isinstance(child, (Tensor, list, tuple)) for child in node)


def _first_item(node: Any, nominal: int | None) -> Tensor | Sequence[Any] | None:
    """The first tensor, or the first list of ``nominal`` tensors of one kind (dtype, dimensions): one per sample."""
    if isinstance(node, Tensor):
        return node if node.ndim > 0 else None
    tensors = isinstance(node, (list, tuple)) and len(node) == nominal and all(isinstance(x, Tensor) for x in node)
    alike = tensors and len({(x.dtype, x.ndim) for x in node}) == 1
    if alike and any(x.ndim == 0 or x.shape[0] != nominal for x in node):
        return node
    items = (_first_item(child, nominal) for child in _children(node) or ())
    return next((item for item in items if item is not None), None)


def split_batch(batch: Any, num_microbatches: int, nominal: int | None = None) -> list[tuple[Any, int]]:
    """Cut along the first dimension into at most ``num_microbatches`` pieces of nearly equal size.

    Tensors whose first dimension is the batch size are cut; so are lists and tuples of that length that hold one thing
    per sample (strings, ids, dicts). Everything else (masks shared by the batch, numbers) goes to every piece.
    Containers may be dicts, any mapping, lists, tuples, named tuples and dataclasses. A batch smaller than
    ``num_microbatches`` (a ragged last one) gives fewer pieces.

    Args:
        batch: what the loader gave.
        num_microbatches: pieces.
        nominal: the loader's batch size where it is known; it tells a list of tensors per sample from two batched
            tensors, and finds batches whose first dimension is not the samples.

    Returns:
        ``(piece, samples)`` per microbatch. With one microbatch the batch itself is passed on, untouched.

    Raises:
        ConfigError: when the batch holds nothing that can be cut along its first dimension.
    """
    if num_microbatches == 1:
        return [(batch, batch_size_of(batch) or 1)]
    first = _first_item(batch, nominal)
    if first is None or not len(first):
        raise ConfigError(
            f"num_microbatches={num_microbatches}: the batch ({type(batch).__name__}) holds no tensor to cut along "
            "its first dimension; use num_microbatches=1"
        )
    size = len(first)
    if nominal is not None and size != nominal and (size > nominal or _holds(batch, nominal)):
        raise ConfigError(
            f"num_microbatches={num_microbatches} cuts batches along the first dimension, but the first tensor of the "
            f"batch has {size} there and the loader's batch_size is {nominal}: collate samples along the first "
            "dimension, or use num_microbatches=1"
        )
    pieces = min(num_microbatches, size)
    bounds = [size * i // pieces for i in range(pieces + 1)]
    return [(_cut(batch, start, stop, size, first), stop - start) for start, stop in pairwise(bounds)]


def _holds(node: Any, size: int) -> bool:
    """Whether anything in a nest has ``size`` samples."""
    if isinstance(node, Tensor):
        return node.ndim > 0 and node.shape[0] == size
    return _is_per_sample(node, size) or any(_holds(child, size) for child in _children(node) or ())


def _cut(node: Any, start: int, stop: int, size: int, first: Any) -> Any:
    if isinstance(node, PackedSequence) or (isinstance(node, Tensor) and node.is_sparse):
        raise ConfigError(
            f"a {type(node).__name__} in the batch cannot be cut along the samples; pack it in the step, or use "
            "num_microbatches=1"
        )
    if isinstance(node, Tensor):
        # Copies: what a step writes into its batch must not reach another microbatch (nor autograd's count of writes).
        return (node[start:stop] if node.ndim > 0 and node.shape[0] == size else node).clone()
    if node is first or _is_per_sample(node, size):
        return node[start:stop]
    children = _children(node)
    if children is not None:
        return _rebuilt(node, [_cut(child, start, stop, size, first) for child in children])
    if hasattr(node, "to"):
        raise ConfigError(
            f"the batch holds a {type(node).__name__}, which cannot be cut along the samples; use num_microbatches=1, "
            "or collate into tensors, lists, dicts, tuples and dataclasses"
        )
    return node


def copied(batch: Any) -> Any:
    """A batch of its own for a run that must leave no trace: steps write into tensors and take things out of dicts.

    What refuses to be copied as a whole is copied tensor by tensor, in the containers that torch knows.
    """
    try:
        return deepcopy(batch)
    except Exception:  # tensors with a graph, the user's own objects
        return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, batch)


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
