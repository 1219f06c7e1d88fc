"""What each rank of a pipeline does, in order, as plain data. No torch.

A pipeline of ``S`` stages runs on ``S`` ranks. A rank holds ``num_chunks`` pieces of the model; the pieces of all
ranks, in the order of the model, are the *virtual stages* ``0 .. S * num_chunks - 1``. :attr:`Schedule.placement` says
which virtual stage each chunk of each rank is.

Sends and receives are not part of a schedule; they follow from what an action needs (``k`` is a virtual stage):

=================================== =====================================================================
action                              needs, of the same microbatch
=================================== =====================================================================
forward of ``k``                    forward of ``k - 1``
backward, backward_input of ``k``   forward of ``k``; backward or backward_input of ``k + 1``
backward_weight of ``k``            backward_input of ``k``
=================================== =====================================================================

``backward`` is the whole backward. The other two are its halves (Qi et al., "Zero Bubble Pipeline Parallelism", 2023):
the gradient of the chunk's inputs, for which the previous stage waits, and the gradients of its weights, for which
nobody waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from lightning_megapar.config import ConfigError

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
"""The letter of each kind in printed grids and in files."""
_PHASES: dict[Kind, str] = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of a rank.

    Args:
        kind: one of :data:`KINDS`.
        microbatch: index within the step, from 0.
        chunk: which of the rank's chunks, from 0.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        """``F3``, or ``F3.1`` on chunk 1. ``B`` is a whole backward, ``I`` and ``W`` are its halves."""
        return f"{LETTERS[self.kind]}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


class Node(NamedTuple):
    """What others wait for: ``phase`` is F, B (a whole backward, or that of the inputs) or W."""

    phase: str
    virtual_stage: int
    microbatch: int


def loop_placement(num_stages: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Chunk ``c`` of rank ``r`` is virtual stage ``c * S + r``: the model goes round the ranks ``num_chunks`` times."""
    return tuple(tuple(chunk * num_stages + rank for chunk in range(num_chunks)) for rank in range(num_stages))


