"""``bf16-true`` with float32 masters: what is registered stays float32, what a step computes with is bfloat16.

Optimizers, checkpoints, norms and clipping see the parameters that the module registers: float32. For the duration of
a step each of them shows a bfloat16 copy *in its own place*: the Parameter object stays the same and only its storage
is another one. So tied weights stay tied, recurrent layers keep their lists of weights, gradients that wait find their
parameter, and nothing in the user's module has to be exchanged. A parameter's gradient is float32 throughout
(``Tensor.grad_dtype``): microbatches and accumulated batches are added in float32, and so are the ranks' sums.

Under FSDP2 (``zero_stage``) the gathered parameters are such copies already; see :func:`gathered_in`.

A copy costs one pass over the parameters per step (autocast rounds each weight at each use) and 2 bytes per parameter
while a step runs; nothing between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_megapar.data_parallel.parameters import LogicalParameter
from lightning_megapar.pipeline.cutting.stand_ins import StandIn
from lightning_megapar.trees import in_any_tree

WORKING = torch.bfloat16
MASTER = torch.float32


class WorkingCopies:
    """Bfloat16 storage for this rank's parameters while a step runs.

    Args:
        parameters: this rank's logical parameters now; those that FSDP2 manages are left to it.
    """

    def __init__(self, parameters: Callable[[], Sequence[LogicalParameter]]) -> None:
        self._parameters = parameters
        self._masters: list[tuple[nn.Parameter, Any]] | None = None

    @contextmanager
    def shown(self) -> Generator[None, None, None]:
        """While active, parameters are bfloat16; their gradients are float32 now and afterwards."""
        if self._masters is not None:  # a step within a step
            yield
            return
        self._show()
        try:
            yield
        finally:
            self._hide()

    @contextmanager
    def masters(self) -> Generator[None, None, None]:
        """While active within a step, parameters are the masters (for an optimizer's step); copies follow them."""
        if self._masters is None:
            yield
            return
        self._hide()
        try:
            yield
        finally:
            self._show()

    @torch.no_grad()
    def _show(self) -> None:
        own = [p.parameter for p in self._parameters() if not p.data_sharded and p.parameter.dtype == MASTER]
        self._masters = []
        for parameter in own:
            if parameter.requires_grad:
                parameter.grad_dtype = MASTER  # said, so that it does not follow the storage
            self._masters.append((parameter, _storage_of(parameter)))
            _put(parameter, _storage_of(parameter.detach().to(WORKING)))

    def _hide(self) -> None:
        masters, self._masters = self._masters or [], None
        for parameter, storage in masters:
            _put(parameter, storage)


def _storage_of(tensor: Tensor) -> Any:
    """What :func:`_put` puts back: the tensor behind, and for a DTensor its local piece and layout (with its dtype)."""
    if isinstance(tensor, DTensor):
        return tensor.data, tensor._local_tensor, tensor._spec
    return (tensor.data,)


def _put(parameter: Any, storage: Any) -> None:
    parameter.data = storage[0]
    if len(storage) > 1:
        parameter._local_tensor, parameter._spec = storage[1:]


def as_masters(module: nn.Module) -> nn.Module:
    """Float32 parameters, bfloat16 buffers (as Lightning's ``HalfPrecision`` makes them); in place.

    What stands for modules of other stages says bfloat16, as they would in a step.
    """
    module._apply(lambda t: t.to(MASTER) if t.is_floating_point() else t)
    for child in module.modules():
        if isinstance(child, StandIn):
            child._apply(lambda t: t.to(WORKING) if t.is_floating_point() else t)
        elif not isinstance(child, Metric):
            for name, buffer in child._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    child._buffers[name] = buffer.to(WORKING)
        if isinstance(child, in_any_tree("core.module", "LightningModule")):
            vars(child)["_dtype"] = WORKING  # what module.dtype says in a step
    return module


def gathered_in() -> MixedPrecisionPolicy:
    """FSDP2's part: shards in float32, gathered parameters in bfloat16, gradients reduced in float32."""
    return MixedPrecisionPolicy(param_dtype=WORKING, reduce_dtype=MASTER, cast_forward_inputs=False)


@dataclass(frozen=True)
class HeldAs:
    """What a module is between steps, where that is not what it is in them.

    Args:
        convert: makes a module so, in place.
        working_dtype: of its floating parameters in a step.
        gathered: the same for FSDP2.
    """

    convert: Callable[[nn.Module], nn.Module] = as_masters
    working_dtype: torch.dtype = WORKING
    gathered: MixedPrecisionPolicy = field(default_factory=gathered_in)


def is_bfloat16_true(plugin: Any) -> bool:
    """Whether this is Lightning's plugin of ``bf16-true``."""
    half = isinstance(plugin, in_any_tree("plugins.precision", "HalfPrecision"))
    return half and str(plugin.precision) == "bf16-true"


def adopt(plugin: Any) -> Callable[[nn.Module], nn.Module]:
    """Make a ``bf16-true`` plugin of Lightning's keep float32 masters.

    Returns:
        what it did to a module before: for trial runs, which train nothing.
    """
    # The class's own: a plugin may have been adopted before, by another strategy.
    convert: Callable[[nn.Module], nn.Module] = type(plugin).convert_module.__get__(plugin)

    def init_context() -> AbstractContextManager[None]:
        return nullcontext()  # parameters are made in float32: they are the masters

    plugin.convert_module = as_masters
    plugin.tensor_init_context = init_context
    plugin.module_init_context = init_context
    return convert
