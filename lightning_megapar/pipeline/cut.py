"""Cut and inject: run somebody's own step on every stage of a pipeline.

The largest stack of blocks in the module (or the one that the user names) is cut. Each stage runs the *whole* user
step, once per microbatch, with these changes:

* the block before the first local one is a stand-in that returns what that very block returned on the stage before,
  so that whatever the step does between two blocks is done to it; blocks before that return poison (NaN), which shows
  when something else than the block's successor needs their results;
* the stand-in after the last local block raises a private ``BaseException`` that carries the local block's output and
  unwinds the step; the last stage runs on to the loss;
* modules with parameters that are registered before the stack live on the first stage only, those registered after it
  on the last one; elsewhere they are stand-ins. Modules without parameters stay everywhere.

The step must call the stack once. Parameters that more than one stage holds (tied embeddings, parameters of a module
that contains the stack) are reported by canonical name, so that their gradients can be summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megapar.config import ConfigError, nearest_name
from lightning_megapar.pipeline.partition import given_split, split_blocks
from lightning_megapar.pipeline.stand_ins import Absent, ShapeOnly, SkippedBlock, StageError, poison

PLACES = ("first", "last", "all")
_NOTHING = object()


class StageExit(BaseException):
    """Carries the last local block's output out of the user's step."""

    def __init__(self, boundary: Any) -> None:
        super().__init__()
        self.boundary = boundary


@dataclass(frozen=True)
class StagePlan:
    """Where everything lives. Pure data, the same on every rank.

    Args:
        stack: dotted name of the stack of blocks.
        ranges: block range ``(start, stop)`` per stage.
        costs: parameters per block.
        outside: dotted name of each outside module with parameters -> ``"first"``, ``"last"`` or ``"all"``.
        before, after: parameters that run before and after the stack.
    """

    stack: str
    ranges: tuple[tuple[int, int], ...]
    costs: tuple[int, ...]
    outside: Mapping[str, str]
    before: int
    after: int

    def rows(self) -> list[tuple[str, str, str]]:
        """(stage, blocks, parameters) for a table."""
        rows = []
        for stage, (start, stop) in enumerate(self.ranges):
            total = sum(self.costs[start:stop])
            total += self.before if stage == 0 else 0
            total += self.after if stage == len(self.ranges) - 1 else 0
            rows.append((str(stage), f"{self.stack}[{start}:{stop}]", f"{total:,}"))
        return rows


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def find_stack(module: nn.Module, name: str | None = None) -> tuple[str, nn.Module]:
    """The stack to cut: the named one (a ``ModuleDict`` as well), else the ``ModuleList``/``Sequential`` with the most
    parameters.

    Raises:
        ConfigError: when there is none, or the name is not one (the candidates are listed).
    """
    # A ModuleDict is rarely a stack (more often it names a model's parts): only when the user says so.
    kinds = (nn.ModuleList, nn.Sequential) if name is None else (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    candidates = {
        path: child
        for path, child in module.named_modules()
        if isinstance(child, kinds) and len(child) >= 2 and _count(child) > 0
    }
    if name is not None:
        if name not in candidates:
            near = nearest_name(name, candidates)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"pipeline_stack={name!r} is not a stack of blocks{hint} (stacks: {sorted(candidates)})")
        return name, candidates[name]
    if not candidates:
        raise ConfigError(
            "pipeline_parallel_size > 1 needs a stack of blocks (an nn.ModuleList or nn.Sequential of at least two "
            f"modules with parameters, or an nn.ModuleDict named by pipeline_stack); {type(module).__name__} has none"
        )
    # Of nested stacks with the same parameters the inner one is the stack of blocks: named_modules lists it later.
    best = max(candidates, key=lambda path: (_count(candidates[path]), len(path)))
    return best, candidates[best]


def plan_stages(
    module: nn.Module,
    num_stages: int,
    *,
    stack: str | None = None,
    split: tuple[int, ...] | None = None,
    keep: Mapping[str, str] | None = None,
) -> StagePlan:
    """Decide which stage holds what.

    Args:
        module: the whole module, real or on the meta device.
        num_stages: pipeline size.
        stack: dotted name of the stack, ``None`` to find it.
        split: blocks per stage, ``None`` to balance parameters.
        keep: outside module name -> ``"first"``, ``"last"`` or ``"all"``, where registration order guesses wrong.

    Raises:
        ConfigError: fewer blocks than stages, a split that does not add up, unknown names or places.
    """
    path, blocks = find_stack(module, stack)
    for name, block in blocks.named_children():
        if isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            raise ConfigError(
                f"pipeline_stack={path!r} cannot be cut: its block {name!r} is an nn.{type(block).__name__}, which is "
                "not called as a whole; make the block a module with a forward, or name another stack"
            )
    parts = path.split(".") if path else []
    outside: dict[str, str] = {}
    for depth in range(len(parts)):
        owner_path = ".".join(parts[:depth])
        owner = module.get_submodule(owner_path)
        passed = False
        for child_name, child in owner.named_children():
            if child_name == parts[depth]:
                passed = True
                continue
            full = f"{owner_path}.{child_name}" if owner_path else child_name
            if next(child.parameters(), None) is not None:
                outside[full] = "last" if passed else "first"
    for name, place in (keep or {}).items():
        if place not in PLACES:
            raise ConfigError(f"pipeline_keep[{name!r}]={place!r} is not one of {', '.join(PLACES)}")
        if name not in outside:
            near = nearest_name(name, outside)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"pipeline_keep names {name!r}, not a module beside the stack{hint}: {sorted(outside)}")
        outside[name] = place
    costs = [_count(block) for block in blocks.children()]
    cost_of = {name: _count(module.get_submodule(name)) for name in outside}
    before = sum(cost for name, cost in cost_of.items() if outside[name] != "last")
    after = sum(cost for name, cost in cost_of.items() if outside[name] != "first")
    if split is None:
        ranges = split_blocks([float(c) for c in costs], num_stages, float(before), float(after))
    else:
        if len(split) != num_stages:
            raise ConfigError(f"pipeline_split={split} names {len(split)} stages, pipeline_parallel_size={num_stages}")
        ranges = given_split(split, len(costs))
    return StagePlan(path, ranges, tuple(costs), outside, before, after)


class StageCut:
    """One stage's share of a module, and the injection around each microbatch.

    Args:
        module: the whole module; cut in place.
        plan: from :func:`plan_stages`.
        stage: this rank's stage.
    """

    def __init__(self, module: nn.Module, plan: StagePlan, stage: int) -> None:
        self.plan = plan
        self.is_first = stage == 0
        self.is_last = stage == len(plan.ranges) - 1
        self.start, self.stop = plan.ranges[stage]
        self._received: Any = None
        self._left: Any = _NOTHING
        self._versions: list[int] = []
        self._entered = 0
        self._active = False
        self.outside_names: list[str] = []
        self._replace(module)
        self._stack = module.get_submodule(plan.stack)
        self._handles: list[Any] = []

    def _replace(self, module: nn.Module) -> None:
        blocks = module.get_submodule(self.plan.stack)
        for name, block in list(blocks.named_children()):
            index = list(blocks._modules).index(name)
            if not self.start <= index < self.stop:
                setattr_module(blocks, name, SkippedBlock(block, partial(self._stand_in, index)))
        for full, place in self.plan.outside.items():
            owner_path, _, child_name = full.rpartition(".")
            owner = module.get_submodule(owner_path)
            child = owner.get_submodule(child_name)
            if place == "first" and not self.is_first:
                setattr_module(owner, child_name, ShapeOnly(full, child))
                self.outside_names.append(full)
            elif place == "last" and not self.is_last:
                setattr_module(owner, child_name, Absent(full, child))

    def install_hooks(self) -> None:
        """Attach injection and exit. Call it after anything else (FSDP2) has put hooks on the blocks."""
        for handle in self._handles:
            handle.remove()
        blocks = list(self._stack.children())[self.start : self.stop]
        self._handles = []
        if not self.is_first:
            self._handles += [block.register_forward_pre_hook(self._expect_input) for block in blocks]
        if not self.is_last:
            self._handles.append(blocks[-1].register_forward_hook(self._keep_output))

    def _stand_in(self, index: int) -> Any:
        """What block ``index`` of another stage returns to the step."""
        if not self._active:
            raise StageError(
                f"block {index} of the pipelined stack {self.plan.stack!r} is on another stage: under "
                "pipeline_parallel_size > 1 the stack runs only inside training_step, validation_step, test_step and "
                "predict_step (and a checkpointed region must not span several blocks)"
            )
        if index >= self.stop:
            if self._left is _NOTHING:
                raise StageError(self._out_of_order(self.stop - 1))
            if _versions(self._left) != self._versions:
                raise StageError(
                    f"the output of block {self.stop - 1} of the pipelined stack {self.plan.stack!r} was modified in "
                    "place before the next block was called; use an out-of-place operation there"
                )
            raise StageExit(self._left)
        if index < self.start - 1:
            return tree_map(lambda x: poison(x, x.device) if isinstance(x, Tensor) else x, self._received)
        self._entered += 1
        if self._entered > 1:
            raise StageError(
                f"the pipelined stack {self.plan.stack!r} was called {self._entered} times in one step; under "
                "pipeline_parallel_size > 1 a step may call it once (use pipeline_parallel_size=1 for this module)"
            )
        # In-place operations on a leaf are errors; they are fine on what a block returned.
        return tree_map(lambda x: _Entrance.apply(x) if isinstance(x, Tensor) else x, self._received)

    def _out_of_order(self, missing: int) -> str:
        return (
            f"block {missing} of the pipelined stack {self.plan.stack!r} was not called before its successors; under "
            "pipeline_parallel_size > 1 a step must call every block, in order (no layer drop, no early exit)"
        )

    def _expect_input(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        if self._active and self._entered == 0:
            raise StageError(self._out_of_order(self.start - 1))

    def _keep_output(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._active:
            self._left, self._versions = output, _versions(output)

    @contextmanager
    def microbatch(self, received: Any) -> Iterator[None]:
        """While active, the step's stack is this stage's share. ``received`` is the previous stage's boundary."""
        self._received = received
        self._left = _NOTHING
        self._entered = 0
        self._active = True
        try:
            yield
        finally:
            self._active = False
            self._received = None
            self._left = _NOTHING

    def call(self, step: Callable[[], Any], received: Any) -> tuple[bool, Any]:
        """Run the user's step for one microbatch.

        Returns:
            ``(True, step's return value)`` on the last stage, ``(False, boundary)`` elsewhere.

        Raises:
            StageError: when a stage before the last ran to the end of the step (the stack was not called), or the
                last stage never entered its blocks.
        """
        with self.microbatch(received):
            try:
                output = step()
            except StageExit as leaving:
                return False, leaving.boundary
            if not self.is_last or (not self.is_first and self._entered == 0):
                raise StageError(
                    f"the step never called the pipelined stack {self.plan.stack!r}; under pipeline_parallel_size > 1 "
                    "every step must call it once"
                )
        return True, output

    def explain_poison(self) -> str:
        """For the error raised when a NaN of a stand-in reached the loss or a boundary."""
        names = ", ".join(repr(n) for n in self.outside_names) or "none"
        return (
            "a value that only an earlier stage computes reached the result on a later stage (not-a-number). "
            f"Modules kept on the first stage only: {names}. If one of them also feeds something other than the "
            "stack's hidden state, keep it everywhere: pipeline_keep={'<name>': 'all'}. If the step gathers something "
            "from every block (a residual added outside the block, auxiliary losses, a list of hidden states), do it "
            "inside the block and return it along with the hidden state"
        )


def setattr_module(owner: nn.Module, name: str, child: nn.Module) -> None:
    """Replace a registered child by name, also in ModuleList and Sequential, keeping the order."""
    child.train(owner.training)
    owner._modules[name] = child


def _versions(nest: Any) -> list[int]:
    """Counters of in-place modifications of a nest's tensors."""
    return [leaf._version for leaf in tree_leaves(nest) if isinstance(leaf, Tensor) and not leaf.is_inference()]


class _Entrance(torch.autograd.Function):
    """The same values as something that is not a leaf (and no view of one)."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def contains_nan(tensors: list[Tensor]) -> bool:
    """Whether any floating-point tensor holds a NaN (synchronises the device; used on the first step only)."""
    return any(bool(torch.isnan(t).any()) for t in tensors if t.is_floating_point())
