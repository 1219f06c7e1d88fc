"""Starting the ranks of a run, and what becomes of an exception in one of them.

:func:`make_launcher` picks:

* :class:`ForkInPlaceLauncher` when nobody started the ranks: the process forks them at the first ``trainer.fit`` (or
  ``validate``, ``test``, ``predict``) and the script goes on in all of them. Nothing is imported, composed or built a
  second time; there is one Hydra job and one output directory; unseeded weights are the same everywhere. A later launch
  with as many ranks continues with them, with another number it forks anew from rank 0. Under pytest and in notebooks,
  where a child must not return to the caller, the children run the launched function only, and the module that the
  caller gets back is whole;
* :class:`ReexecLauncher` where forking is unsafe (CUDA is in use already, macOS, no ``os.fork``): the script is started
  again for each rank, as Lightning's ``ddp`` does it. The reason is printed;
* :class:`ExternalLauncher` when torchrun, SLURM, submitit, ... started them.

Each wraps the launched function in a :class:`~lightning_megapar.launch.failure.FailureReporter`. A strategy may tell
more about itself by optional methods: ``rank_description() -> str`` (``rank 3 (data 0, pipeline 1, tensor 1)``),
``current_stage() -> str`` (``checkpoint save``; return ``""`` for the default, which is read off the trainer) and
``advice_on_lost_ranks() -> str`` (what else than a rank that is gone may let ranks wait for one another).
"""

from __future__ import annotations

import os
import re
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from torch.distributed.tensor import DTensor

from lightning_megapar.config import ConfigError, Layout
from lightning_megapar.launch.environment import check_world, place_of, resolve_environment
from lightning_megapar.launch.failure import FailureReporter, interactive, is_guest, under_pytest
from lightning_megapar.launch.hygiene import code_of, discard_process_group
from lightning_megapar.launch.process_group import RUN_VARIABLE, failure_slot, hosts_store
from lightning_megapar.launch.ranks import ForkedRanks, current_ranks

DISMISS_WITHIN = 10.0
"""Seconds that ranks which a new launch does not need have to reach that launch themselves."""

_CHECKPOINT_HOOKS = {"on_save_checkpoint": "checkpoint save", "on_load_checkpoint": "checkpoint load"}
_STEP_HOOK = re.compile(r"on_\w+_batch_end|on_(before|after)_\w+|optimizer_\w+|lr_scheduler_step|\w+_gradient_clipping")


def make_launcher(strategy: Any) -> _Launcher:
    """The launcher for a strategy whose ``cluster_environment``, ``num_processes`` and ``num_nodes`` are known.

    The strategy's ``cluster_environment`` is replaced by what
    :func:`~lightning_megapar.launch.environment.resolve_environment` makes of it.
    """
    environment = strategy.cluster_environment = resolve_environment(strategy.cluster_environment)
    if isinstance(environment, LightningEnvironment) and current_ranks() is not None:
        return ForkInPlaceLauncher(strategy)  # ranks of an earlier launch; LOCAL_RANK is ours
    if environment.creates_processes_externally or strategy.num_processes * strategy.num_nodes == 1:
        return ExternalLauncher(strategy)
    reason = why_not_fork(strategy.num_nodes)
    if reason:
        rank_zero_info(f"ranks are started by running the script again: {reason}")
        return ReexecLauncher(strategy)
    return ForkInPlaceLauncher(strategy)


def why_not_fork(num_nodes: int = 1) -> str:
    """Why the ranks cannot be forked from this process, or ``""``."""
    if not hasattr(os, "fork"):
        return f"{sys.platform} has no fork"
    if sys.platform == "darwin":
        return "macOS system libraries do not survive a fork"
    if num_nodes > 1:
        return f"num_nodes={num_nodes} without a launcher such as torchrun"
    if cuda_in_use():
        return "CUDA is in use in this process already and does not survive a fork (create no CUDA tensor before fit)"
    return ""


def cuda_in_use() -> bool:
    """Whether the CUDA driver has been initialised in this process, by torch or by anybody else."""
    if torch.cuda.is_initialized():
        return True
    if torch.version.cuda is None or not sys.platform.startswith("linux"):
        return False
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False  # not even loaded
    count = ctypes.c_int()
    return int(driver.cuDeviceGetCount(ctypes.byref(count))) != 3  # CUDA_ERROR_NOT_INITIALIZED


