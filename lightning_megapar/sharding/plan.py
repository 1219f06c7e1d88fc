"""Sharding plans: module-name patterns and the styles in which what they match is sharded.

The vocabulary (:mod:`~lightning_megapar.sharding.vocabulary`) is the one of transformers' configurations
(``base_model_tp_plan``), so that what people have works::

    {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise", "lm_head": "colwise_gather_output"}

A pattern is a dotted name in which ``*`` stands for one part; it matches the end of a module's or parameter's dotted
name. Of several patterns that match, the longest counts, of equally long ones the one with fewer stars. A style may
carry options after a colon: ``packed_colwise:parts=64+32+32``. A plan is plain data: it can be written to YAML and
passed back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from lightning_megapar.config import ConfigError, nearest_name
from lightning_megapar.layers.base import ParallelLayer
from lightning_megapar.layers.foreign import computed_weight, is_linear
from lightning_megapar.sharding.vocabulary import BESIDE_OTHERS, MODULE_STYLES, PARAMETER_STYLES, STYLES, Style

__all__ = ["STYLES", "Assignment", "Rule", "ShardingPlan", "Style", "resolve"]

_CALLED = {  # what they do happens when the module is called
    "all_reduce",
    "entered_output",
    "ep_dispatch_experts",
    "local_arguments",
    "moe_identity_expert",
    "moe_tp_experts",
}


@dataclass(frozen=True)
class Rule:
    """A line of a plan.

    Args:
        pattern: of dotted names; see the module's docstring.
        style: what is done to what it matches.
        why: where the rule comes from, for the table.
    """

    pattern: str
    style: Style
    why: str = "sharding_plan"

    def matches(self, name: str) -> bool:
        return _expression(self.pattern).fullmatch(name) is not None


def _expression(pattern: str) -> re.Pattern[str]:
    parts = [r"[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")]
    return re.compile(r"(?:.*\.)?" + r"\.".join(parts))


@dataclass(frozen=True)
class ShardingPlan:
    """Rules in order.

    Raises:
        ConfigError: for two rules with one pattern.
    """

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        seen: set[tuple[str, str]] = set()
        for rule in self.rules:
            key = (rule.pattern, rule.style.name if rule.style.name in BESIDE_OTHERS else "")
            if key in seen:
                raise ConfigError(
                    f"sharding_plan[{rule.pattern!r}]: two rules for one pattern ({rule.style} is the second); keep "
                    f"one, or join {' or '.join(BESIDE_OTHERS)} to another style by ' + '"
                )
            seen.add(key)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, str], why: str = "sharding_plan") -> ShardingPlan:
        """From pattern -> style, as transformers writes it. Several styles of one module are joined by `` + ``.

        Raises:
            ConfigError: unknown styles.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(
                f"sharding_plan={mapping!r}: expected a mapping of module-name patterns to styles, such as "
                "{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}"
            )
        rules = []
        for pattern, text in mapping.items():
            if not isinstance(pattern, str) or not pattern:
                raise ConfigError(
                    f"sharding_plan: pattern {pattern!r} is not a dotted name of modules, such as 'layers.*.up'"
                )
            for one in str(text).split(" + ") if isinstance(text, str) else [text]:
                try:
                    rules.append(Rule(pattern, Style.parse(one), why))
                except ConfigError as error:
                    raise ConfigError(f"sharding_plan[{pattern!r}]: {error}") from None
        return cls(tuple(rules))

    def to_mapping(self) -> dict[str, str]:
        """The plan in the words in which :meth:`from_mapping` takes it back."""
        mapping: dict[str, str] = {}
        for rule in self.rules:
            mapping[rule.pattern] = " + ".join(filter(None, (mapping.get(rule.pattern), str(rule.style))))
        return mapping

    @classmethod
    def read(cls, path: str | Path) -> ShardingPlan:
        """From a YAML file.

        Raises:
            ConfigError: an unreadable file, or one that holds no plan.
        """
        import yaml

        try:
            mapping = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"sharding_plan={str(path)!r} cannot be read: {str(error).splitlines()[0]}") from None
        try:
            return cls.from_mapping(mapping, why=str(path))
        except ConfigError as error:
            raise ConfigError(f"in {path}: {error}") from None

    def write(self, path: str | Path) -> None:
        """To a YAML file that :meth:`read` takes back."""
        import yaml

        Path(path).write_text(yaml.safe_dump(self.to_mapping(), sort_keys=False))

    def prefixed(self, prefix: str) -> ShardingPlan:
        """The plan of a module that sits at ``prefix``."""
        if not prefix:
            return self
        return ShardingPlan(tuple(Rule(f"{prefix}.{r.pattern}", r.style, r.why) for r in self.rules))

    def __add__(self, other: ShardingPlan) -> ShardingPlan:
        return ShardingPlan((*self.rules, *other.rules))


@dataclass(frozen=True)
class Assignment:
    """What a plan says of one module or parameter.

    Args:
        path: dotted name of the module.
        parameter: name of an own parameter that the style is for, ``None`` for the module.
        style: what is done.
        why: where the rule comes from.
        pattern: of the rule.
        kind: class of the module; on other pipeline stages something else stands in its place.
        aliases: other names of the module; a stage may hold it under one of them only.
    """

    path: str
    parameter: str | None
    style: Style
    why: str
    pattern: str
    kind: type[nn.Module] = nn.Module
    aliases: tuple[str, ...] = ()

    def among(self, held: Mapping[str, nn.Module]) -> Assignment | None:
        """The same for a stage that holds these modules, under the name that it has there; ``None`` if it has none."""
        for path in (self.path, *self.aliases):
            if isinstance(held.get(path), self.kind):
                return replace(self, path=path)
        return None

    @property
    def name(self) -> str:
        return ".".join(filter(None, (self.path, self.parameter)))


