"""Save and load a whole training: Lightning's checkpoint dictionary, optimizers and the place in the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_megapar.checkpoint.errors import CheckpointError
from lightning_megapar.checkpoint.full import load_full_into
from lightning_megapar.checkpoint.reader import is_sharded_checkpoint, read_manifest
from lightning_megapar.checkpoint.sharded import load_sharded, save_sharded
from lightning_megapar.checkpoint.training_state import (
    CURRENT,
    from_plain,
    install_optimizer_state,
    optimizer_targets,
    pack,
)
from lightning_megapar.config import AXES, Layout
from lightning_megapar.data_parallel.parameters import LogicalParameter, ModuleNames
from lightning_megapar.shards import IndexedTensor, Value, is_value


@dataclass(frozen=True)
class DataPosition:
    """How far training is in its data: ``consumed`` samples of ``epoch``, over all data ranks."""

    consumed: int = 0
    epoch: int = 0


def save_training(
    path: Path, checkpoint: dict[str, Any], names: ModuleNames, layout: Layout, position: DataPosition, seed: int
) -> None:
    """Write Lightning's checkpoint dictionary as a sharded directory; collective over all ranks.

    Raises:
        CheckpointError: the same on every rank.
    """
    checkpoint = {**checkpoint, "megapar": {"position": asdict(position), "seed": seed}}
    tensors, rest = pack(checkpoint, names, layout.world_size)
    info = {"layout": dict(zip(AXES, layout.sizes)), "seed": seed, "position": asdict(position)}
    save_sharded(path, tensors, rest, step=int(checkpoint.get("global_step", 0)), info=info)


def load_training(
    path: Path,
    model: Mapping[str, Value],
    optimizers: Sequence[Optimizer],
    parameters: Sequence[LogicalParameter],
    names: ModuleNames,
    *,
    world_size: int,
    strict: bool,
) -> tuple[dict[str, Any], DataPosition | None]:
    """Fill this rank's module and optimizers; collective over all ranks.

    Args:
        path: a sharded directory of any layout, or a plain Lightning file.
        model: this rank's ``state_dict`` under canonical names.
        optimizers: of this run; none outside ``fit``, which then takes the weights alone.
        parameters: this rank's logical parameters.
        names: of the whole module.
        world_size: ranks that take part.
        strict: a name in the checkpoint that no rank asks for is an error (only with optimizers).

    Returns:
        (what Lightning restores itself, place in the data or ``None``). Beside averaged weights the former holds the
        trained ones under :data:`CURRENT`, by canonical name.

    Raises:
        CheckpointError: the same on every rank.
    """
    if path.is_file():
        return _load_plain_file(path, model, optimizers, parameters, names, world_size), None
    if not is_sharded_checkpoint(path):
        load_sharded(path, {})  # raises on every rank, saying what the path is instead
        raise CheckpointError(f"{path} is not a checkpoint")
    manifest = read_manifest(path)
    targets = [optimizer_targets(i, o, parameters, manifest) for i, o in enumerate(optimizers)]
    wanted = {f"model.{name}": value for name, value in model.items() if is_value(value)}
    current = {name: _copy(value) for name, value in model.items() if f"current.{name}" in manifest.tensors}
    wanted.update({f"current.{name}": value for name, value in current.items()})
    for one in targets:
        wanted.update(one)
    rest = load_sharded(path, wanted, strict=strict and bool(optimizers))
    ours = rest.pop("megapar", {})
    for i, (optimizer, saved) in enumerate(zip(optimizers, ours.get("optimizers", []))):
        install_optimizer_state(i, optimizer, parameters, targets[i], saved)
    rest.setdefault("state_dict", {})
    if current:
        rest[CURRENT] = current
    return rest, DataPosition(**ours["position"]) if "position" in ours else None


def _load_plain_file(
    path: Path,
    model: Mapping[str, Value],
    optimizers: Sequence[Optimizer],
    parameters: Sequence[LogicalParameter],
    names: ModuleNames,
    world_size: int,
) -> dict[str, Any]:
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    state = checkpoint.get("state_dict", checkpoint)
    # Tied values stand in a plain file under every name, here under the canonical one.
    load_full_into(dict(model), {k: v for k, v in state.items() if names.canonical.get(k, k) == k})
    for i, (optimizer, saved) in enumerate(zip(optimizers, checkpoint.get("optimizer_states", []))):
        targets, full, groups = from_plain(i, optimizer, parameters, names, saved, world_size)
        load_full_into(targets, full)
        install_optimizer_state(i, optimizer, parameters, targets, groups)
    rest = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
    if CURRENT in rest:
        current = {name: _copy(value) for name, value in model.items() if is_value(value)}
        load_full_into(current, rest[CURRENT])
        rest[CURRENT] = current
    return {**rest, "state_dict": {}}


def _copy(value: Value) -> Value:
    """The same place, memory of its own."""
    return IndexedTensor(value.local.clone(), value.shard) if isinstance(value, IndexedTensor) else value.clone()
