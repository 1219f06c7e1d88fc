"""Apply resolved plan assignments to the modules of one stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_megapar.config import ConfigError, divisors, nearest, nearest_name
from lightning_megapar.layers.collectives import TensorRanks
from lightning_megapar.layers.foreign import is_linear, widths
from lightning_megapar.sharding import embeddings, regions, styles
from lightning_megapar.sharding.apply import parameter_owners
from lightning_megapar.sharding.plan import Assignment, Style
from lightning_megapar.sharding.styles import cut_parameter
from lightning_megapar.shards import ParameterShard, Runs, deal_out, not_divisible, own_shards


def apply_assignments(module: nn.Module, assignments: Sequence[Assignment], ranks: TensorRanks) -> None:
    """Shard what this rank holds of ``module`` in place.

    Args:
        module: whole or cut into a stage; modules that are elsewhere are passed over.
        assignments: from :func:`~lightning_megapar.sharding.plan.resolve` on the whole module.
        ranks: the tensor ranks.

    Raises:
        ConfigError: heads that the ranks do not divide, one parameter in two layouts, tied weights that the plan would
            untie. The setting is named, and the nearest valid sizes.
    """
    tied = [owners for owners in parameter_owners(module).values() if len(owners) > 1]
    held = dict(module.named_modules())
    present = [here for one in assignments if (here := one.among(held)) is not None]
    heads = _HeadCounts(held, present, ranks.size)
    # Bare parameters first, then modules (whose styles look at what is cut already), then what divides attributes.
    order = {"local_attributes": 2, "local_arguments": 2}
    for one in sorted(present, key=lambda a: 0 if a.parameter is not None else order.get(a.style.name, 1)):
        with _naming(one):
            if one.parameter is not None:
                _apply_to_parameter(held[one.path], one.parameter, one.style, ranks)
            else:
                _apply_to_module(one.path, held, one.style, ranks, heads)
    heads.patch(held)
    for owners in tied:
        _tie_again(owners)


def _apply_to_parameter(module: nn.Module, name: str, style: Style, ranks: TensorRanks) -> None:
    parameter = module._parameters[name]
    assert parameter is not None
    shape = own_shards(module)[name].shape if name in own_shards(module) else tuple(parameter.shape)
    if style.name == "replicate":
        return
    if style.name == "replicated_with_grad_allreduce":
        styles.summed(module, [name])
        return
    if not shape:
        raise ConfigError(
            "a parameter of one number cannot be cut; valid styles: replicate, replicated_with_grad_allreduce"
        )
    if style.name == "split":
        dim = style.number("dim")
        if dim is None or dim >= len(shape):
            valid = ", ".join(map(str, range(len(shape))))
            raise ConfigError(f"dim={dim} is no dimension of a parameter of shape {shape}; valid: {valid}")
    elif style.name == "grouped_gemm":
        dim = 0
        if shape[0] % ranks.size:
            raise ConfigError(not_divisible("experts", shape[0], ranks.size))
    elif style.name.endswith("colwise"):
        dim = max(len(shape) - 2, 0)
    else:
        dim = len(shape) - 1
    packed = 2 if style.name.startswith("packed") and len(shape) > 1 else 1
    parts = style.parts_of(shape[dim], packed)
    index = deal_out(parts, ranks.size, style.number("unit") or 1, f"indices of dimension {dim} of {shape}")
    cut_parameter(module, name, dim, index, ranks.rank)


def _apply_to_module(
    path: str, held: dict[str, nn.Module], style: Style, ranks: TensorRanks, heads: _HeadCounts
) -> None:
    module: Any = held[path]
    name = style.name
    inner = style.option("inner") is not None
    if name in ("colwise", "colwise_gather_output", "packed_colwise"):
        width = widths(module)[1]
        if name == "colwise" and (rows := heads.shared_rows(path, ranks)) is not None:
            styles.shared_rows(module, rows, ranks, inner=inner)
            return
        parts = style.parts_of(width, 2 if name == "packed_colwise" else 1)
        unit = style.number("unit") or heads.unit(path, width)
        rows = _shared_heads(parts, unit, ranks) if style.number("unit") else None
        if rows is not None:
            styles.shared_rows(module, rows, ranks, inner=inner)
            return
        index = deal_out(parts, ranks.size, unit, "outputs")
        styles.column(module, index, ranks, gather_output=name.endswith("gather_output"), inner=inner)
    elif name in ("rowwise", "rowwise_split_input", "rowwise_scatter_output", "packed_rowwise"):
        width = widths(module)[0]
        parts = style.parts_of(width, 2 if name == "packed_rowwise" else 1)
        unit = style.number("unit") or heads.unit(path, width)
        index = deal_out(parts, ranks.size, unit, "inputs")
        styles.row(
            module, index, ranks, split_input=name.endswith("split_input"), scatter=name.endswith("scatter_output")
        )
    elif name == "embedding_rowwise":
        embeddings.embedding_rows(module, ranks)
    elif name == "embedding_colwise":
        embeddings.embedding_columns(module, ranks)
    elif name == "replicated_with_grad_allreduce":
        styles.summed(module, [n for n, p in module._parameters.items() if p is not None])
    elif name in ("all_reduce", "moe_tp_experts"):
        regions.region(module, ranks, [n for n in (style.option("once") or "").split("+") if n])
    elif name == "moe_identity_expert":
        regions.identity_expert(module, ranks)
    elif name == "mla_kv_a_proj":
        features = style.number("features") or _rotary_features(path, held)
        if is_linear(module) and features >= widths(module)[1]:
            raise ConfigError(
                f"features={features} of {widths(module)[1]} outputs leave nothing beside the rotary tail; valid: 1 to "
                f"{widths(module)[1] - 1}"
            )
        regions.rotary_tail(module, features, ranks)
    elif name == "entered_output":
        regions.entered_output(module, ranks)
    elif name == "ep_dispatch_experts":
        regions.experts(module, _expert_count(module), ranks)
    elif name == "local_attributes":
        for attribute, _ in style.options:
            _divide_attribute(module, attribute, ranks.size)
    elif name == "local_arguments":
        regions.local_arguments(module, style.number("heads") or 0, ranks)


def _shared_heads(parts: Sequence[int], unit: int, ranks: TensorRanks) -> Runs | None:
    """This rank's rows where some parts have fewer heads than there are ranks; ``None`` where all can be cut.

    Raises:
        ConfigError: heads that the ranks neither divide nor share evenly.
    """
    if any(part % unit for part in parts):
        return None  # refused where they are dealt out
    counts = [part // unit for part in parts]
    if all(count % ranks.size == 0 for count in counts):
        return None
    if any(count % ranks.size and ranks.size % count for count in counts):
        valid = [n for n in range(1, max(counts) + 1) if all(c % n == 0 or n % c == 0 for c in counts)]
        raise ConfigError(
            f"{'+'.join(map(str, counts))} heads (unit={unit}) and tensor_parallel_size={ranks.size}: one must divide "
            f"the other; nearest valid tensor_parallel_size: {', '.join(map(str, nearest(ranks.size, valid)))}"
        )
    rows, start = [], 0
    for part, count in zip(parts, counts):
        each = max(1, count // ranks.size)
        rows.append((start + ranks.rank * count // ranks.size * unit, each * unit))
        start += part
    return tuple(rows)


def _divide_attribute(module: nn.Module, name: str, size: int) -> None:
    value = getattr(module, name, None)
    kind = type(module).__name__
    if type(value) is not int:
        known = [n for n, v in vars(module).items() if type(v) is int and not n.startswith("_")]
        near = nearest_name(name, known)
        hint = f"; did you mean {near!r}?" if near else f" (integer attributes: {', '.join(known) or 'none'})"
        told = (
            f"attribute {name}={value!r} of {kind} is no integer"
            if hasattr(module, name)
            else f"{kind} has no {name!r}"
        )
        raise ConfigError(f"{told}{hint}")
    if value % size:
        raise ConfigError(f"attribute {not_divisible(name, value, size)} ({kind})")
    setattr(module, name, value // size)


def _expert_count(module: nn.Module) -> int:
    shards = own_shards(module)
    counts = {shard.shape[0] for shard in shards.values() if shard.dim == 0}
    if len(counts) != 1:
        own = ", ".join(name for name, p in module._parameters.items() if p is not None)
        raise ConfigError(
            f"ep_dispatch_experts needs expert parameters of {type(module).__name__} with the style grouped_gemm (own "
            f"parameters: {own or 'none'})"
        )
    return counts.pop()


def _rotary_features(path: str, held: dict[str, nn.Module]) -> int:
    while True:
        config = getattr(held.get(path), "config", None)
        if config is not None:
            text = config.get_text_config() if hasattr(config, "get_text_config") else config
            if isinstance(getattr(text, "qk_rope_head_dim", None), int):
                return int(text.qk_rope_head_dim)
        if not path:
            raise ConfigError("mla_kv_a_proj needs features=<rotary width>: no qk_rope_head_dim in the module's config")
        path = path.rpartition(".")[0]


class _HeadCounts:
    """Heads below attention modules: where a cut may go, and key/value heads that ranks must share.

    An attention module is one that has an integer ``head_dim`` and column layers of whole heads below it.
    """

    def __init__(self, held: dict[str, nn.Module], assignments: Iterable[Assignment], size: int) -> None:
        self.size = size
        self._units: dict[str, int] = {}
        self._shared: dict[str, tuple[int, int]] = {}
        self._groups: dict[str, int] = {}
        columns: dict[str, dict[str, int]] = {}
        for one in assignments:
            child = held[one.path]
            parent = one.path.rpartition(".")[0]
            head_dim = getattr(held[parent], "head_dim", None)
            if one.parameter is not None or not isinstance(head_dim, int) or head_dim < 1 or not is_linear(child):
                continue
            width_in, width_out = widths(child)
            if one.style.name == "colwise" and width_out % head_dim == 0:
                columns.setdefault(parent, {})[one.path] = width_out // head_dim
                self._units[one.path] = head_dim
            elif one.style.name == "rowwise" and width_in % head_dim == 0:
                self._units[one.path] = head_dim
        for parent, counts in columns.items():
            most = max(counts.values())
            for path, count in counts.items():
                if count % size == 0:
                    continue
                if count < most and most % size == 0 and size % count == 0:
                    self._shared[path] = (count, self._units[path])
                    self._groups[parent] = most // size
                    continue
                valid = [d for d in divisors(most) if d > 1 and (count % d == 0 or d % count == 0)] or [1]
                raise ConfigError(
                    f"{path} has {count} heads (head_dim={self._units[path]}), which tensor_parallel_size={size} does "
                    f"not divide; nearest valid tensor_parallel_size: {', '.join(map(str, nearest(size, valid)))}"
                )

    def unit(self, path: str, width: int) -> int:
        """Indices that must stay together."""
        unit = self._units.get(path, 1)
        return unit if width % unit == 0 else 1

    def shared_rows(self, path: str, ranks: TensorRanks) -> tuple[tuple[int, int], ...] | None:
        """The rows of the one head that this rank uses of fewer heads than ranks, else ``None``."""
        if path not in self._shared:
            return None
        count, head_dim = self._shared[path]
        head = ranks.rank * count // ranks.size
        return ((head * head_dim, head_dim),)

    def patch(self, held: dict[str, nn.Module]) -> None:
        """Query heads per key/value head, where ranks share one."""
        for parent, groups in self._groups.items():
            module: Any = held[parent]
            if isinstance(getattr(module, "num_key_value_groups", None), int):
                module.num_key_value_groups = groups


def _tie_again(owners: list[tuple[str, nn.Module, str]]) -> None:
    """Owners of one parameter share its piece again.

    Raises:
        ConfigError: when the plan cuts it in two ways, or under one name only.
    """
    cuts: list[ParameterShard | None] = [own_shards(module).get(name) for _, module, name in owners]
    first = cuts[0]
    same = all(
        (cut is None) == (first is None) and (cut is None or first is None or cut.same_cut(first)) for cut in cuts
    )
    if not same:
        told = "; ".join(
            f"{path}.{name} " + ("whole" if cut is None else f"cut along dimension {cut.dim}")
            for (path, _, name), cut in zip(owners, cuts)
        )
        raise ConfigError(
            f"sharding_plan would untie one parameter: {told}. Give all of them the same cut (an embedding "
            "embedding_rowwise and its head colwise_gather_output), or none"
        )
    _, module, name = owners[0]
    for _, other, other_name in owners[1:]:
        other._parameters[other_name] = module._parameters[name]


@contextmanager
def _naming(one: Assignment) -> Any:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{one.name} ({one.style}, from {one.why}): {error}") from error
