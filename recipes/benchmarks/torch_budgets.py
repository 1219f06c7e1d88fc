"""torch's own knob on a chain: ``torch._functorch.config.activation_memory_budget`` under ``torch.compile``.

It limits the bytes that cross from the forward to the backward, as a share of all of them, not the peak (pytorch issue
197838). The backend partitions as Inductor does and then runs the operations one by one, so that no compiler of C++ is
needed and the memory of each operation is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
from chains import Chain, by_turns

from lightning_megapar.memory.blocks import ALL

BACKEND = "aot_eager_decomp_partition"


def measure_budgets(chain: Chain, budgets: Sequence[float], rounds: int) -> list[dict[str, Any]]:
    """Peaks of a compiled chain, and its step's time to that of the same chain, not compiled and all kept.

    A compiled backward returns all gradients of parameters at once, so that they are in these peaks.

    Args:
        chain: any.
        budgets: torch's, 0 to 1.
        rounds: of timed steps.
    """
    chain.choose([ALL] * len(chain.forwards))
    for forward in chain.forwards:  # what is compiled is the block, without what may recompute it
        forward.remove()
    found = []
    try:
        for budget in budgets:
            torch._dynamo.reset()
            compiled: Any = torch.compile(chain.blocks, backend=BACKEND)
            with functorch_config.patch(activation_memory_budget=budget):
                chain.step(compiled)
            times = by_turns({"plain": chain.step, "compiled": partial(chain.step, compiled)}, rounds, chain.device)
            found.append(
                {
                    "budget": budget,
                    "measured_bytes": chain.peak(compiled),
                    "step": times["compiled"].ratio_to(times["plain"]),
                }
            )
    finally:
        for forward in chain.forwards:
            forward.install()
        torch._dynamo.reset()
    return found
