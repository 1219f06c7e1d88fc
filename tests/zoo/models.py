"""Models of other kinds than causal language models, and what a step of each computes."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from lightning.pytorch import demos
from torch import Tensor, nn
from zoo.architectures import tokens

IDS = tokens()


def small(kind: Any, **changes: Any) -> Any:
    common = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    return kind(**{**common, **changes})


def on(module: nn.Module, value: Tensor) -> Tensor:
    return value.to(next(module.parameters()).device)


def labelled(module: Any) -> Tensor:
    return module(input_ids=on(module, IDS), labels=on(module, IDS)).loss


def classified(module: Any) -> Tensor:
    return module(input_ids=on(module, IDS), labels=on(module, torch.tensor([0, 2]))).loss


def pictured(module: Any) -> Tensor:
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return module(pixel_values=on(module, pixels), labels=on(module, torch.tensor([0, 2]))).loss


def demo(module: Any) -> Tensor:
    ids = on(module, IDS[:1])
    return nn.functional.nll_loss(module(ids, ids).view(-1, 128), ids.view(-1))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(small(transformers.BertConfig, vocab_size=128))


def bert_classifier() -> nn.Module:
    return transformers.BertForSequenceClassification(small(transformers.BertConfig, vocab_size=128, num_labels=3))


def llama_classifier() -> nn.Module:
    config = small(transformers.LlamaConfig, vocab_size=128, num_labels=3, pad_token_id=0)
    return transformers.LlamaForSequenceClassification(config)


def vit() -> nn.Module:
    config = small(transformers.ViTConfig, image_size=16, patch_size=8, num_labels=3)
    return transformers.ViTForImageClassification(config)


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4, decoder_start_token_id=0
        )
    )


def bart() -> nn.Module:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 4), ("attention_heads", 4), ("ffn_dim", 64))
    }
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = transformers.BartConfig(vocab_size=128, d_model=32, max_position_embeddings=64, **sides, **ids)
    return transformers.BartForConditionalGeneration(config)


def mixtral_with_router_loss() -> nn.Module:
    config = small(
        transformers.MixtralConfig,
        vocab_size=128,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
    )
    config._experts_implementation = "eager"
    return transformers.MixtralForCausalLM(config)


def lightning_demo() -> nn.Module:
    return demos.Transformer(vocab_size=128, ninp=32, nhead=4, nhid=64, nlayers=4)


class TorchEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.embed, self.encoder = nn.Embedding(128, 32), nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(32, 128)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids)))


def encoded(module: Any) -> Tensor:
    return nn.functional.cross_entropy(module(on(module, IDS)).flatten(0, 1), on(module, IDS).flatten())


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)),
            *(nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)),
        )
        self.short = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.short(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
            nn.Sequential(Residual(8, 8), Residual(8, 8)),
            nn.Sequential(Residual(8, 16), Residual(16, 16)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)),
        )


def images(module: Any) -> Tensor:
    pixels = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return nn.functional.cross_entropy(module.net(on(module, pixels)), on(module, torch.tensor([0, 1, 2, 1])))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(192, 192), nn.Tanh())])
        self.out = nn.Linear(192, 3)


def flat(module: Any) -> Tensor:
    pixels = torch.randn(4, 192, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = module.out(module.net(on(module, pixels)))
    return nn.functional.cross_entropy(out, on(module, torch.tensor([0, 1, 2, 1])))


MODELS = [
    *((bert, labelled), (bert_classifier, classified), (llama_classifier, classified), (vit, pictured)),
    *((t5, labelled), (bart, labelled), (mixtral_with_router_loss, labelled), (lightning_demo, demo)),
    *((TorchEncoder, encoded), (ResNet, images), (Perceptron, flat)),
]
