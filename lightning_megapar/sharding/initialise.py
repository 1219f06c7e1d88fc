"""Initial values that depend on a seed and a parameter's name alone, hence on no layout."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_megapar.config import ConfigError
from lightning_megapar.layers.base import ParallelLayer
from lightning_megapar.layers.local import fill, replace_parameter
from lightning_megapar.sharding.apply import Owner, parameter_owners
from lightning_megapar.sharding.blueprint import Blueprint
from lightning_megapar.shards import own_shards


def name_seed(seed: int, name: str) -> int:
    """A 63-bit seed from ``(seed, name)``, the same in every process and on every machine."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class _Root:
    """Whose seed and whose names hold for a part of the module."""

    path: str
    seed: int
    prefix: str
    aliases: Mapping[str, str]

    def seed_of(self, path: str) -> int:
        """The seed for a dotted path below the module that is initialised."""
        local = path[len(self.path) + 1 :] if self.path else path
        return name_seed(self.seed, self.prefix + self.aliases.get(local, local))


def initialise_by_name(
    module: nn.Module,
    seed: int,
    prefix: str = "",
    only_meta: bool = True,
    device: torch.device | str = "cpu",
    aliases: Mapping[str, str] | None = None,
    blueprints: Sequence[Blueprint] = (),
    loaded: Collection[str] = (),
) -> None:
    """Give parameters values that depend on ``seed`` and their names alone, sharded or not, meta or not.

    Each full value is drawn on the CPU in float32, cut and copied, one after the other. A parallel layer's value comes
    from its ``initial_value`` under a generator seeded from (seed, ``prefix`` + name), the name being the parameter's
    first in ``named_parameters`` order. Any other module's ``reset_parameters`` runs on a full-size CPU copy while
    torch's global generator is seeded from (seed, ``prefix`` + module name), and is restored afterwards.

    A submodule with an integer attribute ``init_seed`` starts names and seed anew: it draws the same values wherever
    it sits. It may have ``init_aliases``, a dict of a tied parameter's further names to its canonical one, which holds
    where the canonical owner is on another pipeline stage.

    Args:
        module: its meta parameters (and meta buffers) become real on ``device``; tied parameters stay tied.
        seed: of everything outside the submodules that bring their own.
        prefix: put in front of the names that ``seed`` goes with.
        only_meta: leave parameters that are real already alone.
        device: where meta parameters materialise.
        aliases: as ``init_aliases``, for names below ``module`` that ``seed`` goes with.
        blueprints: the transformers models in ``module``, whole; what they hold on the meta device gets the value of
            their own ``_init_weights``, drawn under the tensor's name.
        loaded: names of tensors that somebody fills afterwards; they are made, not drawn.

    Raises:
        ConfigError: for meta parameters or buffers that nothing fills (their module has no ``reset_parameters``, or it
            leaves them out), all in one list.
    """
    roots = dict(_roots(module, seed, prefix, aliases or {}))
    owners = parameter_owners(module)
    wanted = {key: own for key, own in owners.items() if _parameter(own[0]).is_meta or not only_meta}
    fresh = {own[0][:1] + own[0][2:]: own for own in wanted.values()}
    unfilled = frozenset().union(*(blueprint.unfilled for blueprint in blueprints))
    failed: list[str] = []
    with torch.no_grad():
        for path, child in module.named_modules():
            names = [n for n in child._parameters if (path, n) in fresh or _join(path, n) in unfilled]
            meta_buffers = [name for name, b in child._buffers.items() if b is not None and b.is_meta]
            if not names and not meta_buffers:
                continue
            for name in names:
                if (path, name) in fresh:
                    _materialise(fresh[path, name], device)
            root = roots[_root_of(path, roots)]
            if loaded:
                names = [name for name in names if _join(path, name) not in loaded]
                for name in [name for name in meta_buffers if _join(path, name) in loaded]:
                    meta_buffers.remove(name)
                    child._buffers[name] = torch.empty_like(child._buffers[name], device=device)  # type: ignore[arg-type]
            if blueprints and only_meta:
                names, meta_buffers = _draw(path, child, names, meta_buffers, root, blueprints, device)
                names = [name for name in names if _join(path, name) not in unfilled]  # real: the constructor's value
            if not names and not meta_buffers:
                continue
            if isinstance(child, ParallelLayer):
                for name in names:
                    generator = torch.Generator("cpu").manual_seed(root.seed_of(_join(path, name)))
                    child.assign_full(name, child.initial_value(name, generator))
                failed += [_join(path, name) for name in meta_buffers]
            else:
                failed += _reset_plain(path, child, names, meta_buffers, root.seed_of(path), device, only_meta)
    if failed:
        raise ConfigError(
            f"nothing says how to fill {', '.join(failed)}: on the meta device, and the module has no "
            "reset_parameters() (a transformers model: no _init_weights) that fills it; add one, or build the module "
            "on a real device"
        )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _parameter(owner: Owner) -> Tensor:
    _, module, name = owner
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def _roots(module: nn.Module, seed: int, prefix: str, aliases: Mapping[str, str]) -> Iterator[tuple[str, _Root]]:
    yield "", _Root("", seed, prefix, aliases)
    for path, child in module.named_modules():
        own = getattr(child, "init_seed", None)
        if isinstance(own, int):
            yield path, _Root(path, own, "", getattr(child, "init_aliases", None) or {})


