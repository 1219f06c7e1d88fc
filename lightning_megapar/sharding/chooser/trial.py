"""Play all tensor ranks of a sharded module in one process, and compare every gradient with the whole module's.

Each rank is a thread with its own copy, and they take turns: a rank runs up to its next collective. Nothing is sent
anywhere, and nothing can hang: when a rank fails or ends early, all of them end. The comparison is the proof
that a plan is right: a wrong order of a fused weight runs without an error, and its loss is off by little.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megapar.data_parallel.parameters import ModuleNames
from lightning_megapar.generators import generator_states, set_generator_states
from lightning_megapar.layers.collectives import Pending, TensorRanks
from lightning_megapar.sharding.by_plan import apply_assignments
from lightning_megapar.sharding.chooser.arithmetic import Arithmetic
from lightning_megapar.sharding.plan import Assignment
from lightning_megapar.sharding.styles import StyledModule
from lightning_megapar.shards import own_addends, own_shards

Run = Callable[[nn.Module], Tensor]
"""Computes a scalar loss with a module."""


class _Meeting:
    """Where the ranks of a trial exchange tensors.

    One rank runs at a time, up to its next collective; then the next one runs. Random numbers are drawn from each
    rank's own state, so that all draw the same ones, as real ranks do from one seed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Tensor | None] = [None] * size
        self._turn = 0
        self._gone: set[int] = set()
        self._failed = False
        self._condition = threading.Condition()

    def begin(self, rank: int) -> None:
        """Wait for the first turn."""
        with self._condition:
            self._condition.wait_for(lambda: self._turn == rank or self._failed)
        self._stop_if_failed()

    def leave(self, rank: int, failed: bool) -> None:
        """This rank has ended."""
        with self._condition:
            self._gone.add(rank)
            self._failed = self._failed or failed
            self._pass_on(rank)

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        """Every rank's value, in rank order."""
        state = generator_states()
        self.slots[rank] = value
        self._next_turn(rank)
        if self._gone:
            raise RuntimeError(f"tensor ranks {sorted(self._gone)} ended before a collective that others take part in")
        values = [v for v in self.slots if v is not None]
        self._next_turn(rank)
        set_generator_states(state)
        shapes = {(tuple(v.shape), v.dtype) for v in values}
        if len(shapes) > 1:
            raise RuntimeError(
                f"tensor ranks meet in one collective with different tensors: {sorted(map(str, shapes))}"
            )
        return values

    def _next_turn(self, rank: int) -> None:
        with self._condition:
            self._pass_on(rank)
            self._condition.wait_for(lambda: self._turn == rank or self._failed)
        self._stop_if_failed()

    def _pass_on(self, rank: int) -> None:
        waiting = [r % self.size for r in range(rank + 1, rank + 1 + self.size) if r % self.size not in self._gone]
        self._turn = waiting[0] if waiting else -1
        self._condition.notify_all()

    def _stop_if_failed(self) -> None:
        if self._failed:
            raise _OtherFailed


class _OtherFailed(BaseException):
    """Ends a rank of a trial of which another has failed."""


class TrialRanks(TensorRanks):
    """The ranks of a trial, as seen by one of them."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        for name, value in {"meeting": meeting, "rank": rank, "size": meeting.size}.items():
            object.__setattr__(self, name, value)

    meeting: Any = None
    sequence_parallel = False

    @classmethod
    def alone(cls, size: int) -> TrialRanks:
        """The first of ``size`` ranks, to cut something without running it."""
        return cls(_Meeting(size), 0)

    def all_reduce(self, x: Tensor) -> Pending:
        total = torch.stack(self.meeting.exchange(self.rank, x.detach().clone())).sum(0)
        with torch.no_grad():
            x.copy_(total)
        return lambda: x

    def all_gather(self, x: Tensor) -> Pending:
        pieces = torch.stack(self.meeting.exchange(self.rank, x.detach()))
        return lambda: pieces


def play(meeting: _Meeting, part: Callable[[int], Any]) -> list[Any]:
    """Run ``part(rank)`` for every rank of a meeting; the results in rank order.

    Raises:
        Exception: of the rank that failed first.
    """
    results: list[Any] = [None] * meeting.size
    errors: list[BaseException] = []
    state = generator_states()
    grad = torch.is_grad_enabled()

    def one(rank: int) -> None:
        failed = True
        try:
            meeting.begin(rank)
            set_generator_states(state)
            with torch.set_grad_enabled(grad):
                results[rank] = part(rank)
            failed = False
        except _OtherFailed:
            pass
        except BaseException as error:
            errors.append(error)
        finally:
            meeting.leave(rank, failed)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(meeting.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    set_generator_states(state)
    if errors:
        raise errors[0]
    return results


@dataclass(frozen=True)
class Verdict:
    """What a trial found.

    Args:
        loss_error: largest relative difference of a rank's loss.
        errors: canonical parameter name -> largest difference of its gathered gradient over its largest magnitude.
        partial: whole parameters whose gradients differ between ranks without being named as addends.
        needless: parameters that are named as addends and whose gradient is whole on every rank: the sum is too large.
    """

    loss_error: float
    errors: dict[str, float] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    needless: tuple[str, ...] = ()

    @property
    def worst_name(self) -> str:
        """Parameter whose gradient is furthest off, or ``"loss"``."""
        name = max(self.errors, key=lambda n: self.errors[n], default="loss")
        return name if self.errors.get(name, 0.0) >= self.loss_error else "loss"

    @property
    def worst(self) -> float:
        return max([self.loss_error, *self.errors.values()])

    def exact(self, tolerance: float) -> bool:
        return self.worst <= tolerance


def gradients_of(
    module: nn.Module, run: Run, names: ModuleNames, arithmetic: Arithmetic | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and the gradients by canonical name (those of unused parameters are left out).

    Args:
        module, run: what is run.
        names: of the whole module.
        arithmetic: in which it is run; by default that of the module, without dropout.
    """
    with arithmetic or Arithmetic.of(module):
        loss = run(module)
        loss.backward()
    found: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            found.setdefault(names.canonical[name], parameter.grad)
    return loss.detach(), found