def resolve(plan: ShardingPlan, module: nn.Module, *, strict: bool) -> list[Assignment]:
    """What the rules of a plan mean for ``module``, in the order of its modules.

    Args:
        plan: the rules.
        module: the whole module (real or meta), before it is cut.
        strict: a pattern that matches nothing is an error (a plan that somebody wrote; published plans name layers that
            only some sizes of a model have).

    Raises:
        ConfigError: patterns that match nothing, or styles that cannot be used on what they match.
    """
    found: list[Assignment] = []
    used: set[str] = set()
    names: list[str] = []
    places: dict[int, list[str]] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        places.setdefault(id(child), []).append(path)
    for path, child in module.named_modules():
        aliases = tuple(other for other in places[id(child)] if other != path)
        own = [(path, None), *((path, name) for name, p in child._parameters.items() if p is not None)]
        for where, parameter in own:
            name = ".".join(filter(None, (where, parameter)))
            if not name:
                continue
            names.append(name)
            matching = [rule for rule in plan.rules if rule.matches(name)]
            extra = [r for r in matching if r.style.name in BESIDE_OTHERS]
            main = [r for r in matching if r not in extra]
            used.update(rule.pattern for rule in matching)
            for kind in (main, extra):
                if kind:
                    rule = max(kind, key=_precedence)
                    same = [r for r in kind if _precedence(r) == _precedence(rule)]
                    if kind is main and strict and len({r.style for r in same}) > 1:
                        raise ConfigError(_ambiguous(name, same))
                    same = same if kind is extra else [rule]
                    found += [
                        Assignment(where, parameter, r.style, r.why, r.pattern, type(child), aliases) for r in same
                    ]
    lost = [rule.pattern for rule in plan.rules if rule.pattern not in used]
    if lost and strict:
        raise ConfigError("\n".join(_matches_nothing(pattern, names) for pattern in lost))
    for one in found:
        _check(one, module, strict)
    return found


def _precedence(rule: Rule) -> tuple[int, int]:
    """Of several rules that match one name the highest counts: the longest, then the one that is more literal."""
    return len(rule.pattern), -rule.pattern.split(".").count("*")


def _ambiguous(name: str, rules: Iterable[Rule]) -> str:
    shown = " and ".join(f"{rule.pattern!r}: {str(rule.style)!r}" for rule in rules)
    return f"sharding_plan: {shown} both match {name}, and neither is longer; give {name!r} a rule of its own"


def _matches_nothing(pattern: str, names: Iterable[str]) -> str:
    from lightning_megapar.sharding.names import starred

    known = dict.fromkeys(starred(name) for name in names)
    length = pattern.count(".") + 1
    near = nearest_name(pattern, {".".join(name.split(".")[-length:]) for name in known})
    hint = f"; did you mean {near!r}?" if near else f" (names: {', '.join(list(known)[:6])}, ...)"
    return f"sharding_plan: the pattern {pattern!r} matches no module and no parameter{hint}"


def _check(one: Assignment, module: nn.Module, strict: bool) -> None:
    child = module.get_submodule(one.path)
    kind = type(child).__name__
    setting = f"sharding_plan[{one.pattern!r}] = {str(one.style)!r}"

    def refuse(expected: str) -> None:
        bare = [n for n, p in child._parameters.items() if p is not None]
        hint = ""
        if bare and not is_linear(child) and not isinstance(child, nn.Embedding):
            shown = ", ".join(f"{one.path}.{n}" for n in bare[:4]) + (", ..." if len(bare) > 4 else "")
            hint = (
                f". Its own parameters ({shown}) can be cut by their names, for example {f'{one.pattern}.{bare[0]}'!r}"
                ": 'split:dim=0'; valid styles of the module: replicate, replicated_with_grad_allreduce, moe_tp_experts"
            )
        raise ConfigError(f"{setting}: {one.name} is a {kind}; {one.style.name} needs {expected}{hint}")

    name = one.style.name
    if isinstance(child, ParallelLayer):
        raise ConfigError(
            f"{setting}: {one.name} is a {kind} of lightning_megapar.layers, which shards itself; leave it out"
        )
    if one.parameter is not None:
        if name not in MODULE_STYLES and name not in PARAMETER_STYLES:
            raise ConfigError(
                f"{setting}: {one.name} is a parameter; parameters take "
                f"{', '.join(sorted(MODULE_STYLES | PARAMETER_STYLES))}"
            )
        return
    if name in PARAMETER_STYLES:
        refuse("a parameter's name")
    if name.startswith("embedding") and not isinstance(child, nn.Embedding):
        refuse("an nn.Embedding")
    if strict and name in _CALLED and type(child).forward is nn.Module.forward:
        refuse("a module that is called (this one has no forward)")
    linear = name in ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "mla_kv_a_proj") or name.endswith(
        ("_gather_output", "_split_input", "_scatter_output")
    )
    if linear and not is_linear(child):
        refuse("an nn.Linear (or transformers' Conv1D)")
    if linear and (source := computed_weight(child)):
        raise ConfigError(
            f"{setting}: {one.name} is a {kind} whose weight or bias is computed by {source} before each call, not an "
            "own parameter that could be cut; leave it out (it stays whole), or remove the parametrization"
        )
