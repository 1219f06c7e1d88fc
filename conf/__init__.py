"""Hydra groups of lightning_megapar; in a wheel they are the package ``pkg://lightning_megapar.conf``."""
