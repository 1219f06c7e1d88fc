"""The two feed-forward blocks: a column layer, an elementwise function, a row layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megapar.layers.linear import ColumnParallelLinear, RowParallelLinear, column_linears


class GeluMLP(nn.Module):
    """``down(gelu(up(x)))`` (tanh approximation, as GPT-2): (..., s, hidden) -> the same.

    Args:
        hidden_size, ffn_hidden_size: widths outside and inside.
        bias: in both linear layers.
        init_std, output_std: initial standard deviations of ``up`` and ``down``; ``None`` as ``nn.Linear``.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        bias: bool = True,
        init_std: float | None = None,
        output_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where: dict = {"bias": bias, "setting": "ffn_hidden_size", "device": device, "dtype": dtype}
        self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, init_std=init_std, **where)
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, init_std=output_std, **where)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202): (..., s, hidden) -> the same.

    ``gate`` and ``up`` are parameters of their own, each cut by itself, and share one collective per direction.

    Args: as in :class:`GeluMLP`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        bias: bool = False,
        init_std: float | None = None,
        output_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where: dict = {"bias": bias, "setting": "ffn_hidden_size", "device": device, "dtype": dtype}
        self.gate = ColumnParallelLinear(hidden_size, ffn_hidden_size, init_std=init_std, **where)
        self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, init_std=init_std, **where)
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, init_std=output_std, **where)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = column_linears(x, self.gate, self.up)
        return self.down(F.silu(gate) * up)
