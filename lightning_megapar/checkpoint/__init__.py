"""Sharded checkpoints that are never half written, and the full state dict of any layout."""

from lightning_megapar.checkpoint.commit import clean_directory, remove_sharded
from lightning_megapar.checkpoint.errors import CheckpointError
from lightning_megapar.checkpoint.full import gather_full_state_dict, load_full_into
from lightning_megapar.checkpoint.manifest import Manifest
from lightning_megapar.checkpoint.reader import ShardedReader, is_sharded_checkpoint, read_manifest
from lightning_megapar.checkpoint.sharded import load_sharded, save_sharded

__all__ = [
    "CheckpointError",
    "Manifest",
    "ShardedReader",
    "clean_directory",
    "gather_full_state_dict",
    "is_sharded_checkpoint",
    "load_full_into",
    "load_sharded",
    "read_manifest",
    "remove_sharded",
    "save_sharded",
]