def _root_of(path: str, roots: Mapping[str, _Root]) -> str:
    while path not in roots:
        path = path.rpartition(".")[0]
    return path


def _materialise(owners: list[Owner], device: torch.device | str) -> None:
    """Replace a meta parameter in all its owners by one empty parameter on ``device``."""
    old = _parameter(owners[0])
    if not old.is_meta:
        return
    if isinstance(old, DTensor):
        empty = torch.empty_like(old.to_local(), device=device)
        value: Tensor = DTensor.from_local(
            empty, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
        )
    else:
        value = torch.empty_like(old, device=device)
    new = replace_parameter(old, value)
    for _, module, name in owners:
        module._parameters[name] = new


def _draw(
    path: str,
    module: nn.Module,
    names: list[str],
    meta_buffers: list[str],
    root: _Root,
    blueprints: Sequence[Blueprint],
    device: torch.device | str,
) -> tuple[list[str], list[str]]:
    """Fill what a transformers model initialises; returns the parameters and buffers that it does not."""
    left: tuple[list[str], list[str]] = ([], [])
    for names_left, wanted in zip(left, (names, meta_buffers)):
        for name in wanted:
            full_name = _join(path, name)
            seed = root.seed_of(full_name)
            value = next((v for b in blueprints if (v := b.draw(full_name, seed)) is not None), None)
            own = module._parameters.get(name)
            if value is None:
                names_left.append(name)
            elif own is not None:
                shard = own_shards(module).get(name)
                if shard is None:
                    fill(own, value)
                else:
                    shard.copy_into(own, value)
            else:
                module._buffers[name] = value.to(device)
    return left


def _reset_plain(
    path: str,
    module: nn.Module,
    names: list[str],
    meta_buffers: list[str],
    seed: int,
    device: torch.device | str,
    only_meta: bool,
) -> list[str]:
    """Run ``reset_parameters`` of a full-size CPU copy; returns the names that stayed unfilled."""
    reset = "reset_parameters" if hasattr(module, "reset_parameters") else "_reset_parameters"
    if not hasattr(module, reset):
        # A real parameter that nobody can draw again keeps its value; a meta one has none.
        return [_join(path, name) for name in names if only_meta] + [_join(path, name) for name in meta_buffers]
    twin = copy.copy(module)
    shards = own_shards(module)
    shapes = {
        name: shards[name].shape if name in shards else p.shape
        for name, p in module._parameters.items()
        if p is not None
    }
    twin._parameters = {
        name: None
        if p is None
        else nn.Parameter(torch.empty(shapes[name], device="cpu"), requires_grad=p.requires_grad)
        for name, p in module._parameters.items()
    }
    twin._buffers = {
        name: None if b is None else torch.empty(b.shape, dtype=b.dtype, device="cpu")
        for name, b in module._buffers.items()
    }
    # Some reset their children as well; those are drawn under their own names and must not change here.
    twin._modules = {name: copy.deepcopy(child).to("meta") for name, child in module._modules.items() if child}
    untouched = {
        id(tensor): tensor._version
        for held in (twin._parameters, twin._buffers)
        for tensor in held.values()
        if tensor is not None
    }
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        getattr(twin, reset)()

    def filled(tensor: Tensor) -> bool:
        return untouched.get(id(tensor)) != tensor._version

    failed = []
    for name in names:
        full, own = twin._parameters[name], module._parameters[name]
        assert full is not None and own is not None
        if filled(full):
            fill(own, shards[name].take(full.detach()) if name in shards else full.detach())
        elif only_meta:
            failed.append(_join(path, name))
    for name in meta_buffers:
        buffer = twin._buffers[name]
        assert buffer is not None
        if filled(buffer):
            module._buffers[name] = buffer.to(device)
        else:
            failed.append(_join(path, name))
    return failed
