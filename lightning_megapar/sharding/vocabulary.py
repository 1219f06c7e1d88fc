"""The words of sharding plans: styles and their options.

They are transformers' (``base_model_tp_plan``), and a few more. A style may carry options after a colon:
``packed_colwise:parts=64+32+32``.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megapar.config import ConfigError, divisors, nearest, nearest_name

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

_COUNT = "a positive integer"
_DIM = "a dimension, 0 or a positive integer"
_PARTS = "a positive integer or positive widths joined by + (64+32+32)"
_SWITCH = "no value"
_NAMES = "names joined by + (a+b)"
_EXAMPLES = {
    "unit": "unit=64",
    "dim": "dim=1",
    "parts": "parts=3",
    "inner": "inner",
    "features": "features=64",
    "once": "once=bias",
    "heads": "heads=8",
}
OPTIONS: dict[str, dict[str, str]] = {
    "colwise": {"unit": _COUNT, "inner": _SWITCH},
    "rowwise": {"unit": _COUNT},
    "colwise_gather_output": {"unit": _COUNT, "inner": _SWITCH},
    "rowwise_split_input": {"unit": _COUNT},
    "rowwise_scatter_output": {"unit": _COUNT},
    "packed_colwise": {"parts": _PARTS, "unit": _COUNT, "inner": _SWITCH},
    "packed_rowwise": {"parts": _PARTS, "unit": _COUNT},
    "split": {"dim": _DIM, "parts": _PARTS, "unit": _COUNT},
    "mla_kv_a_proj": {"features": _COUNT},
    "moe_tp_experts": {"once": _NAMES},
    "all_reduce": {"once": _NAMES},
    "local_arguments": {"heads": _COUNT},
}
"""Options that styles take, and what each needs after ``=``. Those of ``local_attributes`` are attributes' names."""
REQUIRED = {"split": "dim", "local_arguments": "heads"}
"""Options without which a style means nothing."""

MODULE_STYLES = {  # of modules and parameters
    "colwise",
    "rowwise",
    "packed_colwise",
    "packed_rowwise",
    "replicate",
    "replicated_with_grad_allreduce",
}
PARAMETER_STYLES = {"split", "grouped_gemm"}  # of a parameter alone
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
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ConfigError(f"sharding style {self}: the option {twice!r} is given twice; give it once")
        if self.name == "local_attributes":
            self._check_attributes()
            return
        for key, value in self.options:
            self._check_option(key, value)
        needed = REQUIRED.get(self.name)
        if needed is not None and needed not in keys:
            raise ConfigError(
                f"sharding style {self} lacks its option {needed!r}, {OPTIONS[self.name][needed]}: "
                f"{self.name}:{_EXAMPLES[needed]}"
            )

    def _check_attributes(self) -> None:
        if not self.options:
            raise ConfigError(
                f"sharding style {self} names no attribute; it takes the names of integer attributes of the module: "
                "local_attributes:num_heads"
            )
        for key, value in self.options:
            if value:
                raise ConfigError(
                    f"sharding style {self}: {key}={value!r}, but attributes are named without a value (each is "
                    f"divided by the number of ranks): local_attributes:{key}"
                )

    def _check_option(self, key: str, value: str) -> None:
        known = OPTIONS.get(self.name, {})
        if key not in known:
            near = nearest_name(key, known)
            hint = f"; did you mean {near!r}?" if near else f" (options: {', '.join(known) or 'none'})"
            raise ConfigError(f"sharding style {self}: unknown option {key!r}{hint}")
        kind = known[key]
        numbers = value.split("+")
        fits = {
            _COUNT: value.isdecimal() and int(value) >= 1,
            _DIM: value.isdecimal(),
            _PARTS: all(n.isdecimal() and int(n) >= 1 for n in numbers),
            _SWITCH: not value,
            _NAMES: all(numbers),
        }[kind]
        if not fits:
            raise ConfigError(
                f"sharding style {self}: {key}={value!r}, but {key!r} takes {kind}, as in {self.name}:{_EXAMPLES[key]}"
            )

    @classmethod
    def parse(cls, text: str) -> Style:
        """From its text, such as ``"packed_colwise:parts=3"``."""
        if not isinstance(text, str):
            raise ConfigError(
                f"sharding style {text!r} is a {type(text).__name__}, expected a word such as 'colwise' (styles: "
                f"{', '.join(sorted(STYLES))})"
            )
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
        counts = [d for d in divisors(width) if d < width or width == 1]
        if value is not None and "+" in value:
            parts = [int(p) for p in value.split("+")]
            if sum(parts) != width:
                rest = width - sum(parts[:-1])
                last = f"{'+'.join(map(str, [*parts[:-1], rest]))}, or " if rest > 0 else ""
                equal = ", ".join(map(str, nearest(len(parts), counts)))
                raise ConfigError(
                    f"sharding style {self}: parts {value} do not add up to {width} (they make {sum(parts)}); nearest "
                    f"valid: parts={last}equal parts, of which there may be {equal}"
                )
            return parts
        count = self.number("parts") or default
        if width % count:
            raise ConfigError(
                f"sharding style {self}: {count} equal parts do not fit a width of {width}; nearest valid numbers of "
                f"equal parts: {', '.join(map(str, nearest(count, counts)))}, or give their widths (parts=a+b)"
            )
        return [width // count] * count
