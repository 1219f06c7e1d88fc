"""Between a Hugging Face directory's tensors and a module's: what transformers renames, puts together and cuts apart.

transformers keeps a list of conversions for each architecture. They are run here on :class:`Assembly` objects, which
tell where values come from; those that do more than move boxes are kept as a :class:`Conversion`, done on whole tensors
one after the other.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megapar.checkpoint.hugging_face.assembly import Assembly, NotMovedInBoxes
from lightning_megapar.checkpoint.hugging_face.weight_files import FileTensor
from lightning_megapar.config import ConfigError

TESTED = "5.24"


def loading_rules() -> Any:
    """transformers' conversion module.

    Raises:
        ConfigError: transformers is not installed, or another version than one that has these rules.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "reading and writing Hugging Face directories needs transformers: pip install 'lightning_megapar[hf]'"
        ) from error
    try:
        from transformers import core_model_loading as rules
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: F401

        needed = ("rename_source_key", "apply_converters", "apply_renamings", "dot_natural_key", "WeightConverter")
        if all(hasattr(rules, name) for name in needed):
            return rules
    except ImportError:
        pass
    raise ConfigError(
        f"transformers {transformers.__version__} does not say how checkpoints are converted in the way that is needed "
        f"here; install transformers>={TESTED}"
    )


@dataclass(frozen=True)
class Conversion:
    """Targets that are computed from whole sources.

    Args:
        first: transformers' name for the group.
        converter: transformers' ``WeightConverter``; copied for each use.
        sources: (pattern, name of the source tensor), in the order that the converter wants.
        targets: names and shapes of the results.
    """

    first: str
    converter: Any
    sources: tuple[tuple[str, str], ...]
    targets: Mapping[str, tuple[int, ...]]

    def run(self, values: Mapping[str, Any], model: Any) -> dict[str, Any]:
        """The results for source values (tensors or assemblies) by name."""
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.first, name, pattern, values[name])
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass
class NameMap:
    """What becomes of a set of tensors.

    Args:
        direct: target -> where its values stand.
        computed: groups of targets that need whole sources.
        unexpected: names (after renaming) that are no targets, by the source's own name.
        used: the conversions that matched something.
    """

    direct: dict[str, Assembly]
    computed: list[Conversion]
    unexpected: dict[str, str]
    used: list[Any]

    @property
    def targets(self) -> dict[str, tuple[int, ...]]:
        """Every target and the shape that it gets."""
        shapes = {name: assembly.shape for name, assembly in self.direct.items()}
        for conversion in self.computed:
            shapes.update(conversion.targets)
        return shapes


def plain_names(tensors: Mapping[str, FileTensor], targets: Iterable[str]) -> NameMap:
    """For a module that is no transformers model: names are what they are."""
    wanted = set(targets)
    direct = {n: Assembly.of(n, t.shape, t.dtype) for n, t in tensors.items() if n in wanted}
    return NameMap(direct, [], {name: name for name in tensors if name not in wanted}, [])


def names_for_reading(model: Any, tensors: Mapping[str, FileTensor], targets: Mapping[str, Any]) -> NameMap:
    """Follow ``from_pretrained``: rename, add or take away the base model's prefix, convert.

    Args:
        model: the whole transformers model, on any device.
        tensors: of the directory.
        targets: the keys of the model's ``state_dict()``.

    Raises:
        ConfigError: transformers is too old, or a conversion cannot be done (the tensors have wrong shapes).
    """
    rules = loading_rules()
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, rules.WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, rules.WeightConverter)]
    of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix, found = model.base_model_prefix, NameMap({}, [], {}, [])
    groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted(tensors, key=rules.dot_natural_key):
        renamed, pattern = rules.rename_source_key(name, renamings, converters, prefix, targets)
        if renamed not in targets and name in targets:
            renamed, pattern = rules.rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=targets)
        if renamed not in targets:
            found.unexpected[renamed] = name
        elif pattern is not None:
            groups.setdefault(renamed, (of_pattern[pattern], []))[1].append((pattern, name))
        elif renamed in found.direct:
            other = found.direct[renamed].sources[0]
            raise ConfigError(f"{name!r} and {other!r} both become {renamed!r}")
        else:
            found.direct[renamed] = Assembly.of(name, tensors[name].shape, tensors[name].dtype)
    sources = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    for first, (converter, members) in groups.items():
        _convert(found, Conversion(first, converter, tuple(members), {}), sources, model)
    found.used = [c for c in conversions if c.was_used()]
    return found


