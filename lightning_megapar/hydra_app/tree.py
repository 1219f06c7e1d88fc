"""Walks a composed configuration and finds what nobody reads: the part of the check that needs no Hydra.

A node is judged by the first of these that applies: the signature of its ``_target_``, the schema's annotation for it
(a dataclass, ``dict[str, X]``, ``list[X]``, a plain type), or the set of paths that the application's own files define.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from lightning_megapar.config import FOREIGN_NAMES
from lightning_megapar.hydra_app.signatures import (
    INSTANTIATE_KEYS,
    Parameters,
    Target,
    TargetError,
    dataclass_in,
    dataclass_parameters,
    item_annotation,
    locate,
    mismatch,
    parameters,
)

HABITS: dict[str, str] = {
    "batch_size": "global_batch_size",
    "block_size": "sequence_length",
    "checkpoint": "resume",
    "ckpt_path": "resume",
    "context_length": "sequence_length",
    "d_model": "hidden_size",
    "epochs": "max_epochs",
    "gpus": "devices",
    "grad_clip": "gradient_clip_val",
    "learning_rate": "lr",
    "n_embd": "hidden_size",
    "n_head": "num_heads",
    "n_layer": "num_layers",
    "num_gpus": "devices",
    "output_dir": "run_dir",
    "path": "source",
    "save_dir": "run_dir",
    "seq_len": "sequence_length",
    "steps": "max_steps",
}
"""Names that other training scripts use for settings that exist here."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a setting.

    Attributes:
        setting: dotted path, such as ``model.num_layrs``.
        text: what is wrong with it; starts with ``unknown`` for a name that nobody reads.
        near: the setting or value that was probably meant.
    """

    setting: str
    text: str
    near: str | None = None


def join(path: str, key: object) -> str:
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else str(key)


def _signature(target: str) -> Parameters | TargetError:
    try:
        return parameters(locate(target))
    except TargetError as error:
        return error


class TreeCheck:
    """One pass over a configuration; ``problems`` and ``legal`` hold the result.

    Args:
        schema: a dataclass that describes the root, or ``None``.
        defined: paths that count as known where neither a signature nor the schema says anything; ``None`` accepts all
            names there.
        import_targets: whether ``_target_`` is imported to read its signature.
    """

    def __init__(
        self, schema: type | None = None, defined: set[str] | None = None, import_targets: bool = True
    ) -> None:
        self.schema = schema
        self.defined = defined
        self.import_targets = import_targets
        self.problems: list[Problem] = []
        self.all_paths: set[str] = set()
        self._raw: Any = {}
        self.legal: set[str] = set()
        """Every setting that would be accepted, set or not."""

    def run(self, config: DictConfig) -> list[Problem]:
        self.all_paths = defined_paths(config)
        self._raw = OmegaConf.to_container(config, resolve=False)
        self._node(config, "", self.schema if self.schema is not None else Any)
        unknown = [p for p in self.problems if p.text.startswith("unknown")]
        self.legal -= {p.setting for p in unknown}
        named = [
            Problem(p.setting, p.text, nearest_setting(p.setting, self.legal)) if p in unknown and p.near is None else p
            for p in self.problems
        ]
        self.problems = list(dict.fromkeys(named))
        return self.problems

    def _node(self, node: DictConfig, path: str, annotation: Any) -> None:
        if "_target_" in node:
            self._target(node, path)
            return
        kind = dataclass_in(annotation)
        if kind is not None:
            known = dataclass_parameters(kind)
            self._children(node, path, known)
            absent = [join(path, name) for name in known.required if name not in node]
            self.problems += [Problem(name, "is missing") for name in absent]
            return
        if annotation is Target:
            near = get_close_matches("_target_", [str(key) for key in node], n=1, cutoff=0.6)
            self.problems.append(
                Problem(join(path, near[0]), "unknown setting", join(path, "_target_"))
                if near
                else Problem(path, "has no _target_, so nothing can be built from it")
            )
            return
        inside = item_annotation(annotation)
        for key in node:
            name = join(path, key)
            if inside is None and annotation is Any and not self._is_defined(path, key):
                self.problems.append(Problem(name, "unknown setting"))
                continue
            self.legal.add(name)
            self._value(node, key, name, Any if inside is None else inside)

    def _is_defined(self, path: str, key: Any) -> bool:
        """Whether a key is known in a node, or in the one that the node stands for by an interpolation."""
        return self.defined is None or not self.defined.isdisjoint((join(path, key), join(self._source(path), key)))

    def _target(self, node: DictConfig, path: str) -> None:
        self.legal.add(join(path, "_target_"))
        target = self._read(node, "_target_", join(path, "_target_"))
        if not self.import_targets or not isinstance(target, str):
            self._children(node, path, Parameters(open=True))
            return
        found = _signature(target)
        if isinstance(found, TargetError):
            self.problems.append(Problem(join(path, "_target_"), f"is {target!r}, but {found.reason}", found.nearest))
            self._children(node, path, Parameters(open=True))
            return
        self._children(node, path, found)

    def _children(self, node: DictConfig, path: str, known: Parameters) -> None:
        self.legal.update(join(path, name) for name in known.annotations)
        for key in node:
            name = join(path, key)
            if key in INSTANTIATE_KEYS and "_target_" in node:
                continue
            if str(key) not in known.annotations and not known.open:
                self.problems.append(Problem(name, "unknown setting"))
                continue
            self.legal.add(name)
            self._value(node, key, name, known.annotations.get(str(key), Any))

    def _value(self, parent: DictConfig | ListConfig, key: Any, path: str, annotation: Any) -> None:
        value = self._read(parent, key, path)
        if value is _UNREADABLE:
            return
        plain = OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value
        targeted = isinstance(value, DictConfig) and "_target_" in value
        expected = None if targeted else mismatch(plain, annotation)
        if expected is not None:
            shown = "a mapping" if isinstance(plain, dict) else "a list" if isinstance(plain, list) else repr(plain)
            self.problems.append(Problem(self._source(path), f"is {shown}; expected {expected}"))
        if isinstance(value, DictConfig):
            self._node(value, path, annotation)
        elif isinstance(value, ListConfig):
            inside = item_annotation(annotation)
            for index in range(len(value)):
                self._value(value, index, join(path, index), Any if inside is None else inside)

    def _read(self, node: DictConfig | ListConfig, key: Any, path: str) -> Any:
        """A value with its interpolations resolved, or ``_UNREADABLE`` when only a running job could resolve them."""
        try:
            return node[key]
        except (InterpolationKeyError, InterpolationToMissingValueError) as error:
            source = self._source(path)
            wanted = re.search(r"'([^']+)'", str(error))
            near = nearest_setting(wanted.group(1), self.all_paths - {path, source}) if wanted else None
            self.problems.append(Problem(source, f"is {self._at(source)!r}, which refers to nothing", near))
        except MissingMandatoryValue:
            self.problems.append(Problem(self._source(path), "must be given"))
        except OmegaConfBaseException:
            pass  # a resolver that needs a running job, such as ${hydra:...}
        return _UNREADABLE

    def _at(self, path: str) -> Any:
        """The value at a path as the files spell it; ``None`` where there is none."""
        node = self._raw
        for part in path.replace("[", ".").replace("]", "").split("."):
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
            else:
                return None
        return node

    def _source(self, path: str) -> str:
        """The setting that a value really comes from: interpolations such as ``${seed}`` are followed."""
        for _ in range(20):
            spelt = _INTERPOLATION.fullmatch(str(self._at(path)))
            if spelt is None or self._at(spelt.group(1)) is None:
                break
            path = spelt.group(1)
        return path


_UNREADABLE = object()
_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")


def defined_paths(config: DictConfig) -> set[str]:
    """Every dotted path of a configuration, nodes and leaves."""
    found: set[str] = set()

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                found.add(join(path, key))
                walk(value, join(path, key))
        elif isinstance(node, list):
            for index, value in enumerate(node):
                walk(value, join(path, index))

    walk(OmegaConf.to_container(config, resolve=False), "")
    return found


def nearest_setting(setting: str, legal: Iterable[str]) -> str | None:
    """The legal setting that a dotted path most likely means, or ``None``.

    In this order: what another framework's name is called here, a close name at the same place, the same name
    elsewhere, a close path, a close name elsewhere.
    """
    candidates = sorted(legal, key=lambda path: (path.count("."), path))
    parent, _, name = setting.rpartition(".")
    by_name: dict[str, list[str]] = {}
    for path in candidates:
        by_name.setdefault(path.rpartition(".")[2], []).append(path)

    def closest(paths: list[str]) -> str:
        # Of equally named settings the one in the most similar place; the shallowest of equals.
        return max(paths, key=lambda path: SequenceMatcher(None, setting, path).ratio())

    siblings = [path.rpartition(".")[2] for path in candidates if path.rpartition(".")[0] == parent]
    if (name in FOREIGN_NAMES or name in HABITS) and name not in siblings:
        ours = FOREIGN_NAMES.get(name, HABITS.get(name, "")).split()[0]
        if ours in siblings:
            return join(parent, ours)
        if ours in by_name:
            return by_name[ours][0]
    near = get_close_matches(name, siblings, n=1, cutoff=0.6)
    if near:
        return join(parent, near[0])
    if name in by_name:
        return closest(by_name[name])
    near = get_close_matches(setting, candidates, n=1, cutoff=0.7)
    if near and SequenceMatcher(None, name, near[0].rpartition(".")[2]).ratio() >= 0.5:
        return near[0]
    near = get_close_matches(name, list(by_name), n=1, cutoff=0.75)
    return closest(by_name[near[0]]) if near else None
