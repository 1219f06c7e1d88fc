"""Memory: what to recompute within a budget, an allocator, traces and layouts planned from them."""

from lightning_megapar.memory.allocator import AllocatorStats, ArenaFullError, BestFitAllocator, Block
from lightning_megapar.memory.recompute import BlockCosts, RecomputePlan, plan_recompute

__all__ = [
    "AllocatorStats",
    "ArenaFullError",
    "BestFitAllocator",
    "Block",
    "BlockCosts",
    "RecomputePlan",
    "plan_recompute",
]
