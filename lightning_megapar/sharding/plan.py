"""Sharding plans: module-name patterns and the styles in which what they match is sharded.

The vocabulary is the one of transformers' configurations (``base_model_tp_plan``), so that what people have works::

    {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise", "lm_head": "colwise_gather_output"}

A pattern is a dotted name in which ``*`` stands for one part; it matches the end of a module's or parameter's dotted
name. Of several patterns that match, the longest counts. A style may carry options after a colon:
``packed_colwise:parts=64+32+32``. A plan is plain data: it can be written to YAML and passed back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from lightning_megapar.config import ConfigError, nearest_name

STYLES: dict[str, str] = {
    "colwise": "linear layer cut by outputs; parameter cut along its last dimension but one",
    "rowwise": "linear layer cut by inputs, results summed; parameter cut along its last dimension",
    "colwise_gather_output": "linear layer cut by outputs, which are then collected on every rank",
    "rowwise_split_input": "linear layer cut by inputs, of which each rank takes its share first",
    "rowwise_scatter_output": "linear layer cut by inputs; each rank keeps its share of the summed outputs",
    "packed_colwise": "as colwise, for parts that lie one after the other (parts=2, parts=3 or parts=64+32+32)",
    "packed_rowwise": "as rowwise, for parts that lie one after the other",
    "embedding_rowwise": "embedding cut by vocabulary",
    "embedding_colwise": "embedding cut by features, which are then collected",
    "replicated_with_grad_allreduce": "whole on every rank, inside the sharded region: gradients are summed",
    "replicate": "whole on every rank",
    "local_params": "a module that reads its own cut parameters",
    "mla_kv_a_proj": "latent attention's first product: its rotary tail (features=n) enters the region",
    "entered_output": "whole on every rank; its output enters the sharded region",
    "moe_tp_experts": "experts whose parameters are cut: arguments enter, the output is summed",
    "moe_identity_expert": "an identity expert inside such a region",
    "all_reduce": "a region whose output is summed",
    "grouped_gemm": "parameter of which each rank holds whole experts (dimension 0)",
    "ep_dispatch_experts": "experts dealt out to the ranks",
    "split": "parameter cut along a named dimension (split:dim=1 or split:dim=1,parts=2)",
    "local_attributes": "integer attributes of the module, divided by the number of ranks (local_attributes:num_heads)",
    "local_arguments": "per-head arguments of the module's forward, cut (local_arguments:heads=8)",
}
"""Name of each style and what it does."""

_NUMBER, _PARTS, _SWITCH, _NAMES = "a number", "a number or widths (64+32+32)", "no value", "names (a+b)"
OPTIONS: dict[str, dict[str, str]] = {
    "colwise": {"unit": _NUMBER, "inner": _SWITCH},
    "rowwise": {"unit": _NUMBER},
    "colwise_gather_output": {"unit": _NUMBER, "inner": _SWITCH},
    "rowwise_split_input": {"unit": _NUMBER},
    "rowwise_scatter_output": {"unit": _NUMBER},
    "packed_colwise": {"parts": _PARTS, "unit": _NUMBER, "inner": _SWITCH},
    "packed_rowwise": {"parts": _PARTS, "unit": _NUMBER},
    "split": {"dim": _NUMBER, "parts": _PARTS, "unit": _NUMBER},
    "mla_kv_a_proj": {"features": _NUMBER},
    "moe_tp_experts": {"once": _NAMES},
    "all_reduce": {"once": _NAMES},
    "local_arguments": {"heads": _NUMBER},
}
"""Options that styles take, and what each needs after ``=``. Those of ``local_attributes`` are attributes' names."""

_MODULE_STYLES = {  # of modules and parameters
    "colwise",
    "rowwise",
    "packed_colwise",
    "packed_rowwise",
    "replicate",
    "replicated_with_grad_allreduce",
}
_PARAMETER_STYLES = {"split", "grouped_gemm"}  # of a parameter alone
_CALLED = {  # what they do happens when the module is called
    "all_reduce",
    "entered_output",
    "ep_dispatch_experts",
    "local_arguments",
    "moe_identity_expert",
    "moe_tp_experts",
}


BESIDE_OTHERS = ("local_attributes", "local_arguments")
"""Styles that a module may have besides another one."""


