"""Where Hydra's settings come from: the files of a composition, their lines, and defaults lists that cannot be met."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import GroupDefault, InputDefault, ResultDefault
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode

from lightning_megapar.config import nearest_name
from lightning_megapar.hydra_app.tree import join


@dataclass(frozen=True)
class Found:
    """One line of the report.

    Attributes:
        setting: what is named: a dotted path, a group, a file.
        text: what is wrong with it.
        where: ``"command line"`` or ``file:line``.
        near: what was probably meant, or ``None``.
        more: a further sentence, or ``""``.
    """

    setting: str
    text: str
    where: str
    near: str | None = None
    more: str = ""

    def __str__(self) -> str:
        name = repr(self.setting)
        said = f"{self.text} {name}" if self.text.startswith("unknown") else f"{name} {self.text}"
        hint = f"; did you mean {self.near!r}?" if self.near else ""
        return f"{said} ({self.where}){hint}" + (f"{'' if hint else '.'} {self.more}" if self.more else "")


class _Repairable(ConfigRepository):
    """A repository whose defaults lists can lose an entry that cannot be met, so that the rest still composes.

    Each file is read once, however often a configuration is composed.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        self.dropped: set[tuple[str, str, str]] = set()
        self._read: dict[str, ConfigResult | None] = {}
        super().__init__(config_search_path)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Repairable:
        # Hydra copies its repository for each composition; what was dropped and read stays common to all copies.
        twin = copy.copy(self)
        twin.sources = list(self.sources)
        return twin

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        self._read = {}  # other sources: a file of the same name may be another one
        super().initialize_sources(config_search_path)

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self._read:
            self._read[config_path] = super().load_config(config_path)
        loaded = copy.deepcopy(self._read[config_path])  # a composition merges into what it is given
        if loaded is not None and loaded.defaults_list is not None and self.dropped:
            loaded.defaults_list = [
                entry
                for entry in loaded.defaults_list
                if (config_path, *_entry(entry, config_path)) not in self.dropped
            ]
        return loaded


def _entry(entry: InputDefault, config_path: str) -> tuple[str, str]:
    """Absolute group (or config path) and the option(s) of an entry in the defaults list of ``config_path``."""
    if isinstance(entry, GroupDefault):
        return _absolute(entry.group or "", config_path), str(entry.value)
    return _absolute(getattr(entry, "path", None) or "", config_path), ""


def _absolute(name: str, config_path: str) -> str:
    parent = config_path.lstrip("/").rpartition("/")[0]
    return name[1:] if name.startswith("/") else f"{parent}/{name}" if parent else name


