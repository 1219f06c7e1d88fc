"""Self-attention split by heads, with grouped key/value heads and rotary positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_megapar.config import ConfigError, divisors, nearest
from lightning_megapar.layers.base import ParallelLayer
from lightning_megapar.layers.linear import ColumnParallelLinear, RowParallelLinear, column_linears


class RotaryPositions:
    """Rotary position embedding (arXiv 2104.09864) in the half-rotation form of Llama.

    Not a module: its tables are computed when first needed, per device and dtype, and never saved.

    Args:
        head_dim: features per head; even.
        theta: base of the wavelengths.

    Raises:
        ConfigError: for an odd ``head_dim``.
    """

    def __init__(self, head_dim: int, theta: float = 10000.0) -> None:
        if head_dim % 2:
            raise ConfigError(f"rotary positions need an even head size, got {head_dim}")
        self.head_dim, self.theta = head_dim, theta
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> RotaryPositions:
        return RotaryPositions(self.head_dim, self.theta)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tables": {}}

    def tables(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each (length, head_dim), on the device and in the dtype of ``like``."""
        key = (like.device, like.dtype)
        found = self._tables.get(key)
        if found is None or found[0].shape[0] < length:
            # A power of two at least: a sequence that grows by one token does not compute a new table each time.
            rows = 1 << max(length - 1, 1).bit_length()
            with torch.inference_mode(False), torch.no_grad():
                steps = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu") / self.head_dim
                angles = torch.arange(rows, dtype=torch.float64, device="cpu")[:, None] / self.theta**steps
                angles = torch.cat((angles, angles), dim=-1)
                found = angles.cos().to(like), angles.sin().to(like)
            self._tables[key] = found
        return found[0][:length], found[1][:length]

    def computed(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The tables that exist: constants, which nothing that saves activations need keep."""
        return tuple(self._tables.values())

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate (..., s, head_dim), positions 0 to s - 1."""
        cos, sin = self.tables(x.shape[-2], x)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


class CoreAttention(nn.Module):
    """Causal or full attention of heads to heads; no parameters.

    A module of its own, so that its intermediate results can be recomputed while queries, keys and values are kept
    (Korthikanti et al., arXiv 2205.05198: what is cheap to compute and large to keep).

    Args:
        causal: a token sees itself and those before it.
    """

    is_core_attention = True
    """What :mod:`lightning_megapar.memory.blocks` looks for."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries (batch, heads, s, head size), keys and values with a divisor of the heads -> as the queries."""
        grouped = key.shape[-3] != query.shape[-3]
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal, enable_gqa=grouped)

    def extra_repr(self) -> str:
        return f"causal={self.causal}"


class ParallelAttention(ParallelLayer):
    """Causal multi-head self-attention whose heads are split over the tensor ranks.

    Input and output (batch, s, hidden), replicated; under sequence parallelism (batch, s / ranks, hidden), gathered for
    the projections and scattered after the output projection. Query, key and value are parameters of their own, each
    cut by itself, and share one collective per direction.

    With fewer key/value heads than ranks, their weights stay replicated: each rank uses the head that its query heads
    attend to, and the gradients are addends (``key.partial_gradients()``).

    Args:
        hidden_size: width of the input and output.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of ``num_heads``; ``None`` means as many as query heads.
        head_dim: features per head; ``None`` means ``hidden_size / num_heads``.
        bias: in all four projections.
        rotary: rotates queries and keys; ``None`` for none. May be shared between layers.
        causal: a token sees itself and those before it.
        init_std, output_std: initial standard deviations of the first three projections and of the output one.
        device, dtype: of the parameters.

    Raises:
        ConfigError: for head counts that do not fit each other; from :meth:`shard`, when the ranks do not divide
            ``num_heads``, or neither of ``num_kv_heads`` and the number of ranks divides the other.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = True,
        rotary: RotaryPositions | None = None,
        causal: bool = True,
        init_std: float | None = None,
        output_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(hidden_size, num_heads, kv_heads, head_dim)
        self.num_heads, self.num_kv_heads = num_heads, kv_heads
        self.core = CoreAttention(causal)
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.rotary = rotary
        where: dict = {"bias": bias, "device": device, "dtype": dtype}
        query = {"units": num_heads, "setting": "num_heads", "init_std": init_std, **where}
        shared = {"units": kv_heads, "setting": "num_kv_heads", "init_std": init_std, **where}
        self.query = ColumnParallelLinear(hidden_size, num_heads * self.head_dim, **query)
        self.key = ColumnParallelLinear(hidden_size, kv_heads * self.head_dim, **shared)
        self.value = ColumnParallelLinear(hidden_size, kv_heads * self.head_dim, **shared)
        self.output = RowParallelLinear(
            num_heads * self.head_dim, hidden_size, setting="num_heads x head size", init_std=output_std, **where
        )

    def shard(self, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        """Check that the heads can be split; the projections are layers of their own and sharded as such."""
        size = mesh.size()
        fits = sorted(
            d for d in divisors(self.num_heads) if d > 1 and (self.num_kv_heads % d == 0 or d % self.num_kv_heads == 0)
        )
        if size > 1 and size not in fits:
            near = ", ".join(map(str, nearest(size, fits))) or "1"
            if self.num_heads % size:
                below = self.num_heads - self.num_heads % size
                heads = ", ".join(str(n) for n in (below, below + size) if n > 0)
                raise ConfigError(
                    f"num_heads={self.num_heads} is not divisible by tensor_parallel_size={size}; nearest valid "
                    f"tensor_parallel_size: {near}; nearest valid num_heads: {heads}"
                )
            raise ConfigError(
                f"num_kv_heads={self.num_kv_heads} and tensor_parallel_size={size}: one must divide the other; "
                f"nearest valid tensor_parallel_size: {near}"
            )
        super().shard(mesh, sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
            for y in column_linears(x, self.query, self.key, self.value)
        )
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        return self.output(self.core(query, key, value).transpose(-3, -2).flatten(-2))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"


def check_heads(hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int | None = None) -> None:
    """Raise :class:`ConfigError` for head counts that do not fit the width or each other."""
    if num_heads < 1 or num_kv_heads < 1:
        raise ConfigError(f"num_heads={num_heads} and num_kv_heads={num_kv_heads} must be at least 1")
    if head_dim is None and hidden_size % num_heads:
        raise ConfigError(
            f"num_heads={num_heads} does not divide hidden_size={hidden_size}; nearest valid num_heads: "
            f"{', '.join(map(str, nearest(num_heads, divisors(hidden_size))))}"
        )
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}; nearest valid num_kv_heads: "
            f"{', '.join(map(str, nearest(num_kv_heads, divisors(num_heads))))}"
        )
