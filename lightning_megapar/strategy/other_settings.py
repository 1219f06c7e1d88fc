"""A module that is prepared already, under a strategy with other settings."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from lightning_megapar.config import ParallelConfig
from lightning_megapar.memory.compression_options import CompressionConfig
from lightning_megapar.memory.options import given_recompute
from lightning_megapar.strategy.prepare import PreparedModule
from lightning_megapar.strategy.recomputing import keep_activations, made_arena


def with_settings(
    module: nn.Module,
    prepared: PreparedModule,
    config: ParallelConfig,
    compression: CompressionConfig,
    device: torch.device,
) -> PreparedModule:
    """A module that is prepared already, whose blocks keep what other settings say.

    Args:
        module: this rank's share.
        prepared: what is known about it.
        config, compression: the settings.
        device: where this rank computes.
    """
    before = prepared.config
    asked = given_recompute(config.recompute), compression, config.arena
    if (given_recompute(before.recompute), prepared.compression, before.arena) == asked:
        return prepared
    arena = made_arena(config, device) if config.arena != before.arena else prepared.arena
    config = replace(before, recompute=config.recompute, arena=config.arena)
    plan, cut, deferral = prepared.plan, prepared.cut, prepared.deferral
    found = keep_activations(module, config, compression, plan, cut, deferral, device, arena)
    return replace(prepared, config=config, recomputation=found, compression=compression, arena=arena)
