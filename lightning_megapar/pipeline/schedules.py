"""Pipeline schedules as data: what each stage does, in order. Pure functions, no torch.

A :class:`Schedule` is a list of :class:`Action` per rank. Sends and receives are not part of it: a forward of
microbatch ``i`` on stage ``s`` needs the forward on ``s - 1``, a backward needs the one on ``s + 1``.

* ``gpipe`` (Huang et al. 2019): all forwards, then all backwards; ``M`` microbatches are alive on every stage.
* ``1f1b`` (Narayanan et al. 2019, PipeDream-flush): after ``S - s - 1`` warm-up forwards each stage alternates one
  forward and one backward; ``min(S - s, M)`` microbatches are alive on stage ``s``.

Both spend ``(S - 1) / M`` of the *ideal* time idle; as a share of the *total* time that is ``(S - 1) / (M + S - 1)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_megapar.config import SCHEDULES, ConfigError, nearest_name

Kind = Literal["forward", "backward"]


@dataclass(frozen=True)
class Action:
    """One piece of work of a stage: ``kind`` of microbatch ``microbatch``."""

    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """Actions per rank.

    Args:
        name: one of :data:`lightning_megapar.config.SCHEDULES`, or ``"forward"``.
        num_microbatches: microbatches per step.
        ranks: for each stage the tuple of its actions in order.

    Raises:
        ConfigError: when a stage misses or repeats an action, runs a backward before its forward, or the order
            deadlocks (the stuck actions are named).
    """

    name: str
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        kinds = {action.kind for actions in self.ranks for action in actions}
        for stage, actions in enumerate(self.ranks):
            for kind in kinds:
                order = [a.microbatch for a in actions if a.kind == kind]
                if sorted(order) != list(range(self.num_microbatches)):
                    raise ConfigError(f"schedule {self.name!r}: stage {stage} runs {kind} of microbatches {order}")
            seen: set[int] = set()
            for action in actions:
                if action.kind == "forward":
                    seen.add(action.microbatch)
                elif action.microbatch not in seen:
                    raise ConfigError(f"schedule {self.name!r}: stage {stage} runs {action} before its forward")
        self._refuse_deadlock()

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    def _refuse_deadlock(self) -> None:
        position = [0] * self.num_stages
        done: set[tuple[int, Action]] = set()
        moved = True
        while moved:
            moved = False
            for stage, actions in enumerate(self.ranks):
                while position[stage] < len(actions):
                    action = actions[position[stage]]
                    neighbour = stage - 1 if action.kind == "forward" else stage + 1
                    if 0 <= neighbour < self.num_stages and (neighbour, action) not in done:
                        break
                    done.add((stage, action))
                    position[stage] += 1
                    moved = True
        stuck = [
            f"stage {stage} at {actions[position[stage]]}"
            for stage, actions in enumerate(self.ranks)
            if position[stage] < len(actions)
        ]
        if stuck:
            raise ConfigError(f"schedule {self.name!r} deadlocks: {', '.join(stuck)}")

    def peak_activations(self) -> tuple[int, ...]:
        """For each stage the largest number of microbatches whose activations are alive at once."""
        peaks = []
        for actions in self.ranks:
            alive = peak = 0
            for action in actions:
                alive += 1 if action.kind == "forward" else -1
                peak = max(peak, alive)
            peaks.append(peak)
        return tuple(peaks)

    def grid(self) -> str:
        """One line per stage, one column per slot when every action takes one slot."""
        slots: list[list[str]] = [[] for _ in self.ranks]
        finished: dict[tuple[int, Action], int] = {}
        position = [0] * self.num_stages
        time = 0
        while any(position[s] < len(a) for s, a in enumerate(self.ranks)):
            ready = []
            for stage, actions in enumerate(self.ranks):
                if position[stage] == len(actions):
                    continue
                action = actions[position[stage]]
                neighbour = stage - 1 if action.kind == "forward" else stage + 1
                if not 0 <= neighbour < self.num_stages or finished.get((neighbour, action), time + 1) <= time:
                    ready.append((stage, action))
            for stage in range(self.num_stages):
                slots[stage].append(".")
            for stage, action in ready:
                slots[stage][-1] = str(action)
                finished[(stage, action)] = time + 1
                position[stage] += 1
            time += 1
        width = max(len(cell) for line in slots for cell in line) + 1
        return "\n".join(
            f"stage {stage}: " + "".join(cell.ljust(width) for cell in line).rstrip()
            for stage, line in enumerate(slots)
        )


def _forwards(start: int, stop: int) -> list[Action]:
    return [Action("forward", i) for i in range(start, stop)]


def _backwards(start: int, stop: int) -> list[Action]:
    return [Action("backward", i) for i in range(start, stop)]


def build_schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """The named schedule for ``num_stages`` stages and ``num_microbatches`` microbatches.

    ``"forward"`` is the forward-only schedule of validation, test and predict. Fewer microbatches than stages are
    allowed (a ragged last batch): the pipeline is then never full.

    Raises:
        ConfigError: on an unknown name or non-positive numbers.
    """
    if num_stages < 1 or num_microbatches < 1:
        raise ConfigError(f"num_stages={num_stages}, num_microbatches={num_microbatches}: both must be at least 1")
    ranks: list[tuple[Action, ...]] = []
    for stage in range(num_stages):
        if name == "forward":
            actions = _forwards(0, num_microbatches)
        elif name == "gpipe":
            actions = _forwards(0, num_microbatches) + _backwards(0, num_microbatches)
        elif name == "1f1b":
            warm_up = min(num_stages - stage - 1, num_microbatches)
            actions = _forwards(0, warm_up)
            for i in range(num_microbatches - warm_up):
                actions += [Action("forward", warm_up + i), Action("backward", i)]
            actions += _backwards(num_microbatches - warm_up, num_microbatches)
        else:
            near = nearest_name(str(name).lower(), SCHEDULES)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"pipeline_schedule={name!r} is not one of {', '.join(SCHEDULES)}{hint}")
        ranks.append(tuple(actions))
    return Schedule(name, num_microbatches, tuple(ranks))
