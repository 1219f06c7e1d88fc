"""One process plays all stages of the product's own pipeline cut, and compares loss and every gradient."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from zoo.architectures import without_noise

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline.cutting.cut import StageCut, StageError, plan_stages
from lightning_megapar.pipeline.cutting.rehearsal import ROUNDS, endless, learn, notes_of, rehearsing
from lightning_megapar.pipeline.cutting.stages import blocks_of, outside_of
from lightning_megapar.pipeline.cutting.state import state_kept
from lightning_megapar.pipeline.cutting.survey import Survey, observe, without_numbers
from lightning_megapar.pipeline.nest import flatten, unflatten

Step = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Verdict:
    """``exact``, ``refused``, ``wrong`` or ``crash``, with the reason; what travels besides the hidden state."""

    kind: str
    reason: str = ""
    error: float = 0.0
    carried: tuple[str, ...] = ()


def send(boundary: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    """As a channel does it: fresh leaf tensors, everything else through pickle.

    Returns:
        the received nest, and the pairs of tensors (sent, received) through which gradients go back.
    """
    leaves, spec = flatten(boundary)
    sent, received = [], []
    rebuilt = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            rebuilt.append(pickle.loads(pickle.dumps(leaf)))
            continue
        fresh = leaf.detach().clone(memory_format=torch.contiguous_format).requires_grad_(leaf.requires_grad)
        if leaf.requires_grad:
            sent.append(leaf)
            received.append(fresh)
        rebuilt.append(fresh)
    return unflatten(rebuilt, spec), sent, received


def survey_of(
    module: nn.Module, step: Step, stages: int, stack: str | None = None, split: Any = None, **_: Any
) -> Survey | None:
    """As the product does it: on a copy without numbers, else with numbers."""
    path, blocks = blocks_of(module, stages, stack=stack, split=split)
    names = [*outside_of(module, path)]
    empty = without_numbers(module)
    found = observe(empty, lambda: step(empty), blocks, names)
    if found is not None and found.complete:
        return found
    with state_kept(module):
        return observe(module, lambda: step(module), blocks, names) or found


class Stages:
    """A module cut into stages that live side by side.

    Args:
        module: the whole module; it is copied for each stage.
        stages: how many.
        options: of ``plan_stages``.
    """

    def __init__(self, module: nn.Module, stages: int, survey: Survey | None = None, **options: Any) -> None:
        self.modules = [copy.deepcopy(module) for _ in range(stages)]
        self.cuts = []
        self.plan = plan_stages(module, stages, survey=survey, **options)
        for stage, held in enumerate(self.modules):
            cut = StageCut(held, self.plan, stage)
            cut.install_hooks()
            self.cuts.append(cut)

    def rehearse(self, step: Step) -> None:
        for _ in range(ROUNDS):
            received: Any = None
            notes = []
            for module, cut in zip(self.modules, self.cuts):
                error = None
                with state_kept(module), rehearsing(cut), cut.watch:
                    try:
                        _, value = cut.call(partial(step, module), received)
                        received = send(value)[0]
                    except Exception as raised:
                        error = raised
                notes.append(notes_of(cut, error))
                if error is not None:
                    break
            again = [learn(cut, notes) for cut in self.cuts]
            if not any(again):
                return
        raise StageError(endless(self.cuts[0]))

    def forward(self, step: Step) -> tuple[Tensor, list[Any]]:
        """The loss, and for each boundary the tensors on both sides."""
        received: Any = None
        links = []
        value: Any = None
        for module, cut in zip(self.modules, self.cuts):
            finished, value = cut.call(partial(step, module), received)
            if not finished:
                received, *pair = send(value)
                links.append(pair)
        return value, links

    def run(self, step: Step) -> Tensor:
        """Forward and backward of one microbatch; gradients are left on the stages."""
        loss, links = self.forward(step)
        loss.backward()
        for sent, got in reversed(links):
            if sent:
                torch.autograd.backward(sent, [torch.zeros_like(g) if g.grad is None else g.grad for g in got])
        return loss.detach()


def aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Canonical parameter name -> all its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {found[0]: tuple(found) for found in names.values()}


def largest_difference(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> float:
    """Relative to each gradient's largest entry, or a thousandth of the model's largest where that is more."""
    floor = 1e-3 * max((float(g.abs().max()) for g in expected.values()), default=0.0)
    worst = 0.0
    for name, gradient in expected.items():
        found = actual.get(name, torch.zeros_like(gradient))
        worst = max(worst, float((found - gradient).abs().max() / max(float(gradient.abs().max()), floor)))
    return worst


def summed(stages: Stages, names: dict[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """Gradients by canonical name. Aliases that are one Parameter on a stage count once there."""
    total: dict[str, Tensor] = {}
    canonical = {alias: name for name, found in names.items() for alias in found}
    for module in stages.modules:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                key = canonical[name]
                total[key] = total[key] + parameter.grad if key in total else parameter.grad.clone()
    return total


def perturbed(module: nn.Module, size: float = 0.05) -> nn.Module:
    """In float64 and training mode, without dropout, with noise on every parameter (zero biases hide errors)."""
    module = module.double().train()
    without_noise(module)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator).to(parameter))
    return module


def compare(module: nn.Module, step: Step, stages: int = 2, **options: Any) -> Verdict:
    """Run a module of one's own in one process and cut; see :func:`judge`."""
    module = perturbed(module)
    alone = copy.deepcopy(module)
    loss = step(alone)
    loss.backward()
    gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    return judge(module, step, float(loss.detach()), gradients, stages=stages, **options)


@torch.no_grad()
def evaluation_error(module: nn.Module, step: Step, stages: int = 2, **options: Any) -> float:
    """How far the loss in evaluation mode is from that of one process."""
    module = perturbed(module).eval()
    expected = float(step(copy.deepcopy(module)))
    played = Stages(module, stages, survey_of(module, step, stages, **options), **options)
    played.rehearse(step)
    return abs(float(played.forward(step)[0]) - expected)


def judge(
    module: nn.Module,
    step: Step,
    loss: float,
    gradients: dict[str, Tensor],
    *,
    stages: int = 2,
    tolerance: float = 1e-9,
    **options: Any,
) -> Verdict:
    """Cut a module, rehearse, run two microbatches one after the other, compare with one process.

    Args:
        module: the whole module, without gradients.
        step: the loss of a module.
        loss, gradients: of one process.
        tolerance: relative.
        options: of ``plan_stages``.
    """
    names = aliases(module)
    try:
        played = Stages(module, stages, survey_of(module, step, stages, **options), **options)
        played.rehearse(step)
    except (ConfigError, StageError) as error:
        return Verdict("refused", str(error))
    except Exception as error:
        return Verdict("crash", f"set-up: {type(error).__name__}: {error}")
    try:
        found = played.run(step)
    except Exception as error:
        return Verdict("crash", f"{type(error).__name__}: {error}")
    actual = summed(played, names)
    error = max(
        abs(float(found) - loss) / max(abs(loss), 1e-12),
        largest_difference(gradients, actual),
    )
    carried = tuple(sorted({source.describe() for cut in played.cuts for source in cut.carried}))
    extra = set(actual) - set(gradients)
    missing = {name for name in gradients if name not in actual}
    if error > tolerance or extra or missing:
        return Verdict("wrong", f"off by {error:.1e}; on one side only: {sorted(extra | missing)[:3]}", error, carried)
    return Verdict("exact", "", error, carried)
