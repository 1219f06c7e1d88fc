"""The Lightning face: hooks that delegate, and what they need to know of Lightning's ways."""

from lightning_megapar.strategy.megapar import MegaParStrategy, argument_names, register

__all__ = ["MegaParStrategy", "argument_names", "register"]
