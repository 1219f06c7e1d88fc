"""Which blocks of a module are recomputed, and when their plan is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_megapar.config import ConfigError, Layout, ParallelConfig, nearest_name
from lightning_megapar.memory.arena import Arena
from lightning_megapar.memory.blocks import INPUTS, forward_of, is_compiled, refuse_option
from lightning_megapar.memory.compression import compress_blocks, remove_compression
from lightning_megapar.memory.compression_options import CompressionConfig, check_kinds
from lightning_megapar.memory.measure import Postponed
from lightning_megapar.memory.options import MODES, RecomputeConfig, given_recompute
from lightning_megapar.memory.pool import make_arena
from lightning_megapar.memory.recomputation import ChosenPlan, InFlight, Recomputation
from lightning_megapar.memory.room import begin_watch, spare_bytes
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.pipeline.cutting.chunks import RankCut
from lightning_megapar.pipeline.cutting.cut import StagePlan
from lightning_megapar.pipeline.cutting.stages import count, largest_stacks, stacks_of
from lightning_megapar.pipeline.cutting.stand_ins import StandIn
from lightning_megapar.pipeline.cutting.state import state_kept
from lightning_megapar.pipeline.schedules import Schedule

_LARGE = 0.1
"""Share of a module's parameters from which on a stack beside the largest one is recomputed as well."""


def recomputed_blocks(
    module: nn.Module, config: ParallelConfig, options: RecomputeConfig, plan: StagePlan | None = None
) -> dict[str, nn.Module]:
    """The blocks that are meant, by dotted name; stand-ins for those of other stages are left out.

    Args:
        module: whole, or a rank's share.
        config, options: the settings.
        plan: of the pipeline's cut, whose blocks are meant if there is one.

    Raises:
        ConfigError: stacks that are named and are none, or a module without any.
    """
    known = stacks_of(module)
    paths = list(options.blocks or ([config.pipeline_blocks] if config.pipeline_blocks and plan is None else []))
    for path in paths:
        if path not in known:
            near = nearest_name(path, known)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"recompute: blocks={path!r} is not a stack of blocks{hint} (stacks: {sorted(known)})")
    found = {} if plan is None else {name: module.get_submodule(name) for name in plan.blocks}
    if not paths and plan is None:
        paths = _large_stacks(module, known)
        if not paths:
            raise ConfigError(
                f"recompute={options.mode!r} needs a stack of blocks (an nn.ModuleList or nn.Sequential of at least "
                f"two modules with parameters), and {type(module).__name__} has none; valid value: 'none'"
            )
    for path in paths:
        names = {f"{path}.{name}" if path else name: child for name, child in known[path].named_children()}
        if not any(_contains(name, other) or _contains(other, name) for name in names for other in found):
            found |= names
    return {
        name: child
        for name, child in found.items()
        if not isinstance(child, StandIn) and next(child.parameters(), None) is not None
    }


def _large_stacks(module: nn.Module, known: Mapping[str, nn.Module]) -> list[str]:
    """The stack with the most parameters, and those beside it that have many."""
    paths, enough = largest_stacks(module), _LARGE * count(module)
    for path, stack in known.items():
        apart = not any(_contains(path, other) or _contains(other, path) for other in paths)
        if apart and not isinstance(stack, nn.ModuleDict) and count(stack) >= enough:
            paths.append(path)
    return paths


def _contains(outer: str, inner: str) -> bool:
    return outer == inner or inner.startswith(f"{outer}." if outer else "")


def refuse_recompute(config: ParallelConfig, layout: Layout) -> None:
    """What recomputation cannot be combined with.

    Raises:
        ConfigError: naming the setting and the nearest valid values.
    """
    options = given_recompute(config.recompute)
    if not options.is_planned or config.rebalance in (None, False, "off") or layout.world_size == 1:
        return
    raise ConfigError(
        f"recompute='auto' plans for the blocks that a rank holds and for its microbatches, which rebalance="
        f"{config.rebalance!r} changes; valid values: recompute in {', '.join(MODES)}, or rebalance=null"
    )


def refuse_blocks(
    module: nn.Module, config: ParallelConfig, compression: CompressionConfig, plan: StagePlan | None
) -> None:
    """What blocks of a whole module cannot recompute, be measured for, or be compressed.

    Raises:
        ConfigError: naming the setting and the nearest valid values.
    """
    options = given_recompute(config.recompute)
    if options.mode == "none" and compression.codec == "none":
        return
    blocks = recomputed_blocks(module, config, options, plan)
    if compression.codec != "none":
        check_kinds(nn.ModuleList(blocks.values()), compression)
    for name, block in blocks.items():
        refuse_option(name, block, INPUTS if options.is_planned else MODES[options.mode])
        if is_compiled(block) and options.is_planned and config.zero_stage > 0:
            # It gathers its parameters within its compiled call.
            raise ConfigError(
                f"recompute='auto' cannot measure block {name!r}, which is compiled, under "
                f"zero_stage={config.zero_stage}; valid values: recompute='full', zero_stage=0, or blocks that are not "
                "compiled"
            )


