"""Memory: what to recompute within a budget, an allocator, layouts planned from traces, and tensors from an arena."""

from lightning_megapar.memory.allocator import AllocatorStats, ArenaFullError, BestFitAllocator, Block
from lightning_megapar.memory.arena import Arena, ArenaStats, TensorArena
from lightning_megapar.memory.chain import ChainCosts, plan_chain
from lightning_megapar.memory.layout import Layout, plan_offline
from lightning_megapar.memory.options import RecomputeConfig
from lightning_megapar.memory.planned import PlannedAllocator
from lightning_megapar.memory.pool import PoolArena, make_arena
from lightning_megapar.memory.recompute import BlockCosts, RecomputePlan, plan_recompute
from lightning_megapar.memory.stash import GradientStash
from lightning_megapar.memory.trace import Event, Trace

__all__ = [
    "AllocatorStats",
    "Arena",
    "ArenaFullError",
    "ArenaStats",
    "BestFitAllocator",
    "Block",
    "BlockCosts",
    "ChainCosts",
    "Event",
    "GradientStash",
    "Layout",
    "PlannedAllocator",
    "PoolArena",
    "RecomputeConfig",
    "RecomputePlan",
    "TensorArena",
    "Trace",
    "make_arena",
    "plan_chain",
    "plan_offline",
    "plan_recompute",
]