def _convert(
    found: NameMap, conversion: Conversion, sources: Mapping[str, tuple[tuple[int, ...], torch.dtype]], model: Any
) -> None:
    """Run a conversion on names, or else on shapes, to learn its targets."""
    members = [name for _, name in conversion.sources]
    try:
        try:
            made = conversion.run({name: Assembly.of(name, *sources[name]) for name in members}, model)
            found.direct.update(made)
        except NotMovedInBoxes:
            shapes = {n: torch.empty(sources[n][0], dtype=sources[n][1], device="meta") for n in members}
            made = conversion.run(shapes, model)
            targets = {name: tuple(value.shape) for name, value in made.items()}
            found.computed.append(Conversion(conversion.first, conversion.converter, conversion.sources, targets))
    except Exception as error:
        shown = ", ".join(f"{name!r} {sources[name][0]}" for name in members[:3])
        raise ConfigError(
            f"transformers' conversion of {shown}{' ...' if len(members) > 3 else ''} to {conversion.first!r} is not "
            f"possible ({type(error).__name__}: {error})"
        ) from error


def names_for_writing(model: Any, tensors: Mapping[str, Tensor], used: list[Any] | None) -> list[Conversion]:
    """How a model's tensors become a directory's: groups in the order of writing.

    Args:
        model: the whole transformers model on the meta device.
        tensors: its tensors to write, on the meta device with the dtypes to write.
        used: the conversions that matched when the model was read; ``None`` when it was not.

    Raises:
        ConfigError: a conversion cannot be reversed.
    """
    rules = loading_rules()
    from transformers.conversion_mapping import get_model_conversion_mapping

    if used is None:
        # As transformers does for a model from scratch: no legacy names, no prefix that nobody has seen.
        used = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not _is_prefix_change(rules, c)]
    reverse = [c.reverse_transform() for c in used[::-1]]
    renamings = [c for c in reverse if isinstance(c, rules.WeightRenaming)]
    converters = [c for c in reverse if isinstance(c, rules.WeightConverter)]
    of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted(tensors, key=rules.dot_natural_key):
        renamed, pattern = rules.apply_converters(name, converters)
        if pattern is None:
            renamed = rules.apply_renamings(name, renamings)
            groups.setdefault(renamed, (None, []))[1].append((name, name))
        else:
            groups.setdefault(renamed, (of_pattern[pattern], []))[1].append((pattern, name))
    made: list[Conversion] = []
    for first, (converter, members) in groups.items():
        if converter is None:
            converter = rules.WeightRenaming(members[0][1], first)
        elif renamings:
            converter = _ThenRename(converter, renamings, rules)
        conversion = Conversion(first, converter, tuple(members), {})
        try:
            results = conversion.run({name: tensors[name] for _, name in members}, model)
        except Exception as error:
            raise ConfigError(
                f"transformers cannot reverse its conversion of {first!r} ({type(error).__name__}: {error})"
            ) from error
        shapes = {name: tuple(value.shape) for name, value in results.items()}
        made.append(Conversion(first, converter, tuple(members), shapes))
    return made


def _is_prefix_change(rules: Any, conversion: Any) -> bool:
    return isinstance(conversion, getattr(rules, "PrefixChange", ()))


class _ThenRename:
    """A reversed converter whose results get the reversed renamings, as transformers orders the two."""

    def __init__(self, converter: Any, renamings: list[Any], rules: Any) -> None:
        self.converter, self.renamings, self.rename = converter, renamings, rules.apply_renamings

    def __deepcopy__(self, memo: Any) -> _ThenRename:
        made = copy.copy(self)
        made.converter = copy.deepcopy(self.converter, memo)
        return made

    def add_tensor(self, *args: Any) -> None:
        self.converter.add_tensor(*args)

    def convert(self, first: str, **context: Any) -> dict[str, Any]:
        made = self.converter.convert(first, **context)
        return {self.rename(name, self.renamings): value for name, value in made.items()}


def ignored_on_load(model: Any) -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    """transformers' patterns of names that a directory may lack, and of names that it may hold beside the model's."""
    missing = list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    unexpected = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    # Buffers that older versions saved.
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        unexpected.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        unexpected.append(r"(^|\.)position_ids$")
    return [re.compile(p) for p in missing], [re.compile(p) for p in unexpected]


__all__ = ["Conversion", "NameMap", "ignored_on_load", "names_for_reading", "names_for_writing", "plain_names"]
