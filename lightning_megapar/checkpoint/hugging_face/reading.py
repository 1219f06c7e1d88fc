"""Values from a Hugging Face directory (or any safetensors files) into the ranks' tensors, whatever the layout.

The plan is made on the whole module, before it is cut: which box of which file's tensor is which tensor's. Then every
rank reads the boxes that it holds, straight into its tensors.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megapar.checkpoint.errors import CheckpointError
from lightning_megapar.checkpoint.hugging_face.assembly import Assembly, Part
from lightning_megapar.checkpoint.hugging_face.names import (
    Conversion,
    NameMap,
    ignored_on_load,
    names_for_reading,
    plain_names,
)
from lightning_megapar.checkpoint.hugging_face.weight_files import WeightFiles
from lightning_megapar.checkpoint.pieces import Box, local_pieces, local_tensor
from lightning_megapar.checkpoint.ranks import ranks_of
from lightning_megapar.config import ConfigError
from lightning_megapar.data_parallel.parameters import ModuleNames
from lightning_megapar.sharding.blueprint import Blueprint, blueprint_at
from lightning_megapar.shards import Value

_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_SHOWN = 12
LoadFrom = str | os.PathLike[str] | Mapping[str, Any] | None


def check_load_from(load_from: LoadFrom) -> dict[str | None, Path]:
    """Validate the strategy's ``load_from`` as far as it goes without the module.

    Args:
        load_from: a directory or ``.safetensors`` file for the one transformers model in the module, or a mapping from
            dotted module names (``""``: the whole module).

    Returns:
        module name (``None``: to be found) -> path.

    Raises:
        ConfigError: nothing readable there; what it is instead is named.
    """
    if load_from is None:
        return {}
    if isinstance(load_from, Mapping):
        if not load_from or not all(isinstance(p, (str, os.PathLike)) for p in load_from.values()):
            raise ConfigError(
                f"load_from={dict(load_from)!r}: expected a path, or a mapping from module names to paths"
            )
        chosen: dict[str | None, Path] = {str(name): Path(path) for name, path in load_from.items()}
    elif isinstance(load_from, (str, os.PathLike)):
        chosen = {None: Path(load_from)}
    else:
        raise ConfigError(f"load_from={load_from!r}: expected a path, or a mapping from module names to paths")
    for path in chosen.values():
        try:
            WeightFiles.open(path)
            _refuse_quantized(path)
        except CheckpointError as error:
            raise ConfigError(f"load_from: {error}") from error
    return {name: Path(os.path.abspath(path)) for name, path in chosen.items()}


def _refuse_quantized(path: Path) -> None:
    config = path / "config.json"
    if config.is_file():
        try:
            quantization = json.loads(config.read_text(encoding="utf-8")).get("quantization_config")
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{config} is damaged: it is no JSON object") from error
        if quantization:
            raise CheckpointError(
                f"{path} holds quantized weights ({quantization.get('quant_method', 'quantization_config')}); give a "
                "directory of float weights"
            )


@dataclass
class Reading:
    """A plan: where the values of a module's tensors stand.

    Args:
        files: of the directory.
        direct: canonical name in the user's module -> the boxes that make it up.
        computed: (conversion, its targets' canonical names by the model's names).
        copies: a tied tensor's second value in the files -> canonical name; it must be the same.
        names: every name in the user's module (tied ones under each) that is filled.
        blueprint: of the model, ``None`` for a module that is no transformers model.
    """

    files: WeightFiles
    direct: dict[str, Assembly]
    computed: list[tuple[Conversion, dict[str, str]]]
    copies: list[tuple[Assembly, str]]
    names: frozenset[str]
    blueprint: Blueprint | None

    def fill(self, held: Mapping[str, Value]) -> None:
        """Read this rank's boxes.

        Args:
            held: this rank's tensors under canonical names, plain or DTensors.

        Raises:
            CheckpointError: a file that ends early, or two different values for tied tensors.
        """
        tasks = [
            (part, common, piece.view(local), piece.box)
            for name, assembly in self.direct.items()
            if name in held
            for local in [local_tensor(held[name])]
            for piece in local_pieces(name, held[name])
            for part, common in assembly.overlaps(piece.box)
        ]
        tasks.sort(key=lambda task: (str(self.files.tensors[task[0].source].path), self._offset(task[0])))
        try:
            for part, common, view, box in tasks:
                self._copy(part, common, view[common.slices(box.offsets)])
            for conversion, targets in self.computed:
                if any(name in held for name in targets.values()):
                    self._compute(conversion, targets, held)
            for assembly, name in self.copies:
                if name in held:
                    self._compare(assembly, name, held[name])
        finally:
            self.files.close()

    def _offset(self, part: Part) -> int:
        return self.files.tensors[part.source].offset

    def _copy(self, part: Part, box: Box, out: Tensor) -> None:
        """Read ``box`` of the assembly, inside ``part``, into ``out``."""
        if len(part.dims) == len(part.start) and all(s == d for d, s in enumerate(part.dims)):
            self.files.read_box(part.source, part.source_box(box), out)
            return
        dims = list(part.dims)
        for dim in range(len(dims) - 1, -1, -1):
            if dims[dim] is None:
                out = out.select(dim, 0)
                del dims[dim]
        out = out.permute(sorted(range(len(dims)), key=lambda dim: dims[dim] or 0))
        for dim in range(len(part.start)):
            if dim not in dims:
                out = out.unsqueeze(dim)
        self.files.read_box(part.source, part.source_box(box), out)

    def _compute(self, conversion: Conversion, targets: Mapping[str, str], held: Mapping[str, Value]) -> None:
        assert self.blueprint is not None
        dtype = next(held[name].dtype for name in targets.values() if name in held)
        sources = {}
        for _, name in conversion.sources:
            value = self.files.read(name)
            sources[name] = value.to(dtype) if value.is_floating_point() else value
        made = conversion.run(sources, self.blueprint.model)
        with torch.no_grad():
            for target, name in targets.items():
                if name in held:
                    local = local_tensor(held[name])
                    for piece in local_pieces(name, held[name]):
                        piece.view(local).copy_(made[target][piece.box.slices()])

    def _compare(self, assembly: Assembly, name: str, tensor: Value) -> None:
        local = local_tensor(tensor)
        for piece in local_pieces(name, tensor):
            mine = piece.view(local)
            other = torch.empty_like(mine, device="cpu")
            for part, common in assembly.overlaps(piece.box):
                self._copy(part, common, other[common.slices(piece.box.offsets)])
            if not torch.equal(mine.cpu(), other):
                raise CheckpointError(
                    f"{self.files.path} holds different values for {name!r} and {assembly.sources[0]!r}, which the "
                    "model ties; build it with tie_word_embeddings=False"
                )


def plan_reading(
    module: nn.Module,
    names: ModuleNames,
    blueprints: Sequence[Blueprint],
    load_from: Mapping[str | None, Path],
    exceptions: Collection[str] = (),
) -> list[Reading]:
    """Match a module's names with those of the files; collective over all ranks.

    Args:
        module: the whole module, real or on the meta device, before it is cut.
        names: of that module.
        blueprints: its transformers models.
        load_from: as :func:`check_load_from` returned it.
        exceptions: patterns (``*`` for anything) of names in the module that the files may lack, or of names in the
            files that the module may lack.

    Raises:
        ConfigError: on every rank alike: names that do not fit, all in one list.
    """
    if not load_from:
        return []
    made: list[Reading] = []

    def local() -> None:
        for path, directory in load_from.items():
            made.append(_plan(module, names, blueprints, path, directory, tuple(exceptions)))

    try:
        ranks_of(None).step("load_from", local, lambda results: [None] * len(results))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    return made


def fill_module(readings: Sequence[Reading], held: Mapping[str, Value]) -> None:
    """Read every plan's boxes into this rank's tensors (canonical names); collective over all ranks.

    Raises:
        CheckpointError: on every rank alike.
    """
    for reading in readings:

        def local(reading: Reading = reading) -> None:
            reading.fill(held)

        ranks_of(None).step(f"reading {reading.files.path}", local, lambda results: [None] * len(results))
    if readings and dist.is_available() and dist.is_initialized():
        dist.barrier()


def _plan(
    module: nn.Module,
    names: ModuleNames,
    blueprints: Sequence[Blueprint],
    path: str | None,
    directory: Path,
    exceptions: tuple[str, ...],
) -> Reading:
    path, blueprint = _part_of(module, blueprints, path)
    files = WeightFiles.open(directory)
    prefix = f"{path}." if path else ""
    part = module.get_submodule(path) if path else module
    state = {k: v for k, v in part.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
    if blueprint is not None:
        found = names_for_reading(part, files.tensors, state)
        lacking, beside = ignored_on_load(part)
    else:
        found = plain_names(files.tensors, state)
        lacking, beside = [], []

    def excepted(name: str) -> bool:
        return any(fnmatch.fnmatchcase(n, pattern) for pattern in exceptions for n in (name, prefix + name))

    canonical = {name: names.canonical.get(prefix + name, prefix + name) for name in state}
    in_files = {canonical[name] for name in found.targets}
    absent = [
        name
        for name in state
        if canonical[name] not in in_files and not excepted(name) and not any(p.search(name) for p in lacking)
    ]
    extra = [
        name
        for name, original in found.unexpected.items()
        if not (excepted(name) or excepted(original)) and not any(p.search(name) for p in beside)
    ]
    faults = _name_faults(absent, extra, found) + _value_faults(found, state, files)
    if faults:
        shown = faults[:_SHOWN] + ([f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else [])
        raise CheckpointError(
            f"{directory} does not fit {type(part).__name__}"
            + (f" (module {path!r})" if path else "")
            + f", {len(faults)} name{'s' if len(faults) > 1 else ''}:\n  "
            + "\n  ".join(shown)
            + "\nName what may differ by load_except (patterns such as 'score.*')"
        )
    if blueprint is not None:
        # As from_pretrained keeps them: what was renamed on the way in is renamed back on the way out.
        blueprint.model._weight_conversions = found.used
    return _reading(files, found, canonical, names, in_files, blueprint)


def _part_of(module: nn.Module, blueprints: Sequence[Blueprint], path: str | None) -> tuple[str, Blueprint | None]:
    candidates = {b.path: b for b in blueprints}
    if path is None:
        if len(candidates) != 1:
            what = f"there are {len(candidates)}: {', '.join(map(repr, candidates))}" if candidates else "there is none"
            raise CheckpointError(
                f"a path alone goes to the transformers model in {type(module).__name__}, but {what}; give a mapping, "
                "such as load_from={'model': PATH}"
            )
        return next(iter(candidates.items()))
    known = [name for name, _ in module.named_modules()]
    if path not in known:
        near = get_close_matches(path, known, n=1, cutoff=0.5)
        hint = (
            f"; did you mean {near[0]!r}?"
            if near
            else f": its parts are {', '.join(n for n in known if n.count('.') == 0 and n)}"
        )
        raise CheckpointError(f"{type(module).__name__} has no module {path!r}{hint}")
    return path, blueprint_at(blueprints, path)


def _name_faults(absent: Sequence[str], extra: Sequence[str], found: NameMap) -> list[str]:
    def near(name: str, others: Sequence[str]) -> str:
        close = get_close_matches(name, others[:2000], n=1, cutoff=0.6) if others else []
        return f" (nearest there: {found.unexpected.get(close[0], close[0])!r})" if close else ""

    lines = []
    for number, name in enumerate(absent):
        lines.append(f"missing in the files: {name!r}" + (near(name, extra) if number < _SHOWN else ""))
    for number, name in enumerate(extra):
        original = found.unexpected[name]
        renamed = f" (as {name!r})" if original != name else ""
        close = get_close_matches(name, absent[:2000], n=1, cutoff=0.6) if absent and number < _SHOWN else []
        hint = f" (nearest there: {close[0]!r})" if close else ""
        lines.append(f"unknown to the model: {original!r}{renamed}{hint}")
    return lines


def _value_faults(found: NameMap, state: Mapping[str, Tensor], files: WeightFiles) -> list[str]:
    lines = []
    for name, shape in found.targets.items():
        if name not in state:
            lines.append(f"unknown to the model: {name!r}")
        elif tuple(state[name].shape) != shape:
            lines.append(f"other shape: {name!r} is {shape} in the files, {tuple(state[name].shape)} in the model")
    for name, assembly in found.direct.items():
        stored = {files.tensors[source].dtype for source in assembly.sources}
        wanted = state[name].dtype if name in state else None
        wrong = [d for d in stored if wanted is not None and d != wanted and not {d, wanted} <= _FLOATS]
        if wrong:
            lines.append(f"other kind of number: {name!r} is {wrong[0]} in the files, {wanted} in the model")
    return lines


def _reading(
    files: WeightFiles,
    found: NameMap,
    canonical: Mapping[str, str],
    names: ModuleNames,
    in_files: set[str],
    blueprint: Blueprint | None,
) -> Reading:
    direct: dict[str, Assembly] = {}
    copies: list[tuple[Assembly, str]] = []
    for name, assembly in found.direct.items():
        key = canonical[name]
        if key not in direct:
            direct[key] = assembly
        elif assembly != direct[key]:
            copies.append((assembly, key))
    computed = [(c, {target: canonical[target] for target in c.targets}) for c in found.computed]
    every = {name for name, key in names.canonical.items() if key in in_files} | in_files
    return Reading(files, direct, computed, copies, frozenset(every), blueprint)


__all__ = ["LoadFrom", "Reading", "check_load_from", "fill_module", "plan_reading"]