class _MegaParLauncher(_Launcher):
    """What all launchers share: checking numbers, and reporting failures around the launched function."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.trainer: Any = None
        self.failures = FailureReporter(self._rank_description, self._stage, self._advice)

    @property
    def environment(self) -> ClusterEnvironment:
        environment: ClusterEnvironment = self.strategy.cluster_environment
        return environment

    @property
    def is_interactive_compatible(self) -> bool:
        return False

    def kill(self, signum: int) -> None:
        """Send a signal to the ranks that this process started."""

    def _check(self) -> None:
        check_world(self.environment, self.strategy.num_processes, self.strategy.num_nodes)
        self.environment.validate_settings(num_devices=self.strategy.num_processes, num_nodes=self.strategy.num_nodes)

    def _ask_who_refuses(self, trainer: Any, args: Sequence[Any]) -> None:
        """Let a strategy and callbacks refuse (``before_launch``) what cannot be trained, while there is one process.

        They get the Trainer and the arguments of ``fit``: the module, loaders, a data module, in Lightning's order.
        """
        if str(getattr(getattr(getattr(trainer, "state", None), "fn", None), "value", "")) != "fit":
            return
        for one in (self.strategy, *getattr(trainer, "callbacks", ())):
            ask = getattr(one, "before_launch", None)
            if callable(ask):
                ask(trainer, args)

    def _rank_description(self, rank: int | None = None) -> str:
        describe = getattr(self.strategy, "rank_description", None)
        if rank is None and describe is not None:
            return str(describe())
        rank = self.strategy.global_rank if rank is None else rank
        layout = getattr(self.strategy, "layout", None)
        return place_of(rank, layout) if isinstance(layout, Layout) else f"rank {rank}"

    def _stage(self) -> str:
        tell = getattr(self.strategy, "current_stage", None)
        return stage_in_hook(self.trainer, (tell() if tell is not None else "") or stage_of(self.trainer))

    def _advice(self) -> str:
        tell = getattr(self.strategy, "advice_on_lost_ranks", None)
        return str(tell()) if tell is not None else ""

    def _arm_external(self) -> None:
        self.failures.arm(
            failure_slot(self.environment),
            self.environment.global_rank(),
            "guest" if is_guest() else "peer",
            hosts_store=hosts_store(self.environment),
        )

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as exception:
            self._on_exit_request(exception)
            told = self.failures.report(exception)
            self._after_failure()
            if told is exception:
                raise
            raise told from None
        finally:
            self.failures.stop()

    def _on_exit_request(self, exception: BaseException) -> None:
        """KeyboardInterrupt or SystemExit passes through."""

    def _after_failure(self) -> None:
        """Rank 0 is about to raise."""


class ExternalLauncher(_MegaParLauncher):
    """Ranks that torchrun, SLURM, submitit or the user started, or a run of one rank: nothing to start."""

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Check the numbers, then run ``function`` with failures reported."""
        self._check()
        self._ask_who_refuses(trainer, args)
        self.trainer = trainer
        if self.environment.world_size() > 1:
            _share_cores(self.strategy.num_processes)
            self._arm_external()
        return self._call(function, args, kwargs)


