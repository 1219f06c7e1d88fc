"""Layouts that a module might have, as plan rules, in the order in which they are worth a trial.

Widths never tell how a fused weight is ordered: ``[q | k | v]`` (GPT-2), one ``q k v`` after the other per head (BLOOM,
GPT-NeoX), queries and one key and value (GPTBigCode), ``[gate | up]`` (GLM) and gate and up in turn (GPT-OSS) all have
the same shapes, and a wrong one runs. So each is only a hypothesis; :mod:`~lightning_megapar.sharding.chooser.choose`
keeps the first that leaves every gradient exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import nn

from lightning_megapar.layers.base import ParallelLayer
from lightning_megapar.layers.foreign import is_linear, widths
from lightning_megapar.sharding.chooser.pricing import Price
from lightning_megapar.sharding.chooser.survey import Pair, Survey, parent_of
from lightning_megapar.sharding.names import BlockNames

_HEAD_COUNT, _NO_COUNT = re.compile("head"), re.compile("dim|size|scal|group|mask|prune|idx|index")
_HEAD_WIDTHS = ("head_dim", "head_size", "attention_head_size", "dim_head", "d_head", "kv_channels")


Star = Callable[[str], str]


@dataclass(frozen=True)
class Hypothesis:
    """One way to cut one kind of layers.

    Args:
        name: short, for the report.
        rules: pattern -> style, in the plan's words.
    """

    name: str
    rules: dict[str, str]


def head_counts(module: nn.Module) -> dict[str, int]:
    """Integer attributes that look like numbers of heads."""
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) is int and value > 1 and _HEAD_COUNT.search(name) and not _NO_COUNT.search(name)
    }


def head_width(module: nn.Module) -> int | None:
    return next((v for name in _HEAD_WIDTHS if type(v := getattr(module, name, None)) is int and v > 0), None)


@dataclass(frozen=True)
class Owner:
    """The module that knows the heads of a pair, if any does."""

    path: str
    module: nn.Module
    counts: dict[str, int]
    unit: int | None

    def heads(self, width: int) -> int:
        """Heads of the row layer's inputs, 0 when unknown."""
        if self.unit and width % self.unit == 0:
            return width // self.unit
        return max((c for c in self.counts.values() if width % c == 0), default=0)


def owner_of(pair: Pair, held: dict[str, nn.Module]) -> Owner:
    """The nearest module above a pair that has numbers of heads, else the columns' parent."""
    path = pair.columns[0]
    for _ in range(2):
        path = parent_of(path)
        counts = head_counts(held[path])
        if counts:
            return Owner(path, held[path], counts, head_width(held[path]))
        if not path:
            break
    path = parent_of(pair.columns[0])
    return Owner(path, held[path], {}, head_width(held[path]))


def why_not_by_heads(pair: Pair, held: dict[str, nn.Module], size: int) -> str:
    """What is known without a trial: heads that the ranks do not divide, or that no attribute counts; or ``""``."""
    owner = owner_of(pair, held)
    heads = owner.heads(pair.inner_width)
    kind = type(owner.module).__name__
    if heads and heads % size:
        return f"the {heads} heads of {kind} are not divisible by {size} tensor ranks"
    if not heads and any(out > pair.inner_width for out in pair.outputs):
        return f"{kind} has no attribute that counts heads: its forward takes them from the width of its input"
    return ""


def of_pair(
    pair: Pair, held: dict[str, nn.Module], arguments: dict[str, list[tuple[int, ...]]]
) -> Iterator[Hypothesis]:
    """Cuts of a pair: its order inside, times attributes that the module divides by, times what is per head."""
    star = BlockNames(held).star
    owner = owner_of(pair, held)
    heads = owner.heads(pair.inner_width)
    unit = pair.inner_width // heads if heads else 1
    orders = list(_orders(pair, owner, heads, unit, star))
    attributes = _attribute_sets(owner, pair.inner_width)
    per_head = [False]
    shapes = arguments.get(owner.path, [])
    if heads and any(len(s) >= 3 and (heads in s[:2] or (s[0] % heads == 0 and s[0] > heads)) for s in shapes):
        per_head = [True, False]
    bare = _bare_parameters(pair, owner, held, heads, star)
    extras = [bare, {}] if bare else [{}]
    for extra, (name, rules), cut_arguments, divided in product(extras, orders, per_head, attributes):
        rules = {**rules, **extra}
        own = [f"local_attributes:{','.join(divided)}"] if divided else []
        own += [f"local_arguments:heads={heads}"] if cut_arguments else []
        if own:
            rules[star(owner.path)] = " + ".join(own)
        words = [
            name,
            *(["divides " + ",".join(divided)] if divided else []),
            *(["per-head arguments"] if cut_arguments else []),
        ]
        yield Hypothesis(", ".join(words), rules)
    if not pair.feeders:
        gathered = {star(n): "colwise_gather_output" for n in pair.columns}
        yield Hypothesis("gathered", {**gathered, star(pair.row): "rowwise_split_input"})


