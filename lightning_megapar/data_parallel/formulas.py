"""What data parallelism costs a rank in collectives and bytes, by stage of ZeRO. Pure functions.

Sources: Rajbhandari et al., arXiv 1910.02054, section 5 (bytes); the collectives are those of
:mod:`lightning_megapar.data_parallel.zero`. The paper counts a copy of the parameters in full precision to the
optimizer's state; here that copy is the shard that FSDP2 keeps, also where gathered parameters have the same precision.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collectives:
    """Of one rank in an accumulation window, for parameters in FSDP2 units.

    Args:
        gathers: all-gathers of a unit's parameters.
        reductions: reduce-scatters of a unit's gradients.
        sums: all-reduces between replicas under hybrid sharding.
    """

    gathers: int
    reductions: int
    sums: int = 0


def collectives(
    stage: int, *, units: int, tied: int = 0, microbatches: int = 1, accumulate: int = 1, replicas: int = 1
) -> Collectives:
    """Collectives of an accumulation window on a rank with trainable units, each used by every microbatch.

    Args:
        stage: of ZeRO, 1 to 3.
        units: modules that are sharded by themselves (of this rank's pipeline stage).
        tied: units of modules that share parameters, which stay gathered to the end of a step.
        microbatches: of a batch.
        accumulate: batches of the window.
        replicas: groups of ranks that each hold all shards.

    Raises:
        ValueError: for a stage that shards nothing.
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"stage {stage} is none with shards: 1, 2, 3")
    runs = microbatches * accumulate
    reductions = (units + tied) * (1 if stage == 1 else runs)
    gathers = units + tied if stage < 3 else 2 * runs * units + accumulate * tied
    return Collectives(gathers, reductions, reductions if replicas > 1 else 0)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a rank's model state while a batch is worked on, between two microbatches.

    Args:
        gathered: parameters that are whole on the rank.
        shards: its shards of parameters (for stage 0 nothing beside the whole ones).
        gradients: whole ones or shards.
        optimizer: state of the optimizer.
        sums: under hybrid sharding what FSDP2 sends between replicas, which it keeps to the end of a step.
        sent: the whole gradients of the unit that was reduced last, which FSDP2 keeps until the next reduction.
    """

    gathered: float
    shards: float
    gradients: float
    optimizer: float
    sums: float = 0.0
    sent: float = 0.0

    @property
    def total(self) -> float:
        return self.gathered + self.shards + self.gradients + self.optimizer + self.sums + self.sent


def state_bytes(
    stage: int,
    parameters: float,
    ranks: int,
    *,
    tied: float = 0,
    width: int = 4,
    compute_width: int | None = None,
    optimizer_width: int = 8,
    replicas: int = 1,
    last_unit: float = 0,
) -> StateBytes:
    """Bytes of parameters, gradients and optimizer state on one rank.

    =====  ==============  ==========  ==========  ===========
    stage  gathered        shards      gradients   optimizer
    =====  ==============  ==========  ==========  ===========
    0      c P             0           w P         o P
    1      c P             w P / N     w P         o P / N
    2      c P             w P / N     w P / N     o P / N
    3      c T             w P / N     w P / N     o P / N
    =====  ==============  ==========  ==========  ===========

    Args:
        stage: of ZeRO, 0 to 3.
        parameters: ``P``, their number (on this rank's pipeline stage and tensor rank).
        ranks: ``N``, data ranks that share them out (those of one replica under hybrid sharding).
        tied: ``T``, the number of parameters in units that share them, which stay gathered at stage 3.
        width: ``w``, bytes of a parameter and of its gradient.
        compute_width: ``c``, bytes of a gathered parameter; by default ``width``.
        optimizer_width: ``o``, bytes of optimizer state per parameter: 8 for Adam in float32, 4 for momentum.
        replicas: groups of ranks that each hold all shards; with more than one ``w P / N`` more at stages 2 and 3.
        last_unit: number of parameters of the unit that a backward comes to last (the first one called), whose whole
            gradients are kept for a while at stages 2 and 3.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage {stage} is none of ZeRO's: 0, 1, 2, 3")
    compute = width if compute_width is None else compute_width
    return StateBytes(
        gathered=compute * (tied if stage == 3 else parameters),
        shards=0 if stage == 0 else width * parameters / ranks,
        gradients=width * parameters / (ranks if stage >= 2 else 1),
        optimizer=optimizer_width * parameters / (ranks if stage >= 1 else 1),
        sums=width * parameters / ranks if stage >= 2 and replicas > 1 else 0,
        sent=width * last_unit if stage >= 2 else 0,
    )
