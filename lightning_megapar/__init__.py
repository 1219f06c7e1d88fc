"""Your LightningModule, unchanged, under tensor, sequence, pipeline and data parallelism, with one device's numbers.

Importing the package registers ``Trainer(strategy="megapar")``.
"""

from lightning_megapar.config import ConfigError, Layout, ParallelConfig
from lightning_megapar.strategy import MegaParStrategy, register

__version__ = "0.1.0"
__all__ = ["ConfigError", "Layout", "MegaParStrategy", "ParallelConfig", "__version__", "register"]

register()
