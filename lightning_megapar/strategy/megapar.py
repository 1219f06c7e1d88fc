"""``MegaParStrategy``: the Lightning face. Its hooks delegate; the arithmetic lives in the rooms below."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megapar.checkpoint.hugging_face.reading import LoadFrom, check_load_from
from lightning_megapar.config import ConfigError, ParallelConfig, refuse_unknown
from lightning_megapar.data_parallel.agreement import whole_buffers
from lightning_megapar.launch import returns_to_caller
from lightning_megapar.memory.compression_options import given_compression
from lightning_megapar.memory.options import given_recompute
from lightning_megapar.pipeline.balance.options import given_rebalance, usable
from lightning_megapar.pipeline.cutting.state import state_kept
from lightning_megapar.pipeline.schedules import given_schedule
from lightning_megapar.precision import masters
from lightning_megapar.precision.dtypes import product_dtype, working_dtype
from lightning_megapar.precision.fp8 import Fp8Layers, given_fp8
from lightning_megapar.sharding.choice import check_written_plan, given_plan
from lightning_megapar.sharding.chooser.alone import runs_of_step
from lightning_megapar.sharding.chooser.choose import PATIENCE
from lightning_megapar.sharding.chooser.pricing import given_cluster
from lightning_megapar.sharding.chooser.trial import Run
from lightning_megapar.sharding.table import print_plan, stage_part
from lightning_megapar.sharding.watch import PartsWatch
from lightning_megapar.step.random_streams import share_generators
from lightning_megapar.step.stage_metrics import connect_metrics
from lightning_megapar.step.stepper import Stepper
from lightning_megapar.step.tokens import given_token_counter
from lightning_megapar.strategy.averaging import average_shares, averaging_callbacks, defer_copies
from lightning_megapar.strategy.carried_optimizers import OriginalParameters, carry_over
from lightning_megapar.strategy.first_batch import FirstBatch, step_name, trial_of
from lightning_megapar.strategy.limits import (
    optimizers_may_be_empty,
    place_optimizers,
    refuse_callbacks,
    refuse_empty_optimizers,
    refuse_modules,
    refuse_optimizers,
)
from lightning_megapar.strategy.other_settings import with_settings
from lightning_megapar.strategy.prepare import prepare_module, stack_blocks
from lightning_megapar.strategy.recomputing import refuse_recompute
from lightning_megapar.strategy.schedule_choice import keep_schedule, take_schedule
from lightning_megapar.strategy.step_strategy import StepStrategy
from lightning_megapar.strategy.whole_module import WholeModule
from lightning_megapar.trees import register_strategy

TRIAL_SAMPLES = 4
"""Samples of the batch on which a sharding plan is tried."""


class MegaParStrategy(StepStrategy):
    """Train an unchanged LightningModule under tensor, sequence, pipeline and data parallelism.

    Args:
        tensor_parallel_size, pipeline_parallel_size, context_parallel_size, expert_parallel_size,
        data_parallel_size, sequence_parallel, zero_stage, data_parallel_replicas, offload_optimizer, num_microbatches,
        pipeline_schedule, pipeline_memory_limit,
        pipeline_chunks, pipeline_blocks, pipeline_stack, pipeline_split, pipeline_balance_by, sharding_plan, cluster:
            see :class:`~lightning_megapar.config.ParallelConfig`. Every size may be ``"auto"``; ``pipeline_schedule``
            is a name, ``"auto"``, a :class:`~lightning_megapar.pipeline.schedules.data.Schedule`, or the path of a CSV
            file with one (:mod:`lightning_megapar.pipeline.schedules.files`).
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
        rebalance: what to do when a rank is slow: ``True``, ``"layers"``, ``"replicas"``, ``"microbatches"``, or a
            mapping of the arguments of :class:`~lightning_megapar.pipeline.balance.options.Rebalance`; ``None``
            measures nothing. What was found and done is in :attr:`balance_events`.
        recompute: what blocks recompute in the backward instead of keeping it: ``"none"``; ``"selective"``: attention;
            ``"full"``: all but their inputs; ``"auto"``: what costs the least time within a budget; or a mapping of the
            arguments of :class:`~lightning_megapar.memory.options.RecomputeConfig`, such as ``{"budget_bytes": 4e9}``.
            What was chosen is in :attr:`recompute_choices`. Gradients are the same, bit for bit.
        compress_activations: LOSSY: keep what blocks need for the backward in fewer bits: ``"int8"``, ``"fp8"``,
            ``"int4"``, or a mapping of the arguments of
            :class:`~lightning_megapar.memory.compression.CompressionConfig`; ``None`` keeps it as it is.
        arena: take the pipeline's messages, gradients and the kept inputs of recomputed blocks from one piece of
            memory, planned from the first step. Numbers are the same, bit for bit.
        loss_scale: of ``precision="16-mixed"``: a mapping of the arguments of
            :class:`~lightning_megapar.precision.loss_scale.LossScaleOptions`, or a number for a fixed one.
        fp8: 8-bit products of the linear layers inside the stack: ``"rowwise"``, ``"tensorwise"``, or a mapping of the
            arguments of :class:`~lightning_megapar.precision.fp8.Fp8Options`; needs torchao.
        count_tokens: how many valid tokens a microbatch has, for losses that are means over them: the key of the labels
            in the batch, a mapping of the arguments of :class:`~lightning_megapar.step.tokens.LabelCount`, or a
            function of the microbatch; see :mod:`lightning_megapar.step.tokens`. ``None`` weighs by samples, unless
            the step or the batch says ``num_valid_tokens``.

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
        data_parallel_replicas: int = 1,
        offload_optimizer: bool = False,
        num_microbatches: Any = "auto",
        pipeline_schedule: Any = "1f1b",
        pipeline_memory_limit: Any = None,
        pipeline_chunks: Any = "auto",
        pipeline_blocks: str | None = None,
        pipeline_stack: str | None = None,
        pipeline_split: Any = None,
        pipeline_balance_by: Any = "parameters",
        pipeline_keep: Mapping[str, str] | None = None,
        sharding_plan: Any = "auto",
        cluster: Any = None,
        seed: int | None = None,
        empty_init: bool = False,
        load_from: LoadFrom = None,
        load_except: str | Sequence[str] = (),
        timeout_seconds: float = 600.0,
        process_group_backend: str | None = None,
        rebalance: Any = None,
        recompute: Any = "none",
        compress_activations: Any = None,
        arena: bool = False,
        loss_scale: Any = None,
        fp8: Any = None,
        count_tokens: Any = None,
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
            data_parallel_replicas=data_parallel_replicas,
            offload_optimizer=offload_optimizer,
            num_microbatches=num_microbatches,
            pipeline_schedule=given_schedule(pipeline_schedule),
            pipeline_memory_limit=pipeline_memory_limit,
            pipeline_chunks=pipeline_chunks,
            pipeline_blocks=pipeline_blocks,
            pipeline_stack=pipeline_stack,
            pipeline_split=pipeline_split,
            pipeline_balance_by=pipeline_balance_by,
            sharding_plan=sharding_plan,
            cluster=given_cluster(cluster),
            rebalance=given_rebalance(rebalance),
            recompute=given_recompute(recompute),
            arena=arena,
        )
        given_plan(sharding_plan)  # refuse what cannot be read now, before any process exists
        self.fp8 = given_fp8(fp8)
        self.compression = given_compression(compress_activations)
        self.count_tokens = given_token_counter(count_tokens)
        super().__init__(config, timeout_seconds, process_group_backend, seed, loss_scale)
        self.pipeline_keep = dict(pipeline_keep or {})
        self.empty_init = empty_init
        self.load_from = check_load_from(load_from)
        self.load_except = (load_except,) if isinstance(load_except, str) else tuple(load_except)
        self._originals: OriginalParameters | None = None

    # -- who and where -----------------------------------------------------------------------------------------------

    @property
    def chosen_sharding_plan(self) -> dict[str, str]:
        """The plan by which the module is sharded, in the words that ``sharding_plan`` takes back.

        Known from set-up on; ``yaml.safe_dump`` of it is a file for ``sharding_plan="plan.yaml"``.
        """
        return self.prepared.choice.plan.to_mapping()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        usable(self.config, self.layout)  # refuse what cannot be, before any process exists
        refuse_recompute(self.config, self.layout)

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
        if vars(module).get("_megapar_prepared") is not None:
            return
        refuse_modules(module, self.layout)
        if type(module).configure_model.__module__.endswith(".core.hooks"):  # else it may be built later
            check_written_plan(module, self.config.sharding_plan, self.layout.tensor)
            if self.fp8 is not None:
                Fp8Layers.choose(module, self.fp8, stack_blocks(module, self.config.pipeline_blocks), self.root_device)

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._place_precision()
        module = self.lightning_module
        balance = usable(self.config, self.layout)
        earlier = vars(module).get("_megapar_prepared")
        if earlier is None:
            refuse_modules(module, self.layout)  # what configure_model has built
            self._originals = OriginalParameters(module)
            self._whole = WholeModule(module) if returns_to_caller() and self.is_global_zero else None
            first = FirstBatch(trainer)
            trial = trial_of(trainer, first, self.num_microbatches) if self.layout.pipeline > 1 else None
            dtype = product_dtype(str(getattr(self.precision_plugin, "precision", "32-true")))
            convert = self._trial_convert or self.precision_plugin.convert_module
            self._settle(
                take_schedule(
                    module,
                    self.mesh,
                    self.config,
                    keep=self.pipeline_keep,
                    trial=trial,
                    convert=convert,
                    dtype=dtype,
                )
            )
            self._prepared = prepare_module(
                module,
                self.mesh,
                self.settled,
                device=self.root_device,
                seed=self.seed,
                keep=self.pipeline_keep,
                convert=convert,
                held_as=None if self._working is None else masters.HeldAs(),
                fp8=self.fp8,
                runs=lambda whole: self._trial_runs(trainer, first),
                load_from=self.load_from,
                load_except=self.load_except,
                trial=trial,
                # The other ranks wait for the choice in a collective.
                patience=min(PATIENCE, self._timeout.total_seconds() / 3),
                dtype=dtype,
                movable=balance is not None and balance.layers,
                compression=self.compression,
            )
            object.__setattr__(module, "_megapar_prepared", self._prepared)
            self._print_stages()
            self._print_plan(module)
            if self._prepared.float8 is not None:
                rank_zero_info(self._prepared.float8.describe())
        elif earlier.layout != self.layout:
            raise ConfigError(
                f"the module was already cut for {earlier.layout.describe()}; this trainer asks for "
                f"{self.layout.describe()}. Build the module anew and load its checkpoint"
            )
        else:
            self._settle(keep_schedule(self.config, earlier))
            if not earlier.serves(self.order, self.mesh):
                raise ConfigError(
                    f"the module was already cut for another pipeline schedule, with other chunks or whole backwards; "
                    f"this trainer asks for pipeline_schedule={self.schedule!r}. Build the module anew "
                    "and load its checkpoint"
                )
            self._prepared = with_settings(module, earlier, self.settled, self.compression, self.root_device)
            object.__setattr__(module, "_megapar_prepared", self._prepared)
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
            self._refuse_for_precision()
            place_optimizers(self.optimizers, self.prepared, self.mesh)
        self._balance(balance if trainer.state.fn == TrainerFn.FITTING else None, trainer.callbacks)
        self._plan_recomputation()
        self.setup_precision_plugin()

    def _trial_runs(self, trainer: Any, first: FirstBatch) -> list[Run] | str:
        """The module's own step on a few samples of the run's data, or why there is none."""
        assert self.lightning_module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and not self.lightning_module.automatic_optimization:
            return "its step optimizes by itself and cannot be tried"
        rows = first.peek(1, limit=TRIAL_SAMPLES)
        if rows is None:
            return "no samples could be taken beside the loader's own iteration"
        return runs_of_step(step_name(trainer), rows, trainer)

    def _make_stepper(self) -> Stepper:
        module = self.lightning_module
        assert module is not None
        return Stepper(
            self.mesh,
            self.root_device,
            self.prepared.parameters,
            owner=self.prepared,
            cut=self.prepared.cut,
            zero=self.prepared.zero,
            deferral=self.prepared.deferral,
            schedule=self.order,
            num_microbatches=self.num_microbatches,
            streams=self.prepared.streams,
            forward_context=self.precision_plugin.forward_context,
            buffers=lambda: whole_buffers(module),
            parts=PartsWatch(module) if self.prepared.is_cut else None,
            is_cut=self.prepared.is_cut,
            state_kept=lambda: state_kept(module),
            count_tokens=self.count_tokens,
            working_dtype=working_dtype(self.precision_plugin),
            arena=self.prepared.arena,
            recomputation=self.prepared.recomputation,
        )

    def _print_plan(self, module: Any) -> None:
        """What is sharded how on all stages; collective over the stages."""
        choice = self.prepared.choice
        if not choice.assignments and not choice.notes:
            return
        part = stage_part(module, choice.assignments, self.prepared.names.canonical, tuple(choice.whole))
        parts: list[Any] = [part]
        if self.layout.pipeline > 1:
            parts *= self.layout.pipeline
            dist.all_gather_object(parts, part, group=self.mesh.group("pipeline"))
        if self.is_global_zero:
            print_plan(choice, parts)

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


def argument_names() -> tuple[str, ...]:
    """Names of the strategy's arguments."""
    import inspect

    parameters = inspect.signature(MegaParStrategy.__init__).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self")


def register() -> None:
    """Register ``"megapar"`` with Lightning, under both of its names; calling it again changes nothing."""
    register_strategy("megapar", MegaParStrategy, "tensor, sequence, pipeline and data parallelism")
