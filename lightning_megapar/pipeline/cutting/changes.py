"""What a module changes in the containers that it is called with.

Some models hand one dict (or another object) to every block: early blocks put tensors in, late ones take them out. On
another stage the early blocks do not run, so what they put in is put in for them.
"""

from __future__ import annotations

from collections.abc import MutableMapping, MutableSequence, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn


class Change(NamedTuple):
    """New items of one argument.

    Args:
        where: position or keyword of the argument.
        kind: ``dict`` (items by key), ``list`` (all of its items) or ``object`` (attributes by name).
        items: keys and values.
    """

    where: int | str
    kind: str
    items: dict[Any, Any]


class Changed(NamedTuple):
    """What a module returned, and what it changed on the way."""

    returned: Any
    changes: tuple[Change, ...]


class Snapshot(NamedTuple):
    """A container among the arguments, and its items before the call."""

    where: int | str
    kind: str
    container: Any
    items: dict[Any, Any]


def _items(container: Any) -> tuple[str, dict[Any, Any]] | None:
    if isinstance(container, MutableMapping):
        return "dict", dict(container)
    if isinstance(container, MutableSequence):
        return "list", dict(enumerate(container))
    own = getattr(container, "__dict__", None)
    if own is None or isinstance(container, (Tensor, nn.Module, type)) or callable(container):
        return None
    return "object", dict(own)


def snapshot(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Snapshot]:
    """The containers among a call's arguments, as they are now."""
    found = []
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for where, value in arguments:
        items = _items(value)
        if items is not None:
            found.append(Snapshot(where, items[0], value, items[1]))
    return found


def changes(before: Sequence[Snapshot]) -> tuple[Change, ...]:
    """What is new in the containers of a snapshot."""
    found = []
    for where, kind, container, old in before:
        now = _items(container)
        assert now is not None
        new = {key: value for key, value in now[1].items() if key not in old or old[key] is not value}
        if new or (kind == "list" and len(now[1]) != len(old)):
            found.append(Change(where, kind, now[1] if kind == "list" else new))
    return tuple(found)


def apply_changes(found: Sequence[Change], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Do to the arguments of another call what a module did to its own."""
    for change in found:
        container = args[change.where] if isinstance(change.where, int) else kwargs[change.where]
        if change.kind == "dict":
            container.update(change.items)
        elif change.kind == "list":
            container[:] = change.items.values()
        else:
            vars(container).update(change.items)
