"""Callbacks that a user adds to the recipe: ``+callbacks.fault._target_=recipe_callbacks.Fault``."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from typing import Any

from lightning.pytorch.callbacks import Callback

OUT = pathlib.Path(os.environ.get("OUT", "."))


class Fault(Callback):
    """Something happens to one rank, or to all, in a hook at a step, unless ``FAULT_OVER`` is in the environment.

    Args:
        what: ``raise`` or ``kill``.
        hook: name of the hook.
        rank: -1 for all ranks.
        step: ``trainer.global_step`` at which it happens; -1 for the first call.
    """

    def __init__(self, what: str, hook: str, rank: int, step: int = -1) -> None:
        self.what, self.rank, self.step = what, rank, step
        setattr(self, hook, self._happen)
        self.hook = hook

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        path = OUT / f"pid-{trainer.global_rank}"
        path.with_suffix(".part").write_text(str(os.getpid()))
        path.with_suffix(".part").rename(path)
        if self.hook == "set_up":
            self._happen(trainer)

    def _happen(self, trainer: Any, *rest: Any) -> None:
        if "FAULT_OVER" in os.environ or self.step not in (-1, trainer.global_step):
            return
        if self.rank not in (-1, trainer.global_rank):
            return
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        (OUT / "raised").write_text(str(time.time()))
        raise ValueError("-".join(["planted", self.hook, str(self.rank)]))
