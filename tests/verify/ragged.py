"""A module whose loss is a mean over a ragged mask: equal microbatch means are not the mean over all tokens."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Ragged(LightningModule):
    def __init__(self, says_how_many: bool = False, manual: bool = False) -> None:
        super().__init__()
        self.says_how_many = says_how_many
        self.automatic_optimization = not manual
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x, mask = batch
        loss = (self.net(x)[..., 0].square() * mask).sum() / mask.sum()
        return {"loss": loss, "num_valid_tokens": mask.sum()} if self.says_how_many else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(8, 5, 6, generator=generator, dtype=torch.float64)
        mask = (torch.arange(5) < torch.arange(1, 9)[:, None]).double()
        return DataLoader(TensorDataset(x, mask), batch_size=8)


def not_a_module() -> int:
    return 3