class ForkInPlaceLauncher(_MegaParLauncher):
    """Forks the ranks of one host from this process; see the module's text."""

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Bring the ranks into being (or continue with those that exist), then run ``function`` in each of them.

        Raises:
            ConfigError: when another number of ranks is asked for after CUDA has been used.
            RankFailedError: on rank 0, when another rank failed first.
        """
        self._check()
        self._ask_who_refuses(trainer, args)
        self.trainer = trainer
        size = self.strategy.num_processes
        ranks = current_ranks()
        if ranks is not None and (ranks.size != size or not ranks.complete):
            self._dismiss(ranks, size)
            ranks = None
        if ranks is None and size > 1:
            self._refuse_shards(args)
            discard_process_group()
            ranks = ForkedRanks.fork(size, scoped=_must_return())
        self._take_rank()
        if ranks is None:
            self.failures.arm(None, 0, "guest")
            return self._call(function, args, kwargs)
        ranks.begin_launch()
        self.failures.arm(ranks.slot, ranks.rank, "speaker" if ranks.rank == 0 else "child", ranks)
        if ranks.scoped:
            return self._run_scoped(ranks, function, args, kwargs)
        return self._call(function, args, kwargs)

    def kill(self, signum: int) -> None:
        ranks = current_ranks()
        if ranks is not None and ranks.rank == 0:
            ranks.signal(signum)

    def _take_rank(self) -> None:
        # Trainers that were built before the fork think they are rank 0.
        ranks = current_ranks()
        rank = ranks.rank if ranks is not None else 0
        if hasattr(self.strategy, "_local_rank"):
            self.strategy._local_rank = rank
        self.strategy.set_world_ranks()

    def _dismiss(self, ranks: ForkedRanks, size: int) -> None:
        if ranks.rank != 0:
            ranks.leave(0)
        if size > 1 and cuda_in_use():
            raise ConfigError(
                f"devices={size}: this process has {ranks.size} ranks and has used CUDA, so that it cannot fork other "
                f"ranks; use devices={ranks.size}, or start a new process"
            )
        discard_process_group()
        ranks.close(DISMISS_WITHIN)

    def _refuse_shards(self, args: Any) -> None:
        # New ranks are copies of this process: the other shards of a module that was cut before are gone.
        module = args[0] if args and isinstance(args[0], torch.nn.Module) else self.trainer and self.trainer.model
        prepared = vars(module).get("_megapar_prepared") if isinstance(module, torch.nn.Module) else None
        if prepared is None:
            return
        if prepared.layout.pipeline > 1 or any(
            isinstance(record.parameter, DTensor) or record.shard is not None for record in prepared.parameters
        ):
            raise ConfigError(
                f"{type(module).__name__} was cut for {prepared.layout.describe()} and the ranks that held its other "
                f"parts have ended (after a failure); "
                f"build the module anew and load its checkpoint (ckpt_path=...)"
            )

    def _run_scoped(self, ranks: ForkedRanks, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if ranks.rank != 0:
            code = 0
            try:
                function(*args, **kwargs)
                self._give_back()
            except SystemExit as request:
                code = code_of(request.code)
            except BaseException as exception:
                code = 1
                self.failures.report(exception)
            finally:
                ranks.leave(code) if code == 0 else ranks.leave_silently(code)
        try:
            result = self._call(function, args, kwargs)
            self._call(self._give_back, (), {})
            ranks.notice()
            ranks.wait(DISMISS_WITHIN)
            return result
        finally:
            discard_process_group()
            ranks.close()

    def _give_back(self) -> None:
        # The other ranks, and what they hold, end with this launch.
        give_back = getattr(self.strategy, "give_back", None)
        if give_back is not None:
            give_back()

    def _on_exit_request(self, exception: BaseException) -> None:
        ranks = current_ranks()
        if ranks is None:
            return
        if isinstance(exception, SystemExit):
            ranks.note_exit(code_of(exception.code))
        elif isinstance(exception, KeyboardInterrupt):
            if ranks.rank != 0:
                ranks.leave_silently(130)
            ranks.note_exit(1)
            ranks.close(1.0)

    def _after_failure(self) -> None:
        ranks = current_ranks()
        if self.failures.failed and ranks is not None and not ranks.scoped:
            ranks.close()


class ReexecLauncher(_MegaParLauncher, _SubprocessScriptLauncher):
    """Lightning's re-executing launcher, with a run id that the ranks inherit and failures reported once."""

    def __init__(self, strategy: Any) -> None:
        _SubprocessScriptLauncher.__init__(
            self, strategy.cluster_environment, strategy.num_processes, strategy.num_nodes
        )
        _MegaParLauncher.__init__(self, strategy)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the script once more for each further rank, then run ``function``."""
        self._check()
        self._ask_who_refuses(trainer, args)
        if self.strategy.num_nodes == 1:
            os.environ.setdefault(RUN_VARIABLE, uuid.uuid4().hex)
        return _SubprocessScriptLauncher.launch(self, self._reported, function, args, kwargs, trainer)

    def kill(self, signum: int) -> None:
        _SubprocessScriptLauncher.kill(self, signum)

    def _reported(self, function: Callable[..., Any], args: Any, kwargs: Any, trainer: Any) -> Any:
        self.trainer = trainer
        self._arm_external()
        return self._call(function, args, kwargs)


def returns_to_caller() -> bool:
    """Whether the ranks of this process end with the launch that is running."""
    ranks = current_ranks()
    return ranks is not None and ranks.scoped


def _must_return() -> bool:
    # A child has no test runner or kernel to return to, and of the caller's threads only the one that forked.
    return under_pytest() or interactive() or threading.current_thread() is not threading.main_thread()


def _share_cores(processes: int) -> None:
    # As Lightning does for ranks that it did not start: unless told otherwise, no more threads than cores.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))


def stage_of(trainer: Any) -> str:
    """What a trainer is doing, for messages: ``set-up``, ``sanity check``, ``training step 12``, ``validation``, ..."""
    if trainer is None or getattr(trainer, "state", None) is None:
        return "the run"
    if trainer.sanity_checking:
        return "the sanity check"
    if trainer.training:
        started = trainer.fit_loop._combined_loader is not None
        return f"training step {trainer.global_step}" if started else "set-up"
    loop = trainer._active_loop
    started = loop is not None and getattr(loop, "_combined_loader", None) is not None
    name = str(getattr(trainer.state.stage, "value", "") or "")
    names = {"validate": "validation", "test": "the test", "predict": "prediction"}
    return names.get(name, "the run") if started else "set-up"


def stage_in_hook(trainer: Any, stage: str) -> str:
    """A stage made exact by the hook that a trainer is in: ``training step 12 (on_before_optimizer_step)``.

    Args:
        trainer: may be ``None``.
        stage: what its strategy last began: ``set-up``, ``training step 12``, ``checkpoint save``.
    """
    hook = getattr(getattr(trainer, "lightning_module", None), "_current_fx_name", None)
    if stage in _CHECKPOINT_HOOKS.values():
        return stage
    if hook in _CHECKPOINT_HOOKS:
        return _CHECKPOINT_HOOKS[hook]
    if trainer is not None and trainer.training and stage != "set-up" and not stage.startswith("training"):
        stage = f"training step {trainer.global_step}"  # the validation is over
    elif trainer is not None and trainer.sanity_checking:
        stage = stage.replace("validation", "sanity check")
    if hook is None or hook.endswith(("training_step", "validation_step", "test_step", "predict_step")):
        return stage
    if hook == "on_train_batch_start":
        return f"training step {trainer.global_step} ({hook})"
    if stage == "set-up" or _STEP_HOOK.fullmatch(hook):
        return f"{stage} ({hook})"
    return str(hook)
