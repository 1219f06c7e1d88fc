"""Which linear layers multiply in 8-bit floating point, and how: the strategy's ``fp8``.

Independent of Lightning's precision: that says what everything else computes in, and what the products' operands are
before they are rounded. The arithmetic is torchao's (:mod:`lightning_megapar.precision.float8_products`); layers keep
their classes, parameters and collectives, so that tensor parallelism, split backwards and ZeRO are what they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_megapar.config import ConfigError, nearest_name, refuse_unknown
from lightning_megapar.layers.deferral import can_defer, make_own
from lightning_megapar.layers.foreign import output_dim
from lightning_megapar.layers.products import PLAIN, Products

if TYPE_CHECKING:
    from lightning_megapar.precision.float8_products import Float8Products

RECIPES = ("rowwise", "tensorwise")
MULTIPLE = 16
"""Sizes of 8-bit products must be multiples of it (``torch._scaled_mm``)."""


@dataclass(frozen=True)
class Fp8Options:
    """What multiplies in 8 bits.

    Args:
        recipe: ``"rowwise"`` (a scale for each row and column, all of it e4m3) or ``"tensorwise"`` (one for each
            tensor, gradients e5m2; faster, coarser): torchao's recipes of these names.
        layers: patterns of dotted module names (``"*.mlp.*"``); by default the linear layers inside the stack of
            blocks. Heads and embeddings stay out, as torchao advises; a pattern that names one takes it in.
        emulate: round to 8 bits and multiply in float32: ``True``, ``False``, or ``"auto"`` where the device has no
            8-bit products. Emulation shows what training does with such numbers; it saves neither time nor memory.

    Raises:
        ConfigError: on a value outside its range, with the nearest valid ones.
    """

    recipe: str = "rowwise"
    layers: tuple[str, ...] | None = None
    emulate: bool | str = "auto"

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            near = nearest_name(str(self.recipe), RECIPES)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"fp8.recipe={self.recipe!r} is not one of {', '.join(RECIPES)}{hint}")
        if self.emulate not in (True, False, "auto"):
            raise ConfigError(f"fp8.emulate={self.emulate!r}: expected true, false or 'auto'")
        if self.layers is not None:
            given = (self.layers,) if isinstance(self.layers, str) else tuple(self.layers)
            if not given or not all(isinstance(one, str) and one for one in given):
                raise ConfigError(f"fp8.layers={self.layers!r}: expected patterns of module names, or null")
            object.__setattr__(self, "layers", given)


def given_fp8(value: Any) -> Fp8Options | None:
    """The options from what a user gives.

    Args:
        value: ``None`` or ``False``: off. ``"rowwise"`` or ``"tensorwise"``; ``True`` for the defaults; a mapping of
            the arguments of :class:`Fp8Options`, or one.

    Raises:
        ConfigError: on anything else, with the nearest valid values; also when torchao is not installed.
    """
    if value is None or value is False:
        return None
    if isinstance(value, Fp8Options):
        options = value
    elif value is True:
        options = Fp8Options()
    elif isinstance(value, str):
        if value not in RECIPES:
            near = nearest_name(value, RECIPES)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"fp8={value!r}: expected null, {', '.join(RECIPES)}, or a mapping of options{hint}")
        options = Fp8Options(value)
    elif isinstance(value, Mapping):
        refuse_unknown("fp8", map(str, value), [one.name for one in fields(Fp8Options)])
        options = Fp8Options(**value)
    else:
        raise ConfigError(f"fp8={value!r}: expected null, {', '.join(RECIPES)}, or a mapping of options")
    if find_spec("torchao") is None:
        raise ConfigError(
            f"fp8={options.recipe!r} needs torchao, which is not installed: pip install 'lightning_megapar[fp8]'; "
            "valid without it: fp8=None"
        )
    return options


@dataclass
class Fp8Layers:
    """The layers of one run that multiply in 8 bits.

    Args:
        options: as given.
        names: dotted names in the whole module.
        products: their arithmetic.
        whole: found once layers are sharded: name -> (outputs, inputs) of those that stay as they are, since a size is
            no multiple of 16 on this rank.
    """

    options: Fp8Options
    names: tuple[str, ...]
    products: Float8Products
    whole: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def choose(
        cls, module: nn.Module, options: Fp8Options, blocks: Sequence[nn.Module], device: torch.device
    ) -> Fp8Layers:
        """Find the layers in a whole module; nothing is changed yet.

        Args:
            module: before it is cut.
            options: as given.
            blocks: of its stack; ``[]`` for a module without one.
            device: where products run.

        Raises:
            ConfigError: no layer fits, a pattern names nothing that can be one, or the device has no 8-bit products.
        """
        from lightning_megapar.precision.float8_products import Float8Products

        linear = {name: child for name, child in module.named_modules() if can_defer(child)}
        if options.layers is None:
            inside = {id(child) for block in blocks for child in block.modules()}
            names = tuple(name for name, child in linear.items() if id(child) in inside)
            if not names:
                raise ConfigError(
                    f"fp8={options.recipe!r}: no linear layer stands in a stack of blocks of "
                    f"{type(module).__name__}; name layers: fp8={{'layers': ['pattern']}}, such as "
                    f"{', '.join(list(linear)[:3]) or 'none, as there are no linear layers'}"
                )
        else:
            for pattern in options.layers:
                if not any(fnmatchcase(name, pattern) for name in linear):
                    near = nearest_name(pattern, linear)
                    hint = f"; did you mean {near!r}?" if near else ""
                    raise ConfigError(f"fp8.layers={pattern!r} names no linear layer of the module{hint}")
            names = tuple(name for name in linear if any(fnmatchcase(name, p) for p in options.layers))
        return cls(options, names, Float8Products(options.recipe, options.emulate, device))

    def connect(self, module: nn.Module) -> None:
        """Let the chosen layers of ``module`` multiply in 8 bits. Before they get a sharded forward."""
        for child in self._held(module).values():
            make_own(child)
            vars(child)["products"] = self.products

    def settle(self, module: nn.Module) -> None:
        """Once layers are sharded: give back those whose sizes on this rank cannot be multiplied in 8 bits.

        Raises:
            ConfigError: for a layer that a pattern names, or when none is left.
        """
        held = self._held(module)
        refused = 0
        for name, layer in held.items():
            out, inputs = _sizes(layer)
            if out % MULTIPLE == 0 and inputs % MULTIPLE == 0:
                continue
            if self.options.layers is not None:
                raise ConfigError(
                    f"fp8.layers: {name!r} is {out} x {inputs} (outputs x inputs on a tensor rank), and 8-bit products "
                    f"need multiples of {MULTIPLE}; leave it out, or choose its sizes (or tensor_parallel_size) so: "
                    f"nearest {_near(out)} x {_near(inputs)}"
                )
            vars(layer)["products"] = PLAIN
            self.whole[name] = (out, inputs)
            refused += 1
        if held and refused == len(held):
            name, (out, inputs) = next(iter(self.whole.items()))
            raise ConfigError(
                f"fp8={self.options.recipe!r}: no layer of this rank has sizes that are multiples of {MULTIPLE} "
                f"({name!r} is {out} x {inputs}); valid: fp8=None, or sizes such as {_near(out)} x {_near(inputs)}"
            )

    def describe(self) -> str:
        """One line for the run's output."""
        line = f"fp8 ({self.options.recipe}): {len(self.names)} linear layers multiply in 8 bits"
        if self.whole:
            shown = ", ".join(f"{name} {out} x {inputs}" for name, (out, inputs) in list(self.whole.items())[:3])
            line += f", but for {len(self.whole)} on this stage whose sizes are no multiples of {MULTIPLE} ({shown})"
        if self.products.emulate:
            line += f"; emulated ({self.products.why}): numbers as in 8 bits, neither their speed nor their memory"
        return line

    def _held(self, module: nn.Module) -> dict[str, Any]:
        asked = set(self.names)
        return {name: child for name, child in module.named_modules() if name in asked and can_defer(child)}


def multiplied_in_8_bits(layer: nn.Module) -> bool:
    """Whether a layer's products are 8-bit ones."""
    products: Products = getattr(layer, "products", PLAIN)
    return products is not PLAIN


def _sizes(layer: Any) -> tuple[int, int]:
    """(outputs, inputs) that this rank multiplies."""
    weight: Tensor = layer.weight
    shape = tuple(weight._local_tensor.shape if isinstance(weight, DTensor) else weight.shape)
    dim = output_dim(layer)
    out, inputs = shape[dim], shape[1 - dim]
    window = getattr(layer, "window", None)
    if window is not None:
        out = window[1]
    style = vars(layer).get("_style")
    if style is not None and style.rows is not None:
        out = sum(n for _, n in style.rows)
    return out, inputs


def _near(size: int) -> int:
    return max(1, round(size / MULTIPLE)) * MULTIPLE
