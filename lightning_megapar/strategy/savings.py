"""Which settings would let a rank do with less memory, and how many bytes each of them saves. Pure functions.

Every function looks at one family of settings and returns its best one, or ``None`` where it is set already, cannot be
for this layout, or saves nothing. Savings are of the moment with most activations; they are predictions, and of one
setting alone: two of them together may save less than their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from lightning_megapar.config import Layout
from lightning_megapar.memory.prediction import ParameterFacts, ZeroLayout, states
from lightning_megapar.schedule_names import splits_backward

INSIDE = 24 / 34
"""Share of a transformer layer's activations that tensor ranks share out (Korthikanti et al., arXiv 2205.05198, table
2, without attention's matrices)."""
_FRAGMENTED = 0.05
"""Share of a device from which on unusable reserved memory is a cause."""


@dataclass(frozen=True)
class Situation:
    """A rank that has run out of memory.

    Args:
        layout: of the run.
        zero: how data ranks share out what they hold.
        facts: of this rank's parameters.
        optimizer_tensors: of a parameter's size, for each parameter.
        activations: mode of recomputation -> bytes that blocks keep and take under it, as far as known.
        recompute: mode in force.
        outside: activations outside of blocks.
        microbatches: pieces of a batch.
        samples: of this rank's batch, ``None`` where unknown.
        schedule: of the pipeline, ``""`` without one.
        units: ``(schedule, microbatches) -> batches' worth of activations`` that this rank keeps at most, with a
            pipeline. Without one it is a microbatch.
        precision: Lightning's word.
        blocks: of the whole stack.
        is_plain: one rank and one microbatch: gradients of the step before are there with all activations.
        rebalances: whether blocks or microbatches may move.
        is_cuda: whether the device is a GPU.
        device_bytes, fragmented: of the device, and reserved there without being in use, as far as known.
        expandable: whether torch's allocator may already join segments.
    """

    layout: Layout
    zero: ZeroLayout
    facts: tuple[ParameterFacts, ...]
    optimizer_tensors: int
    activations: Mapping[str, int] = field(default_factory=dict)
    recompute: str = "none"
    outside: int = 0
    microbatches: int = 1
    samples: int | None = None
    schedule: str = ""
    units: Callable[[str, int], float] | None = None
    precision: str = "32-true"
    blocks: int = 0
    is_plain: bool = False
    rebalances: bool = False
    is_cuda: bool = False
    device_bytes: int = 0
    fragmented: int = 0
    expandable: bool = False

    @property
    def kept(self) -> int:
        """Activations in force, those outside of blocks included."""
        return self.activations.get(self.recompute, 0) + self.outside

    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        found = states(self.facts, self.zero, self.optimizer_tensors)
        return found.parameters + found.gathered + found.gradients + (found.optimizer or 0)


@dataclass(frozen=True)
class Saving:
    """A setting that helps.

    Args:
        setting: as it would be written.
        saved_bytes: on this rank.
        price: what it costs.
    """

    setting: str
    saved_bytes: int
    price: str


def best_savings(situation: Situation, count: int = 3) -> list[Saving]:
    """The settings that would help most, those with the largest savings first."""
    found = [one for family in FAMILIES if (one := family(situation)) is not None and one.saved_bytes > 0]
    return sorted(found, key=lambda one: -one.saved_bytes)[:count]


def by_recomputation(situation: Situation) -> Saving | None:
    """``recompute``: of the modes that are known to keep less the one that keeps least."""
    own = situation.activations.get(situation.recompute)
    if own is None:
        return None
    prices = {"selective": "attention is computed twice", "full": "about a third more computation"}
    least = min((mode for mode in prices if mode in situation.activations), key=situation.activations.get, default="")  # type: ignore[arg-type]
    return Saving(f"recompute={least!r}", own - situation.activations[least], prices[least]) if least else None


def by_sharding(situation: Situation) -> Saving | None:
    """``zero_stage``: of the higher stages that are valid the one that holds least."""
    zero = situation.zero
    if zero.ranks == 1 or situation.rebalances:
        return None
    last = 2 if situation.schedule and splits_backward(situation.schedule) else 3
    prices = {
        1: "as many collectives",
        2: "gradients are reduced after each microbatch",
        3: "parameters are gathered for each forward and backward",
    }
    own, best = situation.state_bytes(), None
    for stage in range(zero.stage + 1, last + 1):
        facts = tuple(replace(one, is_sharded=True) for one in situation.facts)
        sharded = replace(situation, facts=facts, zero=replace(zero, stage=stage))
        saved = own - sharded.state_bytes()
        if best is None or saved > best.saved_bytes:
            best = Saving(f"zero_stage={stage}", saved, prices[stage])
    return best


