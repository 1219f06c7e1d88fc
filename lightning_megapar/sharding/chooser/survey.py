"""What a module's forward does with its linear layers: one traced run, read by the chooser.

The order in which linear layers run and the storage that each reads say which of them form a pair: layers of one parent
that read one tensor (query, key, value; gate, up), then one layer whose output has the width of their input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lightning_megapar.layers.base import ParallelLayer
from lightning_megapar.layers.foreign import is_linear, is_plain_linear, widths
from lightning_megapar.sharding.names import BlockNames


@dataclass(frozen=True)
class Pair:
    """Column layers that read one tensor, and the row layer that closes the region.

    Args:
        columns: dotted names.
        row: dotted name.
        inner_width: inputs of the row layer.
        outputs: outputs of each column layer.
        feeders: low-rank products before the columns, whole on every rank.
        inner: columns and rows that read what is inside the region already (behind a feeder).
        between: modules with parameters that run between the columns and the row.
    """

    columns: tuple[str, ...]
    row: str
    inner_width: int
    outputs: tuple[int, ...]
    feeders: tuple[str, ...] = ()
    inner: frozenset[str] = frozenset()
    between: tuple[str, ...] = ()

    @property
    def members(self) -> set[str]:
        return {*self.columns, self.row, *self.feeders}


@dataclass(frozen=True)
class Survey:
    """What one run showed.

    Args:
        pairs: kind -> pairs of that kind, in order of their first call.
        singles: starred name -> linear layers that are in no pair.
        arguments: dotted name -> shapes of the tensors that a module was called with, first call.
        called: modules that ran at all.
        mapped: modules that ran on tensors without storage, inside ``torch.func.vmap``.
    """

    pairs: dict[tuple[str, ...], list[Pair]]
    singles: dict[str, list[str]]
    arguments: dict[str, list[tuple[int, ...]]]
    called: frozenset[str]
    mapped: frozenset[str] = frozenset()


def survey(module: nn.Module, run: Callable[[nn.Module], Any], skip: set[str]) -> Survey:
    """Trace one run.

    Args:
        module: whole and real; it is run, not changed.
        run: calls it on a batch.
        skip: dotted names of layers that a plan has dealt with.
    """
    kept: list[Tensor] = []  # storages must stay alive: a freed one would be taken again by another tensor
    calls: list[tuple[str, int]] = []
    arguments: dict[str, list[tuple[int, ...]]] = {}
    called: set[str] = set()
    mapped: set[str] = set()
    handles = []

    def watch(name: str) -> Callable[..., None]:
        def before(child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [t for t in [*args, *kwargs.values()] if isinstance(t, Tensor)]
            arguments.setdefault(name, [tuple(t.shape) for t in tensors])
            called.add(name)
            if any(_storage_of(t) is None for t in tensors):
                mapped.add(name)
            if tensors and child._parameters and (storage := _storage_of(tensors[0])) is not None:
                kept.append(tensors[0])
                calls.append((name, storage))

        return before

    for name, child in module.named_modules():
        handles.append(child.register_forward_pre_hook(watch(name), with_kwargs=True))
    try:
        run(module)  # with gradients: without, torch's encoder layers take a path that calls none of their modules
    finally:
        for handle in handles:
            handle.remove()
    held = dict(module.named_modules())
    order = [
        (i, name, storage)
        for i, (name, storage) in enumerate(calls)
        if is_plain_linear(held[name]) and name not in skip and not isinstance(held[name], ParallelLayer)
    ]
    width = {name: widths(held[name]) for _, name, _ in order}
    pairs = _low_rank(order, width)
    taken = set().union(*(p.members for p in pairs)) if pairs else set()
    names_between = [name for name, _ in calls]
    pairs = [p for p in _neighbours(order, width, names_between, held) if not p.members & taken] + pairs
    taken = set().union(*(p.members for p in pairs)) if pairs else set()
    star = BlockNames(held).star
    kinds: dict[tuple[str, ...], list[Pair]] = {}
    for pair in pairs:
        # The same for pairs of other blocks.
        kinds.setdefault((*map(star, pair.columns), star(pair.row)), []).append(pair)
    singles: dict[str, list[str]] = {}
    for _, name, _ in order:
        if name not in taken and name not in singles.setdefault(star(name), []):
            singles[star(name)].append(name)
    return Survey(kinds, singles, arguments, frozenset(called), frozenset(mapped))


def _storage_of(tensor: Tensor) -> int | None:
    """Where a tensor's values lie; ``None`` for one that has no storage of its own (inside ``torch.func.vmap``)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None


