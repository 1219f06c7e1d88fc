"""Lightning's ``WeightAveraging`` (SWA, EMA) where a rank holds a part of the module: each rank averages what it holds.

The callback copies the whole module in its ``setup`` and goes through two modules' parameters side by side. Here its
copy is replaced by one of this rank's share. An average is taken element by element, so the shares of all ranks
together are the average of the whole; a function of the user's that looks at a whole parameter (its norm) would see a
piece.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_megapar.config import ConfigError
from lightning_megapar.data_parallel.parameters import ModuleNames, local_tensor
from lightning_megapar.shards import IndexedTensor, Value
from lightning_megapar.strategy.prepare import PreparedModule, placed_state
from lightning_megapar.trees import in_any_tree


def averaging_callbacks(callbacks: Iterable[Any]) -> list[Any]:
    """Those that are Lightning's ``WeightAveraging`` or derive from it."""
    return [one for one in callbacks if isinstance(one, in_any_tree("callbacks", "WeightAveraging"))]


def defer_copies(callbacks: Iterable[Any], module: nn.Module, context: Callable[[], AbstractContextManager]) -> None:
    """Keep the callbacks' ``setup`` from copying the module: what they would copy is not a rank's share yet.

    Args:
        callbacks: from :func:`averaging_callbacks`, before Lightning calls their ``setup``.
        module: the user's module.
        context: in which layers are to be made (the callback's ``setup`` calls ``configure_model``).
    """
    for callback in callbacks:
        if isinstance(vars(callback).get("setup"), _Setup | None):  # one may be left from a run that failed early
            callback.setup = _Setup(callback, module, context)


class _Setup:
    """A callback's ``setup``, once, during which a copy of the module is an empty module."""

    def __init__(self, callback: Any, module: nn.Module, context: Callable[[], AbstractContextManager]) -> None:
        self.callback, self.module, self.context = callback, module, context

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        del self.callback.setup  # the class's own again
        object.__setattr__(self.module, "__deepcopy__", lambda memo: nn.Module())
        try:
            with self.context(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*WeightAveraging doesn't support sharding.*")
                self.callback.setup(*args, **kwargs)
        finally:
            object.__delattr__(self.module, "__deepcopy__")


def average_shares(callbacks: Iterable[Any], module: nn.Module, prepared: PreparedModule, device: torch.device) -> None:
    """Give each callback an averaged model of this rank's share.

    Args:
        callbacks: from :func:`averaging_callbacks`, after their ``setup``.
        module: this rank's share, not gathered by FSDP2.
        prepared: what is known about it.
        device: where this rank computes.

    Raises:
        ConfigError: when a callback wants its average on a device of another kind.
    """
    for callback in callbacks:
        wanted = callback._device
        kind = None if wanted is None else torch.device(wanted).type
        if kind not in (None, device.type):
            raise ConfigError(
                f"{type(callback).__name__}(device={str(wanted)!r}): a rank's share is averaged where it is, on "
                f"{device.type}; valid value: device=None"
            )
        options = {**callback._kwargs, "use_buffers": callback._use_buffers}
        callback._average_model = ShareAverage(module, prepared.names, device, options)


class ShareAverage(AveragedModel):
    """torch's ``AveragedModel`` of what one rank holds.

    Args:
        module: this rank's share.
        names: of the whole module.
        device: of the counter.
        options: ``avg_fn``, ``multi_avg_fn``, ``use_buffers``.
    """

    def __init__(self, module: nn.Module, names: ModuleNames, device: torch.device, options: Mapping[str, Any]) -> None:
        super().__init__(nn.Module(), device=device, **options)
        self._live = (module,)  # in a tuple, so that it is no submodule
        self._names = names
        self.module = _Shadow(self._live)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        # torch averages lists of tensors together, which must be of one kind: the pieces, not the DTensors around them.
        shadow = self.module
        self.module = _Pieces(shadow)
        try:
            super().update_parameters(_Pieces(model))
        finally:
            self.module = shadow

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """With ``module.<name>`` for this rank's share, pieces with their global place."""
        placed = placed_state(self._live[0], self._names)
        values = self.module.state_dict()
        return {
            **{f"module.{key}": _like(placed[key], value) for key, value in values.items()},
            "n_averaged": self.n_averaged,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The average is in the live module, where the strategy has loaded it; only the counter is taken from here."""
        self.module.load_state_dict({})
        self.n_averaged.copy_(state_dict["n_averaged"])


class _Shadow(nn.Module):
    """The same tree of modules as a module's, with copies of its parameters and buffers, and nothing to call."""

    def __init__(self, live: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self._live = live
        made: dict[int, Any] = {}
        self._fill(live[0], self, made)

    def _fill(self, source: nn.Module, target: nn.Module, made: dict[int, Any]) -> None:
        made[id(source)] = target
        for name, parameter in source._parameters.items():
            if parameter is not None and id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            target._parameters[name] = None if parameter is None else made[id(parameter)]
        for name, buffer in source._buffers.items():
            if buffer is not None and id(buffer) not in made:
                made[id(buffer)] = buffer.detach().clone()
            target._buffers[name] = None if buffer is None else made[id(buffer)]
        target._non_persistent_buffers_set = set(source._non_persistent_buffers_set)
        for name, child in source._modules.items():
            if child is not None and id(child) not in made:
                self._fill(child, nn.Module(), made)
            target._modules[name] = None if child is None else made[id(child)]

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Take the live module's values, whatever is passed: the strategy has loaded them."""
        live = self._live[0]
        for mine, theirs in zip(
            chain(self.parameters(), self.buffers()), chain(live.parameters(), live.buffers()), strict=True
        ):
            mine.copy_(theirs)


class _Pieces(nn.Module):
    """A module's parameters and buffers in their order, as plain local tensors that share their memory."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for index, parameter in enumerate(module.parameters()):
            self.register_parameter(str(index), nn.Parameter(_local(parameter), requires_grad=False))
        for index, buffer in enumerate(module.buffers()):
            self.register_buffer(f"buffer{index}", _local(buffer))


def _local(value: Tensor) -> Tensor:
    local = local_tensor(value)
    assert local is not None
    return local.detach()


def _like(placed: Value, value: Tensor) -> Value:
    return IndexedTensor(value, placed.shard) if isinstance(placed, IndexedTensor) else value


def own_names(state: Mapping[str, Value], module: nn.Module, names: ModuleNames) -> dict[str, Tensor]:
    """Values under canonical names as a ``state_dict`` that ``module.load_state_dict`` takes on this rank."""
    values = {key: state[names.canonical.get(key, key)] for key in module.state_dict()}
    return {key: value.local if isinstance(value, IndexedTensor) else value for key, value in values.items()}
