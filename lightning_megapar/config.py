"""Every option of the strategy as frozen dataclasses: the one validator behind YAML and Python.

Nothing here touches torch.distributed. A wrong setting raises :class:`ConfigError` (a ``ValueError``) that names
the setting, its value and the nearest valid ones, before any process group exists.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from lightning_megapar.config_errors import (
    FOREIGN_NAMES,
    ConfigError,
    divisors,
    nearest,
    nearest_name,
    refuse_no_number,
    refuse_unknown,
    unknown_schedule,
)
from lightning_megapar.schedule_names import AUTO, SCHEDULES, OwnSchedule, chunks_of, splits_backward

__all__ = [
    "AXES",
    "FOREIGN_NAMES",
    "SCHEDULES",
    "ConfigError",
    "Degree",
    "Layout",
    "ParallelConfig",
    "divisors",
    "nearest",
    "nearest_name",
    "refuse_no_number",
    "refuse_unknown",
    "unknown_schedule",
]

Degree = int | Literal["auto"]
AXES: tuple[str, ...] = ("pipeline", "data", "context", "expert", "tensor")
"""Mesh axes from outermost to innermost: tensor-parallel ranks are neighbours (one node), stages are far apart."""


@dataclass(frozen=True)
class Layout:
    """Resolved degrees; their product is the world size. Rank order: pipeline outermost, tensor innermost."""

    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.context * self.expert * self.tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of :data:`AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis name -> coordinate of a global rank."""
        place: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return {axis: place[axis] for axis in AXES}

    def describe(self) -> str:
        """For messages and banners, such as ``pipeline=2 x data=1 x tensor=2`` (axes that are split, or ``single``)."""
        shown = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " x ".join(shown) or "single device"