class Sources:
    """The files that an application composes its configuration from.

    Args:
        search_path: Hydra's search path, plugins and ``--config-dir`` included.
        config_name: the primary configuration.
        overrides: those that decide where files are looked for (``hydra.searchpath=...``).
    """

    def __init__(self, search_path: ConfigSearchPath, config_name: str | None, overrides: list[str]) -> None:
        self.config_name = config_name
        self.loader = ConfigLoaderImpl(search_path)
        self._repairable = _Repairable(search_path)
        self.loader.repository = self._repairable
        self._overrides = [o for o in overrides if o.startswith("hydra.searchpath=")]
        self.found: list[Found] = []
        self._repository: CachingConfigRepository | None = None

    def repository(self) -> CachingConfigRepository:
        """A view of all sources, those of ``hydra.searchpath`` included."""
        if self._repository is None:
            parse = self.loader._parse_overrides_and_create_caching_repo
            self._repository = parse(self.config_name, self._overrides)[1]
        return self._repository

    def groups(self) -> dict[str, list[str]]:
        """Every group (Hydra's own as well) and its options."""
        repository = self.repository()
        found: dict[str, list[str]] = {}

        def walk(parent: str) -> None:
            for name in repository.get_group_options(parent, ObjectType.GROUP):
                group = f"{parent}/{name}" if parent else name
                found[group] = repository.get_group_options(group, ObjectType.CONFIG)
                walk(group)

        walk("")
        return found

    def defaults(self, overrides: list[str]) -> Any:
        """Hydra's defaults list. Entries of files that cannot be met are recorded in ``found`` and left out."""
        while True:
            try:
                return self.loader.compute_defaults_list(self.config_name, overrides, RunMode.RUN)
            except ConfigCompositionException as error:
                blamed = self._blame(error, overrides)
                if blamed is None or blamed in self._repairable.dropped:
                    raise
                self._repairable.dropped.add(blamed)

    def _blame(self, error: ConfigCompositionException, overrides: list[str]) -> tuple[str, str, str] | None:
        """Record the entry of a defaults list that an error is about and return it."""
        missing = error.missing_cfg_file if isinstance(error, MissingConfigException) else None
        refused = re.search(r"Could not override '([^'@]+)", str(error))
        groups = self.groups()
        for path, entry in self._entries(overrides):
            group, option = _entry(entry, path)
            whole = f"{group}/{option}" if option else group
            if missing is not None and missing.lstrip("/") == whole:
                self.found.append(self._missing(path, group, option, groups))
                return path, group, option
            if missing is None and refused and refused.group(1) == group and entry.is_override():
                self.found.append(self._not_a_default(path, group, option, groups))
                return path, group, option
        return None

    def _missing(self, path: str, group: str, option: str, groups: dict[str, list[str]]) -> Found:
        where = self.where(path, group.rpartition("/")[2], option)
        if group in groups:
            options = groups[group]
            near = nearest_name(option, options)
            return Found(f"{group}: {option}", "unknown option", where, near, f"Options: {', '.join(options)}")
        return Found(f"{group}: {option}", "unknown group", where, nearest_name(group, groups))

    def _not_a_default(self, path: str, group: str, option: str, groups: dict[str, list[str]]) -> Found:
        where = self.where(path, group.rpartition("/")[2], option)
        tail = group.rpartition("/")[2]
        near = f"override /{tail}" if tail in groups else None
        if near is None:
            close = nearest_name(tail, groups)
            near = f"override /{close}" if close else None
        if group in groups:
            more = f"The group exists but is not in the defaults list: write '- /{group}: {option}' to add it."
            return Found(f"override /{group}", "unknown default", where, None, more)
        return Found(f"override {group}", "unknown group", where, near)

    def _entries(self, overrides: list[str]) -> Iterator[tuple[str, InputDefault]]:
        """The entries of all defaults lists that a composition may read."""
        repository = self.repository()
        chosen = dict(o.lstrip("+").split("=", 1) for o in overrides if "=" in o)
        queue = [self.config_name or ""] + [f"{group}/{option}" for group, option in chosen.items()]
        seen: set[str] = set()
        while queue:
            path = queue.pop(0)
            if path in seen:
                continue
            seen.add(path)
            loaded = repository.load_config(path) if repository.config_exists(path) else None
            for entry in (loaded.defaults_list or []) if loaded is not None else []:
                if entry.is_self():
                    continue
                yield path, entry
                group, option = _entry(entry, path)
                queue.append(f"{group}/{option}" if option else group)

    def where(self, config_path: str, *words: str) -> str:
        """``file:line`` of the first line in a file that holds all ``words``."""
        path, text = self._text(config_path)
        for number, line in enumerate(text.splitlines(), start=1):
            if all(word in line for word in words):
                return f"{path}:{number}"
        return path

    def _text(self, config_path: str) -> tuple[str, str]:
        for source in self.repository().get_sources():
            if not source.is_config(config_path):
                continue
            name = config_path if config_path.endswith(".yaml") else f"{config_path}.yaml"
            if source.scheme() == "file":
                path = Path(source.path) / name
                return shown_path(path), path.read_text(encoding="utf-8")
            if source.scheme() == "pkg":
                from importlib import resources

                text = resources.files(source.path).joinpath(name).read_text(encoding="utf-8")
                return f"pkg://{source.path}/{name}", text
            return f"{source.full_path()}{name}", ""
        return config_path, ""

    def origins(self, defaults: list[ResultDefault]) -> dict[str, str]:
        """Setting -> ``file:line`` that set it last."""
        found: dict[str, str] = {}
        for default in defaults:
            path = default.config_path or ""
            if path.startswith("hydra/") or default.package is None:
                continue
            package = default.package.replace("_global_", "").strip(".")
            shown, text = self._text(path)
            for setting, line in lines_of(text):
                found[join(package, setting) if package else setting] = f"{shown}:{line}"
        return found


def shown_path(path: Path) -> str:
    """A path relative to where the command was typed, when it lies below."""
    absolute = os.path.realpath(path)
    relative = os.path.relpath(absolute)
    return absolute if relative.startswith("..") else relative


def lines_of(text: str) -> list[tuple[str, int]]:
    """Dotted path and line number of every key in a YAML text."""
    found: list[tuple[str, int]] = []

    def walk(node: Any, path: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                name = join(path, key.value)
                found.append((name, key.start_mark.line + 1))
                walk(value, name)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                walk(value, join(path, index))

    walk(yaml.compose(text, Loader=yaml.SafeLoader), "")
    return found
