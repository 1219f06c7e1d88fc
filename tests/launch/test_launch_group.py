"""The default process group holds the ranks of one run and of one attempt, or it is not made."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from pool import RankPool, free_port

from lightning_megapar.launch import process_group
from lightning_megapar.launch.environment import SubmititEnvironment, resolve_environment
from lightning_megapar.launch.process_group import ProcessGroupError, create_process_group, failure_slot, run_identity


def _sum() -> float:
    value = torch.tensor([float(os.environ["VALUE"])])
    dist.all_reduce(value)
    return float(value)


def _my_rank() -> int:
    return int(os.environ["RANK"])  # in the pool


def _hand_started(rank: int, world: int, port: int, value: float, late: float = 0.0) -> LightningEnvironment:
    """As if somebody had typed ``LOCAL_RANK=.. MASTER_PORT=.. python train.py`` for each rank."""
    for name in list(os.environ):
        if name.startswith("TORCHELASTIC"):
            del os.environ[name]
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), VALUE=str(value))
    time.sleep(late)
    environment = LightningEnvironment()
    environment.set_global_rank(rank)
    environment.set_world_size(world)
    return environment


@contextmanager
def _impatient(seconds: float = 8.0) -> Iterator[None]:
    kept = process_group.SETUP_TIMEOUT
    process_group.SETUP_TIMEOUT = timedelta(seconds=seconds)
    try:
        yield
    finally:
        process_group.SETUP_TIMEOUT = kept


def _answer(environment: LightningEnvironment | SubmititEnvironment) -> float | str:
    """The sum over the group, or why there is none."""
    with _impatient():
        try:
            create_process_group(environment, "gloo", timedelta(seconds=8))
        except ProcessGroupError as error:
            return str(error)
        return _sum()


def _two_jobs(port: int, late: float) -> tuple[str, float | str]:
    """Pool ranks 0 and 1 are job A (value 1), 2 and 3 job B (value 10); same port."""
    job, rank = divmod(_my_rank(), 2)
    environment = _hand_started(rank, 2, port, 10.0**job, late if job == 1 and rank == 0 else 0.0)
    return "AB"[job], _answer(environment)


@pytest.mark.parametrize("late", [0.0, 0.0, 0.3, 0.3])
def test_two_jobs_on_one_port_never_mix(pool: RankPool, late: float) -> None:
    """Either one job runs with its own ranks, or both are refused; the reason names the port."""
    answers = pool.run(_two_jobs, 4, free_port(), late, mode="trainer")
    for job, own in (("A", 2.0), ("B", 20.0)):
        told = [answer for name, answer in answers if name == job]
        assert all(answer == own for answer in told) or all(isinstance(answer, str) for answer in told), answers
    refusals = [answer for _, answer in answers if isinstance(answer, str)]
    assert refusals, "two jobs cannot both own the port"
    assert all("MASTER_PORT" in text or "did not appear" in text or "not every rank" in text for text in refusals)
    assert any("MASTER_PORT" in text for text in refusals)


def _run_with_ids(port: int) -> tuple[str, str | float]:
    """Two jobs that a launcher gave an identity, on one port."""
    job, rank = divmod(_my_rank(), 2)
    for name in list(os.environ):
        if name.startswith("TORCHELASTIC"):
            del os.environ[name]
    os.environ.update(
        SUBMITIT_LOCAL_JOB_ID=str(4711 + job),
        SUBMITIT_LOCAL_NTASKS="2",
        SUBMITIT_LOCAL_GLOBALID=str(rank),
        SUBMITIT_LOCAL_LOCALID=str(rank),
        MASTER_PORT=str(port),
        VALUE=str(10.0**job),
    )
    environment = resolve_environment(LightningEnvironment())
    assert isinstance(environment, SubmititEnvironment)
    return "AB"[job], _answer(environment)


def test_two_jobs_with_identities_are_told_apart_by_name(pool: RankPool) -> None:
    answers = pool.run(_run_with_ids, 4, free_port(), mode="trainer")
    winner = next(name for name, answer in answers if not isinstance(answer, str))
    for name, answer in answers:
        if name == winner:
            assert answer == {"A": 2.0, "B": 20.0}[name]
        else:
            assert isinstance(answer, str) and "MASTER_PORT" in answer, answers
    stranger = next(answer for name, answer in answers[1::2] if name != winner)
    assert "belongs to run submitit-471" in str(stranger)


def _late_third(port: int) -> float | str | bool:
    """A stray claimant after set-up: the running pair is told through the slot, and within the first minute only."""
    me = _my_rank()
    if me < 2:
        environment = _hand_started(me, 2, port, 1.0)
        create_process_group(environment, "gloo", timedelta(seconds=8))
        slot = failure_slot(environment)
        dist.barrier()
        deadline = time.monotonic() + 10
        while slot.first() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        report = slot.first()
        dist.barrier()
        return report is not None and "claim rank 1" in report.message
    return _answer(_hand_started(1, 2, port, 10.0, late=4.0))


def test_a_late_claimant_is_refused_and_ends_the_contested_run(pool: RankPool) -> None:
    first, second, stray = pool.run(_late_third, 3, free_port(), mode="trainer")
    assert first is True and second is True
    assert isinstance(stray, str) and "two processes claim rank 1" in stray


def _torchrun_like(attempts: int) -> list[float]:
    """One group per attempt on one store that outlives them all, as torchrun's agent keeps it."""
    sums = []
    for attempt in range(attempts):
        os.environ.update(TORCHELASTIC_RESTART_COUNT=str(attempt), VALUE=str(1 + attempt))
        create_process_group(TorchElasticEnvironment(), "gloo", timedelta(seconds=20))
        sums.append(_sum())
        dist.destroy_process_group()
    return sums


