"""A module that can be run by itself, for the chooser's trials: real, shortened, away from its trainer.

A stack of blocks is shortened to one block of each kind, at its real width. ``self.log`` does nothing, and a collective
that the step wants to make is refused: a trial runs on one rank.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megapar.batches import copied, split_batch
from lightning_megapar.generators import seed_generators
from lightning_megapar.sharding.blueprint import record_blueprints
from lightning_megapar.sharding.chooser.trial import Run
from lightning_megapar.sharding.initialise import initialise_by_name
from lightning_megapar.trees import of_tree, tree_of

_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "broadcast",
    "broadcast_object_list",
    "barrier",
    "monitored_barrier",
    "gather",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
    "all_to_all",
    "all_to_all_single",
)


def stand_alone(module: nn.Module, stack: str | None, styles: Mapping[str, str] | None = None) -> nn.Module:
    """A copy of ``module`` on the CPU with real values, whose stack keeps one block of each kind.

    Args:
        module: whole, real or meta. It is not changed.
        stack: dotted name of the stack of blocks, ``None`` where there is none.
        styles: dotted name -> style of a plan: blocks that it treats differently are of different kinds.
    """
    memo: dict[int, Any] = {}
    for child in module.modules():
        for value in vars(child).values():
            # Kept from an earlier forward (weight_norm's weight, a state): only leaves can be copied.
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    dropped: list[str] = []
    if stack is not None:
        seen: set[Any] = set()
        for index, (name, block) in enumerate(module.get_submodule(stack).named_children()):
            around = f"{stack}.{name}"
            own = {
                n.removeprefix(around): style for n, style in (styles or {}).items() if f"{n}.".startswith(around + ".")
            }
            kind = (_kind_of(block, index), tuple(sorted(own.items())))
            if kind in seen:
                dropped.append(name)
                memo[id(block)] = nn.Identity()  # not worth copying
            seen.add(kind)
    twin = copy.deepcopy(module, memo)
    for name in dropped:  # the others keep their names, by which the plan will speak of them
        del twin.get_submodule(stack or "")._modules[name]
    if any(t.is_meta for t in (*twin.parameters(), *twin.buffers())):
        initialise_by_name(twin, seed=0, blueprints=record_blueprints(twin))
    twin = twin.to("cpu")  # in the modes in which the modules are: what one does in training only is tried as well
    _without_dropout(twin)
    return twin


def _kind_of(block: nn.Module, index: int) -> Any:
    """What tells blocks apart: classes, shapes, plain values, functions, hooks, and what is frozen.

    A block's own number (``layer_idx``) tells nothing.
    """
    parts = []
    for path, child in block.named_modules():
        values = []
        for name, value in sorted(vars(child).items()):
            if isinstance(value, (str, bool, float, type(None))) or (isinstance(value, int) and value != index):
                values.append((name, value))
            elif callable(value) and not isinstance(value, nn.Module):
                values.append((name, getattr(value, "__qualname__", repr(value))))
            elif name.endswith("_hooks") and value:
                values.append((name, len(value)))
        own = tuple((n, tuple(p.shape), p.requires_grad) for n, p in child._parameters.items() if p is not None)
        parts.append((path, type(child), tuple(values), own))
    return tuple(parts)


def _without_dropout(module: nn.Module) -> None:
    for child in module.modules():
        for name, value in list(vars(child).items()):
            is_rate = "drop" in name.lower() or (name == "p" and "dropout" in type(child).__name__.lower())
            if is_rate and isinstance(value, float):
                vars(child)[name] = 0.0


class _TrialTrainer:
    """A trainer as a step meets it in a trial: what it sets is forgotten, nothing is logged, an optimizer is there."""

    def __init__(self, trainer: Any) -> None:
        tree = tree_of(trainer)
        nowhere = of_tree(tree, "loggers.logger", "DummyLogger")()
        vars(self).update(
            _real=trainer,
            logger=nowhere,
            loggers=[nowhere],
            optimizers=trainer.optimizers or [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)],
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_real"], name)


def runs_of_step(step: str, batch: Any, trainer: Any = None) -> list[Run]:
    """Two runs of a module's own step, on batches of different shapes.

    Args:
        step: name of the method, such as ``"training_step"``.
        batch: of at least two samples where it can be cut, else it is used twice.
        trainer: what the step finds in ``self.trainer``, apart from loggers and optimizers.
    """
    pieces = [piece for piece, _ in split_batch(batch, 2)]
    batches = [batch, pieces[0]] if len(pieces) == 2 else [batch]
    around = None if trainer is None else _TrialTrainer(trainer)
    return [_run_of(step, one, around) for one in batches]


def _run_of(step: str, batch: Any, trainer: Any) -> Run:
    def run(module: nn.Module) -> Tensor:
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)

        def fitted(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.to(dtype) if leaf.is_floating_point() else leaf

        if trainer is not None:
            object.__setattr__(module, "_trainer", trainer)  # a copy has none
        logged: list[Any] = []
        if hasattr(module, "log"):
            object.__setattr__(module, "log", lambda name, value, *a, **k: logged.append(value))
            object.__setattr__(module, "log_dict", lambda values, *a, **k: logged.extend(dict(values).values()))
        seed_generators(0)
        method = getattr(module, step)
        asked = inspect.signature(method).parameters
        indices = {name: 0 for name in ("batch_idx", "dataloader_idx") if name in asked}
        rest = [] if indices or len(asked) < 2 else [0]  # an index under a name of the user's
        output = method(tree_map(fitted, copied(batch)), *rest, **indices)
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad:
            return loss
        found = [t for t in tree_leaves((output, logged)) if isinstance(t, Tensor) and t.requires_grad]
        if not found and torch.is_grad_enabled():
            raise RuntimeError(f"{step} returned nothing that depends on the parameters")
        return torch.stack([t.float().square().mean() for t in found]).sum() if found else torch.zeros(())

    return run


@contextmanager
def by_itself() -> Iterator[None]:
    """Around trials: collectives are refused, and nothing is compiled.

    Not to be entered by several threads.
    """
    compiles = "torch._dynamo" in sys.modules  # else nothing can have been compiled
    with no_collectives(), torch.compiler.set_stance("force_eager") if compiles else nullcontext():
        yield


@contextmanager
def no_collectives() -> Iterator[None]:
    """Refuse torch.distributed's collectives: the other ranks do not run this. Not to be entered by several threads."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the step makes a collective of its own, which a trial on one rank cannot")

    names = [name for name in _COLLECTIVES if hasattr(dist, name)]
    replaced: list[Any] = [patch.object(dist, name, refuse) for name in names]
    for one in replaced:
        one.start()
    try:
        yield
    finally:
        for one in reversed(replaced):
            one.stop()
