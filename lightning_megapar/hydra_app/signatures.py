"""What a callable takes: names, required ones, and whether a plain value fits its annotation."""

from __future__ import annotations

import importlib
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, Optional, Union, get_args, get_origin

INSTANTIATE_KEYS = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
"""Keys that ``hydra.utils.instantiate`` reads itself."""


class Target:
    """As an annotation in a schema: a node that is instantiated, so it must have a ``_target_``."""


class CsvFile:
    """As an annotation in a schema: the path of a file whose name ends in ``.csv``."""


class TargetError(LookupError):
    """A ``_target_`` that names nothing importable; ``nearest`` is a dotted path that does exist, or ``None``."""

    def __init__(self, path: str, reason: str, nearest: str | None = None) -> None:
        super().__init__(f"{path!r}: {reason}")
        self.reason = reason
        self.nearest = nearest


@dataclass(frozen=True)
class Parameters:
    """The keyword arguments of a callable.

    Attributes:
        annotations: name -> annotation (``Any`` where there is none).
        required: names without a default.
        open: whether any other name is taken too (``**kwargs``).
    """

    annotations: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    open: bool = False


@cache
def locate(path: str) -> Any:
    """Import the object with a dotted path.

    Raises:
        TargetError: when a part of the path does not exist.
    """
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise TargetError(path, "is not a dotted path")
    for end in range(len(parts), 0, -1):
        module_name = ".".join(parts[:end])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
                raise TargetError(path, f"importing {module_name} failed: {error}") from error
            continue
        except Exception as error:
            raise TargetError(path, f"importing {module_name} failed: {type(error).__name__}: {error}") from error
        for index, name in enumerate(parts[end:], start=end):
            if not hasattr(found, name):
                near = get_close_matches(name, dir(found), n=1, cutoff=0.6)
                where = ".".join(parts[:index])
                raise TargetError(path, f"{where} has no {name!r}", f"{where}.{near[0]}" if near else None)
            found = getattr(found, name)
        return found
    raise TargetError(path, f"there is no module {parts[0]!r}")


@cache
def parameters(function: Callable[..., Any]) -> Parameters:
    """The keyword arguments of a function or class; open when it cannot be inspected."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return Parameters(open=True)
    hints = _hints(function)
    named = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    return Parameters(
        annotations={
            name: Optional[hints.get(name, Any)] if parameter.default is None else hints.get(name, Any)  # noqa: UP045
            for name, parameter in named.items()
        },
        required=tuple(name for name, parameter in named.items() if parameter.default is parameter.empty),
        # By convention, **unknown is there to be refused with a message.
        open=any(p.kind is p.VAR_KEYWORD and p.name != "unknown" for p in signature.parameters.values()),
    )


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    owner: Any = function
    if inspect.isclass(function) and not is_dataclass(function):  # a dataclass's fields may come from several modules
        owner = function.__init__  # type: ignore[misc]
    try:
        return typing.get_type_hints(inspect.unwrap(owner))
    except Exception:
        # An annotation that only exists for a type checker: the names can still be checked, the types cannot.
        return {}


def dataclass_in(annotation: Any) -> type | None:
    """The dataclass that an annotation allows, such as ``GPTConfig`` in ``GPTConfig | dict``."""
    return next((kind for kind in _members(annotation) if isinstance(kind, type) and is_dataclass(kind)), None)


def dataclass_parameters(kind: type) -> Parameters:
    """A dataclass read as a schema: its ``init`` fields."""
    taken = parameters(kind)
    names = [entry.name for entry in fields(kind) if entry.init]
    return Parameters(annotations={name: taken.annotations.get(name, Any) for name in names}, required=taken.required)


def item_annotation(annotation: Any) -> Any:
    """What the values of a ``dict[str, X]`` or the items of a ``list[X]`` must be; ``None`` for other annotations."""
    for kind in _members(annotation):
        origin, inside = get_origin(kind), get_args(kind)
        if isinstance(origin, type) and inside:
            if issubclass(origin, Mapping):
                return inside[-1]
            if issubclass(origin, Sequence):
                return inside[0]
    return None


def mismatch(value: Any, annotation: Any) -> str | None:
    """What was expected, when a value from a configuration file cannot be what the annotation says.

    ``None`` means that it fits, or that the annotation holds a type that a file could not spell anyway: no judgement.
    """
    allowed: list[type] = []
    choices: list[Any] = []
    containers: list[Any] = []
    endings: list[str] = []
    for kind in _members(annotation):
        if get_origin(kind) is Literal:
            choices.extend(get_args(kind))
        elif kind is CsvFile:
            endings.append(".csv")
        elif kind in (int, float, bool, str, types.NoneType):
            allowed.append(kind)
        elif isinstance(kind, type) and issubclass(kind, os.PathLike):
            allowed.append(str)
        elif kind is Target or (isinstance(kind, type) and is_dataclass(kind)):
            containers.append(Mapping)
        elif _is_container(kind):
            containers.append(get_origin(kind) or kind)
        else:
            return None
    if any(type(choice) is type(value) and choice == value for choice in choices):
        return None
    if isinstance(value, (Mapping, list)):
        wanted = Mapping if isinstance(value, Mapping) else Sequence
        fits = any(issubclass(kind, wanted) for kind in containers)
    elif value is None:
        fits = types.NoneType in allowed
    elif isinstance(value, bool):
        fits = bool in allowed
    elif isinstance(value, int):
        fits = int in allowed or float in allowed
    elif isinstance(value, float):
        fits = float in allowed
    else:
        fits = isinstance(value, str) and (str in allowed or value.lower().endswith(tuple(endings)))
    return None if fits else describe(annotation)


def describe(annotation: Any) -> str:
    """An annotation in the words of a configuration file."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}
    shown: list[str] = []
    for kind in _members(annotation):
        if get_origin(kind) is Literal:
            shown.extend(repr(choice) for choice in get_args(kind))
        elif kind is Target:
            shown.append("a mapping with _target_")
        elif kind is CsvFile:
            shown.append("the path of a .csv file")
        elif _is_container(kind):
            shown.append("a mapping" if issubclass(get_origin(kind) or kind, Mapping) else "a list")
        elif isinstance(kind, type) and issubclass(kind, os.PathLike):
            shown.append("a path")
        elif isinstance(kind, type) and is_dataclass(kind):
            shown.append(f"the settings of {kind.__name__}")
        else:
            shown.append(words.get(kind, str(kind)))
    return " or ".join(dict.fromkeys(shown))


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in _members(part))
    return (types.NoneType,) if annotation is None else (annotation,)


def _is_container(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, (Mapping, Sequence)) and origin is not str
