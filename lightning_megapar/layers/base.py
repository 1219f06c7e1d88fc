"""What every sharded layer has in common."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from lightning_megapar.config import ConfigError, divisors, nearest
from lightning_megapar.layers.collectives import TensorRanks
from lightning_megapar.layers.local import distribute, fill, replace_parameter


class ParallelLayer(nn.Module):
    """A layer that is an ordinary one until :meth:`shard` splits it over the tensor axis.

    The constructor makes full-size plain parameters (``device`` and ``dtype`` honoured, meta allowed). Without a mesh
    the forward is the plain layer's and touches no process group.

    A subclass names the placement of each own parameter in :meth:`placement`, their initial values in
    :meth:`initial_value` and those whose gradients need a sum over the ranks in :meth:`partial_gradients`.
    """

    ranks: TensorRanks | None = None
    """The ranks that share this layer; ``None`` while it is whole."""

    def placement(self, name: str, mesh: DeviceMesh) -> Placement:
        """How own parameter ``name`` lies on the tensor mesh.

        Raises:
            ConfigError: when the mesh cannot split it.
        """
        return Replicate()

    def shard(self, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        """Replace own parameters by this rank's pieces, as DTensors on ``mesh``.

        Values are kept (each rank takes its slice of the full value that it holds, which must be the same on every
        rank); meta parameters stay meta. ``requires_grad`` and Python attributes set on a parameter are kept.
        A parameter that another layer owns too becomes two: :func:`lightning_megapar.sharding.shard_module` ties
        them again.

        Args:
            mesh: the one-dimensional mesh of the tensor axis.
            sequence_parallel: activations outside the layer hold a slice of the sequence (dimension -2).

        Raises:
            ConfigError: when a size cannot be split over the mesh, naming setting, value and nearest valid values.
            RuntimeError: when the layer is sharded already.
        """
        if self.ranks is not None:
            raise RuntimeError(f"{type(self).__name__} is sharded already, over {self.ranks.size} ranks")
        ranks = TensorRanks(mesh, sequence_parallel)
        if ranks.size == 1:
            return
        own = {name: p for name, p in self._parameters.items() if p is not None}
        # All placements first: a refusal must leave the layer whole.
        placements = {name: self.placement(name, mesh) for name in own}
        for name, parameter in own.items():
            self._parameters[name] = replace_parameter(parameter, distribute(parameter, mesh, placements[name]))
        self.ranks = ranks

    @property
    def tensor_size(self) -> int:
        """Ranks that share the layer (1 while it is whole)."""
        return 1 if self.ranks is None else self.ranks.size

    @property
    def sequence_ranks(self) -> TensorRanks | None:
        """The ranks when activations are cut along the sequence, else ``None``."""
        return self.ranks if self.ranks is not None and self.ranks.sequence_parallel else None

    def full_shape(self, name: str) -> torch.Size:
        """Unsharded shape of own parameter ``name``."""
        return self._own(name).shape

    def initial_value(self, name: str, generator: torch.Generator) -> Tensor:
        """The full initial value of own parameter ``name``: float32 on the CPU, drawn from ``generator`` alone."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to initialise {name!r}")

    def assign_full(self, name: str, full: Tensor) -> None:
        """Copy this rank's piece of the full tensor into own parameter ``name``.

        Raises:
            ValueError: when ``full`` does not have the unsharded shape.
        """
        fill(self._own(name), full)

    def partial_gradients(self) -> tuple[str, ...]:
        """Own parameters whose gradient on each rank is only an addend of the true one.

        Whoever steps the optimizer sums them over the tensor group, once per step; the layers never do. Empty
        while the layer is whole.
        """
        return ()

    def reset_parameters(self) -> None:
        """Draw all own parameters anew from torch's global generator (whole layers only, as ``nn.Linear`` does)."""
        if self.ranks is not None:
            raise RuntimeError("a sharded layer is initialised by name: lightning_megapar.sharding.initialise_by_name")
        for name, parameter in self._parameters.items():
            if parameter is not None and not parameter.is_meta:
                seed = int(torch.randint(2**62, (), device="cpu"))
                self.assign_full(name, self.initial_value(name, torch.Generator("cpu").manual_seed(seed)))

    def _own(self, name: str) -> Tensor:
        parameter = self._parameters.get(name)
        if parameter is None:
            raise KeyError(f"{type(self).__name__} has no parameter {name!r}")
        return parameter


def refuse_uneven(setting: str, value: int, size: int) -> None:
    """Raise :class:`ConfigError` unless ``size`` ranks divide ``value``, with the nearest values of both."""
    if value % size:
        sizes = nearest(size, [d for d in divisors(value) if d > 1] or [1])
        below = value - value % size
        values = [v for v in (below, below + size) if v > 0]
        raise ConfigError(
            f"{setting}={value} is not divisible by tensor_parallel_size={size}; nearest valid tensor_parallel_size: "
            f"{', '.join(map(str, sizes))}; nearest valid {setting}: {', '.join(map(str, values))}"
        )
