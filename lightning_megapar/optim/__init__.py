"""Optimisation rules: the noise of gradients, learning rate and batch by it, weight decay, Muon.

Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_megapar.optim.muon import Muon
    from lightning_megapar.optim.noise_scale import GradientNoiseScale
    from lightning_megapar.optim.ramp import BatchSizeRamp
    from lightning_megapar.optim.rate import NoiseScaleLR
    from lightning_megapar.optim.weight_decay import DynamicWeightDecay

_HOMES = {
    "BatchSizeRamp": "ramp",
    "DynamicWeightDecay": "weight_decay",
    "GradientNoiseScale": "noise_scale",
    "Muon": "muon",
    "NoiseScaleLR": "rate",
}

__all__ = ["BatchSizeRamp", "DynamicWeightDecay", "GradientNoiseScale", "Muon", "NoiseScaleLR"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
