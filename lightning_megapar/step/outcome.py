"""What a user's step returned: its loss, its tokens, and the outputs of microbatches as one."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from lightning_megapar.batches import join_outputs
from lightning_megapar.step.log import LogRecorder


class StepContractError(RuntimeError):
    """The user's step returned something that a pipelined or data-parallel step cannot use."""


READS_SHARDS = (
    "the step reckons with a parameter where its module is not being called, and there it is this rank's shard. Valid "
    "values: zero_stage=0; zero_stage=1 or 2 with such a term behind the forward, where parameters are still whole; or "
    "the term inside of that module's forward"
)


def refusal_of(error: str) -> str:
    """What one of torch's messages means in a step on sharded parameters; empty for others."""
    if "mixed torch.Tensor and DTensor" in error:
        return READS_SHARDS
    if "setStorage" in error and "out of bounds for storage of size 0" in error:
        return (
            "zero_stage=3 lets go of a block's parameters behind its forward, and the step goes back through the block "
            "within itself (autograd.grad, a gradient penalty). Valid values: zero_stage=0, 1 or 2"
        )
    return ""


def loss_of(value: Any) -> tuple[Tensor, Any]:
    """(loss, num_valid_tokens or None) of what a training_step returned."""
    tokens = None
    if isinstance(value, dict):
        tokens = value.get("num_valid_tokens")
        value = value.get("loss")
    if not isinstance(value, Tensor):
        raise StepContractError(
            "training_step must return a loss tensor or a dict with 'loss' (it returned "
            f"{type(value).__name__}); skipping a batch by returning None would leave other ranks waiting"
        )
    if isinstance(value, DTensor):
        raise StepContractError(READS_SHARDS)
    if not value.requires_grad:
        raise StepContractError("training_step returned a loss that depends on no trainable parameter")
    return value, tokens


def weigh_by_tokens(recorder: LogRecorder, weights: list[Tensor]) -> None:
    """Means logged by a step that counts its tokens are means over tokens, unless ``batch_size`` was passed."""
    for entry in recorder.entries.values():
        if not entry.explicit_weight and len(entry.weights) == len(weights):
            entry.weights = list(weights)


def joined(outputs: list[Any], sizes: list[int]) -> Any:
    """The user's outputs of a training step's microbatches as one; counts of tokens add up."""
    whole = join_outputs(outputs, sizes) if outputs else None
    if len(outputs) > 1 and isinstance(whole, dict) and "num_valid_tokens" in whole:
        whole["num_valid_tokens"] = tree_map(lambda *x: sum(x), *[o["num_valid_tokens"] for o in outputs])
    return whole
