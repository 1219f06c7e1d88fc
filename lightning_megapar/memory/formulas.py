"""Activation bytes of a transformer layer: Korthikanti et al.'s formulas, tensor by tensor, beside those of our block.

The formulas are those of table 2 of "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198);
:func:`layer_tensors` names each tensor that they count, and what :class:`~lightning_megapar.models.gpt.GPTBlock` (GPT-2
style) keeps in its place, so that every difference has a name. ``tests/memory/test_formulas.py`` measures both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_megapar.config import ConfigError, nearest_name

RECOMPUTE = ("none", "selective", "full")
"""What is computed again: nothing, the core of attention (scores, softmax, product with the values), the layer."""
KERNELS = ("math", "fused")
"""Attention that keeps its probabilities (s x s for each head), or the log-sum-exp of its scores (s for each head)."""
PRECISIONS = ("true", "autocast")


@dataclass(frozen=True)
class LayerShape:
    """A layer, how it is cut, and in what it computes.

    Args:
        sequence, batch, hidden, heads: s, b, h and a of the paper.
        ffn: inner width of the MLP; ``None`` means 4 h.
        tensor_size: ranks t that share the layer.
        sequence_parallel: activations between the cut regions are cut along the sequence.
        kernel: of attention, one of :data:`KERNELS`.
        activation_bytes: 2 in the paper, 4 for float32.
        mask_bytes: of an element of a dropout mask.
        dropout: on what each half adds to the residual stream.
        precision: ``"true"`` when all activations have ``activation_bytes``; ``"autocast"`` when products alone do, and
            the residual stream has 4.

    Raises:
        ConfigError: values out of their range, or that do not divide.
    """

    sequence: int
    batch: int
    hidden: int
    heads: int
    ffn: int | None = None
    tensor_size: int = 1
    sequence_parallel: bool = False
    kernel: str = "math"
    activation_bytes: int = 2
    mask_bytes: int = 1
    dropout: bool = True
    precision: Literal["true", "autocast"] = "true"

    def __post_init__(self) -> None:
        for name in ("sequence", "batch", "hidden", "heads", "tensor_size", "activation_bytes", "mask_bytes", "ffn"):
            value = getattr(self, name)
            if name == "ffn" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}: expected a positive integer (nearest valid: 1)")
        _check("kernel", self.kernel, KERNELS)
        _check("precision", self.precision, PRECISIONS)
        for name in ("hidden", "heads", "inner") + (("sequence",) if self.sequence_parallel else ()):
            value = getattr(self, name)
            if value % self.tensor_size:
                below = value - value % self.tensor_size
                near = ", ".join(str(v) for v in (below, below + self.tensor_size) if v)
                raise ConfigError(
                    f"{name}={value} is not divisible by tensor_size={self.tensor_size} (nearest valid: {near})"
                )

    @property
    def inner(self) -> int:
        """Width inside the MLP."""
        return 4 * self.hidden if self.ffn is None else self.ffn


@dataclass(frozen=True)
class LayerTensor:
    """A tensor that a layer keeps for the backward, in the paper, in our block or in both.

    Args:
        name: of the layer that reads it, and what it is.
        shape: on one rank.
        published: bytes in the formula, 0 if it does not count the tensor.
        own: bytes in our block, 0 if it does not keep it.
        why: what makes the difference, ``""`` when there is none.
    """

    name: str
    shape: tuple[int, ...]
    published: int
    own: int
    why: str = ""

    def __post_init__(self) -> None:
        if bool(self.why) != (self.published != self.own):
            raise ConfigError(f"{self.name}: {self.published} and {self.own} bytes, because {self.why!r}")


def published_bytes(shape: LayerShape, recompute: str = "none") -> int:
    """Table 2 of the paper for one layer on one rank, with ``activation_bytes`` in place of 2.

    ===================== ==========================================================
    none                  sbh (34 + 5as/h)
    tensor                sbh (10 + 24/t + 5as/(ht))
    tensor, sequence      sbh (34/t + 5as/(ht))
    tensor, selective     sbh (10 + 24/t)
    both, selective       34 sbh / t
    full                  2 sbh (2 sbh / t where the saved input is cut)
    ===================== ==========================================================

    A fused kernel has no matrices of s x s, and so the term 5as/h vanishes. It is the sum of
    :attr:`LayerTensor.published`.
    """
    return sum(tensor.published for tensor in layer_tensors(shape, recompute))


def own_bytes(shape: LayerShape, recompute: str = "none") -> int:
    """What our GPT-2 block keeps on one rank, to the byte: the sum of :attr:`LayerTensor.own`."""
    return sum(tensor.own for tensor in layer_tensors(shape, recompute))


def differences_table(shape: LayerShape, recompute: str = "none") -> str:
    """What our block keeps and the formula does not count, or the other way round, as Markdown."""
    lines = ["| tensor | shape | formula | our block | why |", "|---|---|---|---|---|"]
    for tensor in layer_tensors(shape, recompute):
        if tensor.why:
            size = " x ".join(map(str, tensor.shape))
            lines.append(f"| {tensor.name} | {size} | {tensor.published} | {tensor.own} | {tensor.why} |")
    published, own = published_bytes(shape, recompute), own_bytes(shape, recompute)
    return "\n".join([*lines, f"| all, with what is equal | | {published} | {own} | {own / published - 1:+.1%} |"])


def layer_tensors(shape: LayerShape, recompute: str = "none") -> tuple[LayerTensor, ...]:
    """What one rank keeps of a layer, tensor by tensor, in the order of the forward.

    Args:
        shape: the layer.
        recompute: one of :data:`RECOMPUTE`; ``torch.utils.checkpoint`` around the block's ``attention.core``, or around
            the block.

    Raises:
        ConfigError: another way of recomputing.
    """
    _check("recompute", recompute, RECOMPUTE)
    rows = _Rows(shape)
    if recompute == "full":
        rows.stream("block: input")
        return tuple(rows.found)
    rows.norm("attention_norm")
    rows.product_input("attention.query, key, value", readers=3, weight=shape.hidden * shape.hidden)
    rows.core(recompute == "selective")
    rows.product_input("attention.output", inside=shape.hidden, weight=shape.hidden * shape.hidden)
    rows.dropout("dropout of attention")
    rows.norm("mlp_norm")
    rows.product_input("mlp.up", weight=shape.hidden * shape.inner)
    rows.inside("mlp: gelu's input", shape.inner)
    rows.product_input("mlp.down", inside=shape.inner, weight=shape.hidden * shape.inner)
    rows.dropout("dropout of the MLP")
    return tuple(rows.found)


class _Rows:
    """Collects tensors of a layer."""

    def __init__(self, shape: LayerShape) -> None:
        self.shape = shape
        self.found: list[LayerTensor] = []
        # Where the sequence is cut, outside of the cut regions.
        self.length = shape.sequence // (shape.tensor_size if shape.sequence_parallel else 1)
        self.bytes = shape.activation_bytes
        self.wide = 4 if shape.precision == "autocast" else self.bytes

    def add(self, name: str, shape: tuple[int, ...], published: int, own: int, why: str = "") -> None:
        count = 1
        for size in shape:
            count *= size
        differs = published != own
        self.found.append(LayerTensor(name, shape, count * published, count * own, why if differs and count else ""))

    def stream(self, name: str) -> None:
        s = self.shape
        self.add(
            name, (s.batch, self.length, s.hidden), self.bytes, self.wide, "the residual stream is float32 in autocast"
        )

    def norm(self, name: str) -> None:
        self.stream(f"{name}: input")
        for statistic in ("mean", "1 / standard deviation"):
            # float32 for float32 input; torch's CPU kernel keeps them in the dtype of the parameters.
            self.add(
                f"{name}: {statistic}", (self.shape.batch, self.length, 1), 0, self.wide, "the formula leaves it out"
            )

    def product_input(self, name: str, *, inside: int = 0, readers: int = 1, weight: int) -> None:
        """The input of linear layers: whole features outside of the cut regions, a rank's part ``inside``."""
        s = self.shape
        size = (s.batch, s.sequence, inside // s.tensor_size) if inside else (s.batch, self.length, s.hidden)
        # A fused kernel's result is the input of the output layer: one storage, and either of them counts it.
        self.add(f"{name}: input", size, self.bytes, self.bytes)
        if s.precision == "autocast" and s.tensor_size == 1:
            for number in range(readers):
                self.add(f"{name}: weight {number + 1}", (weight,), 0, self.bytes, "autocast's copy of it")

    def inside(self, name: str, width: int) -> None:
        s = self.shape
        self.add(name, (s.batch, s.sequence, width // s.tensor_size), self.bytes, self.bytes)

    def core(self, is_recomputed: bool) -> None:
        s = self.shape
        heads, size = s.heads // s.tensor_size, s.hidden // s.heads
        by_math = s.kernel == "math" and not is_recomputed
        wide = max(4, self.bytes) if by_math else self.bytes
        why = "torch's math kernel computes in float32"
        for name in ("query", "key"):
            self.add(f"attention.core: {name}", (s.batch, heads, s.sequence, size), self.bytes, wide, why)
        matrix = (s.batch, heads, s.sequence, s.sequence)
        if by_math:
            self.add("attention.core: probabilities", matrix, self.bytes, wide, why)
            no = "our block does not drop attention's probabilities"
            self.add("attention.core: dropout mask", matrix, s.mask_bytes, 0, no)
            self.add("attention.core: dropped probabilities", matrix, self.bytes, 0, no)
        elif s.kernel == "fused" and not is_recomputed:
            self.add(
                "attention.core: log-sum-exp", matrix[:3], 0, 4, "a fused kernel keeps it in place of the probabilities"
            )
        self.add("attention.core: value", (s.batch, heads, s.sequence, size), self.bytes, wide, why)

    def dropout(self, name: str) -> None:
        s = self.shape
        if not s.dropout:
            self.add(f"{name}: mask", (s.batch, self.length, s.hidden), s.mask_bytes, 0, "dropout is 0")
            return
        self.add(f"{name}: mask", (s.batch, self.length, s.hidden), s.mask_bytes, 1, "ours has one byte")
        self.add(f"{name}: scale", (1,), 0, self.bytes, "one number, in the activations' dtype")


def _check(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        near = nearest_name(str(value).lower(), valid)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(valid)}{hint}")
