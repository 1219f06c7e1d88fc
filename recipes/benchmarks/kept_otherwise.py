"""What is kept in another way than as it is: lossy codecs, host memory, recomputation; bytes, time and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from chains import Chain, Forward, by_turns
from torch import Tensor

from lightning_megapar.memory.blocks import ALL, INPUTS
from lightning_megapar.memory.codecs import CODECS
from lightning_megapar.memory.compression import CompressSaved
from lightning_megapar.memory.compression_options import CompressionConfig
from lightning_megapar.memory.offload import OffloadSaved
from lightning_megapar.memory.saved import SavedBytes

AS_IT_IS, HOST, AGAIN = "kept as it is", "moved to the host", "recomputed (inputs)"


class Way:
    """A way to keep what blocks save.

    Args:
        chain: of the blocks.
        name: :data:`AS_IT_IS`, :data:`HOST`, :data:`AGAIN`, or the name of a codec.
    """

    def __init__(self, chain: Chain, name: str) -> None:
        self.chain, self.name = chain, name
        self.offload = OffloadSaved(chain.blocks, minimum_bytes=1 << 12) if name == HOST else None
        config = CompressionConfig(name, minimum_elements=1024) if name in CODECS else None
        self.compression = None if config is None else CompressSaved(config, chain.blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Of the blocks."""
        around: AbstractContextManager[Any] = self.compression or nullcontext()
        with around:
            for index, block in enumerate(self.chain.blocks):
                with self._moving(index, block):
                    x = block(x)
        return x

    def _moving(self, index: int, block: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self.offload is None else self.offload.block(index, module=block)

    @contextmanager
    def chosen(self) -> Iterator[Forward]:
        """Around steps."""
        self.chain.choose([INPUTS if self.name == AGAIN else ALL] * len(self.chain.forwards))
        yield self.forward

    def step(self) -> None:
        """A step of the chain."""
        with self.chosen() as forward:
            self.chain.step(forward)

    def kept_bytes(self) -> tuple[int, int]:
        """On the device and on the host, between the forward and the backward of a microbatch."""
        with self.chosen() as forward, self.chain.kernels():
            with SavedBytes(self.chain.blocks) as saved:
                y = forward(self.chain.x.detach().clone().requires_grad_())
            found = saved.bytes, 0 if self.offload is None else self.offload.moved_bytes
            y.sum().backward()  # what is recomputed takes the same kernels again
        return found


def measure_ways(chain: Chain, names: Sequence[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Each way's bytes, peak, time to :data:`AS_IT_IS`, and gradients beside the exact ones.

    Args:
        chain: any; without dropout.
        names: of ways; :data:`AS_IT_IS` is always there.
        rounds: of timed steps.
    """
    ways = {name: Way(chain, name) for name in dict.fromkeys((AS_IT_IS, *names))}
    times = by_turns({name: way.step for name, way in ways.items()}, rounds, chain.device)
    exact: Tensor | None = None
    found = {}
    for name, way in ways.items():
        kept, moved = way.kept_bytes()
        with way.chosen() as forward:
            peak = chain.peak(forward)
            if exact is None:  # then they are compared with those of another run of the same
                exact = _flat(chain.gradients(forward))
            flat = _flat(chain.gradients(forward))
        found[name] = {
            "kept_bytes": kept,
            "host_bytes": moved,
            "peak_bytes": peak,
            "step": times[name].ratio_to(times[AS_IT_IS]),
            "gradients_are_equal": torch.equal(flat, exact),
            "cosine": float(torch.nn.functional.cosine_similarity(flat.double(), exact.double(), dim=0)),
        }
    return found


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([one.flatten() for one in tensors])


ALL_WAYS = (AS_IT_IS, *CODECS, HOST, AGAIN)
