"""The default process group, made by us: no rank of another job or of an earlier attempt can end up in it.

``init_process_group`` over ``env://`` trusts whoever connects to MASTER_ADDR:MASTER_PORT first. Two jobs on one port
then form a group out of ranks of both, and a torchrun restart reads the addresses of ranks that are dead. Here every
key lives under a prefix of run id, attempt, world size and the count of groups made so far; on a port that a launcher
gave us no identity for, each rank claims its place and a second claimant is refused.

========================  ==========================================  ================================
ranks started by          store                                       run id / attempt
========================  ==========================================  ================================
our fork in place         FileStore in a directory of mode 0700       random / 0
torchrun                  the agent's TCPStore (as a client)          TORCHELASTIC_RUN_ID / RESTART_COUNT
SLURM                     TCPStore of rank 0                          job and step id / SLURM_RESTART_COUNT
submitit, LSF, re-exec    TCPStore of rank 0                          job id, or random / 0
anything else             TCPStore of rank 0                          unknown: ranks claim their places
========================  ==========================================  ================================
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import sys
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from lightning_megapar.launch.environment import SubmititEnvironment
from lightning_megapar.launch.hygiene import discard_process_group
from lightning_megapar.launch.ranks import current_ranks
from lightning_megapar.launch.slot import Report, StoreSlot

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""For collectives in a steady run: longer than one rank may work alone (compiling, writing), far below torch's 30 min
for gloo, after which nobody looks any more."""
SETUP_TIMEOUT = timedelta(minutes=5)
"""For every rank of a run to appear."""
GRACE = 1.0
"""Seconds that rank 0 of a run without identity waits for a second claimant before the group is made."""
CONTESTED = 60.0
"""Seconds after set-up in which a late claimant to a place ends a run without identity; after that it was a stray
process, and it alone is refused."""
RUN_VARIABLE = "MEGAPAR_RUN_ID"
"""Set by our re-executing launcher for the ranks that it starts: the run's random id."""

_stores: dict[tuple[str, int], dist.Store] = {}
_groups_made: dict[str, int] = {}


class ProcessGroupError(RuntimeError):
    """The process group could not be made, or its ranks do not belong to one run."""


@dataclass(frozen=True)
class RunIdentity:
    """What tells this run from every other; ``run_id`` is ``None`` where the launcher gives no identity."""

    run_id: str | None
    attempt: int = 0

    @property
    def key(self) -> str:
        return f"{self.run_id}/{self.attempt}"


def run_identity(environment: ClusterEnvironment) -> RunIdentity:
    """The identity that the launcher gave this run."""
    ranks = current_ranks()
    if ranks is not None:
        return RunIdentity(f"fork-{ranks.uid}")
    read = os.environ.get
    if isinstance(environment, TorchElasticEnvironment):
        return RunIdentity(f"torchrun-{read('TORCHELASTIC_RUN_ID')}", int(read("TORCHELASTIC_RESTART_COUNT", "0")))
    if isinstance(environment, SLURMEnvironment):
        step = read("SLURM_STEP_ID", read("SLURM_STEPID", "0"))
        return RunIdentity(f"slurm-{read('SLURM_JOB_ID')}.{step}", int(read("SLURM_RESTART_COUNT", "0")))
    if isinstance(environment, SubmititEnvironment):
        return RunIdentity(f"submitit-{environment.job_id}")
    if isinstance(environment, LSFEnvironment):
        return RunIdentity(f"lsf-{read('LSB_JOBID')}")
    if read(RUN_VARIABLE):
        return RunIdentity(f"exec-{read(RUN_VARIABLE)}")
    return RunIdentity(None)


