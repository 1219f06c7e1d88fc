"""The logical parameters of a model: one record per parameter that this rank holds, under its canonical name.

The canonical name is the first name in the *whole* module's ``named_parameters`` order, recorded before the module is
cut and sharded; checkpoints, tied-gradient sums and the norm all speak of parameters by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_megapar.shards import IndexedTensor, ParameterShard, Value, own_addends, own_shards


@dataclass(frozen=True)
class ModuleNames:
    """Names of the whole module, recorded before it is cut.

    Args:
        parameters: canonical names in ``named_parameters`` order.
        canonical: every name a parameter has -> its canonical name (tied parameters have several).
        state_dict: keys of the whole module's ``state_dict()`` in order.
        shapes: canonical name -> full shape.
    """

    parameters: tuple[str, ...]
    canonical: dict[str, str]
    state_dict: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def record(cls, module: nn.Module) -> ModuleNames:
        first: dict[int, str] = {}
        canonical: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            key = first.setdefault(id(parameter), name)
            canonical[name] = key
            shapes[key] = tuple(parameter.shape)
        parameters = tuple(dict.fromkeys(canonical.values()))
        return cls(parameters, canonical, tuple(module.state_dict(keep_vars=True)), shapes)

    @property
    def tied(self) -> dict[str, str]:
        """Alias -> canonical name, for parameters with more than one name."""
        return {name: key for name, key in self.canonical.items() if name != key}


@dataclass(frozen=True)
class LogicalParameter:
    """A parameter held by this rank.

    Args:
        name: canonical name.
        parameter: the registered object: plain, a DTensor on the tensor mesh, or FSDP2's DTensor on data x tensor.
        partial_over_tensor: its gradient on each tensor rank is a partial sum.
        stages: pipeline stages that hold it (more than one for tied parameters).
        data_sharded: FSDP2 reduces its gradient over the data ranks and keeps a shard.
        shard: how it is cut over the tensor ranks by a sharding plan; ``None`` for a DTensor or a whole one.
    """

    name: str
    parameter: nn.Parameter
    partial_over_tensor: bool
    stages: tuple[int, ...]
    data_sharded: bool
    shard: ParameterShard | None = None

    def as_value(self, tensor: Tensor) -> Value:
        """``tensor``, laid out as the parameter is (a gradient, an optimizer's state), with its global shape."""
        if self.shard is None or tuple(tensor.shape) != tuple(self.parameter.shape):
            return tensor
        return IndexedTensor(tensor, self.shard)

    @property
    def tensor_sharded(self) -> bool:
        """Whether each tensor rank holds a different piece."""
        if self.shard is not None:
            return True
        if not isinstance(self.parameter, DTensor):
            return False
        names = self.parameter.device_mesh.mesh_dim_names or ()
        return any(
            isinstance(placement, Shard) or placement.is_shard()
            for axis, placement in zip(names, self.parameter.placements)
            if axis == "tensor"
        )

    @property
    def local_gradient(self) -> Tensor | None:
        """This rank's piece of ``.grad`` as a plain tensor (a view), or ``None``."""
        return local_tensor(self.parameter.grad)


def local_tensor(value: Tensor | None) -> Tensor | None:
    """The local shard of a DTensor, the tensor itself otherwise; never tracked by autograd."""
    if isinstance(value, DTensor):
        return value._local_tensor
    return value


def collect_parameters(
    module: nn.Module,
    names: ModuleNames,
    stages_of: dict[str, tuple[int, ...]],
    partial: set[str],
    data_sharded: set[str],
) -> list[LogicalParameter]:
    """One record per parameter of ``module``, in the canonical order (the same on every rank that holds it)."""
    held: dict[str, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        held.setdefault(names.canonical[name], parameter)
    shards = shards_by_name(module, names)
    return [
        LogicalParameter(
            name=name,
            parameter=held[name],
            partial_over_tensor=name in partial,
            stages=stages_of.get(name, (0,)),
            data_sharded=name in data_sharded,
            shard=shards.get(name),
        )
        for name in names.parameters
        if name in held
    ]


def partial_parameter_names(module: nn.Module, names: ModuleNames) -> set[str]:
    """Canonical names of parameters whose gradients the sharded layers leave as partial sums over tensor ranks."""
    found: set[str] = set()
    for path, child in module.named_modules():
        report = getattr(child, "partial_gradients", None)
        partial = [*(report() if callable(report) else ()), *own_addends(child)]
        found.update(names.canonical[f"{path}.{name}" if path else name] for name in partial)
    return found


def shards_by_name(module: nn.Module, names: ModuleNames) -> dict[str, ParameterShard]:
    """Canonical name -> how a sharding plan has cut the parameter."""
    return {
        names.canonical[f"{path}.{name}" if path else name]: shard
        for path, child in module.named_modules()
        for name, shard in own_shards(child).items()
    }


def trainable(parameters: Iterable[LogicalParameter]) -> list[LogicalParameter]:
    return [p for p in parameters if p.parameter.requires_grad]


def set_local_gradient(record: LogicalParameter, gradient: Tensor | None) -> None:
    """Set ``.grad`` from a local piece, in the parameter's own layout."""
    parameter = record.parameter
    if gradient is None:
        parameter.grad = None
    else:
        parameter.grad = laid_out_like(gradient, parameter)


def laid_out_like(local: Tensor, other: Tensor | None) -> Tensor:
    """This rank's piece as a DTensor in the layout of ``other``, or as it is when that is none."""
    if not isinstance(other, DTensor):
        return local
    return DTensor.from_local(
        local, other.device_mesh, other.placements, run_check=False, shape=other.shape, stride=other.stride()
    )


def flatten(tensors: list[Tensor]) -> Tensor:
    """Concatenate the elements of same-dtype tensors into one flat buffer."""
    return torch.cat([t.reshape(-1) for t in tensors])
