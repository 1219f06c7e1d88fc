"""Number formats: fp16's one loss scale, bfloat16 working copies of fp32 masters, fp8 products of linear layers.

Which of them runs is said by Lightning's ``precision`` (and, for fp8, by the strategy's ``fp8``). This package imports
nothing until it is asked for; :mod:`~lightning_megapar.precision.loss_scale` is the part without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_megapar.precision.loss_scale import LossScale, LossScaleOptions, safe_static_scale
    from lightning_megapar.precision.plugin import float16_plugin

_HOMES = {
    "LossScale": "loss_scale",
    "LossScaleOptions": "loss_scale",
    "float16_plugin": "plugin",
    "safe_static_scale": "loss_scale",
}
__all__ = ["LossScale", "LossScaleOptions", "float16_plugin", "safe_static_scale"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
