"""A look at the first batch before the module is cut, so that one run of the step can show what it uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from lightning_megapar.batches import copied, split_batch
from lightning_megapar.generators import generators_kept

Trial = Callable[[nn.Module], Any]
_LOOPS = {
    TrainerFn.FITTING: ("fit_loop", "training_step"),
    TrainerFn.VALIDATING: ("validate_loop", "validation_step"),
    TrainerFn.TESTING: ("test_loop", "test_step"),
    TrainerFn.PREDICTING: ("predict_loop", "predict_step"),
}


def step_name(trainer: Any) -> str:
    """Name of the module's method that the coming run calls for each batch."""
    return _LOOPS[trainer.state.fn][1]


class _CannotPeek(Exception):
    pass


def _samples(loader: Any, pieces: int, limit: int | None) -> Any:
    """As many samples as a microbatch has, without touching the loader's sampler, workers or position."""
    if not isinstance(loader, DataLoader) and hasattr(loader, "__getitem__") and not hasattr(loader, "__next__"):
        return loader[0]  # batches in a list
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise _CannotPeek
    if loader.batch_size is None and loader.batch_sampler is None:
        return loader.collate_fn(loader.dataset[0])
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or pieces
    count = min(max(1, size // pieces), limit or size, len(loader.dataset))  # type: ignore[arg-type]
    return loader.collate_fn([loader.dataset[index] for index in range(count)])


class FirstBatch:
    """Samples of the run that is about to start, on the CPU.

    Loaders of a hook (``train_dataloader``) are made once for all looks (with the random generators kept), beside the
    ones that Lightning makes for the run.

    Args:
        trainer: whose run it is.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaders: list[Any] = []

    def peek(self, pieces: int, limit: int | None = None) -> Any:
        """A microbatch; ``None`` where none can be had without side effects.

        Args:
            pieces: microbatches of a batch.
            limit: samples at most.
        """
        trainer = self._trainer
        with generators_kept(), suppress(Exception):
            loaders = self._made_loaders()
            # What a dataset or a list of batches holds itself must not be written into.
            batch = copied(tree_map(lambda loader: _samples(loader, pieces, limit), loaders, is_leaf=_is_loader))
            batch = trainer.lightning_module._apply_batch_transfer_handler(batch, device=torch.device("cpu"))
            return trainer.strategy.precision_plugin.convert_input(split_batch(batch, 1)[0][0])
        return None

    def _made_loaders(self) -> Any:
        if not self._loaders:
            self._loaders.append(None)  # a hook that failed once is not asked again
            source = getattr(self._trainer, _LOOPS[self._trainer.state.fn][0])._data_source
            loaders = source.dataloader() if source.is_module() else source.instance
            if isinstance(loaders, CombinedLoader):
                loaders = loaders.iterables
            if self._trainer.state.fn != TrainerFn.FITTING and isinstance(loaders, (list, tuple)):
                loaders = loaders[0]
            self._loaders[0] = loaders
        if self._loaders[0] is None:
            raise _CannotPeek
        return self._loaders[0]


def _is_loader(node: Any) -> bool:
    """Whether a node of a nest of loaders is one: also a list of batches, which is a nest itself."""
    if isinstance(node, dict):
        return False
    if isinstance(node, (list, tuple)):
        return not any(isinstance(one, DataLoader) for one in node)
    return True


def trial_of(trainer: Any, first: FirstBatch, pieces: int) -> Trial | None:
    """What runs one step of the coming run on a module (the user's, or a copy of it on the meta device).

    ``None`` when there is no batch to run it on. Logging does nothing meanwhile.
    """
    batch = first.peek(pieces)
    if batch is None:
        return None
    _, name = _LOOPS[trainer.state.fn]
    plugin = trainer.strategy.precision_plugin
    asked = inspect.signature(getattr(trainer.lightning_module, name)).parameters
    kwargs = {key: 0 for key in ("batch_idx", "dataloader_idx") if key in asked}
    rest = [] if kwargs or len(asked) < 2 else [0]  # an index under a name of the user's

    def run(module: Any) -> Any:
        meta = any(p.is_meta for p in module.parameters())
        moved = (
            tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, copied(batch)) if meta else copied(batch)
        )
        if meta:
            for part in module.modules():
                if "_device" in vars(part):
                    vars(part)["_device"] = torch.device("meta")  # what LightningModule.device says
        silenced = {key: _nothing for key in ("log", "log_dict") if hasattr(module, key)}
        vars(module).update(silenced)
        try:
            with generators_kept(), plugin.forward_context():
                return getattr(module, name)(moved, *rest, **kwargs)
        finally:
            for key in silenced:
                del vars(module)[key]

    return run


def _nothing(*_: Any, **__: Any) -> None:
    """Stands in for ``self.log`` in a trial."""
