"""What a rank should hold in a training step, from shapes, the layout and the costs of its blocks. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megapar.data_parallel.formulas import state_bytes
from lightning_megapar.memory.chain import chain_peak
from lightning_megapar.memory.measure import BlockMeasure
from lightning_megapar.memory.recomputation import InFlight

_STATE_TENSORS = {"Adagrad": 1, "Adam": 2, "AdamW": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2, "RMSprop": 1, "SGD": 0}
"""Tensors of a parameter's size in the state of torch's optimizers; options of some add to them."""
_MORE = {"amsgrad": ("Adam", "AdamW"), "centered": ("RMSprop",), "momentum": ("SGD", "RMSprop")}


@dataclass(frozen=True)
class ParameterFacts:
    """A parameter of a rank.

    Args:
        elements: on this pipeline stage and tensor rank, before data ranks share it out.
        width: bytes of an element.
        is_trained: whether it gets a gradient.
        is_sharded: whether data ranks share it out.
    """

    elements: int
    width: int
    is_trained: bool = True
    is_sharded: bool = False

    @classmethod
    def of(cls, parameter: Tensor, is_sharded: bool = False) -> ParameterFacts:
        """Of a plain tensor, or of a DTensor over tensor ranks, data ranks or both."""
        return cls(math.prod(own_shape(parameter)), parameter.element_size(), parameter.requires_grad, is_sharded)


def own_shape(parameter: Tensor) -> tuple[int, ...]:
    """On this tensor rank, before data ranks share the parameter out."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for number, (axis, placement) in enumerate(zip(mesh.mesh_dim_names or (), parameter.placements)):
            if axis == "tensor" and placement.is_shard():
                dim = placement.dim  # type: ignore[attr-defined]
                shape[dim] = -(-shape[dim] // mesh.size(number))
    return tuple(shape)


@dataclass(frozen=True)
class ZeroLayout:
    """How data ranks share out what they hold.

    Args:
        stage: of ZeRO.
        ranks: data ranks.
        shards: that hold everything together; fewer than ``ranks`` under hybrid sharding.
        is_offloaded: shards, their gradients and the optimizer's state are in host memory, and this is a GPU.
    """

    stage: int = 0
    ranks: int = 1
    shards: int = 1
    is_offloaded: bool = False


@dataclass(frozen=True)
class States:
    """Bytes of a rank in a step.

    Args:
        parameters: its own, shards where they are shared out.
        gradients: most at once.
        optimizer: ``None`` for an optimizer of which nothing is known.
        gathered: parameters that are whole beside the shards when most activations are alive.
        buffers: most at once for parameters and gradients on their way between data ranks, ``gathered`` included.
        reduced: of it, what is there when all gradients are.
    """

    parameters: int
    gradients: int
    optimizer: int | None
    gathered: int = 0
    buffers: int = 0
    reduced: int = 0


def states(
    facts: Iterable[ParameterFacts],
    zero: ZeroLayout,
    optimizer_tensors: int | None,
    working_width: int = 0,
    units: Sequence[int] = (),
    microbatches: int = 2,
    accumulate: int = 1,
) -> States:
    """What parameters, gradients and the optimizer's state take.

    FSDP2's buffers are counted by whole units, the largest: under stages 1 and 2 two of them, for the gradients that
    are sent and those that come behind; under stage 3 two more, for parameters that compute and those that are gathered
    ahead. Gradients of a batch that is not the first of its window come beside those of the window.

    Args:
        facts: of the rank's parameters, tied ones once.
        zero: how they are shared out.
        optimizer_tensors: of a parameter's size, see :func:`state_tensors`.
        working_width: bytes of an element of a second copy that steps work with (``bf16-true``), 0 without.
        units: bytes of the parameters that are gathered at once, in the order of the forward.
        microbatches, accumulate: of a batch, batches of a window.
    """
    parameters = gradients = state = gathered = reduced = 0.0
    for one in facts:
        stage = zero.stage if one.is_sharded else 0
        found = state_bytes(
            stage,
            one.elements,
            zero.shards if stage else 1,
            width=one.width,
            compute_width=working_width or one.width,
            optimizer_width=(optimizer_tensors or 0) * one.width,
            replicas=zero.ranks // zero.shards if stage else 1,
        )
        if stage == 0:
            parameters += one.elements * (one.width + working_width)
        else:
            parameters += 0 if zero.is_offloaded else found.shards
            gathered += found.gathered
        if one.is_trained:
            gradients += found.gradients if stage < 2 or not zero.is_offloaded else 0
            state += 0 if stage and zero.is_offloaded else found.optimizer
            reduced += one.elements * one.width if stage == 0 and zero.ranks > 1 else 0
    largest = max(units, default=0)
    shards = gradients if zero.stage >= 2 else gradients / zero.shards
    if zero.stage >= 2 and microbatches > 1:
        gradients += largest  # whole, until they are reduced
    elif units and (zero.stage >= 2 or (zero.stage == 1 and microbatches == accumulate == 1)):
        gradients = _most_in_sweep(units, zero.shards)
    if accumulate > 1 and zero.stage != 1:
        gradients += shards if zero.stage else gradients
    buffers = gathered + (4 if zero.stage == 3 else 2 if zero.stage else 0) * largest
    if zero.stage == 3:
        gathered += largest
    optimizer = None if optimizer_tensors is None else round(state)
    return States(
        round(parameters), round(gradients), optimizer, round(gathered), round(max(buffers, reduced)), round(reduced)
    )


def _most_in_sweep(units: Sequence[int], shards: int) -> float:
    """Most bytes of gradients in a backward that reduces each unit when it is through: its own are whole, and of those
    behind it shards are left.
    """
    behind = most = 0.0
    for unit in reversed(units):
        most = max(most, behind + unit)
        behind += unit / shards
    return max(most, behind)


def state_tensors(optimizers: Sequence[Optimizer]) -> int | None:
    """Tensors of a parameter's size that optimizers keep for each one; ``None`` if it is not known, or differs."""
    found = set()
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if name not in _STATE_TENSORS:
            return None
        for group in optimizer.param_groups:
            more = sum(bool(group.get(option)) and name in names for option, names in _MORE.items())
            found.add(_STATE_TENSORS[name] + more)
    return found.pop() if len(found) == 1 else None


@dataclass(frozen=True)
class Activations:
    """Of a rank's blocks, and outside of them.

    Args:
        layers: block -> bytes that it keeps of all microbatches in flight; ``""`` is outside of blocks.
        transient: most that a block takes beside, in its forward, its backward or while it is recomputed.
        microbatches: in flight, of each chunk.
    """

    layers: Mapping[str, int]
    transient: int
    microbatches: tuple[int, ...] = (1,)

    @property
    def kept(self) -> int:
        """All that is kept."""
        return sum(self.layers.values())

    @property
    def in_blocks(self) -> int:
        """What blocks keep and take."""
        return self.kept - self.layers.get("", 0) + self.transient


def activations(
    chunks: Sequence[Sequence[str]],
    measures: Mapping[str, BlockMeasure],
    choices: Mapping[str, str],
    held: InFlight,
    outside_bytes: int = 0,
    calls: Mapping[str, int] | None = None,
) -> Activations:
    """What the blocks of a rank keep under their options, at the moment when they keep most together.

    Args:
        chunks: names of the blocks of each chunk, in the order of their calls.
        measures: by name.
        choices: name -> option; a block without one keeps everything.
        held: by the schedule.
        outside_bytes: kept outside of blocks.
        calls: of each block in a microbatch, by default one.
    """
    options = {name: _option(measures[name], choices.get(name, "all")) for chunk in chunks for name in chunk}
    saved = {n: measures[n].costs.saved_bytes[option] * (calls or {}).get(n, 1) for n, option in options.items()}

    def kept_at(alive: Sequence[int], late: Sequence[int]) -> dict[str, int]:
        return {
            name: saved[name] * number + measures[name].waiting_bytes * waiting
            for chunk, number, waiting in zip(chunks, alive, late)
            for name in chunk
        }

    most, _ = fullest = max(held.moments, key=lambda moment: sum(kept_at(*moment).values()))
    layers = kept_at(*fullest)
    for chunk, number, keeps in zip(chunks, most, held.keeps_outputs):
        if keeps and chunk:  # a boundary that was sent
            outside_bytes += measures[chunk[-1]].output_bytes * number
    lines = [[measures[name].costs for name in chunk] for chunk in chunks]
    chosen = [options[name] for chunk in chunks for name in chunk]
    kept = sum(
        number * measures[name].costs.saved_bytes[options[name]]
        for chunk, number in zip(chunks, most)
        for name in chunk
    )
    transient = max(0, chain_peak(lines, chosen, most) - kept) if chosen else 0
    if outside_bytes:
        layers[""] = outside_bytes
    return Activations(layers, transient, tuple(most))


def _option(measure: BlockMeasure, wanted: str) -> str:
    known = measure.costs.saved_bytes
    return wanted if wanted in known else next(iter(known))


def peak(found: States, kept: Activations | None, messages: int, gradients_beside: int) -> int | None:
    """The most bytes at once, ``None`` where a part of it is not known.

    Either when most activations are alive, or when gradients are summed behind the last backward.

    Args:
        found: parameters and what belongs to them.
        kept: activations.
        messages: of the pipeline, most at once.
        gradients_beside: bytes of gradients that are there with all activations: of microbatches and batches before.
    """
    if kept is None or found.optimizer is None:
        return None
    at_work = kept.kept + kept.transient + messages + found.gathered + gradients_beside
    behind = found.gradients + max(found.gathered, found.reduced)
    return found.parameters + found.optimizer + max(at_work, behind)
