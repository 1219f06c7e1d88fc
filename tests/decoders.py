"""Small decoders that tests train."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_megapar.models.gpt import GPT, GPTConfig


class Decoder(LightningModule):
    """In GPT-2 style, with dropout; batches are (batch, length + 1) tokens below 64."""

    num_layers = 3

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = GPTConfig.gpt2(
            vocab_size=64,
            num_layers=self.num_layers,
            num_heads=2,
            hidden_size=64,
            max_sequence_length=64,
            dropout=0.1,
        )
        self.model = GPT(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[:, :-1], batch[:, 1:])
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
