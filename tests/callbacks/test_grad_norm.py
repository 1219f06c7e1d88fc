from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from toy import Toy, loader, trainer

from lightning_megapar.callbacks import GradNorm
from lightning_megapar.callbacks.grad_norm import plain_gradient_norm


class Norms(Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.norms.append(trainer.callback_metrics["grad_norm"].item())


def test_norm_is_the_one_before_clipping(tmp_path: Path) -> None:
    def norms(**options: object) -> list[float]:
        watch = Norms()
        trainer(tmp_path, [GradNorm(), watch], max_steps=3, **options).fit(Toy(), loader())
        return watch.norms

    plain, clipped = norms(), norms(gradient_clip_val=1e-3)
    assert clipped[0] == plain[0] > 0.01
    assert clipped[1:] != plain[1:]  # the clipped run moved less


def test_plain_norm_equals_the_sum_of_squares() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).double()
    assert plain_gradient_norm(module) == 0
    module(torch.randn(5, 3, dtype=torch.float64)).square().sum().backward()
    module[0].bias.grad = None
    expected = sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None) ** 0.5
    assert float(plain_gradient_norm(module)) == pytest.approx(expected, rel=1e-12)


def test_strategy_that_knows_the_norm_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Norms()
    fit = trainer(tmp_path, [GradNorm(), watch], max_steps=2)
    monkeypatch.setattr(fit.strategy, "gradient_norm", lambda: torch.tensor(7.25), raising=False)
    fit.fit(Toy(), loader())
    assert watch.norms == [7.25, 7.25]
