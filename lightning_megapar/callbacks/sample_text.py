"""At the end of training: some generated text, and whether the model beats knowing byte frequencies only."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_megapar.callbacks.meter import as_float
from lightning_megapar.config import ConfigError
from lightning_megapar.data.text import SEPARATOR
from lightning_megapar.models.gpt import GPT
from lightning_megapar.models.language_model import LanguageModel


class SampleText(Callback):
    """Prints text that the trained byte-level model writes, and its validation loss beside the unigram entropy.

    Under a strategy that shards the model, all ranks take part in gathering it (``full_state_dict``), and rank 0
    samples from an unsharded copy on the CPU.

    Args:
        prompt: text that the model continues; an empty one starts at a document separator.
        length: bytes to generate.
        temperature: divides the logits; 0 takes the likeliest byte.
        top_k: sample among the k likeliest tokens only; ``None`` among all.
        seed: of the sampling.

    Raises:
        ConfigError: on a value outside its range, or (at set-up) for a module that is no
            :class:`~lightning_megapar.models.language_model.LanguageModel` over bytes.
    """

    def __init__(
        self,
        prompt: str = "def ",
        length: int = 256,
        temperature: float = 0.8,
        top_k: int | None = 40,
        seed: int = 0,
    ) -> None:
        for name, value, valid in (
            ("length", length, length >= 1),
            ("temperature", temperature, temperature >= 0),
            ("top_k", top_k, top_k is None or top_k >= 1),
        ):
            if not valid:
                raise ConfigError(f"SampleText {name}={value!r}: expected a larger number (defaults 256, 0.8, 40)")
        self.prompt = prompt
        self.length = length
        self.temperature = temperature
        self.top_k = top_k
        self.seed = seed

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, LanguageModel) or pl_module.config.vocab_size <= SEPARATOR:
            raise ConfigError(
                f"SampleText needs a LanguageModel over bytes (vocab_size >= {SEPARATOR + 1}), got "
                f"{type(pl_module).__name__}; expected callbacks without SampleText"
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel)
        state = full_state_dict(trainer, pl_module)
        if not trainer.is_global_zero:
            return
        model = GPT(pl_module.config)
        model.load_state_dict({k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")})
        prompt = [SEPARATOR, *self.prompt.encode()]
        tokens = generate(model, prompt, self.length, self.temperature, self.top_k, self.seed)
        print(f"--- sample (temperature {self.temperature}, top-k {self.top_k}, seed {self.seed}) ---")
        print(printable(decode(tokens)))
        print("---")
        loss = as_float(trainer.callback_metrics.get("val_loss"))
        entropy = getattr(getattr(trainer, "datamodule", None), "entropy", None)
        if loss is not None and entropy is not None:
            print(f"validation loss {loss:.4f} {'<' if loss < entropy else '>='} unigram entropy {entropy:.4f} nats")


def full_state_dict(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """The unsharded module's state dict on rank 0 (CPU), an empty dict elsewhere; every rank must call it."""
    gather = getattr(trainer.strategy, "full_state_dict", None)
    if callable(gather):
        return gather()
    if not trainer.is_global_zero:
        return {}
    return {key: value.detach().cpu() for key, value in pl_module.state_dict().items() if isinstance(value, Tensor)}


@torch.no_grad()
def generate(
    model: GPT, prompt: list[int], length: int, temperature: float = 0.8, top_k: int | None = 40, seed: int = 0
) -> list[int]:
    """Continue ``prompt`` by ``length`` tokens; the model sees at most its ``max_sequence_length`` last ones.

    Returns:
        prompt and continuation. The same arguments give the same tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    training = model.training
    model.eval()
    tokens = list(prompt)
    limit = model.config.max_sequence_length
    for _ in range(length):
        logits = model(torch.tensor([tokens[-limit:]]))[0, -1].float()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        if top_k is not None and top_k < logits.numel():
            logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
        chances = torch.softmax(logits / temperature, dim=-1)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    model.train(training)
    return tokens


def decode(tokens: list[int]) -> str:
    """Bytes to text (invalid UTF-8 replaced); a document separator starts a new line."""
    pieces: list[bytearray] = [bytearray()]
    for token in tokens:
        if token < SEPARATOR:
            pieces[-1].append(token)
        else:
            pieces.append(bytearray())
    return "\n".join(bytes(piece).decode(errors="replace") for piece in pieces if piece)


def printable(text: str) -> str:
    """Without control characters that a terminal would obey, and without letters that standard output cannot encode."""
    import sys

    shown = "".join(c if c == "\n" or c.isprintable() else " " for c in text.expandtabs(4))
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    return shown.encode(encoding, errors="replace").decode(encoding)
