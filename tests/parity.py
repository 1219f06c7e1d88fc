"""One hand-written process against the strategy on any layout: losses, norms, every gathered gradient, weights."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megapar.models.gpt import GPT, GPTConfig

IGNORED = -100


class Tokens(Dataset[dict[str, Tensor]]):
    """Random tokens; labels are ignored raggedly (a different number per sample), in ``empty`` rows altogether."""

    def __init__(self, count: int, length: int, vocabulary: int, ragged: bool = True, empty: range = range(0)) -> None:
        generator = torch.Generator().manual_seed(5)
        window = torch.randint(0, vocabulary, (count, length + 1), generator=generator)
        self.tokens, self.labels = window[:, :-1].clone(), window[:, 1:].clone()
        if ragged:
            for row in range(count):
                self.labels[row, : (row * 5 + 1) % length] = IGNORED

        for row in empty:
            self.labels[row] = IGNORED

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index], "labels": self.labels[index]}


def style(name: str, **changes: Any) -> GPTConfig:
    common = {"vocab_size": 61, "num_layers": 4, "num_heads": 4, "hidden_size": 32, "max_sequence_length": 16}
    common |= {"vocab_multiple": 8, "seed": 3}
    if name == "gpt2":
        return GPTConfig.gpt2(**{**common, **changes})
    return GPTConfig.llama(**{**common, "num_kv_heads": 2, "ffn_hidden_size": 64, **changes})


class Model(LightningModule):
    """Somebody's module: it knows nothing of parallelism."""

    def __init__(self, config: GPTConfig, optimizer: str, lr: float = 0.1, count_tokens: bool = True) -> None:
        super().__init__()
        self.config, self.kind, self.lr, self.count_tokens = config, optimizer, lr, count_tokens
        self.gpt: GPT | None = None

    def configure_model(self) -> None:
        if self.gpt is None:
            self.gpt = GPT(self.config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.gpt(batch["tokens"], batch["labels"])
        self.log("train_loss", loss)
        if not self.count_tokens:
            return loss
        return {"loss": loss, "num_valid_tokens": (batch["labels"] != IGNORED).sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters(), self.kind, self.lr)


def make_optimizer(parameters: Any, kind: str, lr: float) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    # With the usual eps AdamW makes a full step of a gradient that is rounding alone: after two of them plain float32
    # differs from float64 by 6e-5.
    eps = 1e-3 if kind.startswith("smooth") else 1e-8
    return torch.optim.AdamW(parameters, lr=lr * 0.03, weight_decay=0.1, eps=eps, fused="fused" in kind or None)


class Record(Callback):
    """Keeps, per optimizer step, the loss, the norm before clipping and every gathered gradient."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.weights: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        from lightning_megapar.checkpoint import gather_full_state_dict

        strategy = trainer.strategy
        self.norms.append(float(strategy.gradient_norm()))
        local = {
            record.name: record.as_value(record.parameter.grad.detach())
            for record in strategy.prepared.parameters
            if record.parameter.grad is not None
        }
        self.gradients.append(gather_full_state_dict(list(strategy.prepared.names.parameters), local))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.weights = trainer.strategy.full_state_dict()


def run_strategy(
    config: GPTConfig,
    world: int,
    optimizer: str,
    options: dict[str, Any],
    *,
    precision: str = "64-true",
    global_batch: int = 16,
    accumulate: int = 1,
    clip: float | None = None,
    steps: int = 3,
    ragged: bool = True,
    count_tokens: bool = True,
    empty: range = range(0),
    root: str = "/tmp/megapar-parity",
) -> dict[str, Any]:
    """Train on this rank (in the pool, mode ``trainer``); rank 0 returns what it recorded."""
    from lightning_megapar import MegaParStrategy

    strategy = MegaParStrategy(**options)
    data = strategy.config.resolve(world)[0].data
    per_rank = global_batch // data // accumulate
    data_set = Tokens(global_batch * steps, config.max_sequence_length, config.vocab_size, ragged, empty)
    loader = DataLoader(data_set, batch_size=per_rank)
    record = Record()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world,
        max_steps=steps,
        precision=precision,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        callbacks=[record],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    trainer.fit(Model(config, optimizer, count_tokens=count_tokens), loader)
    if trainer.global_rank != 0:
        return {"losses": record.losses, "norms": record.norms}
    return {
        "losses": record.losses,
        "norms": record.norms,
        "gradients": record.gradients,
        "weights": record.weights,
    }


def run_reference(
    config: GPTConfig,
    optimizer: str,
    *,
    dtype: torch.dtype = torch.float64,
    global_batch: int = 16,
    clip: float | None = None,
    steps: int = 3,
    ragged: bool = True,
    empty: range = range(0),
) -> dict[str, Any]:
    """The same by hand in plain torch: one process, the whole global batch at once."""
    model = GPT(config).to(dtype)
    steps_data = Tokens(global_batch * steps, config.max_sequence_length, config.vocab_size, ragged, empty)
    optim = make_optimizer(model.parameters(), optimizer, 0.1)
    losses, norms, gradients = [], [], []
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    for step in range(steps):
        rows = slice(step * global_batch, (step + 1) * global_batch)
        optim.zero_grad()
        loss = model(steps_data.tokens[rows], steps_data.labels[rows])
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({f"gpt.{n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        norms.append(float(torch.sqrt(sum(p.grad.double().pow(2).sum() for p in model.parameters()))))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optim.step()
    torch.set_default_dtype(default)
    weights = {f"gpt.{k}": v.clone() for k, v in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def relative(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude."""
    scale = float(expected.double().abs().max())
    difference = float((actual.double() - expected.double()).abs().max())
    return difference / scale if scale > 0 else difference


def gradients(name: str, result: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The steps' gradients that hold ``name`` (a tied alias has none of its own)."""
    held = [g for g in result["gradients"] if name in g]
    return held or [{name: torch.ones(())}]


def compare(actual: dict[str, Any], expected: dict[str, Any], tolerance: float, accumulate: int = 1) -> None:
    """Losses (of whole windows), norms, every gradient of every step and the final weights."""
    losses = actual["losses"]
    if accumulate == 1:
        assert len(losses) == len(expected["losses"])
        for step, (a, e) in enumerate(zip(losses, expected["losses"])):
            assert abs(a - e) <= tolerance * abs(e), f"loss of step {step}: {a} against {e}"
    for step, (a, e) in enumerate(zip(actual["norms"], expected["norms"])):
        assert abs(a - e) <= tolerance * abs(e), f"norm of step {step}: {a} against {e}"
    assert len(actual["gradients"]) == len(expected["gradients"])
    for step, (mine, theirs) in enumerate(zip(actual["gradients"], expected["gradients"])):
        assert set(mine) == set(theirs)
        # A gradient that is zero but for rounding (a key bias) is measured against the whole gradient's scale.
        floor = max(float(g.abs().max()) for g in theirs.values()) * 1e-3
        for name, gradient in theirs.items():
            error = float((mine[name].double() - gradient.double()).abs().max())
            scale = max(float(gradient.abs().max()), floor)
            assert error <= tolerance * scale, f"step {step}, gradient of {name}: off by {error / scale:.1e}"
    assert set(actual["weights"]) == set(expected["weights"])
    for name, weight in expected["weights"].items():
        if all(
            float(g[name].abs().max()) <= 1e-6 * float(max(x.abs().max() for x in g.values()))
            for g in gradients(name, expected)
        ):
            continue  # a key bias: its gradient is rounding alone, which AdamW blows up to full steps
        error = relative(actual["weights"][name], weight)
        assert error <= tolerance * 100, f"weight {name} after the last step: off by {error:.1e}"
