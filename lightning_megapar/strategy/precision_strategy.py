"""What a strategy does in a number format that is not one's own: a loss scale, working copies, Lightning's plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megapar.config import ConfigError, ParallelConfig
from lightning_megapar.data_parallel.norm import clip_gradients, gradient_norm, torch_norms_are_global
from lightning_megapar.data_parallel.parameters import LogicalParameter
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.precision import masters
from lightning_megapar.precision.loss_scale import LossScale, LossScaleOptions, given_loss_scale
from lightning_megapar.precision.masters import WorkingCopies, is_bfloat16_true
from lightning_megapar.precision.plugin import LossScaling, is_float16_mixed, refuse_for_float16
from lightning_megapar.strategy.limits import refuse_clipping, refuse_precision
from lightning_megapar.strategy.state_strategy import StateStrategy, unwrapped


class PrecisionStrategy(StateStrategy):
    """Takes Lightning's precision plugin and puts its own arithmetic where ranks must agree.

    Args: as in :class:`~lightning_megapar.strategy.state_strategy.StateStrategy`; ``loss_scale`` as in
        ``MegaParStrategy``.
    """

    def __init__(
        self,
        config: ParallelConfig,
        timeout_seconds: float,
        process_group_backend: str | None,
        seed: int | None,
        loss_scale: Any = None,
    ) -> None:
        self.loss_scale_options = given_loss_scale(loss_scale)
        self._loss_scale_as_given = loss_scale
        self._loss_scaling: LossScaling | None = None
        self._working: WorkingCopies | None = None
        self._trial_convert: Callable[[nn.Module], nn.Module] | None = None
        super().__init__(config, timeout_seconds, process_group_backend, seed)

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
        optimizer = unwrapped(optimizer)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = [p for p in self.stepper.parameters if id(p.parameter) in held]
        algorithm = "norm" if gradient_clip_algorithm is None else gradient_clip_algorithm
        clip_gradients(parameters, self.mesh, clip_val, str(getattr(algorithm, "value", algorithm)))

    def _norms_are_global(self) -> AbstractContextManager[None]:
        return (
            torch_norms_are_global(self.stepper.parameters, self.mesh) if self.layout.world_size > 1 else nullcontext()
        )

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._loss_scaling = self._working = self._trial_convert = None
        if is_bfloat16_true(plugin):
            self._trial_convert = masters.adopt(plugin)
            self._working = WorkingCopies(lambda: self.stepper.all_parameters)
        if is_float16_mixed(plugin):
            self._loss_scaling = LossScaling(self.loss_scale_options or LossScaleOptions())
            self._loss_scaling.adopt(plugin, ranks=self._parameters_of_ranks, tell=self._log_step)
        elif plugin is not None and self.loss_scale_options is not None:
            raise ConfigError(
                f"loss_scale={self._loss_scale_as_given} is for precision='16-mixed', and this run's is "
                f"{getattr(plugin, 'precision', '32-true')!r}; valid: loss_scale=None, or precision='16-mixed' (where "
                "Lightning turns that into bf16-mixed, on a CPU: "
                "Trainer(plugins=[lightning_megapar.precision.float16_plugin()])). In the recipes: "
                "precision.loss_scale=null, or precision=fp16"
            )
        if plugin is not None:
            # Lightning's clipping sees one rank's tensors only (and refuses fused optimizers): ours is global.
            plugin.clip_gradients = self._clip_gradients  # type: ignore[method-assign]
        self._precision_plugin = plugin

    def before_launch(self, trainer: Any, args: Sequence[Any] = ()) -> None:
        """Refuse what no step can train with, while there is one process."""
        refuse_precision(self.precision_plugin)
        refuse_clipping(trainer.gradient_clip_val)

    def _parameters_of_ranks(
        self,
    ) -> tuple[Sequence[LogicalParameter], ParallelMesh, torch.device, Sequence[str]]:
        return self.stepper.parameters, self.mesh, self.root_device, self.prepared.names.parameters

    @property
    def _needs_stepper(self) -> bool:
        """Whether a plain step has to be run as one of several ranks is."""
        return self._loss_scaling is not None or self._working is not None or self.config.arena

    def _place_precision(self) -> None:
        """The device is known."""
        if self._loss_scaling is not None:
            plugin: Any = self.precision_plugin
            plugin.device = self.root_device.type  # one that was given could not know it

    def _refuse_for_precision(self) -> None:
        if self._loss_scaling is not None:
            refuse_for_float16(self.optimizers, self.prepared.parameters)

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale as it stands, under ``precision="16-mixed"``; ``None`` under any other."""
        return None if self._loss_scaling is None else self._loss_scaling.state

    @property
    def _scale(self) -> float:
        return 1.0 if self._loss_scaling is None else self._loss_scaling.state.scale

    def _log_step(self, values: Mapping[str, float]) -> None:
        """Log numbers of an optimizer step, as a hook of it would."""
        module: Any = self.lightning_module
        if module.trainer.barebones:
            return
        kept, module._current_fx_name = module._current_fx_name, "on_before_optimizer_step"
        try:
            module.log_dict(dict(values))
        finally:
            module._current_fx_name = kept

    def _in_working_dtype(self) -> AbstractContextManager[None]:
        """Around a step: under ``bf16-true`` parameters are bfloat16 in it and float32 outside."""
        return nullcontext() if self._working is None else self._working.shown()

    def _in_masters(self) -> AbstractContextManager[None]:
        """Around an optimizer's step, which may be made within a step of the user's."""
        return nullcontext() if self._working is None else self._working.masters()