def create_process_group(
    environment: ClusterEnvironment,
    backend: str,
    timeout: timedelta | None = None,
    device_id: torch.device | None = None,
) -> None:
    """Make the default process group, or keep one that fits.

    An initialised group of the right size and rank stays as it is; one of another size is dropped first.

    Args:
        environment: as :func:`~lightning_megapar.launch.environment.resolve_environment` returned it, with the ranks
            set.
        backend: ``"gloo"``, ``"nccl"`` or a composite such as ``"cpu:gloo,cuda:nccl"``.
        timeout: for collectives; default :data:`DEFAULT_TIMEOUT`.
        device_id: the accelerator of this rank, which binds the group to it.

    Raises:
        ProcessGroupError: when the port belongs to another run, a place is taken, ranks do not appear within
            :data:`SETUP_TIMEOUT`, or the ranks of the finished group show different runs or world sizes.
    """
    rank, world = environment.global_rank(), environment.world_size()
    if dist.is_initialized():
        if dist.get_world_size() == world and dist.get_rank() == rank:
            return
        discard_process_group()
    identity = run_identity(environment)
    count = _count_group(environment, identity, world)
    prefix = f"megapar/{identity.key}/{world}/{count}"
    base = _base_store(environment, identity, rank, world, count)
    store = dist.PrefixStore(prefix, base)
    store.set_timeout(SETUP_TIMEOUT)
    hook = sys.excepthook
    try:
        uid = _agree(store, environment, identity, rank, world, first=count == 1)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world,
            timeout=timeout or DEFAULT_TIMEOUT,
            device_id=device_id if device_id is not None and device_id.type != "cpu" else None,
        )
        _verify(uid, rank, world, backend, device_id)
    except ProcessGroupError:
        discard_process_group()
        raise
    except dist.DistStoreError as error:
        raise ProcessGroupError(
            f"rank {rank} of {world}: not every rank appeared within "
            f"{min(SETUP_TIMEOUT, timeout or DEFAULT_TIMEOUT).total_seconds():.0f} s ({error})"
        ) from error
    finally:
        # torch wraps the hook once more for each group, to put "[rank0]: " before every line of a traceback; our notes
        # name the rank once.
        sys.excepthook = hook


def failure_slot(environment: ClusterEnvironment) -> StoreSlot:
    """Where ranks that somebody else started leave reports: the run's store, over a connection of its own."""
    prefix = f"megapar/{run_identity(environment).key}/{environment.world_size()}/failure"
    address = (environment.main_address, environment.main_port)
    return StoreSlot(*address, prefix, exists=lambda: _agent_store() or address in _stores)


def hosts_store(environment: ClusterEnvironment) -> bool:
    """Whether this process hosts the run's TCPStore, which then ends with it."""
    return environment.global_rank() == 0 and not _agent_store() and current_ranks() is None


def _agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _count_group(environment: ClusterEnvironment, identity: RunIdentity, world: int) -> int:
    # Every rank of a run makes the same groups in the same order; processes that serve several runs count per run.
    where = "" if current_ranks() is not None else f"@{environment.main_address}:{environment.main_port}"
    key = f"{identity.key}{where}/{world}"
    _groups_made[key] = _groups_made.get(key, 0) + 1
    return _groups_made[key]


def _base_store(
    environment: ClusterEnvironment, identity: RunIdentity, rank: int, world: int, count: int
) -> dist.Store:
    ranks = current_ranks()
    if ranks is not None:
        return dist.FileStore(str(ranks.directory / f"store-{count}"), world)
    address = (environment.main_address, environment.main_port)
    if address in _stores:
        return _stores[address]
    host, port = address
    server = rank == 0 and not _agent_store()
    try:
        store = dist.TCPStore(
            host, port, is_master=server, timeout=SETUP_TIMEOUT, wait_for_workers=False, multi_tenant=server
        )
    except dist.DistNetworkError as error:
        raise ProcessGroupError(_network_message(error, rank, host, port, server)) from None
    if identity.run_id is not None and not _agent_store():
        _check_owner(store, identity, rank, host, port)
    _stores[address] = store
    return store


