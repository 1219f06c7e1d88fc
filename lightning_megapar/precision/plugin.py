"""Lightning's ``16-mixed`` plugin under one loss scale for all ranks.

The plugin that the Trainer has made (or was given) stays, of whichever of Lightning's two packages it is; its
``GradScaler`` goes. That scaler asks one rank's gradients whether they have overflowed, so that one rank would skip a
step that the others take; it has neither hysteresis nor floor; and it leaves fused optimizers to unscale by themselves,
which excludes clipping.

What is different from Lightning's order of things: gradients are divided by the scale in float32 when they reach
``.grad`` and before anybody sees them, so that ``on_after_backward`` sees the true ones as well, and an accumulation
window or two optimizers may live through a change of the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_megapar.config import ConfigError
from lightning_megapar.data_parallel.parameters import LogicalParameter
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.precision.loss_scale import LossScale, LossScaleOptions
from lightning_megapar.precision.overflow import first_nonfinite, overflowed
from lightning_megapar.trees import in_any_tree

HALVES = (torch.float16, torch.bfloat16)


class LossScaleError(RuntimeError):
    """Gradients overflow float16 at every scale that may be taken."""


def float16_plugin() -> Any:
    """A plugin for ``Trainer(plugins=[float16_plugin()])``: ``precision="16-mixed"`` on every device.

    ``Trainer(precision="16-mixed")`` says the same on GPUs. On a CPU Lightning turns that flag into bfloat16, with a
    warning, before a strategy gets to see it; a plugin that is given stays what it is. The strategy sets its device.
    (Scripts that import ``pytorch_lightning`` give that package's ``MixedPrecision("16-mixed", device="cpu")``.)
    """
    from lightning.pytorch.plugins import MixedPrecision

    return MixedPrecision("16-mixed", device="cpu")


def is_float16_mixed(plugin: Any) -> bool:
    """Whether this is Lightning's plugin of ``16-mixed``."""
    mixed = isinstance(plugin, in_any_tree("plugins.precision", "MixedPrecision"))
    return mixed and str(plugin.precision) == "16-mixed"


class LossScaling:
    """The loss scale of a run: scales nothing itself, but knows the scale and takes, or skips, the optimizer's step.

    Args:
        options: how the scale moves.
        state: where it stands.
    """

    def __init__(self, options: LossScaleOptions) -> None:
        self.options = options
        self.state = LossScale.start(options)
        self._warned = False

    def adopt(
        self,
        plugin: Any,
        *,
        ranks: Callable[[], tuple[Sequence[LogicalParameter], ParallelMesh, torch.device, Sequence[str]]],
        tell: Callable[[Mapping[str, float]], None],
    ) -> None:
        """Make a ``16-mixed`` plugin of Lightning's step by this scale.

        Args:
            plugin: its ``GradScaler`` is dropped.
            ranks: this rank's parameters, the ranks, the device, and the whole model's parameter names in order.
            tell: logs a step's numbers.

        Raises:
            ConfigError: for a scaler that was given options of its own.
        """
        self._ranks, self._tell = ranks, tell
        _refuse_options_of(plugin.scaler)
        plugin.scaler = None

        def optimizer_step(optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
            return self._step(plugin, optimizer, model, closure, **kwargs)

        plugin.optimizer_step = optimizer_step
        plugin.state_dict = self.state_dict
        plugin.load_state_dict = self.load_state_dict

    def _step(self, plugin: Any, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Backward, look at the unscaled gradients of all ranks, the user's hooks and clipping, and step or not."""
        result = closure()
        if result is None and model.automatic_optimization:
            plugin._after_closure(model, optimizer)
            return None  # training_step returned None: there are no gradients
        parameters, mesh, device, order = self._ranks()
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        asked = [p for p in parameters if id(p.parameter) in held]
        skipped = overflowed(asked, mesh, device)
        before, self.state = self.state, self.state.after(skipped, self.options)
        self._tell({"loss_scale": before.scale, "skipped_steps": float(self.state.skipped_steps)})
        if skipped:
            if self.state.stuck_steps >= self.options.patience:
                name = first_nonfinite(asked, mesh, order)
                raise LossScaleError(
                    f"gradients were not finite for {self.state.stuck_steps} steps in a row at the loss scale "
                    f"{before.scale:g}, which goes no lower; the first parameter concerned is {name!r}. Look at its "
                    "inputs and at the learning rate, or use precision='bf16-mixed', whose range is float32's"
                )
            if not self._warned:
                self._warned = True
                rank_zero_warn(
                    f"gradients overflowed float16 at the loss scale {before.scale:g}: this optimizer step is skipped "
                    "on every rank. A few such steps are how the scale is found; skipped_steps counts them"
                )
        plugin._after_closure(model, optimizer)
        return None if skipped else optimizer.step(**kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The state in the terms of torch's ``GradScaler``, so that plain Lightning can go on with it, and the rest."""
        return {
            "scale": self.state.scale,
            "growth_factor": self.options.factor,
            "backoff_factor": 1.0 / self.options.factor,
            "growth_interval": self.options.window,
            "_growth_tracker": self.state.good_steps,
            "hysteresis_left": self.state.hysteresis_left,
            "skipped_steps": self.state.skipped_steps,
            "stuck_steps": self.state.stuck_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, or from a ``GradScaler``'s. Options are this run's; a fixed scale stays."""
        if not state:
            return
        start = LossScale.start(self.options)
        fixed = self.options.fixed
        self.state = LossScale(
            scale=start.scale if fixed else max(float(state["scale"]), self.options.floor),
            good_steps=int(state.get("_growth_tracker", 0)),
            hysteresis_left=min(int(state.get("hysteresis_left", start.hysteresis_left)), self.options.hysteresis),
            skipped_steps=int(state.get("skipped_steps", 0)),
            stuck_steps=int(state.get("stuck_steps", 0)),
        )


def _refuse_options_of(scaler: Any) -> None:
    """No silent setting: what a ``GradScaler`` was told is told to ``loss_scale``."""
    usual = {
        "initial": ("_init_scale", 65536.0),
        "factor": ("_growth_factor", 2.0),
        "window": ("_growth_interval", 2000),
    }
    told = {option: getattr(scaler, name, default) for option, (name, default) in usual.items()}
    changed = {option: value for option, value in told.items() if value != usual[option][1]}
    if changed:
        raise ConfigError(
            f"the plugin's GradScaler was given {changed}, and the loss scale is the strategy's, one for all ranks; "
            f"valid: MegaParStrategy(loss_scale={changed}) with MixedPrecision('16-mixed', ...) without a scaler"
        )


def refuse_for_float16(optimizers: Iterable[Optimizer], parameters: Sequence[LogicalParameter]) -> None:
    """Refuse what loses the digits that a loss scale is there to keep.

    Raises:
        ConfigError: naming the parameter or the optimizer, with what to use.
    """
    half = next((p for p in parameters if p.parameter.requires_grad and p.parameter.dtype in HALVES), None)
    if half is not None:
        kind = str(half.parameter.dtype).removeprefix("torch.")
        raise ConfigError(
            f"precision='16-mixed' with {kind} parameters ({half.name!r}): gradients have their parameter's dtype, and "
            "unscaling needs float32. Valid: keep the parameters in float32 (module.float()), or "
            "precision='bf16-true', which keeps float32 masters"
        )
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                f"{type(optimizer).__name__} calls the step's closure several times, and precision='16-mixed' decides "
                "after one backward whether to step; valid: precision='bf16-mixed' or '32-true', or another optimizer"
            )
        for group in optimizer.param_groups:
            told = next((key for key, value in group.items() if value in HALVES or _rounds(key, value)), None)
            if told is not None:
                raise ConfigError(
                    f"precision='16-mixed' with a bf16 optimizer ({type(optimizer).__name__}, {told}={group[told]}): "
                    "float16 gradients carry 11 bits, bfloat16 state keeps 8 of them, and updates below 2^-8 of a "
                    "weight are lost. Valid: float32 state, or precision='bf16-mixed' or 'bf16-true'"
                )


def _rounds(key: str, value: Any) -> bool:
    return key.startswith("bf16") and value is True
