"""Settings of parameter groups that hold for one optimizer step and are taken back behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer


class StepSetting(Callback):
    """A callback that changes a setting around each optimizer step, from :meth:`change` to the end of the fit."""

    _around: AroundStep | None = None

    def change(self, trainer: Trainer, setting: str, value: Callable[[int, int, dict[str, Any]], Any]) -> None:
        """Begin; see :class:`AroundStep` for the arguments."""
        self._around = AroundStep(trainer.optimizers, setting, value)

    def leave(self) -> None:
        """End; a subclass forgets here what belongs to a fit."""
        if self._around is not None:
            self._around.remove()
        self._around = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.leave()


class AroundStep:
    """Changes one setting of each group before an optimizer steps, and restores it afterwards.

    In between, schedulers, checkpoints and other callbacks see the values that the user gave. The hooks are torch's:
    they run around ``optimizer.step`` itself, so that a step that is skipped (half precision) changes nothing. Hooks
    that are made later see what those made earlier have set.

    Args:
        optimizers: whose groups.
        setting: name of the setting.
        value: ``(optimizer index, group index, group) -> value`` for the step that begins, ``None`` to leave it.
    """

    def __init__(
        self,
        optimizers: list[Optimizer],
        setting: str,
        value: Callable[[int, int, dict[str, Any]], Any],
    ) -> None:
        self._setting, self._value = setting, value
        self._kept: dict[int, list[Any]] = {}
        self._handles = []
        for index, optimizer in enumerate(optimizers):
            self._handles.append(optimizer.register_step_pre_hook(self._before(index)))
            self._handles.append(optimizer.register_step_post_hook(self._after(index)))
        self._optimizers = list(optimizers)

    def _before(self, index: int) -> Callable[..., None]:
        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._restore(index, optimizer)  # of a step that failed half way
            self._kept[index] = [group[self._setting] for group in optimizer.param_groups]
            for number, group in enumerate(optimizer.param_groups):
                value = self._value(index, number, group)
                if value is not None:
                    group[self._setting] = value

        return before

    def _after(self, index: int) -> Callable[..., None]:
        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._restore(index, optimizer)

        return after

    def _restore(self, index: int, optimizer: Optimizer) -> None:
        for group, value in zip(optimizer.param_groups, self._kept.pop(index, [])):
            group[self._setting] = value

    def remove(self) -> None:
        """Take back what a failed step left, and the hooks."""
        for index, optimizer in enumerate(self._optimizers):
            self._restore(index, optimizer)
        for handle in self._handles:
            handle.remove()
        self._handles = []
