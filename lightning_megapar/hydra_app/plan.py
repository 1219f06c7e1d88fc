"""What can be refused before a rank exists: devices, layout, batch, model against layout, checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_megapar.config import ConfigError, Layout, ParallelConfig, divisors, nearest
from lightning_megapar.data.batch import BatchPlan
from lightning_megapar.pipeline.schedules import given_schedule

if TYPE_CHECKING:
    from lightning_megapar.models.gpt import GPTConfig

_MOST_AUTO_PROCESSES = 8


@dataclass(frozen=True)
class Devices:
    """Where the ranks compute.

    Attributes:
        accelerator: Lightning's name, ``"cpu"`` or ``"cuda"`` or what was insisted on.
        count: processes on each node.
        reason: why, when it was not given.
    """

    accelerator: str
    count: int
    reason: str = ""


@dataclass(frozen=True)
class RunPlan:
    """Everything that a run is going to do, found possible.

    Attributes:
        devices, layout, batch: see their classes.
        layout_reason: why this layout.
        parallel: the strategy's options.
    """

    devices: Devices
    layout: Layout
    layout_reason: str
    batch: BatchPlan
    parallel: ParallelConfig

    def describe(self) -> str:
        """Two lines for the terminal: where it runs and the batch arithmetic."""
        count = self.devices.count
        where = f"{count} process{'es' if count > 1 else ''} on each node, on {self.devices.accelerator}"
        why = f" ({self.devices.reason})" if self.devices.reason else ""
        return f"devices: {where}{why}\nbatch: {self.batch.describe()}"


def plan_run(
    parallel: Mapping[str, Any],
    *,
    global_batch_size: int,
    accumulate: int = 1,
    num_nodes: int = 1,
    accelerator: str = "auto",
    model: GPTConfig | None = None,
    sequence_length: int | None = None,
) -> RunPlan:
    """Check the numbers of a run against each other.

    Args:
        parallel: ``devices`` and the fields of :class:`~lightning_megapar.config.ParallelConfig`.
        global_batch_size, accumulate: of one optimizer step.
        num_nodes, accelerator: the Trainer's arguments.
        model: checked against the layout when given.
        sequence_length: checked under sequence parallelism when given.

    Raises:
        ConfigError: naming the setting, its value and the nearest valid ones.
    """
    names = {entry.name for entry in fields(ParallelConfig)}
    known = {name: value for name, value in parallel.items() if name in names}
    if "pipeline_schedule" in known:
        known["pipeline_schedule"] = given_schedule(known["pipeline_schedule"])
    config = ParallelConfig(**known)
    devices = choose_devices(
        parallel.get("devices", "auto"), accelerator, config, num_nodes, global_batch_size, accumulate
    )
    layout, reason = config.resolve(devices.count * num_nodes)
    batch = BatchPlan(global_batch_size, layout.data, accumulate, config.microbatches(layout))
    if model is not None:
        check_model(model, layout, config.sequence_parallel, sequence_length)
    return RunPlan(devices, layout, reason, batch, config)


def choose_devices(
    wanted: int | str,
    accelerator: str,
    config: ParallelConfig,
    num_nodes: int = 1,
    global_batch_size: int = 1,
    accumulate: int = 1,
) -> Devices:
    """GPUs when there are as many as ranks, else CPU processes; never Apple's GPU with several ranks.

    Raises:
        ConfigError: ``devices`` is no positive number, or the accelerator insisted on has too few devices.
    """
    if wanted != "auto" and (not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1):
        raise ConfigError(f"parallel.devices={wanted!r}: expected a positive integer or 'auto' (nearest valid: 1)")
    gpus = _gpus() if accelerator in ("auto", "gpu", "cuda") else 0
    given = os.environ.get("LOCAL_WORLD_SIZE")  # torchrun has started that many processes here already
    if wanted == "auto" and given is not None:
        wanted = int(given)
    if accelerator == "mps" and wanted not in ("auto", 1):
        raise ConfigError(
            f"trainer.accelerator=mps has no communication between processes, but parallel.devices={wanted}; "
            "nearest valid: trainer.accelerator=cpu, or parallel=single"
        )
    if wanted == "auto":
        if gpus:
            return Devices("cuda", gpus, f"devices = auto: all {gpus} GPUs")
        if accelerator == "auto" or accelerator == "cpu":
            count = _cpu_processes(config, num_nodes, global_batch_size, accumulate)
            return Devices("cpu", count, "devices = auto: what this machine's cores and the batch allow")
        return Devices(accelerator, 1)
    assert isinstance(wanted, int)
    if accelerator == "auto":
        if gpus >= wanted:
            return Devices("cuda", wanted)
        return Devices("cpu", wanted, f"{gpus} GPU here" if gpus == 1 else f"{gpus} GPUs here" if gpus else "")
    if accelerator in ("gpu", "cuda") and gpus < wanted:
        raise ConfigError(
            f"trainer.accelerator={accelerator} with parallel.devices={wanted}, but this machine has {gpus} GPUs; "
            "nearest valid: trainer.accelerator=cpu" + (f", or parallel.devices={gpus}" if gpus else "")
        )
    return Devices(accelerator, wanted)


def _gpus() -> int:
    import torch

    # Counted by the driver's library: it starts no CUDA context, after which ranks could not be forked.
    return torch.cuda.device_count() if torch.backends.cuda.is_built() else 0


def _cpu_processes(config: ParallelConfig, num_nodes: int, global_batch_size: int, accumulate: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sizes = (config.tensor_parallel_size, config.pipeline_parallel_size)
    fixed = 1
    for size in sizes:
        fixed *= 1 if size == "auto" else size
    if config.data_parallel_size != "auto":
        return max(1, fixed * config.data_parallel_size // num_nodes)
    fits = [
        count
        for count in range(1, min(cores, _MOST_AUTO_PROCESSES) + 1)
        if (count * num_nodes) % fixed == 0 and global_batch_size % (count * num_nodes // fixed * accumulate) == 0
    ]
    return max(fits, default=max(1, fixed // num_nodes))


def check_model(
    model: GPTConfig, layout: Layout, sequence_parallel: bool = False, sequence_length: int | None = None
) -> None:
    """Refuse a decoder that a layout cannot hold.

    Raises:
        ConfigError: fewer blocks than stages; heads, MLP, vocabulary or sequence that the tensor-parallel ranks do not
            divide.
    """
    from lightning_megapar.layers.base import refuse_uneven

    if model.num_layers < layout.pipeline:
        near = nearest(layout.pipeline, range(1, model.num_layers + 1))
        raise ConfigError(
            f"model.num_layers={model.num_layers} is less than pipeline_parallel_size={layout.pipeline}: a stage "
            f"would be empty; nearest valid pipeline_parallel_size: {', '.join(map(str, near))}; nearest valid "
            f"num_layers: {layout.pipeline}"
        )
    size = layout.tensor
    if size > 1:
        refuse_uneven("num_heads", model.num_heads, size)
        if model.kv_heads % size and size % model.kv_heads:
            fits = [d for d in divisors(model.num_heads) if d % model.kv_heads == 0 or model.kv_heads % d == 0]
            raise ConfigError(
                f"num_kv_heads={model.kv_heads} and tensor_parallel_size={size}: one must divide the other; nearest "
                f"valid tensor_parallel_size: {', '.join(map(str, nearest(size, fits)))}"
            )
        refuse_uneven("ffn_hidden_size", model.ffn_size, size)
        padded = -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple
        if padded % size:
            near = nearest(model.vocab_multiple, range(size, model.vocab_multiple + 2 * size, size))
            raise ConfigError(
                f"vocab_multiple={model.vocab_multiple} pads vocab_size={model.vocab_size} to {padded} rows, which "
                f"tensor_parallel_size={size} does not divide; nearest valid vocab_multiple: "
                f"{', '.join(map(str, near))}"
            )
        if sequence_parallel and sequence_length is not None:
            refuse_uneven("sequence_length", sequence_length, size)
    if sequence_length is not None and sequence_length > model.max_sequence_length:
        raise ConfigError(
            f"sequence_length={sequence_length} is above max_sequence_length={model.max_sequence_length}; nearest "
            f"valid: {model.max_sequence_length}"
        )


def checkpoint_to_resume(path: str | os.PathLike[str]) -> tuple[Path | None, Path, int]:
    """What ``resume=`` names.

    Args:
        path: a run directory, or one checkpoint.

    Returns:
        the run directory (``None`` for a checkpoint outside of one), the checkpoint, its optimizer step.

    Raises:
        ConfigError: nothing there that can be resumed; what it is instead is named.
    """
    from lightning_megapar.checkpoint import CheckpointError, read_manifest
    from lightning_megapar.checkpoint.reader import newest_checkpoint, what_is
    from lightning_megapar.hydra_app.run_directory import CHECKPOINTS, CLAIM

    given = Path(os.path.abspath(path))
    if not (given / CLAIM).is_file():
        try:
            step = read_manifest(given).step
        except (CheckpointError, OSError) as error:
            raise ConfigError(
                f"resume={str(path)!r} is neither a run directory nor a checkpoint: {what_is(given)}"
            ) from error
        owner = given.parent.parent
        return (owner if (owner / CLAIM).is_file() else None), given, step
    folder = given / CHECKPOINTS
    found = newest_checkpoint(folder)
    if found is None:
        raise ConfigError(f"resume={str(path)!r} is a run without a checkpoint yet ({folder} holds none)")
    return given, *found