def by_price(price: Price, hypotheses: Iterator[Hypothesis], star: Star) -> Iterator[Hypothesis]:
    """The cheapest layout first, where it is not column and row throughout, then the others in their order."""
    styles = {star(name): style for name, style in price.styles.items()}
    if set(styles.values()) - {"colwise", "rowwise"}:
        yield Hypothesis(f"cheapest: {price.describe()}", styles)
    yield from hypotheses


def _orders(pair: Pair, owner: Owner, heads: int, unit: int, star: Star) -> Iterator[tuple[str, dict[str, str]]]:
    """How the columns' outputs may be ordered."""
    inner = pair.inner_width
    fused = [n for n, out in zip(pair.columns, pair.outputs) if out > inner]
    plain = unit if heads else 1

    def rules(of_fused: str, plain: int = plain) -> dict[str, str]:
        found = {}
        for name, out in zip(pair.columns, pair.outputs):
            style = (
                of_fused if name in fused else f"colwise:unit={plain}" if plain > 1 and out % plain == 0 else "colwise"
            )
            if name in pair.inner:
                style += "," if ":" in style else ":"
                style += "inner"
            found[star(name)] = style
        for name in pair.feeders:
            found[star(name)] = "entered_output"
        found[star(pair.row)] = f"rowwise:unit={plain}" if plain > 1 else "rowwise"
        return found

    if not fused:
        yield "column and row", rules("colwise")
        if plain > 1:  # the heads are those of other layers of the owner
            yield "column and row, no heads", rules("colwise", 1)
        return
    out = max(o for o in pair.outputs if o > inner)
    if out % inner == 0:
        count = out // inner
        yield f"{count} parts, one after the other", rules(_style("packed_colwise", f"parts={count}", plain))
    rest = out - inner
    if rest % 2 == 0 and rest // 2 != inner:
        parts = f"parts={inner}+{rest // 2}+{rest // 2}"
        yield "q, k, v of different widths", rules(_style("packed_colwise", parts, plain))
    if heads and out % heads == 0:
        yield "in turn, per head", rules(_style("colwise", "", out // heads))
    for count in sorted({c for c in owner.counts.values() if c != heads and out % c == 0}):
        yield f"in turn, per group of {count}", rules(_style("colwise", "", out // count))
    yield "in turn", rules("colwise")


def _style(name: str, options: str, unit: int) -> str:
    words = [options] if options else []
    words += [f"unit={unit}"] if unit > 1 else []
    return name + (":" + ",".join(words) if words else "")


def _attribute_sets(owner: Owner, width: int) -> list[tuple[str, ...]]:
    counts = tuple(owner.counts)
    same_width = tuple(n for n, v in vars(owner.module).items() if type(v) is int and v == width and n not in counts)
    sets: list[tuple[str, ...]] = [counts, (*counts, *same_width), (), same_width] if counts else [(), same_width]
    return list(dict.fromkeys(sets))


def _bare_parameters(pair: Pair, owner: Owner, held: dict[str, nn.Module], heads: int, star: Star) -> dict[str, str]:
    """Own parameters of the owner, of what runs in between, that are as wide as the heads or the cut width."""
    inner = pair.inner_width
    counts = {c for c in (heads, *owner.counts.values()) if c > 1}
    rules: dict[str, str] = {}
    for path in dict.fromkeys([*pair.between, owner.path, parent_of(pair.columns[0])]):
        module = held[path]
        if is_linear(module) or isinstance(module, (nn.Embedding, ParallelLayer)):
            continue
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            for dim, width in enumerate(parameter.shape):
                full = parameter.ndim == 1 and width in pair.outputs and width > inner
                if width == inner or width in counts or full:
                    unit = inner // heads if heads and width == inner else 1
                    rules[star(f"{path}.{name}")] = f"split:dim={dim}" + (f",unit={unit}" if unit > 1 else "")
                    break
    return rules


def of_experts(path: str, module: nn.Module, star: Star) -> Iterator[Hypothesis]:
    """Cuts of a module with its experts in parameters of three dimensions, by their inner width."""
    three = {n: p for n, p in module._parameters.items() if p is not None and p.ndim == 3}
    last = next((n for n in three if "down" in n or "output" in n or n == "w2"), list(three)[-1])
    first = [n for n in three if n != last]
    others = {n: p for n, p in module._parameters.items() if p is not None and p.ndim == 2}
    once = [n for n in others if n.startswith(last)]
    where = star(path)
    for row_dim, column_dim in product((2, 1), (1, 2)):
        width = three[last].shape[row_dim]
        if any(three[n].shape[column_dim] % width for n in first):
            continue
        counts = {three[n].shape[column_dim] // width for n in first}
        for packed in (True, False) if max(counts) > 1 else (False,):
            rules = {f"{where}.{last}": f"split:dim={row_dim}"}
            for name in first:
                count = three[name].shape[column_dim] // width if packed else 1
                parts = f",parts={count}" if count > 1 else ""
                rules[f"{where}.{name}"] = f"split:dim={column_dim}{parts}"
                for bias, parameter in others.items():
                    if bias.startswith(name) and parameter.shape[1] == three[name].shape[column_dim]:
                        rules[f"{where}.{bias}"] = f"split:dim=1{parts}"
            rules[where] = "moe_tp_experts" + (f":once={'+'.join(once)}" if once else "")
            yield Hypothesis("experts, " + ("parts one after the other" if packed else "inner width"), rules)


def expert_modules(module: nn.Module, skip: set[str], star: Star) -> dict[str, list[str]]:
    """Starred name -> modules that hold two or more parameters of three dimensions with one first size."""
    found: dict[str, list[str]] = {}
    for path, child in module.named_modules():
        firsts = [p.shape[0] for p in child._parameters.values() if p is not None and p.ndim == 3]
        if path not in skip and len(firsts) >= 2 and len(set(firsts)) == 1:
            found.setdefault(star(path), []).append(path)
    return found


def of_embeddings(module: nn.Module, seen: Survey, skip: set[str], smallest: float) -> Iterator[tuple[str, Hypothesis]]:
    """Tables cut by vocabulary, with the heads that share them.

    Args:
        module: whole.
        seen: which modules ran.
        skip: names that a plan has dealt with.
        smallest: share of all parameters below which a table stays whole.
    """
    star = BlockNames(dict(module.named_modules())).star
    total = sum(p.numel() for p in module.parameters())
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, child in module.named_modules():
        weight: Any = child._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append((path, child))
    for tied in owners.values():
        tables = [(p, m) for p, m in tied if isinstance(m, nn.Embedding) and not isinstance(m, ParallelLayer)]
        if not tables or any(p in skip for p, _ in tied):
            continue
        if not any(p in seen.called for p, _ in tied) or tables[0][1].weight.numel() < smallest * total:
            continue
        rules = {}
        for path, child in tied:
            if isinstance(child, nn.Embedding):
                rules[star(path)] = "embedding_rowwise"
            elif is_linear(child) and widths(child)[1] == tables[0][1].num_embeddings:
                rules[star(path)] = "colwise_gather_output"
        if len(rules) == len({star(p) for p, _ in tied}):
            rules.update(_tied_biases(module, star, [child for _, child in tied if is_linear(child)]))
            yield star(tables[0][0]), Hypothesis("vocabulary", rules)


def _tied_biases(module: nn.Module, star: Star, heads: list[nn.Module]) -> dict[str, str]:
    """Other owners of a head's bias (BERT's predictions own the one of their decoder): cut alike."""
    biases = {id(head._parameters["bias"]) for head in heads if head._parameters.get("bias") is not None}
    rules = {}
    for path, child in module.named_modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and id(parameter) in biases and not is_linear(child):
                rules[star(f"{path}.{name}")] = "split:dim=0"
    return rules
