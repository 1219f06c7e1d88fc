"""Transformers models built empty get what transformers itself would give them, one tensor at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megapar.config import ConfigError
from lightning_megapar.sharding.blueprint import Blueprint, record_blueprints
from lightning_megapar.sharding.initialise import initialise_by_name

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16),
    "openai-gpt": lambda: transformers.OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_key_value_heads=2),
    "modernbert-decoder": lambda: transformers.ModernBertDecoderConfig(**SIZES, pad_token_id=0, eos_token_id=1),
    "rwkv": lambda: transformers.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, context_length=16),
    "xlnet": lambda: transformers.XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=4, d_inner=48),
    "bert": lambda: transformers.BertConfig(**SIZES, is_decoder=True),
}


def built(name: str, device: str) -> Any:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())


def drawn(name: str, seed: int = 0) -> Any:
    model = built(name, "meta")
    initialise_by_name(model, seed, blueprints=record_blueprints(model))
    return model


@pytest.mark.parametrize("name", list(CONFIGS))
def test_like_transformers_itself(name: str) -> None:
    """Constants are equal, random tensors have the same scale (and so the same rule: scales differ between layers)."""
    model, whole = drawn(name), built(name, "cpu")
    assert [n for n, p in model.named_parameters()] == [n for n, p in whole.named_parameters()]
    theirs = dict(whole.named_parameters())
    for key, value in model.named_parameters():
        assert value.dtype == theirs[key].dtype and not value.is_meta
        spread = float(theirs[key].std(correction=0))
        if spread == 0 or (name == "rwkv" and "time" in key):  # no random number in it
            assert torch.equal(value, theirs[key]), key
        else:
            slack = 0.1 + 3 / math.sqrt(value.numel())
            assert float(value.std(correction=0)) == pytest.approx(spread, rel=slack), key
            assert not torch.equal(value, theirs[key]), key
    for key, value in model.named_buffers():
        assert torch.equal(value, dict(whole.named_buffers())[key]), key
    rows = torch.arange(8)[None]
    assert torch.isfinite(model(input_ids=rows).logits).all()


def test_values_depend_on_seed_and_name_alone() -> None:
    model = drawn("gpt2")
    again, other = drawn("gpt2"), drawn("gpt2", seed=1)
    for key, value in model.named_parameters():
        assert torch.equal(value, again.get_parameter(key)), key
        if value.std() > 0:
            assert not torch.equal(value, other.get_parameter(key)), key
    # On a stage that holds the last block and the head alone.
    part = built("gpt2", "meta")
    blueprints = record_blueprints(part)
    part.transformer.h[0] = nn.Identity()
    part.transformer.wte = nn.Identity()
    initialise_by_name(part, 0, blueprints=blueprints, aliases={"lm_head.weight": "transformer.wte.weight"})
    for key, value in part.named_parameters():
        assert torch.equal(value, model.get_parameter(key)), key


def test_a_blueprint_holds_no_memory_and_changes_nothing() -> None:
    model = built("llama", "cpu")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    [blueprint] = record_blueprints(nn.ModuleDict({"net": model}))
    assert blueprint.path == "net" and all(p.is_meta for p in blueprint.model.parameters())
    value = blueprint.draw("net.model.embed_tokens.weight", 3)
    assert value is not None and value.shape == (64, 32)
    assert all(p.is_meta for p in blueprint.model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert blueprint.draw("elsewhere.weight", 3) is None and blueprint.draw("net.model.none.weight", 3) is None


def test_only_one_tensor_is_real_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("mixtral", "meta")
    most = 0
    rule = Blueprint._initialise

    def watched(self: Blueprint, path: str) -> None:
        nonlocal most
        most = max(most, sum(not t.is_meta for t in (*self.model.parameters(), *self.model.buffers())))
        rule(self, path)

    monkeypatch.setattr(Blueprint, "_initialise", watched)
    initialise_by_name(model, 0, blueprints=record_blueprints(model))
    assert most == 1


def test_constructors_that_heed_no_device() -> None:
    """XLNet makes parameters by ``torch.FloatTensor(size)``: real on the meta device, and nothing in them."""
    model = built("xlnet", "meta")
    mask = model.transformer.mask_emb
    assert not mask.is_meta
    with torch.no_grad():
        mask.fill_(1e9)
    [blueprint] = record_blueprints(model)
    assert blueprint.unfilled == {key for key, value in model.named_parameters() if not value.is_meta}
    initialise_by_name(model, 0, blueprints=[blueprint])
    assert model.transformer.mask_emb.abs().max() < 1
    # What was read or trained is not touched.
    [blueprint] = record_blueprints(built("xlnet", "cpu"))
    assert not blueprint.unfilled


def test_what_transformers_leaves_out_is_refused_by_name() -> None:
    model = built("llama", "meta")
    model.model.norm.extra = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(ConfigError, match=r"nothing says how to fill model\.norm\.extra: on the meta device"):
        initialise_by_name(model, 0, blueprints=record_blueprints(model))