def test_attempts_do_not_meet(pool: RankPool) -> None:
    assert pool.run(_torchrun_like, 3, 3, mode="trainer") == [[3.0, 6.0, 9.0]] * 3


def _reuse() -> list[Any]:
    environment = TorchElasticEnvironment()
    create_process_group(environment, "gloo", timedelta(seconds=20))
    kept = dist.group.WORLD
    create_process_group(environment, "gloo", timedelta(seconds=20))
    same = dist.group.WORLD is kept
    rank = dist.get_rank()
    os.environ.update(WORLD_SIZE="2", RANK=str(rank % 2), TORCHELASTIC_RUN_ID=f"half-{rank // 2}", VALUE="1")
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1 + rank // 2)
    create_process_group(environment, "gloo", timedelta(seconds=20))
    return [same, dist.get_world_size(), _sum()]


def test_a_fitting_group_is_kept_and_another_replaced(pool: RankPool) -> None:
    assert pool.run(_reuse, 4, mode="trainer") == [[True, 2, 2.0]] * 4


def _submitit() -> list[Any]:
    rank = _my_rank()
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC", "MASTER")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
    os.environ.update(
        SUBMITIT_LOCAL_JOB_ID=f"{os.getppid()}",
        SUBMITIT_LOCAL_NTASKS="3",
        SUBMITIT_LOCAL_GLOBALID=str(rank),
        SUBMITIT_LOCAL_LOCALID=str(rank),
        SUBMITIT_LOCAL_NODEID="0",
        SUBMITIT_LOCAL_JOB_NUM_NODES="1",
        VALUE=str(rank),
    )
    environment = resolve_environment(LightningEnvironment())
    create_process_group(environment, "gloo", timedelta(seconds=20))
    return [type(environment).__name__, environment.creates_processes_externally, dist.get_rank(), _sum()]


def test_submitit_tasks_find_each_other_by_job_id(pool: RankPool) -> None:
    answers = pool.run(_submitit, 3, mode="trainer")
    assert answers == [["SubmititEnvironment", True, rank, 3.0] for rank in range(3)]


def _missing_rank(port: int) -> str:
    with _impatient(1.0), pytest.raises(ProcessGroupError) as refused:
        create_process_group(_hand_started(0, 2, port, 1.0), "gloo", timedelta(seconds=5))
    return str(refused.value)


def test_a_rank_that_never_comes_is_said(pool: RankPool) -> None:
    (answer,) = pool.run(_missing_rank, 1, free_port(), mode="trainer")
    assert "rank 0 of 2: not every rank appeared within 1 s" in answer


def test_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC", "MEGAPAR", "SUBMITIT", "SLURM")):
            monkeypatch.delenv(name)
    assert run_identity(LightningEnvironment()).run_id is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert run_identity(TorchElasticEnvironment()).key == "torchrun-x/2"
    monkeypatch.setenv("SUBMITIT_LOCAL_JOB_ID", "77")
    assert run_identity(SubmititEnvironment()).key == "submitit-77/0"
    monkeypatch.setenv(process_group.RUN_VARIABLE, "abc")
    assert run_identity(LightningEnvironment()).key == "exec-abc/0"