@dataclass(frozen=True)
class Style:
    """A style with its options.

    Args:
        name: one of :data:`STYLES`.
        options: words and ``key=value`` pairs after the colon, in order; a bare word has the value ``""``.

    Raises:
        ConfigError: for an unknown name (the nearest one is named).
    """

    name: str
    options: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.name not in STYLES:
            near = nearest_name(self.name, STYLES)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"sharding style {self.name!r} is unknown{hint} (styles: {', '.join(sorted(STYLES))})")
        keys = [key for key, _ in self.options]
        if len(set(keys)) < len(keys):
            raise ConfigError(f"sharding style {self}: an option is given twice")
        if self.name != "local_attributes":
            for key, value in self.options:
                self._check_option(key, value)

    def _check_option(self, key: str, value: str) -> None:
        known = OPTIONS.get(self.name, {})
        if key not in known:
            near = nearest_name(key, known)
            hint = f"; did you mean {near!r}?" if near else f" (options: {', '.join(known) or 'none'})"
            raise ConfigError(f"sharding style {self}: unknown option {key!r}{hint}")
        kind = known[key]
        numbers = value.split("+")
        least = 0 if key == "dim" else 1
        fits = {
            _NUMBER: value.isdigit() and int(value) >= least,
            _PARTS: all(n.isdigit() and int(n) >= 1 for n in numbers),
            _SWITCH: not value,
            _NAMES: all(numbers),
        }[kind]
        if not fits:
            raise ConfigError(f"sharding style {self}: {key}={value!r}, but {key!r} takes {kind}")

    @classmethod
    def parse(cls, text: str) -> Style:
        """From its text, such as ``"packed_colwise:parts=3"``."""
        if not isinstance(text, str):
            raise ConfigError(f"sharding style {text!r} is a {type(text).__name__}, expected a word such as 'colwise'")
        name, _, rest = text.partition(":")
        options = []
        for word in filter(None, (part.strip() for part in rest.split(","))):
            key, _, value = word.partition("=")
            options.append((key.strip(), value.strip()))
        return cls(name.strip(), tuple(options))

    def __str__(self) -> str:
        words = [f"{key}={value}" if value else key for key, value in self.options]
        return self.name + (":" + ",".join(words) if words else "")

    def option(self, key: str) -> str | None:
        return dict(self.options).get(key)

    def number(self, key: str) -> int | None:
        """An integer option, ``None`` when it is not given."""
        value = self.option(key)
        return None if value is None else int(value)

    def parts_of(self, width: int, default: int = 1) -> list[int]:
        """Widths of the packed parts of ``width`` outputs.

        Raises:
            ConfigError: when they do not add up.
        """
        value = self.option("parts")
        if value is not None and "+" in value:
            parts = [int(p) if p.isdigit() else -1 for p in value.split("+")]
            if min(parts) < 0 or sum(parts) != width:
                raise ConfigError(f"sharding style {self}: parts {value} do not add up to {width}")
            return parts
        count = self.number("parts") or default
        if width % count:
            raise ConfigError(f"sharding style {self}: {count} equal parts do not fit a width of {width}")
        return [width // count] * count


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
                raise ConfigError(f"sharding plan: two rules for the pattern {rule.pattern!r}")
            seen.add(key)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, str], why: str = "sharding_plan") -> ShardingPlan:
        """From pattern -> style, as transformers writes it. Several styles of one module are joined by `` + ``.

        Raises:
            ConfigError: unknown styles.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"sharding_plan={mapping!r}: expected a mapping of module-name patterns to styles")
        rules = []
        for pattern, text in mapping.items():
            if not isinstance(pattern, str) or not pattern:
                raise ConfigError(f"sharding_plan: pattern {pattern!r} is not a dotted name")
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
        return cls.from_mapping(mapping, why=str(path))

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
    """

    path: str
    parameter: str | None
    style: Style
    why: str
    pattern: str
    kind: type[nn.Module] = nn.Module

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
    for path, child in module.named_modules():
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
                    rule = max(kind, key=lambda r: len(r.pattern))
                    same = [r for r in kind if len(r.pattern) == len(rule.pattern)] if kind is extra else [rule]
                    found += [Assignment(where, parameter, r.style, r.why, r.pattern, type(child)) for r in same]
    lost = [rule.pattern for rule in plan.rules if rule.pattern not in used]
    if lost and strict:
        raise ConfigError("\n".join(_matches_nothing(pattern, names) for pattern in lost))
    for one in found:
        _check(one, module, strict)
    return found


def _matches_nothing(pattern: str, names: Iterable[str]) -> str:
    from lightning_megapar.sharding.names import starred

    known = dict.fromkeys(starred(name) for name in names)
    length = pattern.count(".") + 1
    near = nearest_name(pattern, {".".join(name.split(".")[-length:]) for name in known})
    hint = f"; did you mean {near!r}?" if near else f" (names: {', '.join(list(known)[:6])}, ...)"
    return f"sharding_plan: the pattern {pattern!r} matches no module and no parameter{hint}"


def _check(one: Assignment, module: nn.Module, strict: bool) -> None:
    from lightning_megapar.layers.base import ParallelLayer
    from lightning_megapar.sharding.styles import is_linear

    child = module.get_submodule(one.path)
    kind = type(child).__name__

    def refuse(expected: str) -> None:
        raise ConfigError(
            f"sharding_plan[{one.pattern!r}] = {str(one.style)!r}: {one.name} is a {kind}; "
            f"{one.style.name} needs {expected}"
        )

    name = one.style.name
    if isinstance(child, ParallelLayer):
        raise ConfigError(
            f"sharding_plan[{one.pattern!r}]: {one.name} is a {kind} of lightning_megapar.layers, which shards itself"
        )
    if one.parameter is not None:
        if name not in _MODULE_STYLES and name not in _PARAMETER_STYLES:
            raise ConfigError(
                f"sharding_plan[{one.pattern!r}] = {str(one.style)!r}: {one.name} is a parameter; parameters take "
                f"{', '.join(sorted(_MODULE_STYLES | _PARAMETER_STYLES))}"
            )
        return
    if name in _PARAMETER_STYLES:
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
