"""How a module becomes sharded, and how its parameters get the same values on every layout."""

from lightning_megapar.sharding.apply import shard_module
from lightning_megapar.sharding.initialise import initialise_by_name

__all__ = ["initialise_by_name", "shard_module"]