def try_assignments(
    module: nn.Module,
    assignments: Sequence[Assignment],
    size: int,
    run: Run,
    *,
    sum_partial: bool = True,
    reference: tuple[Tensor, dict[str, Tensor]] | None = None,
    tolerance: float = 1e-5,
) -> Verdict:
    """Compare ``module`` sharded over ``size`` ranks with the whole one.

    Args:
        module: whole and real; it is copied and stays as it is. It must not draw random numbers.
        assignments: what is sharded how.
        size: tensor ranks.
        run: loss of a module on one batch.
        sum_partial: gradients that turn out to be addends are summed before they are compared (and named in the
            verdict).
        reference: loss and gradients of the whole module, when they are known.
        tolerance: difference between ranks from which whole gradients count as addends.

    Raises:
        ConfigError: assignments that cannot be applied at this size.
        Exception: what the sharded forward raises.
    """
    names = ModuleNames.record(module)
    loss, expected = reference if reference is not None else gradients_of(copy.deepcopy(module), run, names)
    meeting = _Meeting(size)
    copies: list[nn.Module] = []
    for rank in range(size):
        twin = copy.deepcopy(module)
        apply_assignments(twin, assignments, TrialRanks(meeting, rank))
        copies.append(twin)

    def part(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        return gradients_of(copies[rank], run, names)

    results = play(meeting, part)
    scale = float(loss.abs()) or 1.0
    loss_error = max(float((one - loss).abs()) / scale for one, _ in results)
    found = [one for _, one in results]
    return _compare(copies, found, expected, names, sum_partial, tolerance, loss_error)


def _compare(
    copies: list[nn.Module],
    found: list[dict[str, Tensor]],
    expected: dict[str, Tensor],
    names: ModuleNames,
    sum_partial: bool,
    tolerance: float,
    loss_error: float,
) -> Verdict:
    shards: dict[str, Any] = {}
    addends: set[str] = set()
    for path, child in copies[0].named_modules():
        prefix = f"{path}." if path else ""
        shards.update({names.canonical[prefix + n]: (n, path) for n in own_shards(child)})
        if isinstance(child, StyledModule):
            addends.update(names.canonical[prefix + n] for n in child.partial_gradients())
        addends.update(names.canonical[prefix + n] for n in own_addends(child))
    largest = max((float(g.abs().max()) for g in expected.values() if g.numel()), default=0.0)
    errors: dict[str, float] = {}
    partial: list[str] = []
    needless: list[str] = []
    for name, whole in expected.items():
        floor = float(whole.abs().max()) + 1e-3 * largest if whole.numel() else 1.0
        pieces = [one.get(name) for one in found]
        if name in shards:
            own, path = shards[name]
            full = torch.zeros_like(whole)
            for twin, piece in zip(copies, pieces):
                shard = own_shards(twin.get_submodule(path))[own]
                if piece is not None:
                    shard.index.place(full, piece, shard.dim, shard.rank)
            errors[name] = _difference(full, whole) / floor
            continue
        present = [torch.zeros_like(whole) if piece is None else piece for piece in pieces]
        if any(piece.shape != whole.shape for piece in present):
            errors[name] = float("inf")
            continue
        spread = max(_difference(piece, present[0]) for piece in present)
        if name in addends:
            errors[name] = _difference(torch.stack(present).sum(0), whole) / floor
            same = max(spread, _difference(present[0], whole)) <= tolerance * floor
            if same and errors[name] > tolerance:
                needless.append(name)
        elif spread > tolerance * floor:
            partial.append(name)
            value = torch.stack(present).sum(0) if sum_partial else present[0]
            errors[name] = _difference(value, whole) / floor
        else:
            errors[name] = _difference(present[0], whole) / floor
    unexpected = {name for one in found for name in one} - set(expected)
    errors.update({name: float("inf") for name in unexpected})
    return Verdict(loss_error, errors, tuple(partial), tuple(needless))


def _difference(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    worst = float((a.double() - b.double()).abs().max())
    return worst if worst == worst else float("inf")


@torch.no_grad()
def perturb(module: nn.Module, scale: float = 0.1, seed: int = 0) -> None:
    """Add small noise to every parameter: zero biases and unit norms hide a bias added twice or a missing sum."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * scale
            parameter.add_(noise.to(parameter.device, parameter.dtype))