def _network_message(error: Exception, rank: int, host: str, port: int, server: bool) -> str:
    if server and (f"errno: {errno.EADDRINUSE}" in str(error) or "EADDRINUSE" in str(error)):
        return (
            f"rank {rank}: port {port} (MASTER_PORT) is in use on this host, perhaps by another job; "
            f"give this one a port of its own, such as MASTER_PORT={_free_port()}"
        )
    return f"rank {rank}: no connection to {host}:{port} (MASTER_ADDR:MASTER_PORT): {error}"


def _check_owner(store: dist.Store, identity: RunIdentity, rank: int, host: str, port: int) -> None:
    if rank == 0:
        owner = store.compare_set("megapar/owner", "", identity.key).decode()
    else:
        owner = store.get("megapar/owner").decode()
    if owner != identity.key:
        raise ProcessGroupError(
            f"rank {rank}: {host}:{port} (MASTER_ADDR:MASTER_PORT) belongs to run {owner}, this is run {identity.key}; "
            f"two jobs may not share a port: give one of them another MASTER_PORT"
        )


def _agree(
    store: dist.Store, environment: ClusterEnvironment, identity: RunIdentity, rank: int, world: int, first: bool
) -> str:
    """All ranks take rank 0's random id; without an identity, only after every place was claimed once."""
    if identity.run_id is not None:
        if rank == 0:
            store.set("uid", uuid.uuid4().hex)
        return store.get("uid").decode()
    card = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "cwd": os.getcwd(), "argv": sys.argv[:3]})
    kept = store.compare_set(f"claim/{rank}", "", card).decode()
    if kept != card:
        _refuse(store, environment, rank, card, kept)
    if rank == 0:
        store.wait([f"claim/{other}" for other in range(world)], SETUP_TIMEOUT)
        deadline = time.monotonic() + GRACE
        while first and time.monotonic() < deadline and not store.check(["conflict"]):
            time.sleep(0.1)
        refused = store.get("conflict").decode() if store.check(["conflict"]) else ""
        store.set("verdict", json.dumps({"uid": uuid.uuid4().hex, "refused": refused, "time": time.time()}))
    verdict = json.loads(store.get("verdict"))
    if verdict["refused"]:
        raise ProcessGroupError(f"rank {rank}: {verdict['refused']}")
    return str(verdict["uid"])


def _refuse(store: dist.Store, environment: ClusterEnvironment, rank: int, card: str, kept: str) -> None:
    mine, other = json.loads(card), json.loads(kept)
    port = environment.main_port
    text = (
        f"two processes claim rank {rank} on port {port} (MASTER_PORT): {_who(other)} and {_who(mine)}. "
        f"Two jobs may not share a port: give one of them another MASTER_PORT"
    )
    if not store.check(["verdict"]):
        store.set("conflict", text)
    elif time.time() - json.loads(store.get("verdict"))["time"] < CONTESTED:
        # The group is up and may hold ranks of both jobs; nobody can tell which. It must not go on.
        failure_slot(environment).claim(Report(-1, f"rank {rank}", "set-up", "", text, "", time.time()))
    raise ProcessGroupError(text)


def _who(card: dict[str, Any]) -> str:
    return f"process {card['pid']} on {card['host']} ({' '.join(card['argv'])} in {card['cwd']})"


def _verify(uid: str, rank: int, world: int, backend: str, device_id: torch.device | None) -> None:
    on_device = "gloo" not in backend and device_id is not None
    device = device_id if on_device else torch.device("cpu")
    mark = int.from_bytes(hashlib.sha256(uid.encode()).digest()[:7], "big")
    mine = torch.tensor([mark, world, rank], dtype=torch.int64, device=device)
    shown = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(shown, mine)
    for place, row in enumerate(torch.stack(shown).tolist()):
        if row != [mark, world, place]:
            raise ProcessGroupError(
                f"rank {rank}: place {place} of the process group is held by rank {row[2]} of a run of {row[1]} ranks"
                f"{'' if row[0] == mark else ' that is not this one'}; start the job again on another MASTER_PORT"
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
