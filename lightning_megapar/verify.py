"""Does a layout compute what one process computes? Losses and every gathered gradient of somebody's own module.

The reference is plain Lightning on one device with the whole batch; the layout runs through the strategy from the same
weights on the same samples. ``recipes/verify.py`` is the command line of it.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_megapar.batches import batch_size_of, split_batch
from lightning_megapar.checkpoint import gather_full_state_dict
from lightning_megapar.config import ConfigError, divisors, nearest
from lightning_megapar.strategy import MegaParStrategy

NOISE_FLOOR = 1e-3
"""Share of the largest gradient of the model below which a gradient is measured against that share (a key's bias has a
true gradient of zero, and rounding alone remains)."""


@dataclass(frozen=True)
class Difference:
    """How far a gradient is off.

    Args:
        name: of the parameter, or ``loss`` or ``gradient norm``.
        step: training step, from 0.
        error: largest absolute difference over the largest magnitude.
        shape: of the whole parameter.
    """

    name: str
    step: int
    error: float
    shape: tuple[int, ...] = ()


@dataclass
class Report:
    """What a comparison found, on rank 0 (elsewhere it is empty).

    Args:
        differences: of losses, norms and gradients, in no order.
        layout: in words.
        tolerance: largest error that counts as equal.
        problems: gradients that only one side has.
    """

    differences: list[Difference] = field(default_factory=list)
    layout: str = ""
    tolerance: float = 1e-5
    problems: list[str] = field(default_factory=list)

    @property
    def worst(self) -> float:
        return max((d.error for d in self.differences), default=math.inf)

    @property
    def ok(self) -> bool:
        return not self.problems and self.worst <= self.tolerance


class _Recorder(Callback):
    """Losses, norms and whole gradients of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, MegaParStrategy):
            prepared = strategy.prepared
            held = [r for r in prepared.parameters if r.parameter.grad is not None]
            local = {r.name: r.as_value(r.parameter.grad.detach()) for r in held if r.parameter.grad is not None}
            names = _names_anywhere(list(local), list(prepared.names.parameters), trainer.world_size)
            self.norms.append(float(strategy.gradient_norm()))
            self.gradients.append(gather_full_state_dict(names, local))
            return
        found = {n: p.grad.detach().cpu().clone() for n, p in pl_module.named_parameters() if p.grad is not None}
        self.norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in found.values())))
        self.gradients.append(found)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))


def _names_anywhere(mine: list[str], order: list[str], world: int) -> list[str]:
    """Names with a gradient on any rank, in the model's order."""
    everyone: list[list[str]] = [mine]
    if world > 1:
        everyone = [[] for _ in range(world)]
        torch.distributed.all_gather_object(everyone, mine)
    present = {name for one in everyone for name in one}
    return [name for name in order if name in present]


def verify(
    module: LightningModule,
    batch: Any,
    strategy: MegaParStrategy,
    *,
    devices: int,
    accelerator: str = "cpu",
    precision: str = "64-true",
    steps: int = 1,
    tolerance: float = 1e-5,
) -> Report:
    """Train ``steps`` steps on one batch in one process and on the layout, and compare.

    Args:
        module: built the same way in every process; both sides start from its weights. Dropout must be off for the
            comparison to mean something on sharded attention.
        batch: the whole batch of a step; its samples are dealt out to the data ranks in order.
        strategy: the layout.
        devices: ranks on this machine.
        accelerator, precision: as the Trainer's. In ``"64-true"`` a difference is a mistake; in ``"32-true"`` it may be
            rounding.
        steps: optimizer steps to compare.
        tolerance: largest relative difference that counts as equal.

    Returns:
        the report on rank 0; an empty one elsewhere.

    Raises:
        ConfigError: a setting out of range, a batch that the layout cannot deal out, manual optimization, a module that
            cannot be copied (its attribute is named), a step without a loss, or a layout that is refused.
    """
    if not module.automatic_optimization:
        raise ConfigError(f"{type(module).__name__} optimizes by itself: there is no gradient of a step to compare")
    if steps < 1:
        raise ConfigError(f"steps={steps}: expected an integer >= 1")
    if not tolerance >= 0:
        raise ConfigError(f"tolerance={tolerance}: expected a number >= 0")
    layout = strategy.config.resolve(devices * strategy.num_nodes)[0]
    pieces = _dealt_out(batch, layout.data)
    expected = _Recorder()
    plain = _trainer(expected, accelerator, 1, "auto", precision, steps)
    plain.fit(_with_checked_step(_copied(module)), _Repeated(lambda: batch, steps))
    found = _Recorder()
    trainer = _trainer(found, accelerator, devices, strategy, precision, steps)
    trainer.fit(module, _Repeated(lambda: pieces[strategy.data_parallel_rank], steps))
    if trainer.global_rank != 0:
        return Report(tolerance=tolerance)
    report = Report(layout=strategy.layout.describe(), tolerance=tolerance)
    _compare(report, expected, found)
    return report


