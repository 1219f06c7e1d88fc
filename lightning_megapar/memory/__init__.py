"""Memory: what to recompute within a budget, an allocator, traces and layouts planned from them."""

from lightning_megapar.memory.allocator import AllocatorStats, ArenaFullError, BestFitAllocator, Block
from lightning_megapar.memory.chain import ChainCosts, plan_chain
from lightning_megapar.memory.layout import Layout, plan_offline
from lightning_megapar.memory.options import RecomputeConfig
from lightning_megapar.memory.recompute import BlockCosts, RecomputePlan, plan_recompute
from lightning_megapar.memory.trace import Trace

__all__ = [
    "AllocatorStats",
    "ArenaFullError",
    "BestFitAllocator",
    "Block",
    "BlockCosts",
    "ChainCosts",
    "Layout",
    "RecomputeConfig",
    "RecomputePlan",
    "Trace",
    "plan_chain",
    "plan_offline",
    "plan_recompute",
]
