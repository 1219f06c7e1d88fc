from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from toy import Toy, loader, trainer

from lightning_megapar.callbacks import SampleText
from lightning_megapar.callbacks.sample_text import decode, generate, printable
from lightning_megapar.config import ConfigError
from lightning_megapar.data import SEPARATOR, TextDataModule
from lightning_megapar.models.gpt import GPT, GPTConfig
from lightning_megapar.models.language_model import LanguageModel

TINY = GPTConfig.gpt2(vocab_size=257, num_layers=1, num_heads=2, hidden_size=16, max_sequence_length=16)


@pytest.fixture
def data(tmp_path: Path) -> TextDataModule:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("abcdefgh\n" * 50)
    return TextDataModule(tmp_path, sequence_length=16, global_batch_size=16, cache_dir=tmp_path / ".cache")


def test_prints_a_sample_and_compares_with_the_entropy(
    tmp_path: Path, data: TextDataModule, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(steps: int, lr: float) -> tuple[str, float]:
        fit = trainer(
            tmp_path, [SampleText(prompt="ab", length=40, temperature=0.0)], max_steps=steps, val_check_interval=steps,
            check_val_every_n_epoch=None,
        )  # fmt: skip
        fit.fit(LanguageModel(TINY, {"lr": lr}), datamodule=data)
        return capsys.readouterr().out, fit.callback_metrics["val_loss"].item()

    trained, loss = run(150, 1e-2)
    assert "abcdefgh\nabcdefgh\nabcdefgh\n" in trained
    assert f"validation loss {loss:.4f} < unigram entropy {data.entropy:.4f} nats" in trained
    assert loss < 0.5 < data.entropy
    untrained, loss = run(1, 1e-9)
    assert f"validation loss {loss:.4f} >= unigram entropy {data.entropy:.4f} nats" in untrained


def test_gathered_state_is_used_on_rank_0_only(
    tmp_path: Path, data: TextDataModule, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = SampleText(length=8)
    fit = trainer(tmp_path, [callback], max_steps=1, limit_val_batches=0)
    module = LanguageModel(TINY)
    asked = []

    def gather() -> dict[str, torch.Tensor]:
        asked.append(1)
        return {key: torch.zeros_like(value) for key, value in module.state_dict().items()}

    monkeypatch.setattr(fit.strategy, "full_state_dict", gather, raising=False)
    fit.fit(module, datamodule=data)
    assert len(asked) == 1 and re.search(r"--- sample .*\n(.|\n)*---\n", capsys.readouterr().out)
    monkeypatch.setattr(type(fit), "is_global_zero", property(lambda self: False))
    callback.on_fit_end(fit, module)
    assert len(asked) == 2, "every rank takes part in gathering"
    assert capsys.readouterr().out == ""


def test_generation_is_seeded_and_sees_the_last_tokens_only() -> None:
    model = GPT(TINY)
    with torch.no_grad():  # untrained logits are nearly uniform: make them tell contexts apart
        for parameter in model.parameters():
            parameter.mul_(20)
    prompt = [SEPARATOR, *b"def "]
    first = generate(model, prompt, 40, seed=3)
    assert first == generate(model, prompt, 40, seed=3)
    assert first != generate(model, prompt, 40, seed=4)
    assert first[:5] == prompt and len(first) == 45 and max(first) < 257
    greedy = generate(model, prompt, 12, temperature=0.0)
    assert greedy == generate(model, prompt, 12, temperature=1.0, top_k=1)
    long = [*range(100), *prompt[:1], *range(15)]
    assert generate(model, long, 5, 0.0)[-5:] == generate(model, long[-16:], 5, 0.0)[-5:]
    assert model.training


def test_top_k_leaves_the_likeliest_only() -> None:
    model = GPT(TINY)
    logits = model(torch.tensor([[1, 2, 3]]))[0, -1]
    likely = set(logits.topk(3).indices.tolist())
    drawn = {generate(model, [1, 2, 3], 1, temperature=5.0, top_k=3, seed=seed)[-1] for seed in range(40)}
    assert drawn == likely


def test_text_is_safe_to_print() -> None:
    tokens = [SEPARATOR, *"grün".encode(), SEPARATOR, 0xFF, *b"a\x1b[2Jb\tc\r"]
    text = printable(decode(tokens))
    assert text.startswith("gr") and "\x1b" not in text and "\r" not in text and text.count("\n") == 1
    assert decode([*"é".encode()]) == "é"


def test_refuses_what_it_cannot_sample(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a LanguageModel over bytes.*got Toy"):
        trainer(tmp_path, [SampleText()]).fit(Toy(), loader())
    for name, value in (("length", 0), ("temperature", -1.0), ("top_k", 0)):
        with pytest.raises(ConfigError, match=f"SampleText {name}={value}"):
            SampleText(**{name: value})  # type: ignore[arg-type]
