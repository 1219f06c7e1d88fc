"""Memory: what to recompute within a budget, an allocator, traces and layouts planned from them."""

from lightning_megapar.memory.allocator import AllocatorStats, ArenaFullError, BestFitAllocator, Block
from lightning_megapar.memory.layout import Layout, plan_offline
from lightning_megapar.memory.planned import PlannedAllocator
from lightning_megapar.memory.recompute import BlockCosts, RecomputePlan, plan_recompute
from lightning_megapar.memory.trace import Trace

__all__ = [
    "AllocatorStats",
    "ArenaFullError",
    "BestFitAllocator",
    "Block",
    "BlockCosts",
    "Layout",
    "PlannedAllocator",
    "RecomputePlan",
    "Trace",
    "plan_offline",
    "plan_recompute",
]