def keep_activations(
    module: nn.Module,
    config: ParallelConfig,
    compression: CompressionConfig,
    plan: StagePlan | None,
    cut: RankCut | None,
    postponed: Postponed | None,
    device: torch.device,
    arena: Arena | None,
) -> Recomputation | None:
    """Let the blocks of this rank keep what the settings say, once the module is cut.

    Args:
        module: this rank's share. Blocks that keep something by other settings follow these.
        config: the options.
        compression: of what is kept.
        plan, cut: of the pipeline.
        postponed: where weight gradients wait.
        device: where it computes.
        arena: where kept inputs come from.

    Returns:
        what the blocks recompute; ``None`` where nothing is.
    """
    options = given_recompute(config.recompute)
    for child in module.modules():
        earlier = forward_of(child)
        if earlier is not None:
            earlier.remove()
    remove_compression(module)
    if options.mode == "none" and compression.codec == "none":
        return None
    blocks = recomputed_blocks(module, config, options, plan)
    compress_blocks(blocks, compression)
    if options.mode == "none":
        return None
    chunks = [blocks]
    if cut is not None:
        chunks = [{n: block for n, block in blocks.items() if n in chunk.local_modules} for chunk in cut.chunks]
        chunks[0] |= {n: block for n, block in blocks.items() if not any(n in chunk for chunk in chunks)}
    return Recomputation(options, chunks, device, state_kept, postponed, arena)


def made_arena(config: ParallelConfig, device: torch.device) -> Arena | None:
    """What buffers of a rank come from, if they are to come from an arena.

    Raises:
        ConfigError: a kind of device that has none.
    """
    if not config.arena:
        return None
    arena = make_arena(device)
    if arena is None:
        raise ConfigError(f"arena=True: there is none for {device.type}; valid value: false")
    return arena


def held_by(schedule: Schedule | None, rank: int) -> InFlight:
    """What a schedule keeps alive on a pipeline rank.

    Args:
        schedule: of a whole batch; ``None`` for one microbatch after the other.
        rank: coordinate in the pipeline.
    """
    if schedule is None:
        return InFlight((((1,), (0,)),), (False,))
    alive, waiting = [0] * schedule.num_chunks, [0] * schedule.num_chunks
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for action in schedule.ranks[rank]:
        if action.kind == "forward":
            alive[action.chunk] += 1
        elif action.kind == "backward_input":
            waiting[action.chunk] += 1  # while its activations are still there
        seen.add((tuple(alive), tuple(waiting)))
        if action.kind == "backward_weight":
            waiting[action.chunk] -= 1
        elif action.kind != "forward":
            alive[action.chunk] -= 1
    last = schedule.num_virtual_stages - 1
    return InFlight(tuple(_largest(seen)), tuple(stage != last for stage in schedule.placement[rank]))


def _largest(
    moments: set[tuple[tuple[int, ...], tuple[int, ...]]],
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Those that no other one is at least as large as in everything."""

    def covers(one: tuple[tuple[int, ...], ...], other: tuple[tuple[int, ...], ...]) -> bool:
        return one != other and all(a >= b for x, y in zip(one, other) for a, b in zip(x, y))

    return sorted(one for one in moments if not any(covers(other, one) for other in moments))


class RecomputePlanner:
    """Makes a rank's plan when it can be made.

    Args:
        recomputation: of the rank's blocks.
        mesh: the ranks.
        device: of this rank.
        ranks_on_host: processes that share the memory of a machine without a device of their own.
        in_flight: gives what the schedule of a whole batch keeps alive on the rank.
        num_microbatches: that a batch is cut into.
    """

    def __init__(
        self,
        recomputation: Recomputation,
        mesh: ParallelMesh,
        device: torch.device,
        ranks_on_host: int,
        in_flight: Callable[[], InFlight],
        num_microbatches: int,
    ) -> None:
        self.recomputation = recomputation
        self._mesh, self._device, self._ranks = mesh, device, ranks_on_host
        self._in_flight, self._num_microbatches = in_flight, num_microbatches
        self._is_open = False
        self._watched_at: int | None = None

    def between_steps(self, updates: int) -> None:
        """Before a training step; collective over the tensor ranks when a plan is made.

        Args:
            updates: steps of the optimizer so far.

        Raises:
            ConfigError: no plan is within the budget.
        """
        if self._is_open:
            self.recomputation.end_step()
            self._is_open = False
        if self.recomputation.can_be_planned:
            self._try(updates)
        self.recomputation.begin_step()
        self._is_open = True

    def _try(self, updates: int) -> None:
        held = self._in_flight()
        given = self.recomputation.config.budget_bytes
        budget = None if given is None else int(given)
        if budget is None:
            if self._watched_at is None:  # the step that measured has taken more than others do
                self._watched_at = updates
                begin_watch(self._device)
                return
            if updates == self._watched_at:
                return  # the optimizer makes its state in its first step
            spare = spare_bytes(self._device, self._ranks, self.recomputation.config.reserve)
            least = self.recomputation.least_bytes(held, self._largest, self._num_microbatches)
            budget = least - int(self._largest([float(-spare)])[0])
        chosen = self.recomputation.plan(budget, held, self._largest, self._num_microbatches)
        self._watched_at = None  # another plan begins with another look
        self._tell(chosen)

    def _largest(self, numbers: list[float]) -> list[float]:
        group = self._mesh.group("tensor")
        if group is None:
            return numbers
        told = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        return told.tolist()

    def _tell(self, chosen: ChosenPlan) -> None:
        counts: dict[str, int] = {}
        for option in chosen.plan.choices:
            counts[option] = counts.get(option, 0) + 1
        kept = ", ".join(f"{number} keep {option}" for option, number in counts.items())
        rank_zero_info(
            f"recompute: of {len(chosen.names)} blocks {kept}; {_mib(chosen.plan.peak_bytes)} of "
            f"{_mib(chosen.budget_bytes)} MiB, {chosen.plan.recompute_seconds * 1e3:.3g} ms for each microbatch"
        )


def _mib(number: int) -> str:
    return f"{number / 2**20:,.0f}"
