"""Write a model of any layout as a directory that ``from_pretrained`` opens.

Tensors are gathered on rank 0 for one file after the other: it holds one file and one tensor, the other ranks their
share and one tensor. The directory is written beside its final place and renamed when everything is on the disk.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megapar.checkpoint.commit import new_uid, sibling
from lightning_megapar.checkpoint.errors import CheckpointError
from lightning_megapar.checkpoint.file_system import FileSystem
from lightning_megapar.checkpoint.full import gather_full_state_dict
from lightning_megapar.checkpoint.hugging_face.names import Conversion, loading_rules, names_for_writing
from lightning_megapar.checkpoint.hugging_face.weight_files import INDEX, SINGLE
from lightning_megapar.checkpoint.ranks import OneRank, Ranks, ranks_of
from lightning_megapar.config import ConfigError, nearest_name
from lightning_megapar.sharding.blueprint import Blueprint, blueprint_at
from lightning_megapar.shards import Value, is_value

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "sentencepiece*.model",
    "spiece.model",
    "source.spm",
    "target.spm",
    "chat_template*",
    "*processor_config.json",
)
"""Names of what a tokenizer or processor consists of."""


@dataclass(frozen=True)
class _File:
    """One file to write: its name, the conversions to gather for it and the tensors that it holds."""

    name: str
    groups: tuple[Conversion, ...]
    tensors: tuple[str, ...]

    def keys(self, blueprint: Blueprint, canonical: Callable[[str], str]) -> list[str]:
        """Canonical names of what is gathered for it, each once."""
        names = (canonical(blueprint.full_name(name)) for group in self.groups for _, name in group.sources)
        return list(dict.fromkeys(names))


@dataclass(frozen=True)
class _Plan:
    files: tuple[_File, ...]
    dtypes: Mapping[str, torch.dtype]
    total_bytes: int


def save_hugging_face(
    directory: str | os.PathLike[str],
    blueprint: Blueprint,
    local: Mapping[str, Value],
    canonical: Callable[[str], str] = lambda name: name,
    *,
    tokenizer_from: str | os.PathLike[str] | None = None,
    max_file_bytes: int = 5_000_000_000,
    process_group: dist.ProcessGroup | Ranks | None = None,
) -> Path:
    """Write ``config.json``, weights, generation settings and tokenizer files; collective over all ranks.

    Args:
        directory: to make; its parent must exist, it must not.
        blueprint: of the model.
        local: this rank's tensors by their names in the module that ``blueprint.path`` goes with; plain or DTensor.
            A gathered state dict on rank 0 and nothing on the other ranks is as good.
        canonical: name in that module -> the name under which ``local`` holds it (tied tensors are held once).
        tokenizer_from: a directory whose tokenizer files are copied; ``None`` copies none.
        max_file_bytes: a weight file holds at most so much, unless a single tensor is larger.

    Returns:
        the directory's absolute path, on every rank.

    Raises:
        CheckpointError: on every rank alike: the directory exists or cannot be written, a tensor that no rank holds.
            Nothing is left behind.
        ConfigError: a setting out of range, or transformers is missing or cannot do it.
    """
    if not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise ConfigError(f"max_file_bytes={max_file_bytes!r}: expected a positive number of bytes")
    loading_rules()
    ranks, target, fs = ranks_of(process_group), Path(os.path.abspath(directory)), FileSystem()
    what = f"writing {target}"
    temporary = sibling(target, "tmp", ranks.broadcast(new_uid()))
    source = None if tokenizer_from is None else Path(tokenizer_from)

    def offer() -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in local.items() if is_value(tensor)}

    plans: list[_Plan] = []  # on rank 0: the others need to know only what is gathered when

    def decide(offers: list[dict[str, torch.dtype]]) -> list[list[list[str]]]:
        held = {name: dtype for one in reversed(offers) for name, dtype in one.items()}
        _refuse(target, source)
        plans.append(_plan(blueprint, held, canonical, max_file_bytes))
        fs.make_directory(temporary)
        return [[file.keys(blueprint, canonical) for file in plans[0].files]] * ranks.size

    written = False
    try:
        made: dict[str, Tensor] = {}
        for number, keys in enumerate(ranks.step(what, offer, decide)):
            gathered = gather_full_state_dict(keys, local, process_group=ranks)

            def write(number: int = number, gathered: dict[str, Tensor] = gathered) -> None:
                _write_file(temporary, plans[0].files[number], gathered, made, blueprint, canonical)

            ranks.first(what, write)

        def finish() -> None:
            _write_rest(temporary, plans[0], blueprint, source)
            for entry in sorted(temporary.iterdir()):
                _sync(fs, entry)
            fs.sync_directory(temporary)
            _refuse(target, None)
            fs.rename(temporary, target)
            fs.sync_directory(target.parent)

        ranks.first(what, finish)
        written = True
    finally:
        if not written and ranks.rank == 0 and temporary.exists():
            fs.remove_tree(temporary)
    return target


def save_hugging_face_state(
    directory: str | os.PathLike[str],
    state: Mapping[str, Tensor],
    config: Any,
    prefix: str = "model",
    *,
    tokenizer_from: str | os.PathLike[str] | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> Path:
    """The same from a state dict that is whole in this process, such as ``to_lightning(path)["state_dict"]``.

    Args:
        directory: to make; its parent must exist, it must not.
        state: of the user's module, tied tensors under one of their names or under each.
        config: the model's transformers configuration.
        prefix: attribute of the user's module that holds the model; ``""`` when it is the model itself.
        tokenizer_from, max_file_bytes: as for :func:`save_hugging_face`.

    Raises:
        CheckpointError, ConfigError: as for :func:`save_hugging_face`.
    """
    loading_rules()
    import transformers

    kind = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        model = kind(config) if kind is not None else transformers.AutoModelForCausalLM.from_config(config)
    names: dict[int, list[str]] = {}
    for name, tensor in _state(model).items():
        names.setdefault(id(tensor), []).append(f"{prefix}.{name}" if prefix else name)
    held = {name: next((n for n in tied if n in state), name) for tied in names.values() for name in tied}
    if not any(name in state for name in held.values()):
        first = sorted({name.partition(".")[0] for name in state})
        raise ConfigError(
            f"the state holds no {type(model).__name__} under {prefix!r}: there is no tensor {next(iter(held))!r}. "
            f"Its first names are {', '.join(first[:6])}; name the attribute that holds the model"
        )
    return save_hugging_face(
        directory,
        Blueprint(prefix, model),
        state,
        lambda name: held.get(name, name),
        tokenizer_from=tokenizer_from,
        max_file_bytes=max_file_bytes,
        process_group=OneRank(),
    )


def find_blueprint(blueprints: Sequence[Blueprint], module: str | None) -> Blueprint:
    """The transformers model of a name, or the only one.

    Raises:
        ConfigError: there is none, or the name does not say which.
    """
    if module is None and len(blueprints) == 1:
        return blueprints[0]
    found = None if module is None else blueprint_at(blueprints, module)
    if found is None:
        known = sorted(blueprint.path for blueprint in blueprints)
        if not known:
            asked = "" if module is None else f"module={module!r}: "
            raise ConfigError(
                f"{asked}nothing in the module is a transformers model (a PreTrainedModel), and only those are written "
                "as Hugging Face directories; trainer.save_checkpoint() and full_state_dict() keep any module"
            )
        if module is None:
            names = ", ".join(map(repr, known))
            raise ConfigError(
                f"the module holds {len(known)} transformers models: name one of them by module=: {names}"
            )
        near = nearest_name(module, known)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"module={module!r} is no transformers model; there are {len(known)}: {known}{hint}")
    return found


def _refuse(target: Path, tokenizer_from: Path | None) -> None:
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists; nothing is written over it, give another name")
    if not target.parent.is_dir():
        raise CheckpointError(f"the directory {target.parent} does not exist")
    if tokenizer_from is not None and not tokenizer_from.is_dir():
        raise CheckpointError(f"tokenizer_from={str(tokenizer_from)!r} is not a directory")


def _plan(
    blueprint: Blueprint, held: Mapping[str, torch.dtype], canonical: Callable[[str], str], max_file_bytes: int
) -> _Plan:
    """Which tensors are written, as what, and into which file."""
    model = blueprint.model
    dtypes: dict[str, torch.dtype] = {}
    tensors: dict[str, Tensor] = {}
    lost = []
    state = _state(model)
    for name in _names_to_write(model):
        key = canonical(blueprint.full_name(name))
        if key not in held:
            lost.append(name)
            continue
        dtypes[name] = held[key]
        tensors[name] = torch.empty(state[name].shape, dtype=held[key], device="meta")
    if lost:
        raise CheckpointError(f"no rank holds {', '.join(map(repr, lost[:4]))} ({len(lost)} names)")
    groups = names_for_writing(model, tensors, getattr(model, "_weight_conversions", None))
    repeated = _repeated([name for group in groups for name in group.targets])
    if repeated:
        raise ConfigError(f"two tensors would both be written as {repeated[0]!r}")
    chunks: list[tuple[list[Conversion], list[str]]] = [([], [])]
    filled = total = 0
    for group in groups:
        dtype = dtypes[group.sources[0][1]]
        for position, (name, shape) in enumerate(group.targets.items()):
            size = prod(shape) * dtype.itemsize
            if filled and filled + size > max_file_bytes:
                chunks.append(([], []))
                filled = 0
            if position == 0:
                chunks[-1][0].append(group)
            chunks[-1][1].append(name)
            filled, total = filled + size, total + size
    names = [SINGLE] if len(chunks) == 1 else [_numbered(i, len(chunks)) for i in range(len(chunks))]
    files = tuple(_File(n, tuple(g), tuple(t)) for n, (g, t) in zip(names, chunks))
    return _Plan(files, dtypes, total)


def _numbered(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _repeated(names: Sequence[str]) -> list[str]:
    seen: set[str] = set()
    return [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]


def _state(model: Any) -> dict[str, Tensor]:
    return {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}


def _names_to_write(model: Any) -> list[str]:
    """The state's names without those that transformers leaves out, tied tensors once.

    Of tied names the one stays that transformers' own table does not derive from another. A tie that transformers
    knows nothing of is written under every name: ``from_pretrained`` would miss it.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    derived = set(getattr(model, "all_tied_weights_keys", None) or {})
    groups: dict[int, list[str]] = {}
    for name, tensor in _state(model).items():
        if name not in ignored:
            groups.setdefault(id(tensor), []).append(name)
    kept: list[str] = []
    for names in groups.values():
        kept += [name for name in names if name not in derived] or names[:1]
    return kept


