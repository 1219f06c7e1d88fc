"""``MegaParStrategy``: the Lightning face. Its hooks delegate; the arithmetic lives in the rooms below."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_megapar.averaging import average_shares, averaging_callbacks, defer_copies, own_names
from lightning_megapar.batches import batch_size_of
from lightning_megapar.carried_optimizers import OriginalParameters, carry_over
from lightning_megapar.checkpoint import gather_full_state_dict, is_sharded_checkpoint, remove_sharded
from lightning_megapar.checkpoint.hugging_face.reading import LoadFrom, check_load_from
from lightning_megapar.checkpoint.hugging_face.saving import find_blueprint, save_hugging_face
from lightning_megapar.checkpoint.training import DataPosition, load_training, save_training
from lightning_megapar.checkpoint.training_state import CURRENT, named_optimizer_state
from lightning_megapar.config import ConfigError, ParallelConfig, refuse_unknown
from lightning_megapar.data.sampler import ResumableSampler
from lightning_megapar.data_parallel.norm import clip_by_norm, clip_by_value, gradient_norm
from lightning_megapar.first_batch import peek, step_name, trial_of
from lightning_megapar.launch import returns_to_caller, shield_worker
from lightning_megapar.launch.preemption import EXIT_CODE
from lightning_megapar.limits import (
    optimizers_may_be_empty,
    refuse_callbacks,
    refuse_empty_optimizers,
    refuse_optimizers,
)
from lightning_megapar.loaders import prepare_loader, same_on_all_ranks
from lightning_megapar.mesh_strategy import MeshStrategy
from lightning_megapar.prepare import PreparedModule, local_state, placed_state, prepare_module
from lightning_megapar.random_streams import share_generators
from lightning_megapar.sharding.choice import given_plan, print_plan
from lightning_megapar.sharding.chooser.alone import runs_of_step
from lightning_megapar.sharding.chooser.pricing import given_cluster
from lightning_megapar.sharding.chooser.trial import Run
from lightning_megapar.shards import is_value
from lightning_megapar.stage_metrics import connect_metrics
from lightning_megapar.step import StepContractError, Stepper, StepResult
from lightning_megapar.step_log import replay
from lightning_megapar.trees import PREFIXES, in_any_tree, of_tree, register_strategy, tree_of
from lightning_megapar.whole_module import WholeModule

TRIAL_SAMPLES = 4
"""Samples of the batch on which a sharding plan is tried."""


class MegaParStrategy(MeshStrategy):
    """Train an unchanged LightningModule under tensor, sequence, pipeline and data parallelism.

    Args:
        tensor_parallel_size, pipeline_parallel_size, context_parallel_size, expert_parallel_size,
        data_parallel_size, sequence_parallel, zero_stage, num_microbatches, pipeline_schedule, pipeline_blocks,
        pipeline_stack, pipeline_split, sharding_plan, cluster: see
            :class:`~lightning_megapar.config.ParallelConfig`. Every size may be ``"auto"``.
        pipeline_keep: module name -> ``"first"``, ``"last"`` or ``"all"``: where a module beside the pipelined stack
            is needed, when neither a trial run of the first batch nor its place in the registration order says so.
        seed: of name-seeded initialisation and of data order; ``None`` takes ``seed_everything``'s, else 0.
        empty_init: build the module on the meta device in ``configure_model``; its parameters are then initialised by
            name, one at a time, on the rank that holds them. ``trainer.init_module(empty_init=True)`` does the same.
        load_from: where values come from: a Hugging Face directory (or a ``.safetensors`` file) for the one
            transformers model in the module, or a mapping from dotted module names to such paths. Each rank reads its
            share, whatever the layout; with ``empty_init`` nothing else is ever in memory.
        load_except: patterns of names (``"score.*"``) that the files may lack (they are initialised) or that the
            module may lack (they are left out).
        timeout_seconds: of a collective.
        process_group_backend: ``None`` takes nccl on GPUs, gloo on CPUs.

    Raises:
        ConfigError: on any unknown or impossible setting, before a process group exists.
    """

    def __init__(
        self,
        tensor_parallel_size: Any = "auto",
        pipeline_parallel_size: Any = "auto",
        context_parallel_size: Any = "auto",
        expert_parallel_size: Any = "auto",
        data_parallel_size: Any = "auto",
        sequence_parallel: bool = False,
        zero_stage: int = 0,
        num_microbatches: Any = "auto",
        pipeline_schedule: str = "1f1b",
        pipeline_blocks: str | None = None,
        pipeline_stack: str | None = None,
        pipeline_split: Any = None,
        pipeline_keep: Mapping[str, str] | None = None,
        sharding_plan: Any = "auto",
        cluster: Any = None,
        seed: int | None = None,
        empty_init: bool = False,
        load_from: LoadFrom = None,
        load_except: str | Sequence[str] = (),
        timeout_seconds: float = 600.0,
        process_group_backend: str | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown("MegaParStrategy", unknown, argument_names())
        config = ParallelConfig(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            context_parallel_size=context_parallel_size,
            expert_parallel_size=expert_parallel_size,
            data_parallel_size=data_parallel_size,
            sequence_parallel=sequence_parallel,
            zero_stage=zero_stage,
            num_microbatches=num_microbatches,
            pipeline_schedule=pipeline_schedule,
            pipeline_blocks=pipeline_blocks,
            pipeline_stack=pipeline_stack,
            pipeline_split=pipeline_split,
            sharding_plan=sharding_plan,
            cluster=given_cluster(cluster),
        )
        given_plan(sharding_plan)  # refuse what cannot be read now, before any process exists
        super().__init__(config, timeout_seconds, process_group_backend)
        self.pipeline_keep = dict(pipeline_keep or {})
        self.empty_init = empty_init
        self.load_from = check_load_from(load_from)
        self.load_except = (load_except,) if isinstance(load_except, str) else tuple(load_except)
        self._seed = seed
        self._prepared: PreparedModule | None = None
        self._stepper: Stepper | None = None
        self._metrics: dict[str, Metric] = {}
        self._averaging: list[Any] = []
        self._originals: OriginalParameters | None = None
        self._whole: WholeModule | None = None
        self._given_back = False
        self._leave_requested = False
        self._accumulating = False
        self._reduced = False  # manual optimization: a backward of this step has averaged its gradients
        self._inject_sampler = True
        self._position = DataPosition()
        self._resumed: DataPosition | None = None
        self._train_sampler: ResumableSampler | None = None

    # -- who and where -----------------------------------------------------------------------------------------------

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
    def chosen_sharding_plan(self) -> dict[str, str]:
        """The plan by which the module is sharded, in the words that ``sharding_plan`` takes back.

        Known from set-up on; ``yaml.safe_dump`` of it is a file for ``sharding_plan="plan.yaml"``.
        """
        return self.prepared.choice.plan.to_mapping()

    @property
    def stepper(self) -> Stepper:
        assert self._stepper is not None
        return self._stepper

    @property
    def num_microbatches(self) -> int:
        return self.config.microbatches(self.layout)

    @property
    def seed(self) -> int:
        return int(os.environ.get("PL_GLOBAL_SEED", "0")) if self._seed is None else self._seed

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if getattr(plugin, "scaler", None) is not None:
            raise ConfigError(
                "precision='16-mixed' is not available yet; valid values: 32-true, bf16-mixed, bf16-true, 64-true"
            )
        if plugin is not None:
            # Lightning's clipping sees one rank's tensors only (and refuses fused optimizers): ours is global.
            plugin.clip_gradients = self._clip_gradients  # type: ignore[method-assign]
        self._precision_plugin = plugin

    def setup_environment(self) -> None:
        module = self.lightning_module
        assert module is not None
        self._refuse_module(module)
        super().setup_environment()
        module._device_mesh = self.mesh.device_mesh
        trainer: Any = module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            context = self.tensor_init_context if self.empty_init else nullcontext
            defer_copies(averaging_callbacks(trainer.callbacks), module, context)
        # Lightning would shuffle a training loader that says shuffle=False; prepare_loader injects the sampler.
        connector = module.trainer._accelerator_connector
        if connector.use_distributed_sampler:
            connector.use_distributed_sampler = False
            self._inject_sampler = True
        elif self._prepared is None:
            self._inject_sampler = False

    def _refuse_module(self, module: Any) -> None:
        """What cannot work, said before ranks wait for each other."""
        if self.layout.pipeline > 1 and not module.automatic_optimization:
            raise ConfigError(
                f"pipeline_parallel_size={self.layout.pipeline} needs automatic optimization: "
                f"{type(module).__name__} sets automatic_optimization=False and steps by itself; valid value: 1"
            )

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        earlier = vars(module).get("_megapar_prepared")
        if earlier is None:
            self._originals = OriginalParameters(module)
            self._whole = WholeModule(module) if returns_to_caller() and self.is_global_zero else None
            self._prepared = prepare_module(
                module,
                self.mesh,
                self.config,
                device=self.root_device,
                seed=self.seed,
                keep=self.pipeline_keep,
                convert=self.precision_plugin.convert_module,
                runs=lambda whole: self._trial_runs(trainer),
                load_from=self.load_from,
                load_except=self.load_except,
                trial=trial_of(trainer, self.num_microbatches) if self.layout.pipeline > 1 else None,
                dtype=_product_dtype(str(getattr(self.precision_plugin, "precision", "32-true"))),
            )
            object.__setattr__(module, "_megapar_prepared", self._prepared)
            self._print_stages()
            if (self.prepared.choice.assignments or self.prepared.choice.notes) and self.is_global_zero:
                print_plan(module, self.prepared.choice)
        elif earlier.layout != self.layout:
            raise ConfigError(
                f"the module was already cut for {earlier.layout.describe()}; this trainer asks for "
                f"{self.layout.describe()}. Build the module anew and load its checkpoint"
            )
        else:
            self._prepared = earlier
        self._metrics = connect_metrics(module, self.mesh, lambda: self.stepper.is_running)
        if earlier is None and self._whole is not None:
            self._whole.note_changes()
        fits = self._stepper is not None and self._stepper.fits(self.mesh, self.prepared)
        if self._stepper is None or not fits:
            self._stepper = self._make_stepper()
        self._stepper.begin_run()
        share_generators(self.mesh)
        # FSDP2 parameters made under inference_mode cannot be trained afterwards.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        self.model = module
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_callbacks(trainer.callbacks, self.prepared)
            self._reset_optimizers_and_schedulers()
            if self.prepared.zero is not None:
                self.prepared.zero.reshard()  # an earlier validation has gathered them
            self._averaging = averaging_callbacks(trainer.callbacks)
            average_shares(self._averaging, module, self.prepared, self.root_device)
            with optimizers_may_be_empty(self.prepared):
                self.setup_optimizers(trainer)
            carry_over(self.optimizers, self._originals, self.prepared.parameters)
            refuse_empty_optimizers(self.optimizers, self.prepared)
            refuse_optimizers(self.optimizers, self.prepared)
        self.setup_precision_plugin()

    def _trial_runs(self, trainer: Any) -> list[Run] | None:
        """The module's own step on a few samples of the run's data; ``None`` where none can be taken."""
        assert self.lightning_module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and not self.lightning_module.automatic_optimization:
            return None  # its step would run optimizers
        rows = peek(trainer, 1, limit=TRIAL_SAMPLES)
        return None if rows is None else runs_of_step(step_name(trainer), rows)

    def _make_stepper(self) -> Stepper:
        return Stepper(
            self.mesh,
            self.root_device,
            self.prepared.parameters,
            owner=self.prepared,
            cut=self.prepared.cut,
            zero=self.prepared.zero,
            schedule=self.config.pipeline_schedule,
            num_microbatches=self.num_microbatches,
            streams=self.prepared.streams,
            forward_context=self.precision_plugin.forward_context,
        )

    def _print_stages(self) -> None:
        plan = self.prepared.plan
        if plan is None or not self.is_global_zero:
            return
        from rich.console import Console
        from rich.table import Table

        table = Table("stage", "blocks", "parameters", title="pipeline stages")
        for row in plan.rows():
            table.add_row(*row)
        Console().print(table)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Around ``configure_model`` and in ``trainer.init_module``: the meta device when the module is built empty."""
        if self.empty_init if empty_init is None else empty_init:
            with torch.device("meta"), self.precision_plugin.tensor_init_context():
                yield
        else:
            with super().tensor_init_context(empty_init):
                yield

    # -- steps -------------------------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning enters it for every batch after which the optimizer does not step."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @property
    def _is_plain(self) -> bool:
        """One rank, one microbatch: the user's step is the whole step, as in plain Lightning."""
        return self.layout.world_size == 1 and self.num_microbatches == 1

    def on_train_start(self) -> None:
        if self._resumed is None:
            return
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        # A checkpoint from the very end of an epoch says that all its batches are done; Lightning would count them
        # into the epoch that follows, and leave it after one batch.
        if progress.completed == progress.ready >= trainer.num_training_batches:
            progress.reset()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._leave_if_requested()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        self._where = f"training step {trainer.global_step}"
        self._reduced = False
        alone = self._is_plain and trainer.accumulate_grad_batches == 1
        if alone or not module.automatic_optimization:
            with self.precision_plugin.train_step_context():
                output = module.training_step(*args, **kwargs)
            self._leave_requested = self._leave_requested or self._preemption.is_set
            self._count_samples(trainer, batch_size_of(args[0]) or 1)
            return output
        result = self.stepper.train(
            lambda piece: module.training_step(piece, *args[1:], **kwargs),
            args[0],
            results=trainer._results,
            accumulate=trainer.accumulate_grad_batches,
            is_last_of_window=not self._accumulating,
            flag=float(self._preemption.is_set),
            share=self._is_seen("on_train_batch_end"),
            nominal=getattr(trainer.train_dataloader, "batch_size", None),
        )
        self._after_step(result)
        self._count_samples(trainer, result.samples)
        return result.output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("validation", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("test", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predictions of this rank's batch, on every stage (sent from the last one)."""
        return self._evaluation_step("predict", *args, **kwargs)

    def _is_seen(self, hook: str) -> bool:
        """Whether somebody's code gets a step's outputs: then every stage needs them, not only the last one."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        owners = (self.lightning_module, *trainer.callbacks) if self.layout.pipeline > 1 else ()
        return any(
            not str(getattr(getattr(owner, hook, None), "__module__", "")).startswith((*PREFIXES, "lightning_megapar."))
            for owner in owners
        )

    def _evaluation_step(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        self._where = f"{kind} step {args[1] if len(args) > 1 else ''}".rstrip()
        self._leave_if_requested()
        step = getattr(module, f"{kind}_step")
        loaders = {"validation": "val_dataloaders"}.get(kind, f"{kind}_dataloaders")
        if self._is_plain:
            self._leave_requested = self._preemption.is_set
            with self.precision_plugin.forward_context():
                return step(*args, **kwargs)
        result = self.stepper.evaluate(
            lambda piece: step(piece, *args[1:], **kwargs),
            args[0],
            results=trainer._results,
            flag=float(self._preemption.is_set),
            share=kind == "predict" or self._is_seen(f"on_{kind}_batch_end"),
            nominal=getattr(getattr(trainer, loaders), "batch_size", None),
            kind=kind,
        )
        self._after_step(result)
        if self._averaging and self.prepared.zero is not None:
            self.prepared.zero.reshard()  # weights are swapped after the validation, and they are the shards
        return result.output

    def _after_step(self, result: StepResult) -> None:
        assert self.lightning_module is not None
        replay(
            self.lightning_module.trainer,
            result.report,
            self._metrics,
            self.root_device,
            self.stepper.loss_dtype,
        )
        self._leave_requested = self._leave_requested or any(result.report.flags)

    def _count_samples(self, trainer: Any, samples: int) -> None:
        epoch = trainer.current_epoch
        if self._train_sampler is not None:
            self._train_sampler.started()
            epoch = self._train_sampler.epoch
        used = self._position.consumed if epoch == self._position.epoch else 0
        if self._train_sampler is not None:
            # What the sampler gave, whatever shape the batch was collated into.
            left = (self._train_sampler.num_samples - used) // self.data_parallel_size
            samples = min(self._train_sampler.batch_size, left) if left > 0 else samples
        self._position = DataPosition(used + samples * self.data_parallel_size, epoch)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        assert module is not None
        if module.automatic_optimization or self.layout.world_size == 1:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        losses: list[Tensor] = []
        self.stepper.backward_alone(
            lambda: losses.append(super(MegaParStrategy, self).backward(closure_loss, optimizer, *args, **kwargs))
        )
        self._reduced = True
        return losses[0]

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        manual = not module.automatic_optimization and self.layout.world_size > 1
        nothing = of_tree(tree_of(module), "core.optimizer", "do_nothing_closure")
        if manual and closure is nothing and not self._reduced:
            raise StepContractError(
                f"{type(module).__name__}.training_step steps an optimizer without self.manual_backward(loss): the "
                "gradients of loss.backward() are not averaged over the ranks; call self.manual_backward(loss)"
            )
        return self.precision_plugin.optimizer_step(optimizer, model=model or module, closure=closure, **kwargs)

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

    # -- gradients ---------------------------------------------------------------------------------------------------

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """Global norm of the current gradients, each logical parameter counted once; equal on every rank.

        Meaningful from ``on_after_backward`` of the last batch of an accumulation window to ``zero_grad``.

        Returns:
            0-dim float64 tensor.
        """
        return gradient_norm(self.stepper.parameters, self.mesh, norm_type)

    def _clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Stands in for ``Precision.clip_gradients``: the same rule on the global norm."""
        if not clip_val or clip_val <= 0:
            return
        optimizer = _unwrapped(optimizer)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = [p for p in self.stepper.parameters if id(p.parameter) in held]
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value":
            clip_by_value(parameters, clip_val)
        else:
            clip_by_norm(parameters, gradient_norm(parameters, self.mesh), clip_val)

    # -- data --------------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        prepared = prepare_loader(
            dataloader,
            data_rank=self.data_parallel_rank,
            data_size=self.data_parallel_size,
            seed=self.seed,
            training=trainer.training,
            predicting=trainer.predicting,
            num_microbatches=self.num_microbatches,
            inject_sampler=self._inject_sampler,
            resume=None if self._resumed is None else (self._resumed.consumed, self._resumed.epoch),
            worker_init=shield_worker,
        )
        if trainer.training:
            sampler = getattr(prepared, "sampler", None)
            self._train_sampler = sampler if isinstance(sampler, ResumableSampler) else None
        if self.layout.world_size > 1:
            places = [self.layout.coordinates(rank)["data"] for rank in range(self.layout.world_size)]
            prepared = same_on_all_ranks(prepared, places, self.root_device)
        return prepared

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return local_state(self.lightning_module, self.prepared.names)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return named_optimizer_state(_unwrapped(optimizer), self.prepared.parameters)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: :meth:`load_checkpoint` has filled the module."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: :meth:`load_checkpoint` has filled the optimizers."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a sharded checkpoint directory at ``filepath``; collective over all ranks."""
        if storage_options is not None:
            raise TypeError("MegaParStrategy.save_checkpoint takes no storage_options: it writes a sharded directory")
        with self.doing("checkpoint save"):
            path = Path(self.broadcast(str(filepath)))
            save_training(path, checkpoint, self.prepared.names, self.layout, self._position, self.seed)

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
        self._prepared = self._stepper = self._whole = self._mesh = self._world = None
        self._metrics, self._averaging, self.optimizers, self.lr_scheduler_configs = {}, [], [], []
        self._given_back = True

    # -- leaving early -----------------------------------------------------------------------------------------------

    def _leave_if_requested(self) -> None:
        """All ranks learnt of a SIGTERM in the same packet: save at this step boundary and leave with code 143."""
        if not self._leave_requested:
            return
        self._preemption.set()  # on ranks that got no signal themselves: from here on they heed none
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            callback = trainer.checkpoint_callback
            directory = getattr(callback, "dirpath", None) or trainer.default_root_dir
            path = Path(directory) / f"preempted-step={trainer.global_step}.ckpt"
            trainer.save_checkpoint(path)
            if self.is_global_zero:
                print(f"stopped by a signal at step {trainer.global_step}; saved {path}", file=sys.stderr, flush=True)
        self._preemption.leave()
        raise SystemExit(EXIT_CODE)


def _product_dtype(precision: str) -> str:
    """In what matrix products run under a Lightning precision."""
    starts = {"bf16": "bf16", "16": "fp16", "64": "fp64"}
    return next((name for start, name in starts.items() if precision.startswith(start)), "fp32")


def argument_names() -> tuple[str, ...]:
    """Names of the strategy's arguments."""
    import inspect

    parameters = inspect.signature(MegaParStrategy.__init__).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self")


def register() -> None:
    """Register ``"megapar"`` with Lightning, under both of its names; calling it again changes nothing."""
    register_strategy("megapar", MegaParStrategy, "tensor, sequence, pipeline and data parallelism")


def _unwrapped(optimizer: Any) -> Optimizer:
    wrapped = isinstance(optimizer, in_any_tree("core.optimizer", "LightningOptimizer"))
    return optimizer._optimizer if wrapped else optimizer  # type: ignore[no-any-return]
