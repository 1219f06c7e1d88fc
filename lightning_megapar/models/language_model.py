"""A LightningModule that trains a :class:`~lightning_megapar.models.gpt.GPT`; it knows nothing of parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_megapar.config import ConfigError, nearest_name, refuse_unknown
from lightning_megapar.models.gpt import GPT, GPTConfig

OPTIMIZERS = ("adamw", "sgd")
SCHEDULES = ("cosine", "constant")
IGNORED_LABEL = -100
"""A label that counts neither in the loss nor in ``num_valid_tokens``."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning rate schedule.

    Args:
        name: ``"adamw"`` or ``"sgd"``.
        lr: peak learning rate.
        weight_decay: decoupled for AdamW; applied to parameters of two or more dimensions only.
        betas, eps: of AdamW.
        momentum: of SGD.
        warmup_steps: optimizer steps over which the rate rises linearly from ``lr / (warmup_steps + 1)``.
        schedule: after the warm-up, ``"constant"``, or ``"cosine"`` down to ``lr * min_lr_ratio`` at ``max_steps``.
        max_steps: optimizer steps of the schedule; ``None`` takes the Trainer's number of steps.
        min_lr_ratio: see ``schedule``.
        fused: torch's fused kernel: ``True``, ``False``, or ``None`` for torch's own choice.

    Raises:
        ConfigError: on a value outside its range.
    """

    name: str = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0
    warmup_steps: int = 0
    schedule: str = "cosine"
    max_steps: int | None = None
    min_lr_ratio: float = 0.1
    fused: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(float(beta) for beta in self.betas))
        for setting, valid in (("name", OPTIMIZERS), ("schedule", SCHEDULES)):
            value = getattr(self, setting)
            if value not in valid:
                near = nearest_name(str(value).lower(), valid)
                hint = f"; did you mean {near!r}?" if near else ""
                raise ConfigError(f"optimizer {setting}={value!r} is not one of {', '.join(valid)}{hint}")
        if not self.lr > 0:
            raise ConfigError(f"optimizer lr={self.lr!r}: expected a positive number (default 3e-4)")
        for setting in ("weight_decay", "eps"):
            if not getattr(self, setting) >= 0:
                raise ConfigError(f"optimizer {setting}={getattr(self, setting)!r}: expected a number >= 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer betas={self.betas!r}: expected two numbers in [0, 1), such as (0.9, 0.95)")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optimizer momentum={self.momentum!r}: expected a number in [0, 1)")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"optimizer min_lr_ratio={self.min_lr_ratio!r}: expected a number in [0, 1]")
        if self.warmup_steps < 0:
            raise ConfigError(f"optimizer warmup_steps={self.warmup_steps!r}: expected an integer >= 0")
        if self.max_steps is not None and self.max_steps <= self.warmup_steps:
            raise ConfigError(
                f"optimizer max_steps={self.max_steps!r} leaves nothing after warmup_steps={self.warmup_steps}; "
                f"expected at least {self.warmup_steps + 1}"
            )

    def factor(self, max_steps: float) -> Callable[[int], float]:
        """Optimizer steps done -> what ``lr`` is multiplied by; ``max_steps`` is the schedule's last step."""

        def of_step(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / (self.warmup_steps + 1)
            if self.schedule == "constant":
                return 1.0
            progress = min(1.0, (step - self.warmup_steps) / max(1.0, max_steps - self.warmup_steps))
            return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))

        return of_step


class LanguageModel(LightningModule):
    """Next-token training of a GPT, on any layout or in plain Lightning.

    Batches are ``{"tokens": (b, s) int64, "labels": (b, s) int64}``; labels of -100 are left out of the loss. Logged:
    ``train_loss`` at each step, ``val_loss`` and ``test_loss`` as means over their loaders.

    Args:
        model: the decoder, as a :class:`~lightning_megapar.models.gpt.GPTConfig` or a mapping of its fields.
        optimizer: an :class:`OptimizerConfig` or a mapping of its fields.

    Raises:
        ConfigError: on a field that does not exist (its neighbour is named) or a value outside its range.
    """

    model: GPT | None

    def __init__(
        self,
        model: GPTConfig | Mapping[str, Any],
        optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.config: GPTConfig = _build(GPTConfig, "model", model)
        self.optimizer_config: OptimizerConfig = _build(OptimizerConfig, "optimizer", optimizer or {})
        # Plain dicts and lists, so that torch.load(..., weights_only=True) and any YAML reader open what is saved.
        optimizer_fields = {**asdict(self.optimizer_config), "betas": list(self.optimizer_config.betas)}
        self.save_hyperparameters({"model": asdict(self.config), "optimizer": optimizer_fields})
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT(self.config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(b, s, vocab_size)`` of the token after each of ``tokens`` ``(b, s)``."""
        return self._gpt()(tokens)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        labels = batch["labels"]
        loss = self._gpt()(batch["tokens"], labels)
        self.log("train_loss", loss, prog_bar=True, batch_size=labels.shape[0])
        return {"loss": loss, "num_valid_tokens": (labels != IGNORED_LABEL).sum()}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._evaluate("val_loss", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._evaluate("test_loss", batch)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The likeliest next token at each position: int64, ``(b, s)``."""
        return self(batch["tokens"]).argmax(dim=-1)

    def configure_optimizers(self) -> Any:
        return make_optimizer(self, self.optimizer_config)

    def _gpt(self) -> GPT:
        if self.model is None:
            self.configure_model()
        assert self.model is not None
        return self.model

    def _evaluate(self, name: str, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        loss = self._gpt()(batch["tokens"], labels)
        self.log(name, loss, prog_bar=True, batch_size=labels.shape[0], sync_dist=True)
        return loss


def make_optimizer(module: LightningModule, config: OptimizerConfig) -> dict[str, Any]:
    """What ``configure_optimizers`` returns: weight decay on matrices alone, a schedule by the optimizer step.

    Raises:
        ConfigError: a schedule that needs an end, on a Trainer without one.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    # Both groups stand on every rank, empty or not: a stage without matrices keeps the same group numbers.
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if config.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=config.fused)
    else:
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=config.fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, config.factor(_schedule_steps(module, config)))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _schedule_steps(module: LightningModule, config: OptimizerConfig) -> float:
    if config.schedule == "constant":
        return math.inf
    if config.max_steps is not None:
        return config.max_steps
    steps = module.trainer.estimated_stepping_batches
    if math.isinf(steps):
        raise ConfigError(
            "optimizer max_steps=null with schedule='cosine' needs a Trainer with an end; give trainer.max_steps "
            "or trainer.max_epochs, or use schedule='constant'"
        )
    return steps


def _build(kind: type[Any], owner: str, given: Any) -> Any:
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"{owner}={given!r}: expected a {kind.__name__} or a mapping of its fields")
    # A mapping from Hydra is no dict and its lists are no lists; neither may get into a checkpoint.
    values = {str(key): _plain(value) for key, value in given.items()}
    refuse_unknown(owner, values, [field.name for field in fields(kind)])
    return kind(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if not isinstance(value, (str, bytes)) and hasattr(value, "__iter__"):
        return tuple(_plain(entry) for entry in value)
    return value


__all__ = ["IGNORED_LABEL", "OPTIMIZERS", "SCHEDULES", "LanguageModel", "OptimizerConfig", "make_optimizer"]
