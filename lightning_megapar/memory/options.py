"""What the strategy's ``recompute`` may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from lightning_megapar.config import ConfigError, nearest_name, refuse_unknown
from lightning_megapar.memory.blocks import ALL, INPUTS, NO_ATTENTION, OPTIONS, PRODUCTS

MODES = {"none": ALL, "selective": NO_ATTENTION, "full": INPUTS}
"""Modes that are one option for every block; beside them there is ``"auto"``."""
AUTO = "auto"


@dataclass(frozen=True)
class RecomputeConfig:
    """What is recomputed in the backward, instead of being kept from the forward.

    Args:
        mode: ``"none"``; ``"selective"``: what attention makes of queries, keys and values (see
            :mod:`lightning_megapar.memory.blocks`); ``"full"``: everything but the blocks' inputs; ``"auto"``: what
            each block keeps is planned, so that the least time is spent on recomputation within a budget.
        budget_bytes: of ``"auto"``: the most bytes that activations of a rank's blocks may take at any moment, what is
            alive while one is recomputed included. ``None``: what the device has left when everything is recomputed,
            less ``reserve``.
        reserve: share of the device's memory that a budget which nobody has given leaves alone.
        options: of ``"auto"``: among which it chooses for each block. Beside the default ones there is ``"offload"``,
            which moves what is kept to host memory.
        blocks: names of the stacks whose blocks are meant, such as ``("encoder.layers", "decoder.layers")``; ``None``:
            the stack that ``pipeline_blocks`` names, else every large one.

    Raises:
        ConfigError: values outside their range, naming the nearest valid ones.
    """

    mode: str = AUTO
    budget_bytes: int | float | None = None
    reserve: float = 0.1
    options: tuple[str, ...] = (ALL, NO_ATTENTION, PRODUCTS, INPUTS)
    blocks: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        modes = (*MODES, AUTO)
        if self.mode not in modes:
            near = nearest_name(str(self.mode).lower(), modes)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(
                f"recompute={self.mode!r} is not one of {', '.join(modes)}, or a mapping of options{hint}"
            )
        object.__setattr__(self, "budget_bytes", _bytes(self.budget_bytes))
        if self.budget_bytes is not None and self.mode != AUTO:
            raise ConfigError(
                f"recompute: budget_bytes={self.budget_bytes} is for mode='auto', but mode={self.mode!r}; valid "
                "values: mode='auto', or budget_bytes=null"
            )
        if isinstance(self.reserve, bool) or not isinstance(self.reserve, int | float) or not 0 <= self.reserve < 1:
            raise ConfigError(f"recompute: reserve={self.reserve!r}: expected 0 <= reserve < 1 (nearest valid: 0, 0.9)")
        if not isinstance(self.options, Sequence) or not isinstance(self.blocks, Sequence | None):
            raise ConfigError(
                f"recompute: options={self.options!r} and blocks={self.blocks!r}: expected lists of names, such as "
                "options=['all', 'inputs'] and blocks=['model.layers'] (or null)"
            )
        options = (self.options,) if isinstance(self.options, str) else tuple(self.options)
        for option in options:
            if option not in OPTIONS:
                near = nearest_name(str(option), OPTIONS)
                hint = f"; did you mean {near!r}?" if near else ""
                raise ConfigError(f"recompute: options has {option!r}, which is not one of {', '.join(OPTIONS)}{hint}")
        if not options:
            raise ConfigError(f"recompute: options is empty; valid values: some of {', '.join(OPTIONS)}")
        object.__setattr__(self, "options", tuple(option for option in OPTIONS if option in options))
        if self.blocks is not None:
            object.__setattr__(self, "blocks", (self.blocks,) if isinstance(self.blocks, str) else tuple(self.blocks))
            if not self.blocks or any(not isinstance(name, str) for name in self.blocks):
                raise ConfigError(
                    f"recompute: blocks={self.blocks!r}: expected names of stacks, such as ('model.layers',)"
                )

    @property
    def is_planned(self) -> bool:
        """Whether blocks get options of their own."""
        return self.mode == AUTO


def given_recompute(value: Any) -> RecomputeConfig:
    """What the argument of the strategy says.

    Args:
        value: a mode, a mapping of the arguments of :class:`RecomputeConfig`, such a configuration, or ``None``.

    Raises:
        ConfigError: anything else.
    """
    if value is None or value is False:
        return RecomputeConfig("none")
    if isinstance(value, RecomputeConfig):
        return value
    if isinstance(value, str):
        return RecomputeConfig(value)
    if isinstance(value, Mapping):
        refuse_unknown("recompute", map(str, value), _names())
        return RecomputeConfig(**{str(key): one for key, one in value.items()})
    raise ConfigError(
        f"recompute={value!r}: expected one of {', '.join((*MODES, AUTO))}, a mapping of options, or a RecomputeConfig"
    )


def _names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(RecomputeConfig))


def _bytes(value: Any) -> int | None:
    """A number of bytes; YAML reads 4e9 as a float."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value <= 0 or value % 1:
        raise ConfigError(f"recompute: budget_bytes={value!r}: expected a whole number of bytes above 0, such as 4e9")
    return int(value)
