"""Keep the results of matrix products and of attention; run the rest of a forward again.

What lies between the products (norms, activations, dropout, residual sums) takes much of the memory and little of the
time. torch's own selective checkpointing does the same, but allows one backward for each forward; a step with a
gradient penalty, or one that retains its graph, has several.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.convolution.default),
        *(aten._scaled_mm.default, aten._grouped_mm.default),
        *(aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default),
        *(aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default),
    }
)
"""Operations whose results are kept."""


class ProductsChangedError(RuntimeError):
    """A forward writes into the result of a product, which can then not be kept."""


class _Kept:
    """Results in the order in which they were computed, and their versions when nobody had written into them yet."""

    def __init__(self) -> None:
        self.results: list[tuple[Any, list[int]]] = []


class Keeping(TorchDispatchMode):
    """Around a first run."""

    supports_higher_order_operators = True

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            kept = tree_map(_alias, output)
            self._kept.results.append((kept, _versions(kept)))
        return output


class Using(TorchDispatchMode):
    """Around a run that follows."""

    supports_higher_order_operators = True

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept
        self._next = 0

    def __enter__(self) -> Using:
        self._next = 0
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        output, versions = self._kept.results[self._next]
        self._next += 1
        if _versions(output) != versions:
            raise ProductsChangedError(
                f"the result of {func} was kept for the backward and has been written into since (an operation in "
                "place behind a linear layer, a convolution or attention): such a block cannot keep 'products'; use "
                "other options of recompute"
            )
        return tree_map(_alias, output)


class Checking(TorchDispatchMode):
    """Around a run that does not count: whether results of products are written into, also by views.

    Raises:
        ProductsChangedError: at its end.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._results: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self._results += [(leaf, leaf.clone()) for leaf in leaves]
        return output

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None and any(not _alike(result, copy) for result, copy in self._results):
            raise ProductsChangedError(
                "the result of a product is written into (an operation in place behind a linear layer, a convolution, "
                "attention or within a recurrent layer): such a block cannot keep 'products'; use other options of "
                "recompute"
            )


def _alike(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def products_kept() -> tuple[Keeping, Using]:
    """Contexts of a first run and of those that follow, as ``torch.utils.checkpoint`` takes them."""
    kept = _Kept()
    return Keeping(kept), Using(kept)


def _alias(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _versions(nest: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]
