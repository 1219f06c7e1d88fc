"""What is compressed of saved activations, and how much gradients suffer (LOSSY; off unless a codec is named)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import nn

from lightning_megapar.config import ConfigError, nearest_name, refuse_unknown
from lightning_megapar.memory.codecs import CODECS, codec_named

GRADIENT_COSINES: dict[str, tuple[float, float]] = {
    "int8": (0.9999, 0.9998),
    "fp8": (0.9997, 0.9985),
    "int4": (0.993, 0.98),
}
"""Cosine between the gradient with ``kinds="all"`` and the exact one: of all gradients together, and the least of one
parameter or the input (but for those that are zero but for rounding, such as a key's bias).

Measured on one block of GPT-2 and of Llama style, 128 wide, float32 and bfloat16 autocast: int8 0.99996 and 0.9999, fp8
0.9997 and 0.9990, int4 (groups of 64) 0.9936 and 0.982; with groups of 32 0.9951 and 0.984, whole rows 0.989 and 0.975.
Behind a ReLU they are lower: its backward asks which results are above 0, and int8 rounds small ones to 0. A
``nn.TransformerEncoderLayer`` with ReLU has 0.9990 and 0.993 (int8), 0.9996 and 0.999 (fp8), 0.982 and 0.917 (int4).
"""


@dataclass(frozen=True)
class CompressionConfig:
    """What is compressed, and how.

    Args:
        codec: ``"int8"``, ``"fp8"`` or ``"int4"``, all LOSSY; ``"none"`` leaves everything as it is.
        kinds: class names of the layers whose saved tensors are compressed, with what runs inside of them; a base
            class's name stands for all of its kind, and ``Linear`` for the parallel linear layers too. ``"all"``
            means whole modules, operations between layers included.
        group_size: elements that share a magnitude: ``"row"`` (the last dimension), or a number that rows are cut into
            where it divides them. ``None`` is ``"row"`` for 8 bits and 64 for 4.
        minimum_elements: smaller tensors are kept as they are.
        minimum_row: so are tensors with shorter rows, such as the statistics of a norm.
        minimum_share: and those with a smaller part of the elements of the largest tensor that the same layer has
            saved before: attention's log-sum-exp, of which an error would be exponentiated.

    Raises:
        ConfigError: a value outside its range.
    """

    codec: str = "none"
    kinds: tuple[str, ...] | Literal["all"] = "all"
    group_size: int | Literal["row"] | None = None
    minimum_elements: int = 4096
    minimum_row: int = 16
    minimum_share: float = 1 / 16

    def __post_init__(self) -> None:
        if self.codec != "none":
            codec_named(self.codec)
        if isinstance(self.kinds, str):
            if self.kinds != "all":
                raise ConfigError(f"kinds={self.kinds!r}: expected 'all' or a list of class names, ['{self.kinds}']")
        elif (
            not isinstance(self.kinds, Sequence)
            or not self.kinds
            or not all(isinstance(kind, str) and kind for kind in self.kinds)
        ):
            raise ConfigError(f"kinds={self.kinds!r}: expected 'all' or class names such as 'Linear', 'LayerNorm'")
        else:
            object.__setattr__(self, "kinds", tuple(self.kinds))
        if self.group_size not in (None, "row") and not _is_positive(self.group_size):
            raise ConfigError(
                f"group_size={self.group_size!r}: expected 'row' or a positive integer (nearest valid: 32)"
            )
        for name in ("minimum_elements", "minimum_row"):
            if not _is_positive(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected a positive integer (nearest valid: 1)")
        share = self.minimum_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigError(f"minimum_share={self.minimum_share!r}: expected 0 to 1 (nearest valid: 0.0625)")

    @property
    def group(self) -> int | None:
        """Elements that share a magnitude; ``None`` for a row."""
        if self.group_size is None:
            return 64 if self.codec == "int4" else None
        return None if self.group_size == "row" else self.group_size

    def matches(self, module: nn.Module) -> bool:
        """Whether a module is of one of the chosen kinds."""
        return self.kinds != "all" and any(name in self.kinds for name in kind_names(module))


def kind_names(module: nn.Module) -> set[str]:
    """The names by which :class:`CompressionConfig` knows a module: its class and those that it is derived from."""
    return {kind.__name__.lstrip("_") for kind in type(module).__mro__} - {"object", "Module"}


def given_compression(value: Any) -> CompressionConfig:
    """What the argument of the strategy says.

    Args:
        value: ``None`` or ``False``: nothing is compressed. A codec's name, a mapping of the arguments of
            :class:`CompressionConfig`, or such a configuration.

    Raises:
        ConfigError: anything else.
    """
    if value is None or value is False:
        return CompressionConfig()
    if isinstance(value, CompressionConfig):
        return value
    if isinstance(value, str):
        return CompressionConfig(value)
    if isinstance(value, Mapping):
        names = [field.name for field in fields(CompressionConfig)]
        refuse_unknown("compress_activations", map(str, value), names)
        return CompressionConfig(**{str(key): one for key, one in value.items()})
    raise ConfigError(
        f"compress_activations={value!r}: expected null, one of {', '.join(CODECS)} (all of them lossy), or a mapping "
        "of options"
    )


def check_kinds(module: nn.Module, config: CompressionConfig) -> None:
    """Refuse names that no layer has.

    Raises:
        ConfigError: naming those and the nearest ones.
    """
    if config.kinds == "all":
        return
    there = {name for child in module.modules() for name in kind_names(child)}
    for kind in config.kinds:
        if kind not in there:
            near = nearest_name(kind, tuple(sorted(there)))
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"kinds: no layer is a {kind!r}{hint} There are: {', '.join(sorted(there))}")


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
