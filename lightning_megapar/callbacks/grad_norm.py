"""Logs the global gradient norm."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer


class GradNorm(Callback):
    """Logs ``grad_norm``: the 2-norm of all gradients before clipping, once per optimizer step.

    The strategy's ``gradient_norm()`` is used where there is one (each logical parameter counted once over all ranks);
    otherwise the norm of this process's gradients, which in plain Lightning (one device or DDP) is the global one.
    """

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        own = getattr(trainer.strategy, "gradient_norm", None)
        norm = own() if callable(own) else plain_gradient_norm(pl_module)
        pl_module.log("grad_norm", norm, prog_bar=True)


def plain_gradient_norm(module: torch.nn.Module) -> Tensor:
    """2-norm over all ``.grad`` of a module, as a float32 (or the gradients' wider type) scalar; 0 without any."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    return torch.nn.utils.get_total_norm(gradients)
