"""Values that another stage computes: the shape is here, the numbers are not.

On every stage the whole user step runs, so on a later stage it also does what belongs to an earlier one: it adds
positions to an embedding that lives elsewhere, hands the sum to a block that lives elsewhere. :class:`Away` tensors
flow through that part of the step. They know shape, dtype and device, and from which modules' results they were
computed (their sources). An operation on them gives another one; nothing is computed, nothing is approximated. When
one reaches something that runs here (a local block, the loss, a number that decides a branch) its numbers are needed
after all: the rehearsal of the first batch notes the sources, which from then on travel with the boundary. A step that
later needs a source that does not travel is stopped, whatever the values are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten


class StageError(RuntimeError):
    """The user's step needs something that lives on another stage; the message says what to change."""


class Source(NamedTuple):
    """One tensor that a module returned.

    Args:
        unit: dotted name of the module.
        call: which call of it in a microbatch, from 0.
        leaf: which tensor of what it returned, from 0; ``OWNED`` for a parameter or buffer of it.
    """

    unit: str
    call: int
    leaf: int

    def describe(self) -> str:
        if self.leaf == OWNED:
            return f"a parameter or buffer of {self.unit!r}"
        return f"what {self.unit!r} returned" + (f" (call {self.call + 1})" if self.call else "")


OWNED = -1


@dataclass
class Ledger:
    """What a stage found out that it needs.

    Args:
        device: where absent values would be.
        recording: note needs and go on with zeros (the rehearsal), instead of stopping.
        needs: sources whose numbers are needed here.
        copies: modules whose travelling result the step modified in place.
        changing: modules that change containers among their arguments.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    recording: bool = False
    needs: set[Source] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    changing: set[str] = field(default_factory=set)

    def use(self, sources: Iterable[Source]) -> None:
        """Called when the numbers of these sources are needed on this stage.

        Raises:
            StageError: when they cannot travel, or did not in the first step.
        """
        sources = sorted(sources)
        owned = [s for s in sources if s.leaf == OWNED]
        if owned:
            name = owned[0].unit
            raise StageError(
                f"{owned[0].describe()} is used on a pipeline stage that does not hold it (as in an output layer that "
                f"reads the embedding's weight, or a module used both before and after the stack). Keep it on every "
                f"stage: pipeline_keep={{{name!r}: 'all'}}"
            )
        if not self.recording:
            named = ", ".join(s.describe() for s in sources[:3])
            raise StageError(
                f"this call of the step needs {named} on a later pipeline stage. The rehearsal before the first step "
                "of its kind did not, so that it does not travel there: the step differs from call to call (by what it "
                "counts, by batch_idx, by its data, by random numbers), and it is called once per microbatch. Use the "
                "same results in every call (weigh by zero what is not wanted), or keep the module on every stage: "
                f"pipeline_keep={{{sources[0].unit!r}: 'all'}}"
            )
        self.needs.update(sources)


_SHAPE_ONLY = {
    op
    for name in [
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "rand_like",
        "randn_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new_empty_strided",
    ]
    for op in [getattr(aten, name)]
}
_VALUE_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Away(Tensor):
    """A tensor without numbers. Use :meth:`make`."""

    _sources: frozenset[Source]
    _ledger: Ledger

    @staticmethod
    def make(like: Tensor, device: torch.device, ledger: Ledger, sources: frozenset[Source]) -> Away:
        """Shape, strides and dtype of ``like`` (any device, often meta), as if on ``device``."""
        made: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Away, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        made._sources = sources
        made._ledger = ledger
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def numbers(self) -> Tensor:
        """Zeros while needs are recorded (they are noted); an error otherwise."""
        self._ledger.use(self._sources)
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        if zeros.is_floating_point() and torch.is_grad_enabled():
            zeros = zeros.requires_grad_().clone()  # no leaf: operations in place are fine on what a module returned
        return zeros

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.numbers().detach().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.numbers().tolist()

    def data_ptr(self) -> int:
        return self.numbers().data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        names = sorted({s.unit for s in self._sources})
        return f"<{self.dtype} {tuple(self.shape)} of another pipeline stage, from {', '.join(names)}>"

    def __deepcopy__(self, memo: Any) -> Away:
        return Away.make(self, self.device, self._ledger, self._sources)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.numbers().detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        away = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Away)]
        ledger = away[0]._ledger
        sources = frozenset().union(*(leaf._sources for leaf in away))
        if func.overloadpacket in _SHAPE_ONLY:
            return func(*tree_map(_blank, args), **tree_map(_blank, kwargs))
        if any(tag in func.tags for tag in _VALUE_TAGS) or _writes_outside(func, args, kwargs):
            return func(*tree_map(present, args), **tree_map(present, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            # The generator must go on as on the stage that has the numbers: later draws would differ otherwise.
            shapes = func(*tree_map(_zeros, args), **tree_map(_zeros, kwargs))
            return _like(func, args, shapes, away[0].device, ledger, sources)
        device = torch.device(kwargs.get("device") or away[0].device)
        meta_kwargs = dict(kwargs, device=torch.device("meta")) if kwargs.get("device") is not None else kwargs
        try:
            shapes = func(*tree_map(_to_meta, args), **tree_map(_to_meta, meta_kwargs))
        except Exception:  # an operation without shape rules, or one that looks at values
            return func(*tree_map(present, args), **tree_map(present, kwargs))
        return _like(func, args, shapes, device, ledger, sources)


def _like(func: Any, args: Any, shapes: Any, device: torch.device, ledger: Ledger, sources: frozenset[Source]) -> Any:
    """What an operation returns, without its numbers."""
    if func._schema.is_mutable and args and isinstance(args[0], Away):
        args[0]._sources = sources
        return args[0]
    return tree_map(lambda x: Away.make(x, device, ledger, sources) if isinstance(x, Tensor) else x, shapes)


def present(leaf: Any) -> Any:
    """A leaf with its numbers: an :class:`Away` tensor's are asked for, everything else is returned as it is."""
    return leaf.numbers() if isinstance(leaf, Away) else leaf


def _blank(leaf: Any) -> Any:
    if not isinstance(leaf, Away):
        return leaf
    return torch.empty((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)


def _zeros(leaf: Any) -> Any:
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if isinstance(leaf, Away) else leaf


def _to_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _writes_outside(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the operation writes into an ordinary tensor, which cannot become one without numbers."""
    if not func._schema.is_mutable:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if any(isinstance(leaf, Tensor) and not isinstance(leaf, Away) for leaf in tree_leaves(value)):
            return True
    return False
