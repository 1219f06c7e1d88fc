"""LightningModules as people write them, and how to train one on any layout or with plain Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY, LENGTH = 61, 12


class Rows(Dataset[dict[str, Tensor]]):
    """Tokens, pixels, features and classes for every module below."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "tokens": torch.randint(3, VOCABULARY, (LENGTH,), generator=generator),
            "pixels": torch.randn(3, 16, 16, generator=generator, dtype=torch.float64).to(torch.get_default_dtype()),
            "features": torch.randn(10, generator=generator, dtype=torch.float64).to(torch.get_default_dtype()),
            "label": torch.randint(4, (), generator=generator),
        }


class Somebody(LightningModule):
    """Shared by the modules: perturbed weights, SGD with momentum, a log."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.build()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))

    def build(self) -> None:
        raise NotImplementedError

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class GPT2(Somebody):
    def build(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        settings = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.model = GPT2LMHeadModel(GPT2Config(**settings, **drop, bos_token_id=0, eos_token_id=0))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(input_ids=batch["tokens"], use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())


class LateGPT2(GPT2):
    """Built in ``configure_model``, without memory where the strategy says so."""

    def __init__(self) -> None:
        LightningModule.__init__(self)

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.build()


class MaskedBERT(Somebody):
    def build(self) -> None:
        from transformers import BertConfig, BertForMaskedLM

        settings = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
        drop = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        self.model = BertForMaskedLM(BertConfig(**settings, **drop, vocab_size=VOCABULARY, max_position_embeddings=32))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        masked = batch["tokens"] % 5 == 0
        logits = self.model(input_ids=batch["tokens"].masked_fill(masked, 1)).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten())


class ViT(Somebody):
    def build(self) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        settings = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
        drop = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        config = ViTConfig(**settings, **drop, image_size=16, patch_size=4, num_labels=4)
        self.model = ViTForImageClassification(config)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.model(pixel_values=batch["pixels"]).logits, batch["label"])


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.norm(self.first(x))))


class ResNet(Somebody):
    def build(self) -> None:
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)]
        self.net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Residual(16) for _ in range(4)), *head)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch["pixels"]), batch["label"])


class Demo(Somebody):
    """Lightning's own demo transformer."""

    def build(self) -> None:
        from lightning.pytorch.demos import Transformer

        self.model = Transformer(vocab_size=VOCABULARY, ninp=32, nhead=4, nhid=64, nlayers=4, dropout=0.0)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["tokens"]
        return F.nll_loss(self.model(tokens[:, :-1], tokens[:, 1:]), tokens[:, 1:].reshape(-1))


class MLP(Somebody):
    """Written by hand: a stack of blocks of two layers, beside a stem and a head."""

    def build(self) -> None:
        self.stem = nn.Linear(10, 24)
        blocks = [nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(4)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(24, 4)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.stem(batch["features"])
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x), batch["label"])


MODULES: dict[str, Callable[[], Somebody]] = {
    "late": LateGPT2,
    "gpt2": GPT2,
    "bert": MaskedBERT,
    "vit": ViT,
    "resnet": ResNet,
    "demo": Demo,
    "mlp": MLP,
}


class Record(Callback):
    """Losses, norms and whole gradients of each step, on any strategy."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.weights: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        strategy: Any = trainer.strategy
        if hasattr(strategy, "prepared"):
            from lightning_megapar.checkpoint import gather_full_state_dict

            held = [r for r in strategy.prepared.parameters if r.parameter.grad is not None]
            local = {r.name: r.as_value(r.parameter.grad.detach()) for r in held}
            self.norms.append(float(strategy.gradient_norm()))
            self.gradients.append(gather_full_state_dict(list(strategy.prepared.names.parameters), local))
        else:
            found = {n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None}
            self.norms.append(float(torch.sqrt(sum(g.double().square().sum() for g in found.values()))))
            self.gradients.append(found)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        strategy: Any = trainer.strategy
        state = strategy.full_state_dict() if hasattr(strategy, "full_state_dict") else pl_module.state_dict()
        self.weights = {k: v.detach().clone() for k, v in state.items()}


def train(kind: str, world: int, options: dict[str, Any] | None, steps: int = 2) -> dict[str, Any]:
    """Train on this rank; ``options=None`` is plain Lightning.

    Returns:
        what :func:`parity.compare` takes, and by which styles this rank's layers were sharded.
    """
    from lightning_megapar import MegaParStrategy

    strategy: Any = "auto" if options is None else MegaParStrategy(**options)
    data = 1 if options is None else strategy.config.resolve(world)[0].data
    record = Record()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world,
        max_steps=steps,
        precision="64-true",
        callbacks=[record],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir="/tmp/megapar-somebody",
    )
    module = MODULES[kind]()
    trainer.fit(module, DataLoader(Rows(), batch_size=8 // data))
    choice = getattr(getattr(trainer.strategy, "prepared", None), "choice", None)
    return {
        "losses": record.losses,
        "norms": record.norms,
        "gradients": record.gradients,
        "weights": record.weights,
        "styles": [str(a.style) for a in choice.assignments] if choice is not None else [],
        "local": sum(p.numel() for p in module.parameters()),
    }


def loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Rows(), batch_size=8)


__all__ = ["MODULES", "Rows", "loader", "parity", "train"]