def _write_file(
    directory: Path,
    file: _File,
    gathered: dict[str, Tensor],
    made: dict[str, Tensor],
    blueprint: Blueprint,
    canonical: Callable[[str], str],
) -> None:
    """Convert what was gathered and write one file; ``made`` keeps what a later file needs."""
    from safetensors.torch import save_file

    uses: dict[str, int] = {}
    for group in file.groups:
        for _, name in group.sources:
            key = canonical(blueprint.full_name(name))
            uses[key] = uses.get(key, 0) + 1
    for group in file.groups:
        values = {}
        for _, name in group.sources:
            key = canonical(blueprint.full_name(name))
            uses[key] -= 1
            values[name] = gathered.pop(key) if uses[key] == 0 else gathered[key].clone()
        made.update(group.run(values, blueprint.model))
    # A cut of a larger tensor would be written with all of it.
    ready = {name: made.pop(name).contiguous() for name in file.tensors}
    save_file(ready, directory / file.name, metadata={"format": "pt"})


def _write_rest(directory: Path, plan: _Plan, blueprint: Blueprint, source: Path | None) -> None:
    model = blueprint.model
    if len(plan.files) > 1:
        weight_map = {name: file.name for file in plan.files for name in file.tensors}
        index = {"metadata": {"total_size": plan.total_bytes}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    floats = [dtype for dtype in plan.dtypes.values() if dtype.is_floating_point]
    if floats:
        model.config.dtype = str(floats[0]).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)
    if source is None:
        return
    own_code = getattr(model.config, "auto_map", None) is not None
    for entry in sorted(source.iterdir()):
        is_tokenizer = any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in TOKENIZER_FILES)
        if entry.is_file() and (is_tokenizer or (own_code and entry.suffix == ".py")):
            shutil.copyfile(entry, directory / entry.name)
        elif entry.is_dir() and entry.name == "additional_chat_templates":
            shutil.copytree(entry, directory / entry.name)


def _sync(fs: FileSystem, path: Path) -> None:
    if path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fs.sync(descriptor, path)
    finally:
        os.close(descriptor)


__all__ = ["TOKENIZER_FILES", "find_blueprint", "save_hugging_face", "save_hugging_face_state"]
