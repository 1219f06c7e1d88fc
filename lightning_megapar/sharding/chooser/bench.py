"""The bench on which plans are tried: a copy of the module, and what the whole one computes on each batch."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_megapar.config import ConfigError
from lightning_megapar.data_parallel.parameters import ModuleNames
from lightning_megapar.sharding.chooser.arithmetic import Arithmetic
from lightning_megapar.sharding.chooser.trial import Run, Verdict, gradients_of, perturb, try_assignments
from lightning_megapar.sharding.plan import ShardingPlan, resolve

LARGEST_TRIAL = 16e9
"""Bytes of host memory that the copies of a trial may take, all ranks together."""

Reference = tuple[Tensor, dict[str, Tensor]]


def bytes_of_trial(module: nn.Module, size: int, dtype: torch.dtype = torch.float32) -> float:
    """Host memory that the copies of a trial take, all ranks together."""
    return float(sum(p.numel() for p in module.parameters()) * torch.finfo(dtype).bits // 8 * (size + 2))


def in_one_line(error: BaseException, length: int = 200) -> str:
    """An exception as part of a sentence."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:length]}"


@dataclass
class Bench:
    """A copy of the module with perturbed weights, and what the whole one computes on each batch.

    Args:
        module: whole; it is copied for each trial.
        size: tensor ranks.
        runs: each computes a loss on one batch.
        tolerance: largest relative difference of a gradient that counts as none.
        references: per batch, loss and gradients of the whole module.
        called: modules that ran in any of them.
        seconds: that the slowest of them took.
    """

    module: nn.Module
    size: int
    runs: Sequence[Run]
    tolerance: float
    references: list[Reference] = field(default_factory=list)
    called: frozenset[str] = frozenset()
    seconds: float = 0.0

    @classmethod
    def of(cls, module: nn.Module, size: int, runs: Sequence[Run]) -> Bench:
        """For a module that is whole and real: in float64 where it fits and runs, else as it is.

        Raises:
            ConfigError: when it cannot be run on the batches, or has no finite loss.
        """
        bench = None
        if bytes_of_trial(module, size, torch.float64) <= LARGEST_TRIAL:
            try:
                bench = cls._made(copy.deepcopy(module).double(), size, runs)
            except Exception:  # a forward that computes in float32 whatever it is given
                pass
        try:
            bench = bench or cls._made(copy.deepcopy(module), size, runs)
        except Exception as error:
            raise ConfigError(
                f"{type(module).__name__} cannot be run by itself, which a trial of a sharding needs "
                f"({in_one_line(error)})"
            ) from error
        for loss, _ in bench.references:
            if not torch.isfinite(loss):
                raise ConfigError(f"{type(module).__name__} has a loss of {float(loss)} with perturbed weights")
        return bench

    @classmethod
    def _made(cls, twin: nn.Module, size: int, runs: Sequence[Run]) -> Bench:
        perturb(twin)
        names = ModuleNames.record(twin)
        arithmetic = Arithmetic.of(twin)
        called: set[str] = set()
        references = []
        seconds = 0.0
        for run in runs:
            whole = copy.deepcopy(twin)
            for path, child in whole.named_modules():
                child.register_forward_pre_hook(_noting(path, called))
            start = time.monotonic()
            references.append(gradients_of(whole, run, names, arithmetic))
            seconds = max(seconds, time.monotonic() - start)
        return cls(twin, size, runs, arithmetic.tolerance, references, frozenset(called), seconds)

    def in_its_arithmetic(self, run: Run) -> Run:
        """The run as the references were made."""

        def exact(module: nn.Module) -> Tensor:
            with Arithmetic.of(module):
                return run(module)

        return exact

    def verdict(self, plan: ShardingPlan, batch: int = 0, *, sum_partial: bool = True) -> Verdict:
        """Of one trial.

        Raises:
            ConfigError: a plan that cannot be applied.
            Exception: what the sharded forward raises.
        """
        return try_assignments(
            self.module,
            resolve(plan, self.module, strict=False),
            self.size,
            self.runs[batch],
            sum_partial=sum_partial,
            reference=self.references[batch],
            tolerance=self.tolerance,
        )

    def judge(self, plan: ShardingPlan, batch: int = 0) -> tuple[Verdict | None, str]:
        """The verdict on an exact plan, or ``None`` and why it is not exact."""
        try:
            verdict = self.verdict(plan, batch)
        except Exception as error:  # somebody's forward may raise anything when a layout is wrong
            told = (
                str(error) if isinstance(error, ConfigError) else f"does not run in pieces ({in_one_line(error, 100)})"
            )
            return None, told
        if verdict.exact(self.tolerance):
            return verdict, ""
        return None, f"off by {verdict.worst:.1e} ({verdict.worst_name})"

    def repeats(self, batch: int, times: int = 2) -> bool:
        """Whether the whole module computes the same once more."""
        names = ModuleNames.record(self.module)
        loss, expected = self.references[batch]
        largest = max((float(g.abs().max()) for g in expected.values() if g.numel()), default=0.0)
        for _ in range(times):
            again, found = gradients_of(copy.deepcopy(self.module), self.runs[batch], names)
            if found.keys() != expected.keys() or not _close(again, loss, float(loss.abs()), self.tolerance):
                return False
            if not all(_close(found[n], g, largest, self.tolerance) for n, g in expected.items()):
                return False
        return True


def _close(a: Tensor, b: Tensor, scale: float, tolerance: float) -> bool:
    return not a.numel() or float((a - b).abs().max()) <= tolerance * (scale or 1.0)


def _noting(path: str, called: set[str]) -> Callable[..., None]:
    def before(module: nn.Module, args: object) -> None:
        called.add(path)

    return before
