"""How a strategy runs steps: training, evaluation, backward, clipping, loaders, and leaving at a step's boundary."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_megapar.batches import batch_size_of
from lightning_megapar.checkpoint.training import DataPosition
from lightning_megapar.config import ParallelConfig
from lightning_megapar.data.sampler import ResumableSampler
from lightning_megapar.launch import shield_worker
from lightning_megapar.launch.preemption import EXIT_CODE
from lightning_megapar.optim.lists import pieces_in_lists
from lightning_megapar.pipeline.balance.options import Rebalance
from lightning_megapar.sharding.watch import PartsWatch
from lightning_megapar.step.log import replay
from lightning_megapar.step.stepper import StepContractError, StepResult
from lightning_megapar.strategy.balance.rebalancer import BalanceEvent, Rebalancer, refuse_rebalance
from lightning_megapar.strategy.limits import place_optimizers
from lightning_megapar.strategy.loaders import forget_fetched_batch, prepare_loader, same_on_all_ranks
from lightning_megapar.strategy.out_of_memory import BatchFacts, answered
from lightning_megapar.strategy.precision_strategy import PrecisionStrategy
from lightning_megapar.strategy.prepare import PreparedModule
from lightning_megapar.strategy.recomputing import RecomputePlanner
from lightning_megapar.strategy.state_strategy import unwrapped
from lightning_megapar.trees import PREFIXES, of_tree, tree_of


class StepStrategy(PrecisionStrategy):
    """The hooks that Lightning calls for each batch; they go to a :class:`~lightning_megapar.step.stepper.Stepper`.

    Args: as in :class:`~lightning_megapar.strategy.precision_strategy.PrecisionStrategy`.
    """

    def __init__(
        self,
        config: ParallelConfig,
        timeout_seconds: float,
        process_group_backend: str | None,
        seed: int | None,
        loss_scale: Any = None,
    ) -> None:
        super().__init__(config, timeout_seconds, process_group_backend, seed, loss_scale)
        self.out_of_memory_answer: str | None = None
        self.batch_facts = BatchFacts()
        self._leave_requested = False
        self._accumulating = False
        self._reduced = False  # manual optimization: a backward of this step has averaged its gradients
        self._inject_sampler = True
        self._train_sampler: ResumableSampler | None = None

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
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress
        self.stepper.steps, progress = batches.total.started, batches.current  # random numbers go on as well
        # A checkpoint from the very end of an epoch says that all its batches are done; Lightning would count them
        # into the epoch that follows, and leave it after one batch.
        if progress.completed == progress.ready >= trainer.num_training_batches:
            progress.reset()

    def on_train_end(self) -> None:
        if self._rebalancer is not None:
            self._rebalancer.close()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._leave_if_requested()
        if self._rebalancer is not None and not self.stepper.window_is_open:
            with self.doing("rebalancing"):
                self._rebalancer.between_steps()

    @answered
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        self._where = f"training step {trainer.global_step}"
        self._reduced = False
        if self._recomputing is not None:
            self._recomputing.between_steps(trainer.global_step)
        alone = self._is_plain and trainer.accumulate_grad_batches == 1 and not self._needs_stepper
        if alone or not module.automatic_optimization:
            by_itself = self.stepper.alone() if not module.automatic_optimization else nullcontext()
            with (
                by_itself,
                self._norms_are_global(),
                self._in_working_dtype(),
                self.precision_plugin.train_step_context(),
            ):
                output = module.training_step(*args, **kwargs)
            self._leave_requested = self._leave_requested or self._preemption.is_set
            self._count_samples(trainer, batch_size_of(args[0]) or 1)
            return output
        if self._rebalancer is not None:
            self._rebalancer.before_step()
        begun = self._in_window if self.stepper.window_is_open else None
        self._in_window = (self._position, 1) if begun is None else (begun[0], begun[1] + 1)
        seen = self._is_seen("on_train_batch_end")
        with self._in_working_dtype():
            result = self.stepper.train(
                lambda piece: module.training_step(piece, *args[1:], **kwargs),
                args[0],
                results=trainer._results,
                accumulate=trainer.accumulate_grad_batches,
                is_last_of_window=not self._accumulating,
                loss_scale=self._scale,
                flag=float(self._preemption.is_set),
                share=seen and self.layout.pipeline > 1,
                collect=seen,
                nominal=getattr(trainer.train_dataloader, "batch_size", None),
            )
        if self._rebalancer is not None:
            self._rebalancer.after_step(result.samples)
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
        owners = (self.lightning_module, *trainer.callbacks) if self.layout.world_size > 1 else ()
        return any(
            not str(getattr(getattr(owner, hook, None), "__module__", "")).startswith((*PREFIXES, "lightning_megapar."))
            for owner in owners
        )

    @answered
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
            with self._in_working_dtype(), self.precision_plugin.forward_context():
                return step(*args, **kwargs)
        with self._in_working_dtype():
            result = self.stepper.evaluate(
                lambda piece: step(piece, *args[1:], **kwargs),
                args[0],
                results=trainer._results,
                flag=float(self._preemption.is_set),
                share=kind == "predict" or (self.layout.pipeline > 1 and self._is_seen(f"on_{kind}_batch_end")),
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
        self._batch_samples = samples
        self._position = DataPosition(used + samples * self.data_parallel_size, epoch)

    def batches_left(self) -> int | None:
        """Batches of this rank after the latest in its epoch; ``None`` with a sampler of the user's own."""
        sampler, position = self._train_sampler, self._position
        if sampler is None:
            return None
        return sampler.batches_after(position.consumed if sampler.epoch == position.epoch else 0)

    @answered
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        assert module is not None
        if module.automatic_optimization or (self.layout.world_size == 1 and self._loss_scaling is None):
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        scaled = closure_loss if self._loss_scaling is None else closure_loss.float() * self._scale
        losses: list[Tensor] = []
        self.stepper.backward_alone(
            lambda: losses.append(super(StepStrategy, self).backward(scaled, optimizer, *args, **kwargs)),
            closure_loss.detach(),
            self._scale,
        )
        self._reduced = True
        return losses[0]

    @answered
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
        if manual:
            self._show_shards()
        # The closure calls the user's hooks around clipping.
        with self._norms_are_global(), self._in_masters(), pieces_in_lists(unwrapped(optimizer)):
            result = self.precision_plugin.optimizer_step(optimizer, model=model or module, closure=closure, **kwargs)
        if self.prepared.zero is not None:
            self.prepared.zero.reshard()  # what hooks, or a step by hand, have gathered is out of date
        return result

    # -- balance -------------------------------------------------------------------------------------------------------

    @property
    def balance_events(self) -> list[BalanceEvent]:
        """Slow ranks that were found and moves that were made; see ``rebalance``."""
        return list(self._events)

    def _balance(self, options: Rebalance | None, callbacks: Sequence[Any]) -> None:
        """Keep the run that begins in balance, or not."""
        if self._rebalancer is not None:
            self._rebalancer.close()
            self._rebalancer = None
        if options is None:
            return
        module = self.lightning_module
        assert module is not None
        refuse_rebalance(module, options, callbacks, self.prepared)
        self._rebalancer = Rebalancer(
            options,
            module,
            self.mesh,
            self.root_device,
            self.order,
            self.stepper,
            self.prepared,
            lambda: [unwrapped(one) for one in self.optimizers],
            self.precision_plugin.convert_module,
            self._take_over,
            lambda: callbacks,
        )
        self._events = self._rebalancer.events

    @property
    def recompute_choices(self) -> dict[str, str]:
        """What each of this rank's blocks keeps now, by name; see ``recompute``. Empty where all keep everything."""
        found = None if self._prepared is None else self._prepared.recomputation
        return {} if found is None else found.choices()

    def _plan_recomputation(self) -> None:
        """Plan for the run that begins, if anything is to be planned."""
        found = self.prepared.recomputation
        if self._recomputing is None or self._recomputing.recomputation is not found:
            self._recomputing = None
            if found is not None and found.config.is_planned:
                self._recomputing = RecomputePlanner(
                    found,
                    self.mesh,
                    self.root_device,
                    self.num_processes,
                    lambda: self.in_flight,
                    self.num_microbatches,
                )

    def _take_over(self, prepared: PreparedModule) -> None:
        """Blocks were moved: this is what the rank holds now."""
        module = self.lightning_module
        assert module is not None
        self._prepared = prepared
        object.__setattr__(module, "_megapar_prepared", prepared)
        parts = PartsWatch(module) if prepared.is_cut else None
        self.stepper.adopt(prepared.parameters, prepared.cut, parts, prepared)
        place_optimizers(map(unwrapped, self.optimizers), prepared, self.mesh)
        self._print_stages()

    def _print_stages(self) -> None:
        plan = self.prepared.plan
        if plan is None or not self.is_global_zero:
            return
        from rich.console import Console
        from rich.table import Table

        by_flops = self.settled.pipeline_balance_by == "flops" and self.settled.pipeline_split is None
        title = "pipeline stages" + (", balanced by the operations of a step" if by_flops else "")
        table = Table("stage", "blocks", "parameters", title=title)
        for row in plan.rows():
            table.add_row(*row)
        Console().print(table)

    # -- collectives of the user's in a step -------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks.

        Raises:
            StepContractError: inside a pipelined step, whose stages are at different microbatches at any moment.
        """
        self._refuse_in_step("barrier")
        super().barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank ``src``'s object on every rank.

        Raises:
            StepContractError: inside a pipelined step, whose stages are at different microbatches at any moment.
        """
        self._refuse_in_step("broadcast")
        return super().broadcast(obj, src)

    def _refuse_in_step(self, what: str) -> None:
        if self.layout.pipeline > 1 and self._stepper is not None and self._stepper.is_running:
            raise StepContractError(
                f"trainer.strategy.{what}() was called in a step of a pipeline, whose stages are at different "
                "microbatches at any moment and would wait for each other for ever; call it in a hook such as "
                "on_train_batch_end, or use pipeline_parallel_size=1"
            )

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

    # -- leaving early -----------------------------------------------------------------------------------------------

    def _leave_if_requested(self) -> None:
        """All ranks learnt of a SIGTERM in the same packet: save between two windows and leave with code 143."""
        if not self._leave_requested or self.stepper.window_is_open:
            return
        self._preemption.set()  # on ranks that got no signal themselves: from here on they heed none
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            callback = trainer.checkpoint_callback
            directory = getattr(callback, "dirpath", None) or trainer.default_root_dir
            path = Path(directory) / f"preempted-step={trainer.global_step}.ckpt"
            if trainer.training:
                forget_fetched_batch(trainer)
            trainer.save_checkpoint(path, weights_only=False)
            if self.is_global_zero:
                print(f"stopped by a signal at step {trainer.global_step}; saved {path}", file=sys.stderr, flush=True)
        self._preemption.leave()
        raise SystemExit(EXIT_CODE)