Ordered = list[tuple[int, str, int]]
Widths = dict[str, tuple[int, int]]


def parent_of(name: str) -> str:
    return name.rpartition(".")[0]


def _neighbours(order: Ordered, width: Widths, calls: list[str], held: dict[str, nn.Module]) -> list[Pair]:
    """Layers of one parent that read one tensor, followed by one layer of the width that they give."""
    groups: list[tuple[list[tuple[int, str]], int]] = []
    for position, name, storage in order:
        if groups and groups[-1][1] == storage and parent_of(groups[-1][0][-1][1]) == parent_of(name):
            groups[-1][0].append((position, name))
        else:
            groups.append(([(position, name)], storage))
    names = BlockNames(held)
    found: list[Pair] = []
    seen: set[tuple[tuple[str, ...], str]] = set()
    used: set[int] = set()
    # A way back to the width that was read is a pair for sure; what else follows each other may be one (a head of two
    # layers), but must not take a layer from another.
    for any_width in (False, True):
        at = 0
        while at < len(groups) - 1:
            pair = None if {at, at + 1} & used else _pair_of(groups[at][0], groups[at + 1][0], width, any_width)
            # What pairs across blocks does not do so in all of them, and a rule speaks of all.
            if pair is not None and len({names.address(name) for name in (*pair.columns, pair.row)}) > 1:
                pair = None
            if pair is None:
                at += 1
                continue
            used |= {at, at + 1}
            if (pair.columns, pair.row) not in seen:
                seen.add((pair.columns, pair.row))
                between = calls[groups[at][0][0][0] : groups[at + 1][0][0][0]]
                others = tuple(dict.fromkeys(n for n in between if not is_linear(held[n])))
                found.append(replace(pair, between=others))
            at += 2
    return found


def _pair_of(
    first: list[tuple[int, str]], second: list[tuple[int, str]], width: Widths, any_width: bool
) -> Pair | None:
    row = second[0][1]
    inner_width, back = width[row]
    columns = tuple(dict.fromkeys(name for _, name in first))
    outputs = tuple(width[name][1] for name in columns)
    fits = any(
        out == inner_width or (out > inner_width and (out % inner_width == 0 or (out - inner_width) % 2 == 0))
        for out in outputs
    )
    if len(second) != 1 or not fits or row in columns or (back != width[columns[0]][0] and not any_width):
        return None
    return Pair(columns, row, inner_width, outputs)


def _low_rank(order: Ordered, width: Widths) -> list[Pair]:
    """Products of products in one module, then its output (multi-head latent attention)."""
    by_parent: dict[str, dict[str, int]] = {}
    for _, name, storage in order:
        by_parent.setdefault(parent_of(name), {}).setdefault(name, storage)
    found = []
    for members in by_parent.values():
        layers = list(members.items())
        if len(layers) < 3:
            continue
        (first, start), row = layers[0], layers[-1][0]
        body = layers[:-1]
        if width[row][1] != width[first][0] or all(storage == start for _, storage in body):
            continue
        inner_width = width[row][0]
        columns = tuple(n for n, storage in body if storage != start or width[n][1] >= inner_width)
        feeders = tuple(n for n, _ in body if n not in columns)
        if not feeders or not columns:
            continue
        inner = frozenset(n for n, storage in layers if storage != start)
        found.append(Pair(columns, row, inner_width, tuple(width[n][1] for n in columns), feeders, inner))
    return found
