"""No silent setting: a name that nobody reads is refused before any rank starts, in one list, with its neighbour.

Hydra's struct mode guards plain overrides alone; a misspelt key in an experiment file or a group file passes. Here
every key of the composed configuration is judged (:mod:`lightning_megapar.hydra_app.tree`), every override and every
defaults list as well, and each finding says which file and line, or that it stood on the command line.

From somebody's own application::

    @hydra.main(version_base="1.3", config_path="conf", config_name="train")
    def main(cfg):
        refuse_unknown_settings(cfg)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from lightning_megapar.config import ConfigError, nearest_name
from lightning_megapar.hydra_app.sources import Found, Sources, shown_path
from lightning_megapar.hydra_app.tree import Problem, TreeCheck, defined_paths, join, nearest_setting

if TYPE_CHECKING:
    from hydra._internal.defaults_list import DefaultsList

COMMAND_LINE = "command line"
OVERLAYS = ("experiment", "debug")
"""Groups whose options change settings that other files define; a name that only they define is a misspelt one."""
_MOST_VARIATIONS = 64


class UnknownSettings(ConfigError):
    """Settings that nobody reads, or that cannot be what they are; ``found`` lists them."""

    def __init__(self, found: Sequence[Found]) -> None:
        self.found = tuple(found)
        super().__init__("\n".join(str(entry) for entry in found))


def refuse_unknown_settings(cfg: DictConfig, schema: type | None = None, overlays: Sequence[str] = OVERLAYS) -> None:
    """Inside a running ``@hydra.main`` task: refuse its configuration when a setting is unknown.

    Args:
        cfg: the task's configuration (also after the task changed it).
        schema: a dataclass that describes the root, or ``None``: then what the application's files define is known.
        overlays: groups that may only change what other files define.

    Raises:
        UnknownSettings: with every finding in one message.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    loader = GlobalHydra.instance().config_loader()
    overrides = [*hydra.overrides.hydra, *hydra.overrides.task]
    check = SettingsCheck(loader.get_search_path(), hydra.job.config_name, schema, overlays)
    found = check.run(overrides)
    if not found:
        found = check.judge(cfg, check.sources.defaults(check.group_overrides).defaults)
    if found:
        raise UnknownSettings(found)


