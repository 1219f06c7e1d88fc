"""Layers, callbacks and optimizers that cannot work on several ranks: refused in set-up, with what to use instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_megapar.config import ConfigError, Layout
from lightning_megapar.data_parallel.parameters import LogicalParameter
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.optim.lists import refuse_lists
from lightning_megapar.optim.muon import Muon
from lightning_megapar.strategy.prepare import PreparedModule
from lightning_megapar.trees import in_any_tree


def why_split(prepared: PreparedModule) -> str | None:
    """The setting by which a rank holds only part of the parameters, or ``None`` when it holds them all."""
    if prepared.cut is not None:
        return f"pipeline_parallel_size={prepared.layout.pipeline}"
    if prepared.zero is not None:
        return f"zero_stage={prepared.config.zero_stage}"
    if any(_is_piece(record) for record in prepared.parameters):
        return f"tensor_parallel_size={prepared.layout.tensor}"
    return None


def _is_piece(record: LogicalParameter) -> bool:
    return record.shard is not None or isinstance(record.parameter, DTensor)


def refuse_precision(plugin: Any) -> None:
    """Refuse to train in a number format whose gradients vanish or overflow without a word.

    Raises:
        ConfigError: with formats that train.
    """
    if getattr(plugin, "precision", None) == "16-true":
        raise ConfigError(
            "precision='16-true' keeps weights and gradients in float16, without a loss scale: gradients below 6e-8 "
            "are 0, and Adam divides by their squares (validate, test and predict may use it); valid for fit: "
            "'32-true', 'bf16-mixed', 'bf16-true', '16-mixed'"
        )


def refuse_clipping(bound: float | None) -> None:
    """Refuse a ``gradient_clip_val`` that bounds nothing and does not say so.

    Raises:
        ConfigError: below 0, or no number.
    """
    if bound is not None and not bound >= 0:
        raise ConfigError(
            f"gradient_clip_val={bound!r}: expected a positive number, or None (or 0) for no clipping"
            + (f"; nearest valid: {-bound!r}" if bound < 0 else "")
        )


def refuse_callbacks(callbacks: Iterable[Any], prepared: PreparedModule) -> None:
    """Refuse Lightning's callbacks that need whole parameters where a rank has parts, or all ranks when one fails.

    Raises:
        ConfigError: naming the callback and the setting.
    """
    setting = why_split(prepared)
    for callback in callbacks if prepared.layout.world_size > 1 else ():
        if isinstance(callback, in_any_tree("callbacks", "OnExceptionCheckpoint")) or getattr(
            callback, "save_on_exception", False
        ):
            raise ConfigError(
                f"{type(callback).__name__} saves when a rank fails, but a checkpoint needs all "
                f"{prepared.layout.world_size} ranks; use ModelCheckpoint(every_n_train_steps=...) without "
                "save_on_exception (a stop signal saves on all ranks)"
            )
    if setting is None:
        return
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, in_any_tree("callbacks", "StochasticWeightAveraging")):
            raise ConfigError(
                f"{name} averages copies of the whole module, of which a rank holds only a part under {setting}; "
                "use Lightning's WeightAveraging or EMAWeightAveraging, which work on parts, or zero_stage=0 on data "
                "ranks only"
            )
        if isinstance(callback, in_any_tree("callbacks", "BaseFinetuning")) and not setting.startswith("pipeline"):
            raise ConfigError(
                f"{name} compares parameters with those in the optimizer, which are sharded under {setting}; give all "
                "parameters to the optimizer and switch requires_grad in a callback of your own, with zero_stage=0"
            )


WHOLE_TENSORS = {
    "Adafactor": "takes means over rows and columns",
    "Muon": "orthogonalises matrices",
    "LAMB": "takes a norm of each parameter",
    "LARS": "takes a norm of each parameter",
    "Shampoo": "factors matrices",
    "DistributedShampoo": "factors matrices",
    "SOAP": "factors matrices",
}
"""Optimizers, by the name of their class, whose update of a piece is not the piece of the update, and why."""


def refuse_optimizers(optimizers: Iterable[torch.optim.Optimizer], prepared: PreparedModule) -> None:
    """Refuse optimizers that look at whole parameters, or at all of them, where a rank has parts of them.

    Raises:
        ConfigError: naming the optimizer and the setting.
    """
    setting = why_split(prepared)
    optimizers = list(optimizers)
    refuse_lists(optimizers)
    pieces = {id(record.parameter) for record in prepared.parameters if _is_piece(record)}
    for optimizer in optimizers:
        if isinstance(optimizer, Muon):
            continue  # ours: it gathers
        sharded = any(id(parameter) in pieces for group in optimizer.param_groups for parameter in group["params"])
        whole = {kind.__name__.lower(): kind.__name__ for kind in type(optimizer).__mro__}
        known = next((name for name in WHOLE_TENSORS if name.lower() in whole), None)
        if sharded and known is not None:
            raise ConfigError(
                f"{whole[known.lower()]} {WHOLE_TENSORS[known]}, of which a rank holds only pieces under {setting}; "
                f"use {'lightning_megapar.optim.Muon' if known == 'Muon' else 'another optimizer'}, or neither tensor "
                "parallelism nor shards over data ranks (zero_stage=0)"
            )
        if setting is not None and isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                f"{type(optimizer).__name__} needs inner products over all parameters, of which a rank holds only a "
                f"part under {setting}; use another optimizer, or data parallelism with zero_stage=0"
            )


def place_optimizers(optimizers: Iterable[torch.optim.Optimizer], prepared: PreparedModule, mesh: ParallelMesh) -> None:
    """Tell optimizers of this package that look at whole matrices how these are cut over the ranks."""
    for optimizer in optimizers:
        if isinstance(optimizer, Muon):
            optimizer.place(prepared.parameters, mesh)


def refuse_modules(module: nn.Module, layout: Layout) -> None:
    """Refuse layers that cannot work on several ranks, before ranks wait for each other.

    Args:
        module: whole; what ``configure_model`` has yet to build is looked at once more when it is there.
        layout: resolved degrees.

    Raises:
        ConfigError: naming the layer, its option, and what to do.
    """
    if layout.world_size == 1:
        return
    ranks = layout.describe()
    for path, child in module.named_modules():
        kind, name = type(child).__name__, path or type(module).__name__
        lazy = [n for n, t in (*child._parameters.items(), *child._buffers.items()) if t is not None and is_lazy(t)]
        if lazy:
            raise ConfigError(
                f"{name} is a {kind} whose {' and '.join(lazy)} have no shape yet, and {ranks} divides shapes; give "
                "its sizes when it is built, or run the module on one batch before trainer.fit"
            )
        kept = (n for n in child._buffers if n not in child._non_persistent_buffers_set)
        sparse = [n for n in kept if (b := child._buffers[n]) is not None and b.layout != torch.strided]
        if sparse:
            raise ConfigError(
                f"the buffer {sparse[0]!r} of {name} is sparse, and checkpoints of several ranks ({ranks}) hold dense "
                f"tensors; valid: register_buffer({sparse[0]!r}, ..., persistent=False), or a dense buffer"
            )
        if not isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if child.sparse:
            raise ConfigError(
                f"{name} is an nn.{kind}(sparse=True), whose sparse gradients cannot be summed over ranks ({ranks}); "
                "valid value: sparse=False (with a dense optimizer), or one rank"
            )
        if child.max_norm is not None and layout.data > 1:
            raise ConfigError(
                f"{name} is an nn.{kind}(max_norm={child.max_norm}), which shrinks the rows that a rank looks up: with "
                f"data_parallel_size={layout.data} the replicas would drift apart; valid: max_norm=None, or "
                "data_parallel_size=1"
            )


@contextmanager
def optimizers_may_be_empty(prepared: PreparedModule) -> Iterator[None]:
    """While active, an optimizer without parameters is one with an empty group, where another stage has its parameters.

    An adapter or a head that is trained alone lives on some stages only; the user's ``configure_optimizers`` runs on
    all of them.
    """
    if prepared.cut is None:
        yield
        return
    kept = torch.optim.Optimizer.__init__

    def init(optimizer: torch.optim.Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        given = params if isinstance(params, torch.Tensor) else list(params)
        kept(optimizer, given if isinstance(given, torch.Tensor) or given else [{"params": []}], defaults)

    torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.optim.Optimizer.__init__ = kept  # type: ignore[method-assign]


def refuse_empty_optimizers(optimizers: Iterable[torch.optim.Optimizer], prepared: PreparedModule) -> None:
    """Refuse optimizers that have no parameter on any stage. Collective over all ranks of a pipeline.

    Raises:
        ConfigError: the same on every rank.
    """
    if prepared.cut is None:
        return
    counts = [sum(len(group["params"]) for group in optimizer.param_groups) for optimizer in optimizers]
    everyone: list[Any] = [None] * prepared.layout.world_size
    dist.all_gather_object(everyone, counts)
    if len({len(one) for one in everyone}) > 1:
        raise ConfigError(
            f"configure_optimizers returned {' and '.join(sorted({str(len(one)) for one in everyone}))} optimizers on "
            "different ranks; return the same ones on every pipeline stage (a stage may have no parameter for one)"
        )
    empty = [index for index, over_ranks in enumerate(zip(*everyone)) if not any(over_ranks)]
    if empty:
        raise ConfigError(
            f"configure_optimizers gave optimizer {empty[0]} an empty parameter list: no pipeline stage has a "
            "parameter for it"
        )
