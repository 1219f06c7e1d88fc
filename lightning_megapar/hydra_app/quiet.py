"""Keep third-party adverts and repeated hints off a recipe's terminal; what is the user's business stays."""

from __future__ import annotations

import logging
import re
import warnings

_ADVERTS = re.compile(
    r"(GPU|TPU|HPU|IPU|MPS) available|Using default `ModelCheckpoint`|litlogger|LitLogger|Tip:|tip: |"
    r"`Trainer\.fit` stopped|Seed set to|Restor(ing|ed) (states|all states)|You are using a CUDA device|"
    r"`weights_only` was not set|`Trainer\(limit_\w+=[\d.]+\)` was configured"
)
"""What Lightning says through its loggers in every run, whether or not anything is to be done."""

_WARNINGS: tuple[tuple[type[Warning], str, str], ...] = (
    (UserWarning, r".*does not have many workers which may be a bottleneck", r"lightning\.pytorch.*"),
    (UserWarning, r"The `srun` command is available on your system but is not used", r"lightning\..*"),
    (UserWarning, r".*Checkpoint directory .* exists and is not empty", r"lightning\.pytorch.*"),
    (UserWarning, r".*It is recommended to use `self\.log\(.*sync_dist=True\)`", r"lightning\.pytorch.*"),
    (UserWarning, r".*your dataloader is not resumable", r"lightning\.pytorch.*"),  # the strategy's sampler is
    (FutureWarning, r".*", r"torch\.distributed.*"),
    (DeprecationWarning, r".*", r"lightning\..*"),
    (UserWarning, r".*isinstance\(treespec, LeafSpec\).*", r".*"),
    (FutureWarning, r".*isinstance\(treespec, LeafSpec\).*", r".*"),
    (DeprecationWarning, r".*isinstance\(treespec, LeafSpec\).*", r".*"),
)


class _WithoutAdverts(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or not _ADVERTS.search(record.getMessage())


_FILTER = _WithoutAdverts()
_LOGGERS = (
    "lightning.pytorch",
    "lightning.pytorch.utilities.rank_zero",
    "lightning.pytorch.trainer.connectors.accelerator_connector",
    "lightning.fabric",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.seed",
)
_IMPORTED_ALONG = re.compile(
    r"Failed to load .*_C_\w+|Skipping import of cpp extensions|is an Enum subclass and is now natively"
)
"""What torchao, which transformers imports wherever it is installed, says about kernels that nobody has asked for."""


class _WithoutImports(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not _IMPORTED_ALONG.search(record.getMessage())


_IMPORTS = _WithoutImports()


def quiet() -> None:
    """Drop the lines named above in this process and in those forked from it. Warnings of other sorts stay."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_FILTER)
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).addFilter(_IMPORTS)
    for category, message, module in _WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