class SettingsCheck:
    """The check of one command against one application's files.

    Args:
        search_path: where Hydra looks for files.
        config_name: the primary configuration.
        schema: a dataclass that describes the root, or ``None``.
        overlays: groups that may only change what other files define.
        import_targets: whether each ``_target_`` is imported to read its signature (seconds, for Lightning's classes).
    """

    def __init__(
        self,
        search_path: ConfigSearchPath,
        config_name: str | None,
        schema: type | None = None,
        overlays: Sequence[str] = OVERLAYS,
        import_targets: bool = True,
    ) -> None:
        self.search_path = search_path
        self.config_name = config_name
        self.schema = schema
        self.overlays = tuple(overlays)
        self.import_targets = import_targets
        self.group_overrides: list[str] = []
        self.sources = Sources(search_path, config_name, [])
        self._found: list[Found] = []
        self._given: dict[str, str] = {}

    def run(self, overrides: Sequence[str], multirun: bool = False) -> list[Found]:
        """Every finding for a command's overrides; an empty list when the command is right."""
        found: list[Found] = []
        for variation in self._variations(overrides) if multirun else [list(overrides)]:
            found += [entry for entry in self._one(variation) if entry not in found]
        return found

    def _one(self, overrides: list[str]) -> list[Found]:
        self._found, self._given, self.group_overrides = [], {}, []
        self.sources = Sources(self.search_path, self.config_name, overrides)
        try:
            self._compose(overrides)
        except (ConfigCompositionException, OmegaConfBaseException, HydraException, YAMLError, ValueError) as error:
            # A file that Hydra itself cannot read: nothing further can be judged.
            self._found.append(self._unreadable(error))
        seen: dict[Found, None] = dict.fromkeys(self.sources.found + self._found)
        return list(seen)

    def _compose(self, overrides: list[str]) -> None:
        groups = self.sources.groups()
        parsed = self._parse(overrides)
        values = []
        for override in parsed:
            if override.key_or_group in groups and not isinstance(override.value(), dict):
                self._group_override(override, groups)
            else:
                values.append(override)
        defaults = self._defaults(groups)
        config = self.sources.loader.load_configuration(self.config_name, self.group_overrides, RunMode.RUN)
        legal = self._tree(config, defaults).legal | defined_paths(config) | {g for g in groups if "/" not in g}
        good = [override for override in values if self._value_override(override, config, legal)]
        whole = self._apply(good) if good else config
        if whole is not None:
            self._found += self.judge(_task_of(whole), defaults.defaults)

    def _parse(self, overrides: list[str]) -> list[Override]:
        parser = OverridesParser.create()
        parsed = []
        for text in overrides:
            try:
                override = parser.parse_override(text)
                if override.is_sweep_override():
                    more = f"Add -m to run each value, or quote it: {override.get_key_element()}='[...]'"
                    self._found.append(Found(text, "is a sweep over several values", COMMAND_LINE, None, more))
                else:
                    parsed.append(override)
            except HydraException as error:
                reason = str(error).splitlines()[0]
                self._found.append(Found(text, f"is not an override such as key=value: {reason}", COMMAND_LINE))
        return parsed

    def _group_override(self, override: Override, groups: dict[str, list[str]]) -> None:
        """Keep a choice of options in ``group_overrides`` when all of them exist."""
        group, value = override.key_or_group, override.value()
        options = [value] if isinstance(value, str) else list(value) if isinstance(value, list) else []
        wrong = [option for option in options if option not in groups[group] and option != "null"]
        for option in wrong:
            near = nearest_name(str(option), groups[group])
            more = f"Options: {', '.join(groups[group])}"
            self._found.append(
                Found(f"{group}={option}", "unknown option", COMMAND_LINE, f"{group}={near}" if near else None, more)
            )
        line = override.input_line or ""
        if value is None and not override.is_delete():
            self._found.append(Found(line, "chooses nothing", COMMAND_LINE, None, f"To leave it out, type ~{group}"))
        elif override.is_add() and override.package is None and group in self._standing():
            more = f"To choose another option, type {line.lstrip('+')}"
            self._found.append(Found(group, "is chosen already", COMMAND_LINE, None, more))
        elif not wrong:
            self.group_overrides.append(line)
            if override.is_delete():
                self._given[group] = line

    def _defaults(self, groups: dict[str, list[str]]) -> DefaultsList:
        """The defaults list; choices of groups that it does not hold are recorded and left out."""
        wanted = list(self.group_overrides)
        while True:
            try:
                return self.sources.defaults(self.group_overrides)  # type: ignore[no-any-return]
            except ConfigCompositionException as error:
                blamed = next((o for o in self.group_overrides if f"'{_group_of(o)}" in str(error)), None)
                if blamed is None:
                    self.group_overrides = wanted
                    raise
                self.group_overrides.remove(blamed)
                group = _group_of(blamed)
                more = f"To add the group, type +{blamed.lstrip('+~')}" if group in groups else ""
                if blamed.startswith("~"):
                    more = "There is nothing to remove"
                self._found.append(Found(blamed, "is not among the defaults", COMMAND_LINE, None, more))

    def _value_override(self, override: Override, config: DictConfig, legal: set[str]) -> bool:
        """Whether an override of a value can be applied; if not, what is wrong is recorded."""
        key, line = override.key_or_group, override.input_line or ""
        present = _contains(config, key)
        self._given[key] = line
        if override.package is not None:
            groups = [path for path in legal if "." not in path]
            self._found.append(Found(key, "unknown group", COMMAND_LINE, nearest_name(key, groups)))
        elif override.is_force_add() or (override.is_add() and not present):
            return True
        elif override.is_add():
            if isinstance(override.value(), (dict, list)):
                return True
            self._found.append(
                Found(key, "is set already", COMMAND_LINE, None, f"To change it, type {line.lstrip('+')}")
            )
        elif present:
            return self._inside(override, config, legal)
        elif key in legal:
            more = f"It is a valid setting that no file sets: type +{line.lstrip('~')}"
            self._found.append(Found(key, "cannot be changed without +", COMMAND_LINE, None, more))
        else:
            self._found.append(Found(key, "unknown setting", COMMAND_LINE, nearest_setting(key, legal)))
        return False

    def _inside(self, override: Override, config: DictConfig, legal: set[str]) -> bool:
        """The keys inside a mapping that is merged into a node, as in ``model={num_layers: 8}``."""
        value = override.value()
        if not isinstance(value, dict) or override.is_delete():
            return True
        if not isinstance(OmegaConf.select(config, override.key_or_group), DictConfig):
            return True  # it takes the place of a plain value: what may be in it is for the setting's owner to say
        inside = [join(override.key_or_group, path) for path in defined_paths(OmegaConf.create(value))]
        wrong = [path for path in inside if not _contains(config, path)]
        for path in wrong:
            self._found.append(Found(path, "unknown setting", COMMAND_LINE, nearest_setting(path, legal)))
        return not wrong

    def _apply(self, good: list[Override]) -> DictConfig | None:
        """The configuration with all good overrides; those whose value Hydra refuses are recorded."""
        lines = [override.input_line or "" for override in good]
        load = self.sources.loader.load_configuration
        try:
            return load(self.config_name, self.group_overrides + lines, RunMode.RUN)
        except (ConfigCompositionException, ValueError) as error:
            for line in lines:
                try:
                    load(self.config_name, [*self.group_overrides, line], RunMode.RUN)
                except (ConfigCompositionException, ValueError) as single:
                    self._found.append(Found(line, f"is refused: {_reason(single)}", COMMAND_LINE))
            if not self._found:
                self._found.append(Found(" ".join(lines), f"is refused: {_reason(error)}", COMMAND_LINE))
            return None

    def _tree(self, config: DictConfig, defaults: DefaultsList) -> TreeCheck:
        base = self._base(defaults) if self.schema is None else None
        check = TreeCheck(self.schema, base, self.import_targets)
        check.run(_task_of(config))
        return check

    def _base(self, defaults: DefaultsList) -> set[str] | None:
        """Paths that the files define when no overlay is chosen, with the options that overlays choose."""
        choices = defaults.overrides.known_choices
        standing = self._standing()
        chosen = [
            f"{group}={option}"
            for group, option in choices.items()
            if option is not None
            and group.split("@")[0] not in self.overlays
            and not group.startswith("hydra/")
            and group in standing
        ]
        added = [o for o in self.group_overrides if o.startswith("+") and _group_of(o) not in self.overlays]
        try:
            base = self.sources.loader.load_configuration(
                self.config_name, [*self._without_overlays(), *chosen, *added], RunMode.RUN
            )
        except (ConfigCompositionException, ValueError):
            return None
        return defined_paths(_task_of(base))

    def _standing(self) -> set[str]:
        """Groups in the defaults list of the files alone: these can be chosen without ``+``."""
        try:
            return set(
                self.sources.loader.compute_defaults_list(self.config_name, [], RunMode.RUN).overrides.known_choices
            )
        except (ConfigCompositionException, ValueError):
            return set()

    def _without_overlays(self) -> list[str]:
        """Overrides that take every overlay out of the defaults list."""
        try:
            plain = self.sources.loader.compute_defaults_list(self.config_name, [], RunMode.RUN)
        except (ConfigCompositionException, ValueError):
            return []
        return [f"~{group}" for group in plain.overrides.known_choices if group in self.overlays]

    def _variations(self, overrides: Sequence[str]) -> Iterable[list[str]]:
        """A sweep as single commands: the first value of everything, then each further choice of a group on its own."""
        parser = OverridesParser.create(config_loader=self.sources.loader)
        groups = self.sources.groups()
        first: list[str] = []
        others: list[tuple[int, str]] = []
        for index, text in enumerate(overrides):
            try:
                [override] = parser.parse_overrides([text])
                values = list(override.sweep_string_iterator()) if override.is_discrete_sweep() else []
                if override.is_interval_sweep():
                    continue  # a sweeper draws from it: only the name could be judged
            except HydraException:
                values = []
            first.append(f"{override.get_key_element()}={values[0]}" if values else text)
            if values and override.key_or_group in groups:
                others += [(index, f"{override.get_key_element()}={value}") for value in values[1:]]
        yield first
        for index, text in others[:_MOST_VARIATIONS]:
            yield [*first[:index], text, *first[index + 1 :]]

    def _unreadable(self, error: BaseException) -> Found:
        """What Hydra or the YAML reader complains about, with the file and line that it names."""
        if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
            mark = error.problem_mark
            shown = shown_path(Path(mark.name))
            return Found(shown, f"is no YAML: {error.problem}", f"{shown}:{mark.line + 1}")
        text = str(error).strip() or _reason(error)
        if isinstance(error, MissingConfigException) and "primary config" in text:
            names = self.sources.repository().get_group_options("", ObjectType.CONFIG)
            near = nearest_name(str(self.config_name), names)
            return Found(str(self.config_name), "unknown primary configuration", COMMAND_LINE, near)
        named = re.match(r"In '([^']+)': (.*)", text, re.DOTALL)
        file, said = (named.group(1), named.group(2)) if named else (self.config_name or "", text)
        key = re.search(r"full_key: ([\w.]+)", text)
        if key is not None and key.group(1).startswith("hydra."):
            plain = self.sources.loader.load_configuration(None, [], RunMode.RUN)
            near = nearest_setting(key.group(1), defined_paths(plain))
            return Found(
                key.group(1), "unknown setting", self.sources.where(file, key.group(1).rpartition(".")[2]), near
            )
        return Found(file, "cannot be read: " + " ".join(said.split("\n")[:3]), self.sources.where(file))

    def judge(self, task: DictConfig, defaults: list) -> list[Found]:  # type: ignore[type-arg]
        """The findings in a task's configuration itself, each with the place that set it."""
        base = self._base(self.sources.defaults(self.group_overrides)) if self.schema is None else None
        if base is not None:
            added = [key for key, line in self._given.items() if line.startswith("+")]
            base |= {path for path in defined_paths(task) if any(_related(path, key) for key in added)}
        check = TreeCheck(self.schema, base, self.import_targets)
        problems = check.run(task)
        origins = self.sources.origins(defaults) if problems else {}
        found: dict[str, Found] = {}
        for problem in problems:
            near = _also_defaults(problem)
            entry = Found(problem.setting, problem.text, self._where(problem.setting, origins), near)
            # A value that others refer to is wrong in each of their places: named once, with a hint if there is one.
            if problem.setting not in found or (near and found[problem.setting].near is None):
                found[problem.setting] = entry
        return list(found.values())

    def _where(self, setting: str, origins: dict[str, str]) -> str:
        path = setting
        while path:
            if path in self._given:
                return COMMAND_LINE
            if path in origins:
                return origins[path]
            cut = max(path.rfind("."), path.rfind("["))
            path = path[:cut] if cut > 0 else ""
        return "in no file"