class _Repeated:
    """A loader of one batch, ``count`` times; the batch is asked for when the ranks exist."""

    def __init__(self, batch: Callable[[], Any], count: int) -> None:
        self._batch, self._count = batch, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if index >= self._count:
            raise IndexError(index)
        return self._batch()


def _trainer(recorder: _Recorder, accelerator: str, devices: int, strategy: Any, precision: Any, steps: int) -> Trainer:
    try:
        return Trainer(
            accelerator=accelerator,
            devices=devices,
            strategy=strategy,
            precision=precision,
            max_steps=steps,
            callbacks=[recorder],
            logger=False,
            limit_val_batches=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except ConfigError:
        raise
    except (ValueError, MisconfigurationException) as error:  # Lightning's own refusals name no setting
        raise ConfigError(f"accelerator={accelerator!r}, precision={precision!r}, devices={devices}: {error}") from None


def _copied(module: LightningModule) -> LightningModule:
    """The module for the run in one process.

    Raises:
        ConfigError: something in it cannot be copied; where it is kept is named.
    """
    try:
        return copy.deepcopy(module)
    except Exception as error:  # whatever somebody's classes raise
        where, value = _not_copyable(module)
        kind = type(value)
        shown = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        raise ConfigError(
            f"{type(module).__name__} cannot be copied for the run in one process: "
            + (f"its attribute {where!r} holds a {shown} " if where else "")
            + f"({type(error).__name__}: {error}). Make it in setup() or when it is first used, or leave it out of "
            "copies (__deepcopy__, __getstate__)"
        ) from None


def _not_copyable(module: LightningModule) -> tuple[str, Any]:
    """Where the innermost value is kept that cannot be copied, and the value; ``("", None)`` when it is not found."""
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if name == "_modules":
                continue
            shown = "" if name in ("_parameters", "_buffers") else name
            found = _inside(value, ".".join(filter(None, (path, shown))), {})
            if found is not None:
                return found
    return "", None


def _inside(value: Any, where: str, seen: dict[int, Any]) -> tuple[str, Any] | None:
    """The part of ``value`` that cannot be copied; ``None`` when all of it can."""
    if id(value) in seen:
        return None
    seen[id(value)] = value
    try:
        copy.deepcopy(value)
    except Exception:
        parts: list[tuple[str, Any]] = []
        if isinstance(value, dict):
            parts = [(f"{where}.{k}" if isinstance(k, str) else f"{where}[{k!r}]", v) for k, v in value.items()]
        elif isinstance(value, (list, tuple)):
            parts = [(f"{where}[{index}]", part) for index, part in enumerate(value)]
        elif not isinstance(value, (Tensor, type)):
            parts = [(f"{where}.{k}", v) for k, v in getattr(value, "__dict__", {}).items()]
        inner = (_inside(part, name.lstrip("."), seen) for name, part in parts)
        return next((found for found in inner if found is not None), (where, value))
    return None


def _with_checked_step(module: LightningModule) -> LightningModule:
    """The module with a ``training_step`` whose result is looked at: Lightning skips a step that returns nothing."""
    step: Any = module.training_step

    @functools.wraps(step)
    def checked(*args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, dict) else output
        wrong = ""
        if not isinstance(loss, Tensor):
            keys = f" with the keys {list(output)}" if isinstance(output, dict) and "loss" not in output else ""
            wrong = f"returned {'a dict' + keys if keys else _kind_of(loss)}; there is no loss to compare"
        elif loss.numel() != 1:
            wrong = f"returned a loss of shape {tuple(loss.shape)}; a loss is one number"
        elif not loss.requires_grad:
            wrong = "returned a loss that depends on no trainable parameter; there is no gradient to compare"
        if wrong:
            raise ConfigError(
                f"{type(module).__name__}.training_step {wrong}. It must return a loss tensor, or a dict with 'loss'"
            )
        return output

    vars(module)["training_step"] = checked
    return module


def _kind_of(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__} as loss"


def _dealt_out(batch: Any, data: int) -> list[Any]:
    if data == 1:
        return [batch]
    size = batch_size_of(batch)
    if size is None or size % data:
        sizes = nearest(data, divisors(size)) if size else [1]
        raise ConfigError(
            f"a batch of {size} samples cannot be dealt out to data_parallel_size={data} ranks; nearest valid: "
            f"{', '.join(map(str, sizes))}"
        )
    return [piece for piece, _ in split_batch(batch, data)]


def _compare(report: Report, expected: _Recorder, found: _Recorder) -> None:
    for step, (mine, theirs) in enumerate(zip(found.losses, expected.losses)):
        report.differences.append(Difference("loss", step, _relative(mine, theirs)))
    for step, (mine, theirs) in enumerate(zip(found.norms, expected.norms)):
        report.differences.append(Difference("gradient norm", step, _relative(mine, theirs)))
    if len(found.gradients) != len(expected.gradients):
        report.problems.append(f"{len(found.gradients)} optimizer steps, {len(expected.gradients)} in one process")
    for step, (ours, whole) in enumerate(zip(found.gradients, expected.gradients)):
        floor = NOISE_FLOOR * max((float(g.abs().max()) for g in whole.values() if g.numel()), default=0.0)
        for name, gradient in whole.items():
            if name not in ours:
                report.problems.append(f"step {step}: {name} has a gradient in one process only")
                continue
            scale = max(float(gradient.abs().max()) if gradient.numel() else 0.0, floor) or 1.0
            error = float((ours[name].double() - gradient.double()).abs().max()) / scale if gradient.numel() else 0.0
            error = error if error == error else math.inf
            report.differences.append(Difference(name, step, error, tuple(gradient.shape)))
        for name in ours.keys() - whole.keys():
            report.problems.append(f"step {step}: {name} has a gradient on the layout only")


def _relative(mine: float, theirs: float) -> float:
    error = abs(mine - theirs) / (abs(theirs) or 1.0)
    return error if error == error else math.inf


def print_report(report: Report, rows: int = 10) -> None:
    """The worst differences as a table, and the verdict."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    table = Table(title=f"{report.layout} against one process (tolerance {report.tolerance:.0e})")
    for heading in ("what", "step", "shape", "difference"):
        table.add_column(heading, justify="right" if heading in ("step", "difference") else "left", no_wrap=True)
    ordered = sorted(report.differences, key=lambda d: -d.error)
    summary = [d for d in ordered if d.name in ("loss", "gradient norm")]
    gradients = [d for d in ordered if d.name not in ("loss", "gradient norm")]
    for one in [*summary, *gradients[:rows]]:
        shape = " x ".join(map(str, one.shape))
        colour = "" if one.error <= report.tolerance else "[red]"
        table.add_row(one.name, str(one.step), shape, f"{colour}{one.error:.1e}")
    console.print(table)
    for problem in report.problems[:rows]:
        console.print(problem, markup=False)
    verdict = "equal" if report.ok else "NOT equal"
    console.print(
        f"{verdict}: largest difference {report.worst:.1e} over {len(gradients)} gradients, "
        f"{len(report.problems)} gradients on one side only",
        markup=False,
    )
