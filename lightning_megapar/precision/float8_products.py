"""A linear layer's three products in 8-bit floating point: torchao's casts and scaled product, apart from its module.

``torchao.float8.float8_linear.matmul_with_hp_or_float8_args`` computes them in one autograd function. They are apart
here, since between them stand a tensor-parallel layer's collectives and a schedule's waiting weight gradients; which
operand is scaled along which dimension is that function's (torchao 0.18), and the results are the same bit for bit
(``tests/precision/test_fp8.py``). Importing this module imports torchao.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_megapar.config import ConfigError


@contextmanager
def _quietly() -> Iterator[None]:
    """What torchao says while it is imported is about kernels that are not used here (its C++ extensions)."""
    kept = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(kept)


with _quietly():
    try:
        import torchao
        from torchao.float8.config import Float8LinearConfig, ScalingType
        from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig, ScaledMMConfig
    except ImportError as error:
        raise ConfigError(
            f"fp8 needs torchao's float8 training, which the installed torchao lacks ({error}); valid: "
            "torchao from 0.15, or fp8=None"
        ) from error

VERSION = str(torchao.__version__)


class Float8Products:
    """See :class:`~lightning_megapar.layers.products.Products`.

    Args:
        recipe: ``"rowwise"`` or ``"tensorwise"``.
        emulate: ``True``, ``False``, or ``"auto"`` for where the device has no 8-bit products.
        device: where products run.

    Raises:
        ConfigError: ``emulate=False`` on a device without 8-bit products.
    """

    def __init__(self, recipe: str, emulate: bool | str, device: torch.device) -> None:
        missing = _missing(recipe, device)
        if emulate is False and missing:
            raise ConfigError(f"fp8.emulate=False: {missing}; valid values: true, 'auto'")
        self.recipe = recipe
        self.emulate = bool(missing) if emulate == "auto" else bool(emulate)
        self.why = missing or "asked for"
        self.config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=self.emulate)
        gemms = (
            self.config.gemm_config_output,
            self.config.gemm_config_grad_input,
            self.config.gemm_config_grad_weight,
        )
        self._mm = LinearMMConfig(*(ScaledMMConfig(self.emulate, one.use_fast_accum, False, False) for one in gemms))

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self._check(x)
        a = self._cast(x.reshape(-1, x.shape[-1]), self.config.cast_config_input, GemmInputRole.INPUT, -1)
        b = self._cast(weight.t(), self.config.cast_config_weight, GemmInputRole.WEIGHT, 0)
        y = torch.mm(a, b).view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        a = self._cast(gradient, self.config.cast_config_grad_output, GemmInputRole.GRAD_OUTPUT, -1)
        b = self._cast(weight.t(), self.config.cast_config_weight_for_grad_input, GemmInputRole.WEIGHT, -1)
        return torch.mm(a, b.t())

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        rest = -x.shape[0] % 16
        if rest and not self.emulate:  # rows of zeros add nothing, and the number of rows must be a multiple too
            gradient, x = (torch.nn.functional.pad(one, (0, 0, 0, rest)) for one in (gradient, x))
        role = GemmInputRole.GRAD_OUTPUT
        a = self._cast(gradient, self.config.cast_config_grad_output_for_grad_weight, role, 0)
        b = self._cast(x, self.config.cast_config_input_for_grad_weight, GemmInputRole.INPUT, 0)
        return torch.mm(a.t(), b)

    def _cast(self, value: Tensor, cast: Any, role: Any, dim: int) -> Any:
        if cast.scaling_type is ScalingType.DISABLED:
            return value
        return hp_tensor_to_float8_dynamic(
            value,
            cast.target_dtype,
            self._mm,
            gemm_input_role=role,
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(dim, cast.scaling_granularity),
            round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
        )

    def _check(self, x: Tensor) -> None:
        if not self.emulate and x.dtype != torch.bfloat16:
            kind = str(x.dtype).removeprefix("torch.")
            raise ConfigError(
                f"fp8={self.recipe!r}: 8-bit products on this GPU give bfloat16, and the layers' inputs are {kind}; "
                "valid: precision='bf16-mixed' or 'bf16-true', or fp8={'emulate': True}"
            )


def _missing(recipe: str, device: torch.device) -> str:
    """Why a device has no 8-bit products of a recipe; ``""`` when it has them."""
    if device.type != "cuda":
        return f"a {device.type} has no 8-bit products"
    if torch.version.hip is not None:
        return ""
    needed = (9, 0) if recipe == "rowwise" else (8, 9)
    found = torch.cuda.get_device_capability(device)
    if found < needed:
        return (
            f"{torch.cuda.get_device_name(device)} has no 8-bit products ({recipe} needs compute capability {needed})"
        )
    return ""