def _task_of(config: DictConfig) -> DictConfig:
    """A composed configuration without Hydra's own node, as a task gets it."""
    task = config.copy()
    OmegaConf.set_struct(task, False)
    task.pop("hydra", None)
    return task


def _group_of(override: str) -> str:
    return override.lstrip("+~").split("=", 1)[0]


def _related(path: str, added: str) -> bool:
    """Whether a path is the setting that was added, a node on the way to it, or inside it."""
    return path == added or added.startswith(path + ".") or path.startswith((added + ".", added + "["))


def _also_defaults(problem: Problem) -> str | None:
    """The nearest setting; at the top of a file it may also be the word ``defaults`` that was meant."""
    misspelt = get_close_matches(problem.setting, ["defaults"], n=1, cutoff=0.7)
    return misspelt[0] if misspelt and problem.text.startswith("unknown") else problem.near


def _contains(config: DictConfig, key: str) -> bool:
    node: object = config
    for part in key.replace("[", ".").replace("]", "").split("."):
        if OmegaConf.is_list(node):
            if not part.isdigit() or int(part) >= len(node):  # type: ignore[arg-type]
                return False
            node = node[int(part)]  # type: ignore[index]
        elif isinstance(node, DictConfig) and (part in node or OmegaConf.is_missing(node, part)):
            try:
                node = node[part]
            except OmegaConfBaseException:
                node = None
        else:
            return False
    return True


def _reason(error: BaseException) -> str:
    cause = error.__cause__ if error.__cause__ is not None else error
    text = str(cause).strip() or str(error).strip() or type(cause).__name__
    return text.splitlines()[0]
