"""An out-of-memory error of a step, answered once: what the rank holds, and the settings that would help most."""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_megapar.batches import batch_size_of
from lightning_megapar.callbacks.memory_facts import RankFacts
from lightning_megapar.callbacks.meter import token_count
from lightning_megapar.config import ConfigError
from lightning_megapar.memory import prediction
from lightning_megapar.memory.options import MODES, given_recompute
from lightning_megapar.memory.recomputation import InFlight
from lightning_megapar.memory.recorder import storages
from lightning_megapar.memory.report import LABELS, RankMemory, device_bytes, mib, table
from lightning_megapar.memory.timeline import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS
from lightning_megapar.pipeline.schedules import build_schedule
from lightning_megapar.strategy.recomputing import held_by
from lightning_megapar.strategy.savings import Situation, best_savings

_SAID = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
Method = TypeVar("Method", bound=Callable[..., Any])


def answered(method: Method) -> Method:
    """A method of a strategy whose first out-of-memory error of a run carries an answer. It is raised as it is, with a
    note (on Python 3.10, which has none, it is printed).
    """

    takes_batch = {"training_step": 0, "_evaluation_step": 1}.get(method.__name__)

    @wraps(method)
    def run(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        if takes_batch is not None and len(args) > takes_batch:
            strategy.batch_facts = BatchFacts.of(args[takes_batch])  # a backward may fail, which does not see it
        try:
            return method(strategy, *args, **kwargs)
        except Exception as error:
            if strategy.out_of_memory_answer is None and is_out_of_memory(error):
                strategy.out_of_memory_answer = ""  # whatever happens in here, it is tried once
                strategy.out_of_memory_answer = answer = _answer(strategy)
                if hasattr(error, "add_note"):
                    error.add_note(answer)
                else:
                    print(answer, file=sys.stderr, flush=True)
            raise

    return run  # type: ignore[return-value]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or what it was raised from, says that memory could not be allocated."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(seen, RuntimeError) and any(words in str(seen) for words in _SAID):
            return True
        seen = seen.__cause__
    return False


@dataclass(frozen=True)
class BatchFacts:
    """What estimates need of a rank's batch.

    Args:
        rows: tokens, else rows of the first tensor of numbers.
        samples: ``None`` where unknown.
    """

    rows: int = 0
    samples: int | None = None

    @classmethod
    def of(cls, batch: Any) -> BatchFacts:
        """Of any nest; nothing is known of one whose tensors have no sizes (nested ones)."""
        try:
            return cls(_rows(batch), batch_size_of(batch))
        except Exception:  # it is looked at in every step, and an estimate is no reason to end one
            return cls()


def _answer(strategy: Any) -> str:
    """Without collectives: other ranks may be gone. Nothing large is allocated."""
    try:
        return answer_of(strategy, strategy.batch_facts)
    except Exception as error:  # the error that is being raised is the one that counts
        return f"out of memory on {strategy.rank_description()}; what it holds could not be found out: {error!r}"


def answer_of(strategy: Any, batch: BatchFacts) -> str:
    """The table of what this rank holds, and the settings that would help most.

    Args:
        strategy: in a run.
        batch: of this rank; activations that nobody has measured are estimated from it.
    """
    from rich.console import Console

    facts = RankFacts(strategy.lightning_module.trainer, strategy.lightning_module)
    shown = io.StringIO()
    situation, source = situation_of(facts, batch)
    Console(file=shown, width=100).print(table([_memory(facts, situation)], "now / predicted for the step"))
    lines = [f"out of memory on {strategy.rank_description()}, in {strategy.current_stage()}. What it holds:"]
    lines.append(shown.getvalue().rstrip())
    lines.append(f"Activations {source}.")
    found = best_savings(situation)
    lines.append("What would help most (predicted, each by itself):" if found else "No setting is known to help.")
    for number, one in enumerate(found, 1):
        lines.append(f"  {number}. {one.setting} saves {mib(one.saved_bytes)} MiB ({one.price})")
    return "\n".join(lines)


def situation_of(facts: RankFacts, batch: BatchFacts) -> tuple[Situation, str]:
    """What is known of a rank, and where its activations are known from."""
    strategy = facts.strategy
    config, layout = strategy.settled, strategy.layout
    activations, outside, source = _activations(facts, batch)
    mode = given_recompute(config.recompute).mode
    device = device_bytes(facts.device)
    records = strategy.stepper.all_parameters
    schedule = strategy.schedule if layout.pipeline > 1 else ""
    known = prediction.state_tensors(facts.trainer.optimizers)
    return (
        Situation(
            layout=layout,
            zero=facts.zero(),
            facts=tuple(prediction.ParameterFacts.of(one.parameter, one.data_sharded) for one in records),
            optimizer_tensors=2 if known is None else known,
            activations=activations,
            recompute=mode,
            outside=outside,
            microbatches=facts.microbatches,
            samples=batch.samples,
            schedule=schedule,
            units=_units(facts) if schedule else None,
            precision=facts.precision,
            blocks=len(facts.prepared.plan.blocks) if facts.prepared.plan is not None else len(facts.blocks()),
            is_plain=facts.is_plain,
            rebalances=config.rebalance not in (None, False, "off"),
            is_cuda=facts.device.type == "cuda",
            device_bytes=device.total or 0,
            fragmented=(device.reserved or 0) - (device.allocated or 0),
            expandable=any("expandable_segments:True" in os.environ.get(n, "") for n in _ALLOCATOR),
        ),
        source,
    )


_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def _memory(facts: RankFacts, situation: Situation) -> RankMemory:
    states = facts.states()
    predicted = {PARAMETERS: states.parameters, GRADIENTS: states.gradients}
    if states.optimizer is not None:
        predicted[OPTIMIZER] = states.optimizer
    if situation.kept:
        predicted[ACTIVATIONS] = situation.kept
    device = device_bytes(facts.device)
    measured = {use: sum(storages(some, facts.device).values()) for use, some in facts.tensors().items()}
    known = sum(measured.values())
    peak = torch.cuda.max_memory_allocated(facts.device) if facts.device.type == "cuda" else known
    if device.allocated is not None:
        measured[ACTIVATIONS] = max(0, device.allocated - known)
    assert set(measured) <= set(LABELS)
    place = facts.strategy.layout.coordinates(facts.strategy.global_rank)
    return RankMemory(
        rank=facts.strategy.global_rank,
        place=facts.place,
        stage=place["pipeline"],
        step=facts.trainer.global_step,
        measured=measured,
        measured_peak=peak,
        predicted=predicted,
        predicted_peak=sum(predicted.values()) if situation.kept and states.optimizer is not None else None,
        microbatches=facts.in_flight().microbatches,
        device=device,
    )


def _activations(facts: RankFacts, batch: BatchFacts) -> tuple[dict[str, int], int, str]:
    """Bytes of the blocks by mode, bytes outside of them, and where they are known from."""
    for callback in facts.trainer.callbacks:
        costs = getattr(callback, "block_costs", None)
        if costs is not None and costs.measures:
            found = {mode: facts.activations(costs, option) for mode, option in MODES.items()}
            own = facts.activations(costs)
            if own is not None and all(one is not None for one in found.values()):
                blocks = {mode: one.in_blocks for mode, one in found.items() if one is not None}
                blocks.setdefault(given_recompute(facts.strategy.settled.recompute).mode, own.in_blocks)
                return blocks, own.layers.get("", 0), "as measured block by block"
    estimates = [estimated_bytes(block, batch.rows / facts.microbatches) for block in facts.blocks().values()]
    number = sum(facts.in_flight().microbatches) / len(facts.in_flight().microbatches)
    found_all = round(number * sum(kept for kept, _ in estimates))
    if not found_all:
        return {}, 0, "are not known before a step has been measured (callbacks.MemoryReport)"
    largest = max(kept for kept, _ in estimates)
    full = round(number * sum(inputs for _, inputs in estimates)) + largest
    estimated = {"none": found_all, "full": full}
    mode = given_recompute(facts.strategy.settled.recompute).mode
    estimated.setdefault(mode, found_all)
    return estimated, 0, "as estimated from the batch and the widths of layers (callbacks.MemoryReport measures them)"


def estimated_bytes(block: nn.Module, rows: float) -> tuple[int, int]:
    """What a block keeps of so many rows (tokens), and its input alone: of each layer with weights its input and, where
    it is a matrix, its output.
    """
    kept = first = 0
    for part in block.modules():
        weight = part._parameters.get("weight")
        if weight is None or weight.dim() not in (1, 2):
            continue
        fact = prediction.own_shape(weight)
        first = first or (fact[-1] * weight.element_size())
        kept += sum(fact) * weight.element_size()
    return round(rows * kept), round(rows * first)


def _rows(batch: Any) -> int:
    """Tokens of a batch, else rows of its first tensor of numbers."""
    tokens = token_count(batch)
    if tokens:
        return tokens
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else (batch,)
    first = next((one for one in values if isinstance(one, Tensor) and one.dim() > 1), None)
    return 0 if first is None else math.prod(first.shape[:-1])


def _units(facts: RankFacts) -> Callable[[str, int], float]:
    layout, place = facts.strategy.layout, facts.strategy.mesh.coordinate("pipeline")
    own = facts.strategy.stepper.schedule_of_batch

    def units(schedule: str, microbatches: int) -> float:
        if schedule == own.name and microbatches == own.num_microbatches:
            found = own
        else:
            try:
                found = build_schedule(schedule, layout.pipeline, microbatches, None)
            except ConfigError:
                return math.inf
        held: InFlight = held_by(found, place)
        return sum(held.microbatches) / len(held.microbatches) / microbatches

    return units
