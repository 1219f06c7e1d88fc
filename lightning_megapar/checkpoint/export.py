"""A sharded checkpoint as one dictionary in plain Lightning's format, in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megapar.checkpoint.commit import new_uid, sibling
from lightning_megapar.checkpoint.errors import CheckpointError
from lightning_megapar.checkpoint.file_system import CheckedFile, FileSystem
from lightning_megapar.checkpoint.plain_values import plain
from lightning_megapar.checkpoint.reader import ShardedReader, locate, read_manifest
from lightning_megapar.checkpoint.training_state import CURRENT, NUMBER_SUFFIX

MODEL_KEYS = ("epoch", "global_step", "pytorch-lightning_version", "hyper_parameters", "hparams_name", "hparams_type")
"""What ``LightningModule.load_from_checkpoint`` looks at, besides the weights."""


def to_lightning(
    path: str | os.PathLike[str], *, model_only: bool = False, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Read a sharded checkpoint into plain Lightning's checkpoint dictionary; no process group, no GPU.

    Needs the memory of everything that it returns. Every checksum is verified.

    Args:
        path: of the sharded checkpoint.
        model_only: leave out optimizers, schedulers, loops and callbacks.
        progress: called with (bytes read, bytes in all) after each tensor.

    Returns:
        ``"state_dict"`` with the keys of the unsharded module, in their order, tied tensors sharing memory;
        ``"optimizer_states"`` with parameters numbered in the order of the groups; the rest as it was saved.

    Raises:
        CheckpointError: not a checkpoint, damaged, or not saved by this package's strategy.
    """
    directory = locate(path)
    manifest = read_manifest(directory)
    reader = ShardedReader(directory, manifest)
    reader.check_files(manifest.files)
    rest = reader.rest()
    ours = rest.pop("megapar", {})
    wanted = [name for name in manifest.tensors if name.startswith("model.") or not model_only]
    total, done = sum(manifest.tensors[name].num_bytes for name in wanted), 0
    tensors: dict[str, Tensor] = {}
    for name in wanted:
        tensors[name] = reader.read(name)
        done += manifest.tensors[name].num_bytes
        if progress is not None:
            progress(done, total)
    if model_only:
        rest = {key: rest[key] for key in MODEL_KEYS if key in rest}
    rest.setdefault("pytorch-lightning_version", _lightning_version())
    rest["state_dict"] = _state_dict(tensors, ours, "model")
    if any(name.startswith("current.") for name in tensors):
        rest[CURRENT] = _state_dict(tensors, ours, "current")
    if not model_only and "optimizers" in ours:
        rest["optimizer_states"] = [_optimizer(i, saved, tensors) for i, saved in enumerate(ours["optimizers"])]
    return rest


def _lightning_version() -> str:
    import lightning.pytorch

    return str(lightning.pytorch.__version__)


def _state_dict(tensors: dict[str, Tensor], ours: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    keys = ours.get("state_dict_keys") or [n.removeprefix("model.") for n in tensors if n.startswith("model.")]
    tied = ours.get("tied", {})
    missing = [key for key in keys if f"{prefix}.{tied.get(key, key)}" not in tensors]
    if missing:
        raise CheckpointError(f"the checkpoint has no tensor for {missing[:4]} of the module's state_dict")
    return {key: tensors[f"{prefix}.{tied.get(key, key)}"] for key in keys}


def _optimizer(index: int, saved: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """``optimizer.state_dict()`` of the unsharded run: state and groups by position instead of name."""
    position: dict[str, int] = {}
    groups = []
    for group in saved["param_groups"]:
        for name in group["params"]:
            position.setdefault(name, len(position))
        groups.append({**group, "params": [position[name] for name in group["params"]]})
    state: dict[int, dict[str, Any]] = {}
    prefix = f"optimizer.{index}."
    for full, value in tensors.items():
        if not full.startswith(prefix):
            continue
        name, _, key = full.removeprefix(prefix).rpartition(".")
        if name not in position:
            raise CheckpointError(f"{full!r} belongs to no parameter group of optimizer {index}")
        entry = state.setdefault(position[name], {})
        if key.endswith(NUMBER_SUFFIX):
            entry[key.removesuffix(NUMBER_SUFFIX)] = value.item()
        else:
            entry[key] = value
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def write_single_file(checkpoint: dict[str, Any], out: str | os.PathLike[str], *, replace: bool = False) -> int:
    """``torch.save`` to a file that appears whole or not at all and opens with ``weights_only=True``.

    Args:
        checkpoint: as :func:`to_lightning` returns it.
        out: path of the file.
        replace: whether an existing file is replaced.

    Returns:
        size in bytes.

    Raises:
        CheckpointError: ``out`` exists and must not be replaced, or a value is not plain.
        OSError: from the disk.
    """
    target, fs = Path(os.path.abspath(out)), FileSystem()
    refuse_existing(target, replace)
    for key, value in checkpoint.items():
        if key not in ("state_dict", "optimizer_states"):
            checkpoint[key] = plain(value, key)
    temporary = sibling(target, "tmp", new_uid())
    file = CheckedFile(fs, temporary)
    try:
        file.save(checkpoint)
        file.finish()
        torch.load(temporary, mmap=True, map_location="cpu", weights_only=True)
        refuse_existing(target, replace)
        os.replace(temporary, target)
        fs.sync_directory(target.parent)
    finally:
        file.abandon()
        temporary.unlink(missing_ok=True)
    return file.position


def refuse_existing(target: Path, replace: bool) -> None:
    """Raise :class:`CheckpointError` when ``target`` cannot be written without harm."""
    if target.is_dir():
        raise CheckpointError(f"{target} is a directory; give the name of the file to write")
    if os.path.lexists(target) and not replace:
        raise CheckpointError(f"{target} exists; use --force to replace it")
    if not target.parent.is_dir():
        raise CheckpointError(f"the directory {target.parent} does not exist")
