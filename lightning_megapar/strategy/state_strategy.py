"""What a strategy keeps: checkpoints of all ranks, the whole state on one, and the module given back to a notebook."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_megapar.checkpoint import gather_full_state_dict, is_sharded_checkpoint, remove_sharded
from lightning_megapar.checkpoint.hugging_face.saving import find_blueprint, save_hugging_face
from lightning_megapar.checkpoint.training import DataPosition, load_training, save_training
from lightning_megapar.checkpoint.training_state import CURRENT, named_optimizer_state
from lightning_megapar.config import ParallelConfig
from lightning_megapar.memory.recomputation import InFlight
from lightning_megapar.shards import is_value
from lightning_megapar.step.stepper import Stepper
from lightning_megapar.step.watching import GradientObserver
from lightning_megapar.strategy.averaging import own_names
from lightning_megapar.strategy.balance.rebalancer import BalanceEvent, Rebalancer
from lightning_megapar.strategy.loaders import rewind
from lightning_megapar.strategy.mesh_strategy import MeshStrategy
from lightning_megapar.strategy.prepare import PreparedModule, local_state, placed_state
from lightning_megapar.strategy.recomputing import RecomputePlanner, held_by
from lightning_megapar.strategy.whole_module import WholeModule
from lightning_megapar.trees import in_any_tree, of_tree, tree_of


class StateStrategy(MeshStrategy):
    """The hooks by which Lightning saves and loads, on a module of which each rank holds its share.

    Args: as in :class:`~lightning_megapar.strategy.mesh_strategy.MeshStrategy`; ``seed`` as in ``MegaParStrategy``.
    """

    def __init__(
        self, config: ParallelConfig, timeout_seconds: float, process_group_backend: str | None, seed: int | None
    ) -> None:
        super().__init__(config, timeout_seconds, process_group_backend)
        self._seed = seed
        self._prepared: PreparedModule | None = None
        self._stepper: Stepper | None = None
        self._metrics: dict[str, Metric] = {}
        self._averaging: list[Any] = []
        self._whole: WholeModule | None = None
        self._given_back = False
        self._rebalancer: Rebalancer | None = None
        self._recomputing: RecomputePlanner | None = None
        self._events: list[BalanceEvent] = []
        self._position = DataPosition()
        self._resumed: DataPosition | None = None
        self._in_window: tuple[DataPosition, int] | None = None
        """Where the accumulation window began, and how many batches have been started in it."""
        self._batch_samples = 0

    @property
    def prepared(self) -> PreparedModule:
        if self._prepared is None:
            raise RuntimeError(
                "the module is prepared in the strategy's setup (inside fit, validate, test or predict). In notebooks "
                "and under pytest it is whole again after each call: save it by a callback during the run, or by "
                "torch.save(module.state_dict(), path)"
            )
        return self._prepared

    @property
    def stepper(self) -> Stepper:
        assert self._stepper is not None
        return self._stepper

    def samples_of_batch(self) -> int:
        """Of this rank in the latest training batch."""
        return self._batch_samples

    def observe_gradients(self, observer: GradientObserver | None) -> None:
        """Show an observer every window's gradients before they are summed over the data ranks; ``None`` ends it.

        From ``on_fit_start`` on, on all ranks alike; manual optimization is not observed.
        """
        if self._stepper is not None:
            self._stepper.observe(observer)

    @property
    def num_microbatches(self) -> int:
        return self.config.microbatches(self.layout)

    @property
    def in_flight(self) -> InFlight:
        """What the pipeline's schedule of a whole batch keeps alive on this rank; one microbatch without one."""
        schedule = self.stepper.schedule_of_batch if self.layout.pipeline > 1 else None
        return held_by(schedule, self.mesh.coordinate("pipeline"))

    @property
    def seed(self) -> int:
        return int(os.environ.get("PL_GLOBAL_SEED", "0")) if self._seed is None else self._seed

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return local_state(self.lightning_module, self.prepared.names)

    def on_validation_start(self) -> None:
        self._show_shards()  # averaged weights are swapped in behind this hook

    def on_validation_end(self) -> None:
        self._show_shards()

    def on_test_end(self) -> None:
        self._show_shards()

    def on_predict_end(self) -> None:
        self._show_shards()

    def _show_shards(self) -> None:
        """Where hooks may change weights, the module shows what optimizers and checkpoints know of."""
        if self._prepared is not None and self._prepared.zero is not None:
            self._prepared.zero.let_go()

    @property
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        wrapper = of_tree(tree_of(self.lightning_module), "core.optimizer", "LightningOptimizer")
        self._optimizers = optimizers
        self._lightning_optimizers = [wrapper._to_lightning_optimizer(one, self) for one in optimizers]

    def setup_optimizers(self, trainer: Any) -> None:
        module = self.lightning_module
        configure = of_tree(tree_of(module), "core.optimizer", "_init_optimizers_and_lr_schedulers")
        self.optimizers, self.lr_scheduler_configs = configure(module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return named_optimizer_state(unwrapped(optimizer), self.prepared.parameters)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: :meth:`load_checkpoint` has filled the module."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: :meth:`load_checkpoint` has filled the optimizers."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a sharded checkpoint directory at ``filepath``; collective over all ranks.

        Within an accumulation window it is the state at the window's beginning: gradients are in no checkpoint, so the
        batches that have given them are to come again.
        """
        if storage_options is not None:
            raise TypeError("MegaParStrategy.save_checkpoint takes no storage_options: it writes a sharded directory")
        with self.doing("checkpoint save"):
            path = Path(self.broadcast(str(filepath)))
            position = self._position
            if self._in_window and self._stepper is not None and self._stepper.window_is_open and "loops" in checkpoint:
                position, batches = self._in_window
                rewind(checkpoint, batches)
            save_training(path, checkpoint, self.prepared.names, self.layout, position, self.seed)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill module and optimizers from a checkpoint of any layout, or from a plain Lightning file.

        Raises:
            CheckpointError: what is wrong with the path, the same on every rank.
        """
        path = Path(self.broadcast(str(checkpoint_path)))
        assert self.lightning_module is not None
        for optimizer in self.optimizers:
            optimizer.state.clear()  # what the checkpoint does not hold (it may be of step 0) is not there
        with self.doing("checkpoint load"):
            rest, position = load_training(
                path,
                local_state(self.lightning_module, self.prepared.names),
                self.optimizers,
                self.prepared.parameters,
                self.prepared.names,
                world_size=self.layout.world_size,
                strict=self.lightning_module.strict_loading,
            )
        if position is not None:
            self._position = self._resumed = position
        if CURRENT in rest:
            rest[CURRENT] = own_names(rest[CURRENT], self.lightning_module, self.prepared.names)
        return rest

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            path = Path(filepath)
            if path.is_dir() and is_sharded_checkpoint(path):
                remove_sharded(path)
            else:
                super().remove_checkpoint(filepath)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole module's state on rank 0; collective over all ranks.

        Gathered tensor by tensor onto rank 0's CPU, with the keys and values of the unsharded module's
        ``state_dict()``. An empty dict on the other ranks.
        """
        assert self.lightning_module is not None
        if self._prepared is None and self._given_back:
            return {k: v.detach() for k, v in self.lightning_module.state_dict().items() if isinstance(v, Tensor)}
        names = self.prepared.names
        local = {k: v.detach() for k, v in placed_state(self.lightning_module, names).items() if is_value(v)}
        return gather_full_state_dict(list(names.state_dict), local)

    def save_hugging_face(
        self,
        directory: str | os.PathLike[str],
        module: str | None = None,
        *,
        tokenizer_from: str | os.PathLike[str] | None = None,
        max_file_bytes: int = 5_000_000_000,
    ) -> Path:
        """Write a transformers model of the module as a directory that ``from_pretrained`` opens; collective.

        Args:
            directory: to make; it must not exist.
            module: dotted name of the model; ``None`` takes the only one.
            tokenizer_from, max_file_bytes: see
                :func:`~lightning_megapar.checkpoint.hugging_face.saving.save_hugging_face`.

        Raises:
            CheckpointError: on every rank alike, with nothing left behind.
            ConfigError: no transformers model of that name.
        """
        assert self.lightning_module is not None
        names = self.prepared.names
        with self.doing("writing a Hugging Face directory"):
            return save_hugging_face(
                Path(self.broadcast(os.path.abspath(directory))),
                find_blueprint(self.prepared.blueprints, module),
                local_state(self.lightning_module, names),
                lambda name: names.canonical.get(name, name),
                tokenizer_from=tokenizer_from,
                max_file_bytes=max_file_bytes,
            )

    def give_back(self) -> None:
        """Make the caller's module whole on rank 0, before the other ranks end with the launch; collective."""
        if self._prepared is None:
            return
        assert self.lightning_module is not None
        full = self.full_state_dict()
        if self._whole is not None:
            self._whole.restore(full)
        self.lightning_module._device_mesh = None
        for callback in self._averaging:
            callback._average_model = None  # the module holds the average
        # Nothing may keep a process group: other ranks are forked for the next call.
        self._prepared = self._stepper = self._whole = self._mesh = self._world = self._rebalancer = None
        self._recomputing = None
        self._metrics, self._averaging, self.optimizers, self.lr_scheduler_configs = {}, [], [], []
        self._given_back = True


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer inside Lightning's wrapper, or the one that is given."""
    wrapped = isinstance(optimizer, in_any_tree("core.optimizer", "LightningOptimizer"))
    return optimizer._optimizer if wrapped else optimizer  # type: ignore[no-any-return]
