"""Somebody's unchanged module, sharded by a plan on real ranks: losses, norms, gathered gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from pool import RankPool
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

WIDTH, HEADS, VOCABULARY, LENGTH = 32, 4, 61, 16

LLAMA = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "use_cache": False,
}


class HuggingFace(LightningModule):
    """A user's module around a transformers model: it knows nothing of parallelism."""

    def __init__(self, kind: str, settings: dict[str, Any], optimizer: str = "sgd") -> None:
        super().__init__()
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**settings)
        self.model = getattr(transformers, f"{kind}ForCausalLM")(config)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        self.kind = optimizer
        self.seen: list[float] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self.model(input_ids=batch["tokens"], labels=batch["tokens"]).loss
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.seen.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return parity.make_optimizer(self.parameters(), self.kind, 0.1)


def train(kind: str, settings: dict[str, Any], world: int, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    from lightning_megapar import MegaParStrategy

    strategy = MegaParStrategy(**options)
    module = HuggingFace(kind, settings, more.get("optimizer", "sgd"))
    data = strategy.config.resolve(world)[0].data
    record = parity.Record()
    record.on_train_batch_end = lambda *a, **k: None  # the loss is a plain tensor here
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world,
        max_steps=more.get("steps", 3),
        precision=more.get("precision", "64-true"),
        callbacks=[record],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir="/tmp/megapar-plan",
    )
    loader = DataLoader(parity.Tokens(48, LENGTH, VOCABULARY), batch_size=8 // data)
    trainer.fit(module, loader, ckpt_path=more.get("resume"))
    if "save" in more:
        trainer.save_checkpoint(more["save"])
    return {
        "losses": module.seen,
        "norms": record.norms,
        "gradients": record.gradients,
        "weights": record.weights,
        "local": sum(p.numel() for p in module.parameters()),
    }


def reference(kind: str, settings: dict[str, Any], optimizer: str = "sgd", steps: int = 3) -> dict[str, Any]:
    """The same by hand in one process."""
    module = HuggingFace(kind, settings, optimizer).double()
    optim = parity.make_optimizer(module.parameters(), optimizer, 0.1)
    tokens = parity.Tokens(48, LENGTH, VOCABULARY).tokens
    losses, norms, gradients = [], [], []
    for step in range(steps):
        rows = tokens[step * 8 : step * 8 + 8]
        optim.zero_grad()
        loss = module.model(input_ids=rows, labels=rows).loss
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
        norms.append(float(torch.sqrt(sum(p.grad.pow(2).sum() for p in module.parameters()))))
        optim.step()
    weights = {k: v.clone() for k, v in module.state_dict().items()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


LAYOUTS = {
    "tp2": (2, {"tensor_parallel_size": 2}),
    "tp4_shared_heads": (4, {"tensor_parallel_size": 4}),
    "tp2_pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "dp2_tp2_zero1": (4, {"tensor_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 1}),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_llama(pool: RankPool, layout: str) -> None:
    world, options = LAYOUTS[layout]
    results = pool.run(train, world, "Llama", LLAMA, world, options, mode="trainer")
    expected = reference("Llama", LLAMA)
    parity.compare(results[0], expected, 1e-6)  # transformers computes its loss in float32
    whole = sum(p.numel() for p in HuggingFace("Llama", LLAMA).parameters())
    assert results[0]["local"] < 0.75 * whole, "nothing was cut"


def test_gradients_that_a_plan_forgot_are_summed(pool: RankPool) -> None:
    """Norms over heads that the plan leaves out see one rank's heads: exact loss, partial gradients."""
    plan = {
        f"layers.*.self_attn.{name}": style
        for name, style in {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}.items()
    }
    settings = {**LLAMA, "head_dim": 8}
    options = {"tensor_parallel_size": 2, "sharding_plan": plan}
    results = pool.run(train, 2, "Qwen3", settings, 2, options, mode="trainer")
    parity.compare(results[0], reference("Qwen3", settings), 1e-6)


@pytest.mark.parametrize(
    "layout",
    ["tp2", pytest.param("tp2_pp2", marks=pytest.mark.slow), pytest.param("dp2_tp2_zero1", marks=pytest.mark.slow)],
)
def test_a_checkpoint_goes_on_on_another_layout(pool: RankPool, tmp_path: Path, layout: str) -> None:
    world, options = LAYOUTS[layout]
    path = str(tmp_path / "two.ckpt")
    pool.run(train, world, "Llama", LLAMA, world, options, mode="trainer", steps=2, save=path, optimizer="adamw")
    expected = reference("Llama", LLAMA, "adamw", steps=4)
    for other in ("single", "tp4_shared_heads", "tp2_pp2"):
        ranks, settings = (1, {}) if other == "single" else LAYOUTS[other]
        found = pool.run(
            train, ranks, "Llama", LLAMA, ranks, settings, mode="trainer", steps=4, resume=path, optimizer="adamw"
        )[0]
        assert len(found["losses"]) == 2
        for ours, theirs in zip(found["losses"], expected["losses"][2:]):
            assert abs(ours - theirs) < 1e-6 * abs(theirs), (other, found["losses"], expected["losses"])


class Stream(IterableDataset[Tensor]):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows)


class Rezero(LightningModule):
    """A scale inside the region, behind a way out that starts at zero: its gradient is zero in the first step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        torch.nn.init.zeros_(self.down.weight)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return (self.down(torch.tanh(self.scale * self.up(batch))) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit_rezero(world: int) -> tuple[float, list[Any]]:
    from lightning_megapar import MegaParStrategy

    plan = {"up": "colwise", "down": "rowwise"}
    strategy = MegaParStrategy(tensor_parallel_size=world, sharding_plan=plan)
    module = Rezero()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world,
        max_steps=4,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir="/tmp/megapar-plan",
    )
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    # A loader of which no sample can be taken before the run: the plan cannot be tried in set-up.
    trainer.fit(module, DataLoader(Stream(rows), batch_size=4))
    return float(module.scale), [p.name for p in strategy.stepper.parameters if p.partial_over_tensor]


def test_an_addend_that_shows_only_after_the_first_step_is_found(pool: RankPool) -> None:
    found = pool.run(fit_rezero, 2, 2, mode="trainer")
    alone = pool.run(fit_rezero, 1, 1, mode="trainer")[0]
    assert all(addends == ["scale"] for _, addends in found)
    assert all(abs(scale - alone[0]) < 1e-12 for scale, _ in found)
