"""Who started this process, and whether its numbers are the ones that were asked for."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_megapar.config import AXES, ConfigError, Layout
from lightning_megapar.launch.ranks import current_ranks
from lightning_megapar.trees import own_environment

if TYPE_CHECKING:
    from rich.table import Table

COMPACT_ABOVE = 32
_ALWAYS = ("data", "pipeline", "tensor")
AXES_SHOWN = (*_ALWAYS, *(axis for axis in AXES if axis not in _ALWAYS))


class SubmititEnvironment(ClusterEnvironment):
    """Ranks started by submitit's local executor (``hydra/launcher=submitit_local``): one host, one task per rank.

    Rendezvous: rank 0 listens on 127.0.0.1 at a port derived from the job id, unless MASTER_PORT is set.
    submitit's SLURM executor needs nothing of this: it runs under srun, whose variables Lightning reads.
    """

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        if "MASTER_PORT" in os.environ:
            return int(os.environ["MASTER_PORT"])
        digest = hashlib.sha256(f"submitit {self.job_id}".encode()).digest()
        return 15000 + int.from_bytes(digest[:4], "big") % 15000

    @property
    def job_id(self) -> str:
        return os.environ.get("SUBMITIT_LOCAL_JOB_ID", "")

    @staticmethod
    def detect() -> bool:
        return "SUBMITIT_LOCAL_GLOBALID" in os.environ

    def world_size(self) -> int:
        return int(os.environ["SUBMITIT_LOCAL_NTASKS"])

    def set_world_size(self, size: int) -> None:
        pass  # given by submitit

    def global_rank(self) -> int:
        return int(os.environ["SUBMITIT_LOCAL_GLOBALID"])

    def set_global_rank(self, rank: int) -> None:
        rank_zero_only.rank = self.global_rank()  # type: ignore[attr-defined]

    def local_rank(self) -> int:
        return int(os.environ.get("SUBMITIT_LOCAL_LOCALID", self.global_rank()))

    def node_rank(self) -> int:
        return int(os.environ.get("SUBMITIT_LOCAL_NODEID", 0))


def resolve_environment(environment: ClusterEnvironment | None) -> ClusterEnvironment:
    """The environment that the run really has, given what Lightning detected. Idempotent.

    * submitit's local executor is recognised where Lightning sees a plain process (which would start every rank again
      in each task);
    * SLURM's ``auto_requeue`` is switched off: it saves inside a signal handler, where the collectives of a sharded
      save pair with whatever the other ranks are doing. :class:`~lightning_megapar.launch.preemption.PreemptionFlag`
      handles SIGUSR1 and SIGTERM at a step boundary instead.

    torchrun wins over submitit, submitit over a plain process; MPI and LSF are Lightning's.
    """
    environment = own_environment(environment)
    if environment is None:
        environment = TorchElasticEnvironment() if TorchElasticEnvironment.detect() else LightningEnvironment()
    if isinstance(environment, SLURMEnvironment):
        environment.auto_requeue = False
    if isinstance(environment, LightningEnvironment) and SubmititEnvironment.detect():
        return SubmititEnvironment()
    return environment


@dataclass(frozen=True)
class _Given:
    """What a launcher says about the world; ``None`` where it says nothing."""

    launcher: str
    nodes: int | None
    per_node: int | None
    ranks: int | None
    names: tuple[str, str, str]
    line: str


def check_world(environment: ClusterEnvironment, devices: int, num_nodes: int) -> None:
    """Compare what the launcher gave with what the run asks for.

    Args:
        environment: as :func:`resolve_environment` returned it.
        devices: ranks per node that the run asks for.
        num_nodes: nodes that the run asks for.

    Raises:
        ConfigError: with a table of the numbers and the line to write, when they disagree or when a batch script runs
            ``python`` without ``srun``.
    """
    given = _given(environment, devices, num_nodes)
    if given is None:
        return
    asked = (num_nodes, devices, devices * num_nodes)
    rows = list(zip(given.names, (given.nodes, given.per_node, given.ranks), asked, strict=True))
    if all(have is None or have == want for _, have, want in rows):
        return
    labels = ("nodes", "ranks per node", "ranks")
    width = max(
        len(given.launcher) + 1, *(len(f"{have if have is not None else '-'} ({name})") for name, have, _ in rows)
    )
    lines = [
        f"devices={devices}, num_nodes={num_nodes}: {given.launcher} started other numbers",
        f"{'':<16}{given.launcher:<{width + 2}}asked for",
    ]
    for label, (name, have, want) in zip(labels, rows, strict=True):
        shown = f"{have if have is not None else '-'} ({name})"
        setting = {"nodes": "num_nodes=", "ranks per node": "devices=", "ranks": ""}[label]
        mark = "" if have is None or have == want else "   <-- differs"
        lines.append(f"{label:<16}{shown:<{width + 2}}{setting}{want}{mark}")
    lines.append(f"Start it with:  {given.line}")
    nodes = given.nodes or 1
    per_node = given.per_node or ((given.ranks or devices * nodes) // nodes)
    lines.append(f"or ask for:     devices={per_node} num_nodes={nodes}")
    raise ConfigError("\n".join(lines))


def _given(environment: ClusterEnvironment, devices: int, num_nodes: int) -> _Given | None:
    number = _environment_number
    if isinstance(environment, TorchElasticEnvironment):
        world, local = number("WORLD_SIZE"), number("LOCAL_WORLD_SIZE")
        nodes = number("GROUP_WORLD_SIZE") or (world // local if world and local else None)
        return _Given(
            "torchrun",
            nodes,
            local,
            world,
            ("--nnodes", "--nproc-per-node", "WORLD_SIZE"),
            f"torchrun --nnodes={num_nodes} --nproc-per-node={devices} {_script()}",
        )
    if isinstance(environment, SLURMEnvironment):
        _require_srun(devices, num_nodes)
        return _Given(
            "SLURM",
            number("SLURM_NNODES") or number("SLURM_JOB_NUM_NODES"),
            number("SLURM_NTASKS_PER_NODE"),
            number("SLURM_NTASKS"),
            ("--nodes", "--ntasks-per-node", "--ntasks"),
            f"#SBATCH --nodes={num_nodes} --ntasks-per-node={devices}",
        )
    if isinstance(environment, SubmititEnvironment):
        tasks = number("SUBMITIT_LOCAL_NTASKS")
        nodes = number("SUBMITIT_LOCAL_JOB_NUM_NODES") or 1
        return _Given(
            "submitit",
            nodes,
            tasks // nodes if tasks else None,
            tasks,
            ("nodes", "tasks_per_node", "tasks"),
            f"hydra.launcher.nodes={num_nodes} hydra.launcher.tasks_per_node={devices}",
        )
    if isinstance(environment, LightningEnvironment) and current_ranks() is None and "LOCAL_RANK" in os.environ:
        return _Given(
            "environment",
            None,
            number("LOCAL_WORLD_SIZE"),
            number("WORLD_SIZE"),
            ("-", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
            f"WORLD_SIZE={devices * num_nodes} LOCAL_RANK=<0..{devices - 1}> NODE_RANK=... {_script()}",
        )
    return None


def _require_srun(devices: int, num_nodes: int) -> None:
    # Inside a batch script SLURM_PROCID is 0 and SLURM_NTASKS the job's: rank 0 would wait for ranks nobody starts.
    several = (_environment_number("SLURM_NTASKS") or 1) > 1
    in_job = "SLURM_JOB_ID" in os.environ
    in_step = any(name in os.environ for name in ("SLURM_STEP_ID", "SLURM_STEPID"))
    if several and in_job and not in_step:
        raise ConfigError(
            f"SLURM gave this job {os.environ['SLURM_NTASKS']} tasks, but python was started without srun: only one "
            f"rank exists. Start it with:  srun --ntasks-per-node={devices} --nodes={num_nodes} {_script()}"
        )


def _environment_number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


def _script() -> str:
    return " ".join(["python", *sys.argv[:1]])


def place_of(rank: int, layout: Layout) -> str:
    """A rank with its coordinates for messages, such as ``rank 3 (data 0, pipeline 1, tensor 1)``."""
    place = layout.coordinates(rank)
    shown = [f"{axis} {place[axis]}" for axis in AXES_SHOWN if axis in _ALWAYS or getattr(layout, axis) > 1]
    return f"rank {rank} ({', '.join(shown)})"


def rank_table(layout: Layout, ranks_per_node: int) -> Table:
    """Which rank is which: one row per rank, or one per node above 32 ranks.

    Args:
        layout: resolved degrees.
        ranks_per_node: ranks on each host.

    Returns:
        a :class:`rich.table.Table` with the columns rank, data, pipeline, tensor (context and expert where they are
        split) and node.
    """
    from rich import box
    from rich.table import Table

    axes = [axis for axis in AXES_SHOWN if axis in _ALWAYS or getattr(layout, axis) > 1]
    table = Table(title=f"{layout.world_size} ranks: {layout.describe()}", box=box.SIMPLE, title_justify="left")
    world = layout.world_size
    if world <= COMPACT_ABOVE:
        for name in ("rank", *axes, "node"):
            table.add_column(name, justify="right")
        for rank in range(world):
            place = layout.coordinates(rank)
            table.add_row(str(rank), *(str(place[axis]) for axis in axes), str(rank // ranks_per_node))
        return table
    for name in ("node", "ranks", *axes):
        table.add_column(name, justify="right")
    for first in range(0, world, ranks_per_node):
        ranks = range(first, min(world, first + ranks_per_node))
        places = [layout.coordinates(rank) for rank in ranks]
        table.add_row(
            str(first // ranks_per_node),
            _span(ranks),
            *(_span([place[axis] for place in places]) for axis in axes),
        )
    return table


def print_rank_table(layout: Layout, ranks_per_node: int, rank: int | None = None) -> None:
    """Print :func:`rank_table` on rank 0 (default: Lightning's) to standard output; nothing for a run of one rank."""
    rank = getattr(rank_zero_only, "rank", 0) if rank is None else rank
    if rank != 0 or layout.world_size == 1:
        return
    from rich.console import Console

    Console(highlight=False).print(rank_table(layout, ranks_per_node))


def _span(values: Any) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"
