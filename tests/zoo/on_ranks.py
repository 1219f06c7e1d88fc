"""Architectures trained by ``Trainer(strategy=MegaParStrategy(...))`` on real ranks, against one process."""

from __future__ import annotations

import logging
import re
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from pool import RankError, RankPool
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from zoo.architectures import CannotRunAlone, Reference, architectures, loss_of, reference, tokens
from zoo.trial import largest_difference

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
ROWS = 4
TOLERANCE = 1e-5
"""Relative. Parts of some models compute in float32 whatever their parameters are, and round otherwise on less rows."""
SLOW_CHOICE = 300.0
"""Seconds that a collective may take: rank 0 chooses a sharding meanwhile, which takes long with many kinds."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "tp2_pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}),
}
"""Name -> number of ranks, arguments of the strategy."""
REFUSAL = re.compile(r"^lightning_megapar\.[\w.]+\.(?:ConfigError|StageError|FirstStepError): (.*)$", re.MULTILINE)
"""Last line of a rank's traceback."""


@dataclass(frozen=True)
class Outcome:
    """What became of one class on one layout.

    Args:
        kind: ``exact``; ``refused`` by the strategy; ``alone``: one process fails already; ``wrong``; ``crash``, which
            includes ranks that do not answer.
        error: largest relative difference of the loss and of all gradients, when there are any.
        reason: of what is not exact.
        precision: in which one process ran.
        held: largest share of the parameters that a rank holds.
        seconds: of the trial, one process included.
    """

    kind: str
    error: float = 0.0
    reason: str = ""
    precision: str = ""
    held: float = 1.0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Wrapped(LightningModule):
    """Somebody's module around a language model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = loss_of(self.model, batch[0])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Gradients(Callback):
    """Gathers every gradient before the optimizer's step, by its name in the whole module, and keeps the loss."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}
        self.loss = float("nan")
        self.numel = 0

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        from lightning_megapar.checkpoint import gather_full_state_dict

        prepared: Any = trainer.strategy.prepared  # type: ignore[attr-defined]
        self.numel = sum(r.parameter.numel() for r in prepared.parameters)
        held_here = [r for r in prepared.parameters if r.parameter.grad is not None]
        local = {r.name: r.as_value(r.parameter.grad) for r in held_here}
        held: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(held, set(local))
        names = [name for name in prepared.names.parameters if name in set().union(*held)]
        self.found = gather_full_state_dict(names, local)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.loss = float(outputs["loss"])


def train_one(name: str, hidden: int, layout: str, timeout: float = SLOW_CHOICE) -> Outcome:
    """One step of one class on this rank; rank 0 judges, the others say what they hold.

    Raises:
        ConfigError, StageError: what is refused. Not every rank needs to raise it: peers inside of a tensor-parallel
            collective end when this one has ended.
    """
    from lightning_megapar import MegaParStrategy

    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    start = time.monotonic()
    ids = tokens(ROWS)
    world, options = LAYOUTS[layout]
    try:
        expected = reference(architectures()[name], hidden=hidden, ids=ids)
    except CannotRunAlone as error:
        return Outcome("alone", reason=str(error))
    double = expected.dtype is torch.float64
    gradients = Gradients()
    trainer = Trainer(
        strategy=MegaParStrategy(**options, timeout_seconds=timeout),
        accelerator="cpu",
        devices=world,
        max_steps=1,
        precision="64-true" if double else "32-true",
        callbacks=[gradients],
        **QUIET,
    )
    total = sum(p.numel() for p in expected.model.parameters())
    outcome = Outcome("exact", precision="float64" if double else "float32")
    trainer.fit(Wrapped(expected.model), DataLoader(TensorDataset(ids), batch_size=ROWS))
    outcome = replace(outcome, held=gradients.numel / total, seconds=time.monotonic() - start)
    return judged(outcome, gradients, expected) if trainer.global_rank == 0 else outcome


def judged(outcome: Outcome, gathered: Gradients, expected: Reference) -> Outcome:
    """Compare with one process."""
    actual = {key.removeprefix("model."): value for key, value in gathered.found.items()}
    off = abs(gathered.loss - expected.loss) / abs(expected.loss)
    error = max(off, largest_difference(expected.gradients, actual))
    if set(actual) != set(expected.gradients):
        odd = sorted(set(actual) ^ set(expected.gradients))
        return replace(outcome, kind="wrong", error=error, reason=f"gradients on one side only: {odd[:3]}")
    if not error <= TOLERANCE:  # not a number is wrong, too
        worst = max(expected.gradients, key=lambda n: largest_difference({n: expected.gradients[n]}, actual))
        return replace(outcome, kind="wrong", error=error, reason=f"loss off by {off:.1e}; worst gradient: {worst}")
    return replace(outcome, error=error)


def train(names: Sequence[str], hidden: int, layout: str, timeout: float = SLOW_CHOICE) -> dict[str, Outcome]:
    """Each class in turn on this rank."""
    return {name: train_one(name, hidden, layout, timeout) for name in names}


def outcomes(pool: RankPool, names: Sequence[str], hidden: int, layout: str, patience: float) -> dict[str, Outcome]:
    """Several classes on one set of ranks, one by one where that breaks.

    Args:
        pool: of ranks.
        names: model types.
        hidden: hidden size.
        layout: one of :data:`LAYOUTS`.
        patience: seconds that all ranks may take for each class.
    """
    world, _ = LAYOUTS[layout]
    try:
        ranks = pool.run(train, world, names, hidden, layout, mode="trainer", timeout=patience * len(names))
    except RankError as error:
        if len(names) == 1:
            refusal = REFUSAL.search(str(error))
            if refusal and "did not answer" not in str(error):
                return {names[0]: Outcome("refused", reason=refusal[1])}
            return {names[0]: Outcome("crash", reason=str(error)[-3000:])}
        return {name: one for each in names for name, one in outcomes(pool, [each], hidden, layout, patience).items()}
    return {name: _of_all([found[name] for found in ranks]) for name in names}


def _of_all(ranks: Sequence[Outcome]) -> Outcome:
    """Rank 0's judgement with the largest share; ranks that disagree on whether there was a run have crashed."""
    ran = {one.kind in ("exact", "wrong") for one in ranks}
    if len(ran) > 1:
        kinds = ", ".join(f"rank {rank}: {one.kind} {one.reason}" for rank, one in enumerate(ranks))
        return Outcome("crash", reason=f"the ranks do not agree: {kinds}")
    return replace(ranks[0], held=max(one.held for one in ranks), seconds=max(one.seconds for one in ranks))
