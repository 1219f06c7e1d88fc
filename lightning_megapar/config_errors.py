"""Errors of settings: they name the setting, its value, and the nearest valid ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches

from lightning_megapar.schedule_names import AUTO, SCHEDULES

FOREIGN_NAMES: dict[str, str] = {
    "tensor_model_parallel_size": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "tp": "tensor_parallel_size",
    "autotp_size": "tensor_parallel_size",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "pp": "pipeline_parallel_size",
    "num_stages": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "dp": "data_parallel_size",
    "context_model_parallel_size": "context_parallel_size",
    "cp_size": "context_parallel_size",
    "cp": "context_parallel_size",
    "expert_model_parallel_size": "expert_parallel_size",
    "ep_size": "expert_parallel_size",
    "ep": "expert_parallel_size",
    "zero_optimization_stage": "zero_stage",
    "stage": "zero_stage",
    "data_parallel_replicate_degree": "data_parallel_replicas",
    "num_distributed_optimizer_instances": "data_parallel_replicas",
    "hybrid_shard": "data_parallel_replicas",
    "cpu_offload": "offload_optimizer",
    "optimizer_cpu_offload": "offload_optimizer",
    "n_microbatches": "num_microbatches",
    "num_micro_batches": "num_microbatches",
    "microbatches": "num_microbatches",
    "gradient_accumulation_steps": "accumulate_grad_batches (a Trainer argument)",
    "sp": "sequence_parallel",
    "schedule": "pipeline_schedule",
    "virtual_pipeline_model_parallel_size": "pipeline_chunks",
    "virtual_pipeline_parallel_size": "pipeline_chunks",
    "num_chunks": "pipeline_chunks",
    "dynamic_balance": "rebalance",
}
"""What the same thing is called in Megatron-LM, NeMo, DeepSpeed, torchtitan and nanotron."""


class ConfigError(ValueError):
    """A setting that cannot work, found before any rank starts."""


def unknown_schedule(value: object, files: Iterable[str] = ()) -> ConfigError:
    """The error for a ``pipeline_schedule`` that is neither a name nor a file, with the nearest of both.

    Args:
        value: what was given.
        files: CSV files that could have been meant.
    """
    word = str(value).lower().removesuffix(".csv")
    name = nearest_name(word, (*SCHEDULES, AUTO))
    file = get_close_matches(str(value), list(files), n=1)
    near = [repr(one) for one in (name, *file) if one]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return ConfigError(
        f"pipeline_schedule={str(value)!r} is not one of {', '.join((*SCHEDULES, AUTO))}, nor the path of a .csv file "
        f"that exists{hint}"
    )


def nearest_name(name: str, valid: Iterable[str]) -> str | None:
    """The valid setting that ``name`` most likely means, or ``None``."""
    candidates = list(valid)
    if name in FOREIGN_NAMES:
        return FOREIGN_NAMES[name]
    close = get_close_matches(name, candidates, n=1, cutoff=0.6)
    return close[0] if close else None


def refuse_unknown(owner: str, names: Iterable[str], valid: Iterable[str]) -> None:
    """Raise :class:`ConfigError` listing every name that ``owner`` does not know, each with its nearest neighbour."""
    valid = list(valid)
    lines = []
    for name in names:
        if name not in valid:
            near = nearest_name(name, valid)
            lines.append(f"{owner}: unknown argument {name!r}" + (f"; did you mean {near!r}?" if near else ""))
    if lines:
        raise ConfigError("\n".join(lines) + f"\nValid arguments: {', '.join(valid)}")


def refuse_no_number(name: str, value: object, above: float) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a finite number above a bound."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
        what = "a positive number" if above == 0 else f"a number above {above:g}"
        raise ConfigError(f"{name}={value!r}: expected {what}, and a finite one")


def divisors(number: int) -> list[int]:
    """All positive divisors of ``number`` in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest(value: int, candidates: Iterable[int], count: int = 2) -> list[int]:
    """The ``count`` candidates closest to ``value``, ascending."""
    return sorted(sorted(candidates, key=lambda c: (abs(c - value), c))[:count])
