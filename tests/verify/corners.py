"""Modules and data that ``recipes/verify.py`` refuses with a reason."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import ragged
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

WIDTH = 6


class Needy(ragged.Ragged):
    def __init__(self, width: int, depth: int, bias: bool = True) -> None:
        super().__init__()


class Holder:
    def __init__(self, kept: Any) -> None:
        self.kept = kept


class Locked(ragged.Ragged):
    """Holds something that cannot be copied, somewhere."""

    def __init__(self, what: str) -> None:
        super().__init__()
        if what == "lock":
            self.net[1].guard = threading.Lock()
        elif what == "file":
            self.log_file = open(__file__)  # noqa: SIM115
        elif what == "generator":
            self.source = {"draws": [iter_of_numbers()]}
        elif what == "nested":
            self.holder = Holder(Holder(threading.RLock()))
        elif what == "activation":
            self.net[0].cached = self.net[0].weight * 2


def iter_of_numbers() -> Iterator[int]:
    yield 1


class Steps(ragged.Ragged):
    """Returns what is no loss."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.returns = returns

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {
            "nothing": None,
            "float": float(loss.detach()),
            "dict": {"train_loss": loss},
            "vector": loss.expand(3),
            "detached": loss.detach(),
        }[self.returns]


class WithData(ragged.Ragged):
    """Its own loader gives two loaders at once, as a dict."""

    def __init__(self) -> None:
        super().__init__(says_how_many=True)

    def train_dataloader(self) -> Any:
        return {"a": ragged.Data().train_dataloader(), "b": ragged.Data().train_dataloader()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx)


def nothing() -> None:
    return None


def empty() -> DataLoader[Any]:
    return DataLoader([], batch_size=2)


def batches() -> Iterator[list[Tensor]]:
    yield next(iter(ragged.Data().train_dataloader()))


class Alone(nn.Module):
    pass


def whole_batch() -> Tensor:
    return torch.ones(2)
