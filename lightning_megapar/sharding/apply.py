"""Shard every parallel layer below a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_megapar.config import ConfigError
from lightning_megapar.layers.base import ParallelLayer

Owner = tuple[str, nn.Module, str]
"""Dotted name of the module ("" for the root), the module, the parameter's name in it."""


def parameter_owners(module: nn.Module) -> dict[int, list[Owner]]:
    """``id(parameter)`` -> its owners, in the order of ``named_parameters``; more than one owner means tied."""
    owners: dict[int, list[Owner]] = {}
    for path, child in module.named_modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((path, child, name))
    return owners


def shard_module(module: nn.Module, mesh: DeviceMesh | None, sequence_parallel: bool) -> None:
    """Call :meth:`ParallelLayer.shard` on every parallel layer below ``module`` (itself included).

    A Parameter shared by several layers (a tied embedding and head) is one shared Parameter afterwards as well.

    Args:
        module: any module; other layers in it stay as they are.
        mesh: the one-dimensional mesh of the tensor axis; ``None`` or one rank leaves everything whole.
        sequence_parallel: activations between sharded regions hold a slice of the sequence.

    Raises:
        ConfigError: from a layer that the mesh cannot split, with the layer's dotted name in front; or for a
            parameter shared between a parallel layer and another one, or between two that split it differently.
    """
    if mesh is None or mesh.size() == 1:
        return
    tied = [owners for owners in parameter_owners(module).values() if len(owners) > 1]
    for owners in tied:
        kinds = {isinstance(owner, ParallelLayer) for _, owner, _ in owners}
        names = [f"{path}.{name}".lstrip(".") for path, _, name in owners]
        if kinds == {True, False}:
            raise ConfigError(
                f"{' and '.join(names)} share one parameter, but only one of the layers is a parallel layer; make both "
                "parallel (such as VocabParallelEmbedding with VocabParallelHead), or untie them"
            )
        if kinds == {True}:
            placements = set()
            for path, owner, name in owners:
                with _naming(path):
                    placements.add(owner.placement(name, mesh))  # type: ignore[operator]
            if len(placements) > 1:
                raise ConfigError(
                    f"{' and '.join(names)} share one parameter but split it differently: "
                    f"{', '.join(sorted(map(str, placements)))}"
                )
    for path, layer in module.named_modules():
        if isinstance(layer, ParallelLayer):
            with _naming(path):
                layer.shard(mesh, sequence_parallel)
    for (_, first, first_name), *others in tied:
        for _, other, name in others:
            other._parameters[name] = first._parameters[first_name]


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Put the layer's dotted name in front of what it refuses."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error