def v_placement(num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Rank ``r`` holds virtual stages ``r`` and ``2S - 1 - r``: the model goes down the ranks and back up."""
    return tuple((rank, 2 * num_stages - 1 - rank) for rank in range(num_stages))


@dataclass(frozen=True)
class Schedule:
    """Actions per rank. One that exists can be executed: it is complete and cannot deadlock.

    Args:
        name: for messages and titles.
        num_microbatches: microbatches per step.
        ranks: for each rank the tuple of its actions in order.
        placement: for each rank the virtual stage of each of its chunks. ``()`` stands for one chunk per rank.

    Raises:
        ConfigError: when the placement is not a permutation of the virtual stages, when a rank misses or repeats an
            action or runs one before another of its own that it needs, or when the order deadlocks (the cycle of
            ranks that wait for each other is named).
    """

    name: str
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[tuple[int, ...], ...] = ()
    order: tuple[tuple[int, Action], ...] = field(init=False, repr=False, compare=False)
    """Every action with its rank, each after all that it needs."""

    def __post_init__(self) -> None:
        if not self.ranks or self.num_microbatches < 1:
            raise ConfigError(f"schedule {self.name!r}: needs at least one rank and one microbatch")
        if not self.placement:
            object.__setattr__(self, "placement", loop_placement(len(self.ranks), 1))
        self._check_placement()
        self._check_actions()
        object.__setattr__(self, "order", tuple(self._executable_order()))

    @property
    def num_stages(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def num_chunks(self) -> int:
        """Chunks per rank."""
        return len(self.placement[0])

    @property
    def num_virtual_stages(self) -> int:
        return self.num_stages * self.num_chunks

    @cached_property
    def holders(self) -> tuple[tuple[int, int], ...]:
        """``(rank, chunk)`` of each virtual stage."""
        places = {k: (rank, chunk) for rank, row in enumerate(self.placement) for chunk, k in enumerate(row)}
        return tuple(places[k] for k in range(len(places)))

    @property
    def is_training(self) -> bool:
        """Whether there is a backward."""
        return any(action.kind != "forward" for action in self.ranks[0])

    @property
    def splits_backward(self) -> bool:
        """Whether a rank computes weight gradients apart from the rest of the backward."""
        return any(action.kind == "backward_weight" for row in self.ranks for action in row)

    def node(self, rank: int, action: Action) -> Node:
        """What others wait for when they wait for ``action`` of ``rank``."""
        return Node(_PHASES[action.kind], self.placement[rank][action.chunk], action.microbatch)

    def needs(self, rank: int, action: Action) -> list[Node]:
        """What has to be done before ``action`` of ``rank`` (see the table above); on other ranks or on its own."""
        phase, k, microbatch = self.node(rank, action)
        if phase == "F":
            return [Node("F", k - 1, microbatch)] if k else []
        if phase == "W":
            return [Node("B", k, microbatch)]
        own = Node("F", k, microbatch)
        return [own] if k == self.num_virtual_stages - 1 else [own, Node("B", k + 1, microbatch)]

    def completions(self, rank: int) -> dict[int, int]:
        """For each chunk of a rank the position of the action after which its gradients are complete, in that order.

        Empty without backwards.
        """
        last = {a.chunk: index for index, a in enumerate(self.ranks[rank]) if a.kind != "forward"}
        return dict(sorted(last.items(), key=lambda item: item[1]))

    def peak_activations(self) -> tuple[int, ...]:
        """For each rank the largest number of (microbatch, chunk) pairs whose activations are alive at once.

        A pair is alive from its forward to the end of its whole backward, or of its backward_weight; without backwards
        as long as its forward runs. Independent of the time that actions take, because a rank's order is fixed. What
        an action needs only while it runs does not count. In bytes it is what autograd saved for the backward, without
        parameters, and what linear layers keep for their weights' gradients.
        """
        if not self.is_training:
            return (1,) * self.num_stages
        peaks = []
        for actions in self.ranks:
            alive = peak = 0
            for action in actions:
                if action.kind == "forward":
                    alive += 1
                elif action.kind != "backward_input":
                    alive -= 1
                peak = max(peak, alive)
            peaks.append(peak)
        return tuple(peaks)

    def peak_boundaries(self) -> tuple[int, ...]:
        """For each rank the largest number of boundaries that it holds at once, received and sent ones together.

        A received one is held from the start of its forward, a sent one from the end of its forward; both to the end of
        the backward or backward_input, which needs the first for its gradient and starts at the second. Between two
        virtual stages of one rank, where nothing travels, the next one's is there from the end of the forward before
        it. Without backwards a sent one is not held, and a received one as long as its forward runs.

        Independent of the time that actions take. What does depend on it is left out: at most one receive under way per
        link and direction, gradients on their way, and copies that the transport has not delivered.
        """
        last, peaks = self.num_virtual_stages - 1, []
        for rank, actions in enumerate(self.ranks):
            own = set(self.placement[rank])
            held = peak = 0
            for action in actions:
                k = self.placement[rank][action.chunk]
                received, sent = int(k > 0), int(k < last and self.is_training)
                if action.kind == "forward":
                    arrives = int(k > 0 and k - 1 not in own)
                    handed_on = int(k + 1 in own)
                    held += arrives + sent + handed_on
                    peak = max(peak, held)
                    if not self.is_training:
                        held -= received
                elif action.kind != "backward_weight":
                    held -= received + sent
            peaks.append(peak)
        return tuple(peaks)

    def restricted(self, num_microbatches: int) -> Schedule:
        """The same order without the microbatches from ``num_microbatches`` on.

        Always executable: microbatches do not depend on each other, so leaving some out removes waits and adds none.
        """
        kept = tuple(tuple(a for a in row if a.microbatch < num_microbatches) for row in self.ranks)
        return Schedule(self.name, num_microbatches, kept, self.placement)

    def grid(self) -> str:
        """One line per rank, one column per slot when every action takes one slot and messages take no time."""
        finished: dict[Node, int] = {}
        cells: list[list[str]] = [[] for _ in self.ranks]
        for rank, action in self.order:
            start = max([len(cells[rank]), *(finished[node] for node in self.needs(rank, action))])
            cells[rank] += ["."] * (start - len(cells[rank])) + [str(action)]
            finished[self.node(rank, action)] = start + 1
        slots = max(len(row) for row in cells)
        width = max(len(cell) for row in cells for cell in row) + 1
        label = len(str(self.num_stages - 1))
        return "\n".join(
            f"rank {rank:>{label}}: " + "".join(c.ljust(width) for c in row + ["."] * (slots - len(row))).rstrip()
            for rank, row in enumerate(cells)
        )

    # -- validation --------------------------------------------------------------------------------------------------

    def _check_placement(self) -> None:
        if len(self.placement) != self.num_stages or len({len(row) for row in self.placement}) != 1:
            raise ConfigError(
                f"schedule {self.name!r}: {self.num_stages} ranks but placement={self.placement}; every rank needs the "
                "same number of chunks"
            )
        if sorted(k for row in self.placement for k in row) != list(range(self.num_virtual_stages)):
            raise ConfigError(
                f"schedule {self.name!r}: placement={self.placement} is not a permutation of the virtual stages "
                f"0 to {self.num_virtual_stages - 1}"
            )

    def _check_actions(self) -> None:
        training = any(action.kind != "forward" for row in self.ranks for action in row)
        wanted = [(c, m) for c in range(self.num_chunks) for m in range(self.num_microbatches)]
        for rank, row in enumerate(self.ranks):
            self._check_rank(rank, row)
            done = {phase: [(a.chunk, a.microbatch) for a in row if _PHASES[a.kind] == phase] for phase in "FBW"}
            halves = [(a.chunk, a.microbatch) for a in row if a.kind == "backward_input"]
            for what, found, expected in (
                ("forward", done["F"], wanted),
                ("backward", done["B"], wanted if training else []),
                ("backward_weight", done["W"], sorted(halves)),
            ):
                if sorted(found) != expected:
                    raise ConfigError(f"schedule {self.name!r}: rank {rank} {_difference(what, found, expected)}")

    def _check_rank(self, rank: int, row: Sequence[Action]) -> None:
        seen: set[Node] = set()
        own = set(self.placement[rank]) if row else set()
        for action in row:
            if action.kind not in KINDS or not 0 <= action.chunk < self.num_chunks or action.microbatch < 0:
                raise ConfigError(f"schedule {self.name!r}: rank {rank} has no action {action!r}")
            node = self.node(rank, action)
            for need in self.needs(rank, action):
                if need.virtual_stage == node.virtual_stage and need not in seen:
                    what = {"F": "forward", "B": "backward_input"}[need.phase]
                    raise ConfigError(f"schedule {self.name!r}: rank {rank} runs {action} before its {what}")
                if need.virtual_stage in own and need not in seen:
                    needed = self._action_text(need)
                    raise ConfigError(f"schedule {self.name!r}: rank {rank} runs {action} before {needed}, its input")
            seen.add(node)

    def _action_text(self, node: Node) -> str:
        rank, chunk = self.holders[node.virtual_stage]
        for action in self.ranks[rank]:
            if action.chunk == chunk and self.node(rank, action) == node:
                return str(action)
        return f"{node.phase}{node.microbatch}" + (f".{chunk}" if chunk else "")

    def _executable_order(self) -> list[tuple[int, Action]]:
        """Run every rank as far as it gets, waking those that waited for what was done; raise when all wait."""
        order: list[tuple[int, Action]] = []
        position = [0] * self.num_stages
        done: set[Node] = set()
        waiting: dict[Node, list[int]] = {}
        stuck: dict[int, Node] = {}
        ready = deque(range(self.num_stages))
        while ready:
            rank = ready.popleft()
            stuck.pop(rank, None)
            while position[rank] < len(self.ranks[rank]):
                action = self.ranks[rank][position[rank]]
                missing = next((node for node in self.needs(rank, action) if node not in done), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    stuck[rank] = missing
                    break
                node = self.node(rank, action)
                done.add(node)
                order.append((rank, action))
                position[rank] += 1
                ready.extend(waiting.pop(node, ()))
        if stuck:
            raise ConfigError(f"schedule {self.name!r} deadlocks: {self._cycle(stuck, position)}")
        return order

    def _cycle(self, stuck: dict[int, Node], position: list[int]) -> str:
        """The ranks that wait for each other, each with the action that it stands at."""
        rank = next(iter(stuck))
        seen: list[int] = []
        while rank not in seen:
            seen.append(rank)
            rank = self.holders[stuck[rank].virtual_stage][0]
        cycle = seen[seen.index(rank) :]
        parts = []
        for rank in cycle:
            owner = self.holders[stuck[rank].virtual_stage][0]
            here = self.ranks[rank][position[rank]]
            parts.append(f"rank {rank} at {here} waits for {self._action_text(stuck[rank])} of rank {owner}")
        return ", ".join(parts) + " (a cycle)"


def _difference(what: str, found: Sequence[tuple[int, int]], expected: Sequence[tuple[int, int]]) -> str:
    """Which (chunk, microbatch) pairs are missing, repeated or too many."""
    kinds = {
        "misses": sorted(set(expected) - set(found)),
        "repeats": sorted({pair for pair in found if found.count(pair) > 1}),
        "has no business with": sorted(set(found) - set(expected)),
    }
    verb, pairs = next((verb, pairs) for verb, pairs in kinds.items() if pairs)
    shown = ", ".join(f"microbatch {m}" + (f" of chunk {c}" if c else "") for c, m in pairs[:4])
    more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
    return f"{verb} the {what} of {shown}{more}"