def by_offload(situation: Situation) -> Saving | None:
    """``offload_optimizer``: shards, their gradients and the optimizer's state go to host memory."""
    zero = situation.zero
    if not situation.is_cuda or zero.is_offloaded or zero.stage == 0 or zero.ranks == 1:
        return None
    away = replace(situation, zero=replace(zero, is_offloaded=True))
    price = "the optimizer steps on the host, with copies both ways"
    return Saving("offload_optimizer=True", situation.state_bytes() - away.state_bytes(), price)


def by_microbatches(situation: Situation) -> Saving | None:
    """``num_microbatches``: the next number, from twice as many on, that divides the batch."""
    now, samples = situation.microbatches, situation.samples
    wanted = [number for number in range(2 * now, (samples or 2 * now) + 1) if samples is None or samples % number == 0]
    if not wanted:
        return None
    more = wanted[0]
    ratio = now / more
    if situation.units is not None:
        ratio = situation.units(situation.schedule, more) / situation.units(situation.schedule, now)
    saved = situation.kept * (1 - ratio)
    if now == 1 and not situation.is_plain:  # they come beside the activations of the microbatches behind
        saved -= states(situation.facts, situation.zero, 0).gradients
    return Saving(f"num_microbatches={more}", round(saved), "smaller matrix products; a smaller batch saves the same")


def by_schedule(situation: Situation) -> Saving | None:
    """``pipeline_schedule``: 1F1B keeps no more microbatches than there are stages behind."""
    if situation.units is None or situation.schedule == "1f1b":
        return None
    count = situation.microbatches
    ratio = situation.units("1f1b", count) / situation.units(situation.schedule, count)
    return Saving("pipeline_schedule='1f1b'", round(situation.kept * (1 - ratio)), "stages may wait longer")


def by_tensor_ranks(situation: Situation) -> Saving | None:
    """``tensor_parallel_size``, twice as large: on ranks taken from data parallelism, else on twice as many."""
    size = 2 * situation.layout.tensor
    halved = _halved(situation)
    saved = situation.state_bytes() - halved.state_bytes() + situation.kept * INSIDE / 2
    return Saving(f"tensor_parallel_size={size}", round(saved), _ranks_for(situation, "collectives in every layer"))


def by_stages(situation: Situation) -> Saving | None:
    """``pipeline_parallel_size``, twice as large; the first stage keeps as many activations as before."""
    size = 2 * situation.layout.pipeline
    if situation.blocks < size:
        return None
    saved = situation.state_bytes() - _halved(situation).state_bytes()
    return Saving(f"pipeline_parallel_size={size}", saved, _ranks_for(situation, "stages wait for one another"))


def by_precision(situation: Situation) -> Saving | None:
    """``precision``: activations of half the width, beside a second copy of the weights."""
    if situation.precision != "32-true":
        return None
    copies = sum(2 * one.elements for one in situation.facts)
    return Saving("precision='bf16-true'", situation.kept // 2 - copies, "steps compute in bfloat16")


def by_allocator(situation: Situation) -> Saving | None:
    """Torch's own setting, where reserved memory lies idle in pieces."""
    if not situation.is_cuda or situation.expandable:
        return None
    if situation.fragmented < _FRAGMENTED * situation.device_bytes:
        return None
    price = "a variable of the environment, read when torch starts"
    return Saving("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", situation.fragmented, price)


FAMILIES = (
    by_recomputation,
    by_sharding,
    by_offload,
    by_microbatches,
    by_schedule,
    by_tensor_ranks,
    by_stages,
    by_precision,
    by_allocator,
)


def _halved(situation: Situation) -> Situation:
    """Half of every parameter, on ranks that are taken from data parallelism where they can be."""
    facts = tuple(replace(one, elements=-(-one.elements // 2)) for one in situation.facts)
    zero = situation.zero
    if zero.ranks % 2 == 0 and zero.shards == zero.ranks:
        zero = replace(zero, ranks=zero.ranks // 2, shards=zero.shards // 2)
        zero = replace(zero, stage=zero.stage if zero.ranks > 1 else 0)
    return replace(situation, facts=facts, zero=zero)


def _ranks_for(situation: Situation, price: str) -> str:
    data = situation.layout.data
    if data % 2 == 0 and situation.zero.shards == situation.zero.ranks:
        return f"with data_parallel_size={data // 2}; {price}"
    return f"with {2 * situation.layout.world_size} ranks; {price}"
