"""Which activations a chain of blocks keeps, by a model of the peak that goes through a step block by block.

:func:`~lightning_megapar.memory.recompute.plan_recompute` takes a step's peak for what everything keeps and the largest
recomputation together. Blocks are recomputed one after the other, though, and what has been gone through backward is
gone. With blocks ``0 ... n`` of a chunk of which ``m`` microbatches are in flight, ``S`` what all of them keep,
``P_b`` what blocks up to ``b`` keep, and ``O`` what the microbatches in flight in other chunks keep,

    in the forward of b:    O + (m - 1) S + P_(b-1) + forward(b)
    in the backward of b:   O + (m - 1) S + P_b + backward(b)

where ``forward`` and ``backward`` are the most bytes alive in the block's forward, and in its backward beyond what it
keeps. The peak is the largest of these, and the plan has the least time of all whose peak is within the budget: dynamic
programming from the last block to the first over (bytes, peak, seconds) of the blocks behind, without those partial
plans that another one dominates, or that cannot come below the best whole plan any more.

An exact model of the chain of one stage (the idea of Beaumont et al., "Rotor", arXiv 1911.13214, with the options of a
block in the place of its positions in time); with several chunks on a rank it takes the most microbatches of each for
alive together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_megapar.config import ConfigError
from lightning_megapar.memory.knapsack import UNIT, Option, Relaxation, exceeds, frontier
from lightning_megapar.memory.recompute import BlockCosts, RecomputePlan, check_costs, plan_recompute


@dataclass(frozen=True)
class ChainCosts:
    """What a block's options cost.

    Args:
        saved_bytes: option -> bytes that are kept for each microbatch from its forward to its backward.
        recompute_seconds: option -> seconds that a microbatch's step takes longer.
        forward_bytes: option -> most bytes alive in its forward, beyond what blocks before it keep.
        backward_bytes: option -> most bytes alive in its backward, beyond what it and blocks before it keep.

    Raises:
        ConfigError: options that differ between the four, none at all, negative or other than whole bytes, negative
            seconds.
    """

    saved_bytes: Mapping[str, int]
    recompute_seconds: Mapping[str, float]
    forward_bytes: Mapping[str, int]
    backward_bytes: Mapping[str, int]

    def __post_init__(self) -> None:
        check_costs(self, "recompute_seconds")

    def only(self, options: Iterable[str]) -> ChainCosts:
        """The same with these options alone; all of them, if the block has none of these."""
        kept = [option for option in self.saved_bytes if option in set(options)] or list(self.saved_bytes)
        return ChainCosts(
            {option: self.saved_bytes[option] for option in kept},
            {option: self.recompute_seconds[option] for option in kept},
            {option: self.forward_bytes[option] for option in kept},
            {option: self.backward_bytes[option] for option in kept},
        )

    def with_kept(self, more: int) -> ChainCosts:
        """The same where so many bytes more are kept, whatever the option."""
        saved = {option: number + more for option, number in self.saved_bytes.items()}
        return ChainCosts(saved, self.recompute_seconds, self.forward_bytes, self.backward_bytes)


def chain_peak(chunks: Sequence[Sequence[ChainCosts]], choices: Sequence[str], in_flight: Sequence[int]) -> int:
    """Bytes of the model in this module's description.

    Args:
        chunks: blocks of each chunk of a rank.
        choices: an option for each block, chunk by chunk.
        in_flight: microbatches of each chunk.
    """
    names = iter(choices)
    chosen = [[(block, next(names)) for block in blocks] for blocks in chunks]
    kept = [sum(block.saved_bytes[name] for block, name in pairs) for pairs in chosen]
    held = sum(number * total for number, total in zip(in_flight, kept))
    peak = 0
    for pairs, total, number in zip(chosen, kept, in_flight):
        if not number:
            continue
        below = held - total
        for block, name in pairs:
            peak = max(peak, below + block.forward_bytes[name])
            below += block.saved_bytes[name]
            peak = max(peak, below + block.backward_bytes[name])
    return peak


def plan_chain(
    chunks: Sequence[Sequence[ChainCosts]], budget_bytes: int, in_flight: Sequence[int] = (1,)
) -> RecomputePlan:
    """The plan with the least recomputation whose peak is within the budget; of several, that with the lowest peak.

    Args:
        chunks: blocks of each chunk of a rank, in the order of the model.
        budget_bytes: for activations of the blocks.
        in_flight: for each chunk the microbatches that are between their forward and their backward; where it is 0, the
            chunk takes nothing.

    Raises:
        ConfigError: no plan is within the budget (the message has the smallest budget that one is in), or an argument
            out of its range.
    """
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes < 0:
        raise ConfigError(f"plan_chain budget_bytes={budget_bytes!r}: expected a whole number >= 0")
    if len(in_flight) != len(chunks) or any(
        isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in in_flight
    ):
        raise ConfigError(
            f"plan_chain in_flight={in_flight!r}: expected a whole number >= 0 for each of {len(chunks)} chunks"
        )
    blocks = [(block, number) for one, number in zip(chunks, in_flight) for block in one]
    if not blocks:
        return RecomputePlan((), 0, 0, 0.0)
    found = _search(chunks, in_flight, budget_bytes)
    if found is None:
        raise ConfigError(
            f"budget_bytes={budget_bytes}: no choice for {len(blocks)} blocks with {max(in_flight)} microbatches in "
            f"flight is within it; the smallest possible budget is {smallest_peak(chunks, in_flight)}"
        )
    pairs = [(block, name) for (block, _), name in zip(blocks, found)]
    return RecomputePlan(
        found,
        chain_peak(chunks, found, in_flight),
        sum(block.saved_bytes[name] for block, name in pairs),
        sum(block.recompute_seconds[name] for block, name in pairs),
    )


def smallest_peak(chunks: Sequence[Sequence[ChainCosts]], in_flight: Sequence[int]) -> int:
    """The lowest peak of all plans, in bytes."""
    quick = [
        [ChainCosts(b.saved_bytes, dict.fromkeys(b.saved_bytes, 0.0), b.forward_bytes, b.backward_bytes) for b in one]
        for one in chunks
    ]
    found = _search(quick, in_flight, None)
    assert found is not None
    return chain_peak(chunks, found, in_flight)


_State = tuple[int, int, int, int, tuple[str, ...]]
"""Of the blocks behind: units of time; peak; bytes of all microbatches in flight; bytes that one microbatch keeps in
the chunk that is being gone through; options."""


def _search(
    chunks: Sequence[Sequence[ChainCosts]], in_flight: Sequence[int], budget: int | None
) -> tuple[str, ...] | None:
    """The best plan of all, ``None`` if none is within the budget; without a budget the one with the lowest peak."""
    line = [(block, count, place == 0) for one, count in zip(chunks, in_flight) for place, block in enumerate(one)]
    options: list[list[Option]] = [
        [(block.saved_bytes[n] * count, round(block.recompute_seconds[n] * UNIT), n) for n in block.saved_bytes]
        for block, count, _ in line
    ]
    best = float("inf") if budget is None else _units_of_simple_plan(line, budget)
    states: list[_State] = [(0, 0, 0, 0, ())]
    for place in range(len(line) - 1, -1, -1):
        block, count, is_first = line[place]
        before = Relaxation([frontier(some) for some in options[:place]])
        grown: list[_State] = []
        for units, peak, held, own, names in states:
            for total, longer, name in options[place]:
                saved = block.saved_bytes[name]
                others = held + total - own - saved if count else 0
                most = peak + total
                if count:
                    most = max(most, others + block.forward_bytes[name], others + saved + block.backward_bytes[name])
                least = 0.0 if budget is None else before.bounds(budget - most)[0]
                if least < float("inf") and not exceeds(units + longer + least, best):
                    grown.append((units + longer, most, held + total, own + saved, (name, *names)))
        if is_first:  # the chunk before keeps nothing of its own yet
            grown = [(units, peak, held, 0, names) for units, peak, held, _, names in grown]
        states = _undominated(grown, has_chunks_before=any(first for _, _, first in line[1 : place + 1]))
    return min(states, key=lambda one: one[1] if budget is None else one[:2])[4] if states else None


def _units_of_simple_plan(line: Sequence[tuple[ChainCosts, int, bool]], budget: int) -> float:
    """Units of time of a plan that is within the budget by the simpler model, which never has the lower peak."""
    blocks = [
        BlockCosts(
            {name: saved * count for name, saved in block.saved_bytes.items()},
            block.recompute_seconds,
            {n: max(block.forward_bytes[n] - s, block.backward_bytes[n], 0) for n, s in block.saved_bytes.items()},
        )
        for block, count, _ in line
    ]
    try:
        choices = plan_recompute(blocks, budget).choices
    except ConfigError:
        return float("inf")
    return sum(round(block.recompute_seconds[name] * UNIT) for block, name in zip(blocks, choices))


def _undominated(states: list[_State], has_chunks_before: bool) -> list[_State]:
    """Those that no other one is at least as good as in whatever may matter for the blocks before."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda one: one[:4]):
        _, peak, held, own, _ = state
        if not any(
            p <= peak and h - o <= held - own and (not has_chunks_before or h <= held) for _, p, h, o, _ in kept
        ):
            kept.append(state)
    return kept
