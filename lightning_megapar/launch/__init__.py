"""Starting ranks, finding each other, failing once, leaving when asked."""

from lightning_megapar.launch.environment import (
    SubmititEnvironment,
    check_world,
    print_rank_table,
    rank_table,
    resolve_environment,
)
from lightning_megapar.launch.failure import FailureReporter, RankFailedError
from lightning_megapar.launch.launcher import ForkInPlaceLauncher, make_launcher, returns_to_caller
from lightning_megapar.launch.preemption import PreemptionFlag, shield_worker
from lightning_megapar.launch.process_group import ProcessGroupError, create_process_group

__all__ = [
    "FailureReporter",
    "ForkInPlaceLauncher",
    "PreemptionFlag",
    "ProcessGroupError",
    "RankFailedError",
    "SubmititEnvironment",
    "check_world",
    "create_process_group",
    "make_launcher",
    "print_rank_table",
    "rank_table",
    "resolve_environment",
    "returns_to_caller",
    "shield_worker",
]