@dataclass(frozen=True)
class ParallelConfig:
    """The strategy's options. ``"auto"`` degrees are filled by :meth:`resolve`.

    Args:
        tensor_parallel_size: ranks that share each layer (Megatron-LM column/row sharding).
        pipeline_parallel_size: stages that the stack of blocks is cut into.
        context_parallel_size, expert_parallel_size: 1; larger values are refused until those rooms exist.
        data_parallel_size: replicas that see different samples.
        sequence_parallel: shard the activations between tensor-parallel regions along the sequence.
        zero_stage: what data ranks share out: 0 nothing, 1 optimizer state, 2 gradients as well, 3 parameters as well;
            see :mod:`lightning_megapar.data_parallel.zero`.
        data_parallel_replicas: hybrid sharding: groups of data ranks (of neighbours, such as the GPUs of a node), each
            of which holds all shards; gradients are summed within a group and then between them. 1 shards over all.
        offload_optimizer: keep the shards of parameters and gradients, and with them the optimizer's state and its
            step, in host memory.
        num_microbatches: pieces that a batch is cut into; ``"auto"`` is 1 without a pipeline, else
            ``2 x pipeline_parallel_size``.
        pipeline_schedule: ``"gpipe"``, ``"1f1b"``, or the zero-bubble ``"zb_h1"`` and ``"zb_h2"``, which compute the
            weight gradients of linear layers later, where a stage would be idle (``"zb_h2"`` keeps up to twice as many
            microbatches alive); with several chunks per stage ``"interleaved_1f1b"``, and ``"zbv"`` and
            ``"dualpipe_v"``, whose second chunks come back from the last stage to the first. Sources: see
            :mod:`lightning_megapar.pipeline.schedules.build`. ``"auto"`` takes the one that the simulator finds
            fastest (:mod:`lightning_megapar.pipeline.auto`). A
            :class:`~lightning_megapar.pipeline.schedules.data.Schedule` of your own fixes stages, chunks and
            microbatches, and fills those that are ``"auto"``; the strategy also takes the path of its CSV file.
        pipeline_memory_limit: for ``pipeline_schedule="auto"``, the most activations that a stage may keep alive, in
            microbatches through its whole share of the blocks (a chunk counts as its part): one number, or one for
            each stage. ``None`` takes what the first stage of ``"1f1b"`` keeps, the smaller of stages and microbatches.
        pipeline_chunks: pieces of the stack on each stage; ``"auto"`` is the least that the schedule can have (1 or 2),
            and under ``pipeline_schedule="auto"`` part of the choice.
        pipeline_blocks: dotted name of the ``ModuleList``/``Sequential`` to cut, e.g. ``"model.layers"``; ``None``
            takes the one with the most parameters.
        pipeline_stack: the same under its older name; afterwards equal to ``pipeline_blocks``.
        pipeline_split: blocks per stage (with chunks: per chunk, in the order of the model), e.g. ``(3, 5)``; ``None``
            balances by ``pipeline_balance_by``.
        pipeline_balance_by: what a block costs: its ``"parameters"``, or the ``"flops"`` of its forward in a trial run
            of the step (what is only looked up costs nothing then). What runs before and after the stack counts.
        sharding_plan: how layers that are not from ``lightning_megapar.layers`` are cut over the tensor ranks:
            ``"auto"`` (the module's own plan, else the one that transformers publishes), ``"off"``, a mapping of
            module-name patterns to styles, or the path of a YAML file with one.
        cluster: description of devices and links (a mapping, or the path of a YAML file; see
            :class:`~lightning_megapar.planner.cluster.Cluster`), by which the chooser of a sharding plan takes the
            cheapest layout; ``None`` cuts whatever can be cut.
        rebalance: what is done when a rank is slow: options of
            :class:`~lightning_megapar.pipeline.balance.options.Rebalance`; ``None`` measures nothing.
        recompute: what is recomputed in the backward instead of being kept: ``"none"``, ``"selective"``, ``"full"``,
            ``"auto"``, or :class:`~lightning_megapar.memory.options.RecomputeConfig` and its arguments.
        arena: take the pipeline's messages, gradients and the kept inputs of recomputed blocks from one piece of
            memory, whose layout is planned from the first step (:mod:`lightning_megapar.memory.arena`).

    Raises:
        ConfigError: on any value outside its range, naming the setting, the value and the nearest valid ones.
    """

    tensor_parallel_size: Degree = "auto"
    pipeline_parallel_size: Degree = "auto"
    context_parallel_size: Degree = "auto"
    expert_parallel_size: Degree = "auto"
    data_parallel_size: Degree = "auto"
    sequence_parallel: bool = False
    zero_stage: int = 0
    data_parallel_replicas: int = 1
    offload_optimizer: bool = False
    num_microbatches: Degree = "auto"
    pipeline_schedule: str | OwnSchedule = "1f1b"
    pipeline_memory_limit: float | list[float] | tuple[float, ...] | None = None
    pipeline_chunks: Degree = "auto"
    pipeline_blocks: str | None = None
    pipeline_stack: str | None = None
    pipeline_split: tuple[int, ...] | None = None
    pipeline_balance_by: Literal["parameters", "flops"] = "parameters"
    sharding_plan: Any = "auto"
    cluster: Any = None
    rebalance: Any = None
    recompute: Any = "none"
    arena: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name.endswith("_size") or field.name in ("num_microbatches", "pipeline_chunks"):
                _check_degree(field.name, getattr(self, field.name))
        for name in ("context_parallel_size", "expert_parallel_size"):
            if getattr(self, name) not in ("auto", 1):
                raise ConfigError(f"{name}={getattr(self, name)} is not available yet; valid values: 1, 'auto'")
        if not isinstance(self.sequence_parallel, bool):
            raise ConfigError(f"sequence_parallel={self.sequence_parallel!r}: expected true or false")
        if not isinstance(self.arena, bool):
            raise ConfigError(f"arena={self.arena!r}: expected true or false")
        if self.pipeline_balance_by not in ("parameters", "flops"):
            near = nearest_name(str(self.pipeline_balance_by), ("parameters", "flops"))
            raise ConfigError(
                f"pipeline_balance_by={self.pipeline_balance_by!r}: expected 'parameters' or 'flops'"
                + (f"; did you mean {near!r}?" if near else "")
            )
        self._check_schedule()
        self._check_zero()
        if self.pipeline_blocks and self.pipeline_stack and self.pipeline_blocks != self.pipeline_stack:
            raise ConfigError(
                f"pipeline_blocks={self.pipeline_blocks!r} and pipeline_stack={self.pipeline_stack!r} are two names of "
                "one setting; give one of them (pipeline_blocks)"
            )
        for name in ("pipeline_blocks", "pipeline_stack"):
            object.__setattr__(self, name, self.pipeline_blocks or self.pipeline_stack)
        if self.pipeline_split is not None:
            object.__setattr__(self, "pipeline_split", tuple(self.pipeline_split))
            if any(not isinstance(n, int) or n < 1 for n in self.pipeline_split or ()):
                raise ConfigError(f"pipeline_split={self.pipeline_split!r}: every stage needs at least one block")
            named = len(self.pipeline_split or ())
            each = f" of {self.chunks} chunks" if self.chunks > 1 else ""
            if named % self.chunks or self.pipeline_parallel_size not in ("auto", named // self.chunks):
                raise ConfigError(
                    f"pipeline_split={self.pipeline_split!r} names {named} stages but "
                    f"pipeline_parallel_size={self.pipeline_parallel_size}{each}"
                )

    def _check_zero(self) -> None:
        stage = self.zero_stage
        if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage <= 3:
            raise ConfigError(f"zero_stage={stage!r} is none of ZeRO's; valid values: 0, 1, 2, 3")
        if stage == 3 and self.splits_backward:
            raise ConfigError(
                f"zero_stage=3 with pipeline_schedule={self.schedule_name!r}: a block lets go of its parameters "
                "behind the backward of its inputs, while the microbatch is alive for the gradients of its weights. "
                "Valid values: zero_stage=2, or pipeline_schedule=1f1b, interleaved_1f1b, gpipe"
            )
        replicas = self.data_parallel_replicas
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
            raise ConfigError(f"data_parallel_replicas={replicas!r}: expected a positive integer (nearest valid: 1)")
        if not isinstance(self.offload_optimizer, bool):
            raise ConfigError(f"offload_optimizer={self.offload_optimizer!r}: expected true or false")
        for name, default in (("data_parallel_replicas", 1), ("offload_optimizer", False)):
            if getattr(self, name) != default and stage == 0:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is for sharded data ranks, but zero_stage=0 shards nothing; valid: "
                    f"zero_stage=1, 2 or 3, or {name}={default}"
                )
        if self.data_parallel_size != "auto":
            self._check_shards(self.data_parallel_size)

    def _check_shards(self, data: int) -> None:
        if self.offload_optimizer and data == 1:
            raise ConfigError(
                "offload_optimizer=True keeps the shards of several data ranks in host memory, but data_parallel_size "
                "is 1; valid: data_parallel_size=2 or more, or offload_optimizer=false"
            )
        if data % self.data_parallel_replicas:
            near = nearest(self.data_parallel_replicas, divisors(data))
            raise ConfigError(
                f"data_parallel_replicas={self.data_parallel_replicas} does not divide data_parallel_size={data}; "
                f"nearest valid values: {', '.join(map(str, near))}"
            )

    def _check_schedule(self) -> None:
        own = self.pipeline_schedule
        if isinstance(own, str):
            if own not in (*SCHEDULES, AUTO):
                raise unknown_schedule(own)
        else:
            self._check_own(own)
        if self.pipeline_memory_limit is not None:
            self._check_memory_limit()
        least, most = chunks_of(own)
        if self.pipeline_chunks != "auto" and not least <= self.pipeline_chunks <= (most or self.pipeline_chunks):
            valid = f"{least} or more" if most is None else str(least)
            raise ConfigError(
                f"pipeline_chunks={self.pipeline_chunks} is none that pipeline_schedule={self.schedule_name!r} can "
                f"have; valid values: {valid}, 'auto'"
            )

    def _check_own(self, own: OwnSchedule) -> None:
        """What a schedule of the user's own fixes; settings that are ``"auto"`` are filled from it."""
        if not all(hasattr(own, name) for name in ("num_stages", "num_chunks", "num_microbatches", "splits_backward")):
            raise ConfigError(
                f"pipeline_schedule={own!r}: expected one of {', '.join((*SCHEDULES, AUTO))}, the path of a .csv file, "
                "or a Schedule"
            )
        if own.num_stages < 2 or not own.is_training:
            what = "is for one stage; a pipeline has at least 2" if own.is_training else "has no backward"
            raise ConfigError(f"pipeline_schedule={own.name!r} {what}")
        for setting, what in (("pipeline_parallel_size", "stages"), ("num_microbatches", "microbatches")):
            needed = own.num_stages if what == "stages" else own.num_microbatches
            if getattr(self, setting) not in ("auto", needed):
                raise ConfigError(
                    f"{setting}={getattr(self, setting)}, but pipeline_schedule={own.name!r} is for {needed} {what}; "
                    f"valid values: {needed}, 'auto'"
                )
            object.__setattr__(self, setting, needed)

    def _check_memory_limit(self) -> None:
        limit = self.pipeline_memory_limit
        if self.pipeline_schedule != AUTO:
            raise ConfigError(
                f"pipeline_memory_limit={limit} is for the choice of a schedule, but pipeline_schedule="
                f"{self.schedule_name!r} is given; use pipeline_schedule='auto', or pipeline_memory_limit=null"
            )
        numbers = tuple(limit) if isinstance(limit, list | tuple) else (limit,)
        stages = self.pipeline_parallel_size
        if any(isinstance(one, bool) or not isinstance(one, int | float) or not one > 0 for one in numbers) or (
            isinstance(limit, list | tuple) and (not numbers or stages not in ("auto", len(numbers)))
        ):
            raise ConfigError(
                f"pipeline_memory_limit={limit!r}: expected a positive number of microbatches, or one for each stage "
                f"(pipeline_parallel_size={stages})"
            )
        if isinstance(limit, list):
            object.__setattr__(self, "pipeline_memory_limit", numbers)

    @property
    def schedule_name(self) -> str:
        """Name of the pipeline's schedule, for messages."""
        return self.pipeline_schedule if isinstance(self.pipeline_schedule, str) else self.pipeline_schedule.name

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes weight gradients apart from the rest of the backward."""
        return splits_backward(self.pipeline_schedule)

    @property
    def chunks(self) -> int:
        """Chunks per stage; under ``pipeline_schedule="auto"`` the fewest that may be chosen."""
        if self.pipeline_chunks != "auto":
            return self.pipeline_chunks
        if self.pipeline_schedule == AUTO and self.pipeline_split and self.pipeline_parallel_size != "auto":
            return max(1, len(self.pipeline_split) // self.pipeline_parallel_size)
        return chunks_of(self.pipeline_schedule)[0]

    @property
    def chunks_are_given(self) -> bool:
        """Whether a choice of the schedule is bound to :attr:`chunks`."""
        return self.pipeline_chunks != "auto" or self.pipeline_split is not None

    def resolve(self, world_size: int) -> tuple[Layout, str]:
        """Fill the ``"auto"`` degrees for ``world_size`` ranks.

        Returns:
            the layout and one sentence that says why it was chosen.

        Raises:
            ConfigError: when the product of the sizes cannot be ``world_size``; the nearest valid layouts are named.
        """
        pipeline_default = len(self.pipeline_split) // self.chunks if self.pipeline_split else 1
        tensor = 1 if self.tensor_parallel_size == "auto" else self.tensor_parallel_size
        pipeline = pipeline_default if self.pipeline_parallel_size == "auto" else self.pipeline_parallel_size
        fixed = tensor * pipeline
        if self.data_parallel_size == "auto":
            if world_size % fixed:
                raise ConfigError(self._mismatch(world_size, tensor, pipeline, None))
            data = world_size // fixed
        else:
            data = self.data_parallel_size
            if fixed * data != world_size:
                raise ConfigError(self._mismatch(world_size, tensor, pipeline, data))
        chosen = [
            name
            for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
            if getattr(self, name) == "auto"
        ]
        reason = (
            f"{', '.join(chosen)} = auto: every rank that no given degree uses becomes a data-parallel replica"
            if chosen
            else "all degrees given"
        )
        self._check_shards(data)
        return Layout(pipeline=pipeline, data=data, tensor=tensor), reason

    def microbatches(self, layout: Layout) -> int:
        """Microbatches per batch for a layout."""
        if self.num_microbatches == "auto":
            return 1 if layout.pipeline == 1 else 2 * layout.pipeline
        return self.num_microbatches

    def _mismatch(self, world: int, tensor: int, pipeline: int, data: int | None) -> str:
        asked = f"tensor_parallel_size={tensor}, pipeline_parallel_size={pipeline}" + (
            f", data_parallel_size={data}" if data is not None else ""
        )
        valid = sorted(
            ((t, p, world // (t * p)) for t in divisors(world) for p in divisors(world // t)),
            key=lambda c: abs(c[0] - tensor) + abs(c[1] - pipeline) + (abs(c[2] - data) if data is not None else 0),
        )[:3]
        named = "; ".join(
            f"tensor_parallel_size={t} pipeline_parallel_size={p} data_parallel_size={d}" for t, p, d in valid
        )
        product = tensor * pipeline * (data or 1)
        return (
            f"{asked}: the sizes multiply to {product} but devices x num_nodes = {world}. "
            f"Nearest valid layouts for {world}: {named}; or use devices={product}"
        )


def _check_degree(name: str, value: object) -> None:
    if value == "auto":
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r}: expected a positive integer or 'auto' (nearest valid: 1)")
