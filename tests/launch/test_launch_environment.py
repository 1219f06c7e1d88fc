"""Numbers that disagree are refused with a table; ranks are shown with their coordinates."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from lightning_megapar.config import ConfigError, Layout
from lightning_megapar.launch import launcher as launchers
from lightning_megapar.launch.environment import (
    SubmititEnvironment,
    check_world,
    place_of,
    print_rank_table,
    rank_table,
    resolve_environment,
)
from lightning_megapar.launch.failure import FailureReporter, RankFailedError, is_failure, lost_peer
from lightning_megapar.launch.slot import FileSlot, Report


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a plain shell."""
    for name in list(os.environ):
        if name.startswith(("SLURM", "SUBMITIT", "TORCHELASTIC")) or name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


def give(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


SLURM = {
    "SLURM_JOB_ID": 1,
    "SLURM_STEP_ID": 0,
    "SLURM_JOB_NAME": "train",
    "SLURM_NNODES": 2,
    "SLURM_NTASKS_PER_NODE": 4,
    "SLURM_NTASKS": 8,
    "SLURM_PROCID": 5,
    "SLURM_LOCALID": 1,
    "SLURM_NODEID": 1,
}


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, **SLURM)
    environment = resolve_environment(SLURMEnvironment())
    assert isinstance(environment, SLURMEnvironment) and environment.auto_requeue is False
    check_world(environment, devices=4, num_nodes=2)
    with pytest.raises(ConfigError) as refused:
        check_world(environment, devices=8, num_nodes=1)
    lines = str(refused.value).splitlines()
    assert lines[0] == "devices=8, num_nodes=1: SLURM started other numbers"
    assert lines[1].split() == ["SLURM", "asked", "for"]
    assert lines[2].split() == ["nodes", "2", "(--nodes)", "num_nodes=1", "<--", "differs"]
    assert lines[3].split() == ["ranks", "per", "node", "4", "(--ntasks-per-node)", "devices=8", "<--", "differs"]
    assert lines[4].split() == ["ranks", "8", "(--ntasks)", "8"]
    assert lines[5] == "Start it with:  #SBATCH --nodes=1 --ntasks-per-node=8"
    assert lines[6] == "or ask for:     devices=4 num_nodes=2"


def test_slurm_without_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, **{k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"})
    with pytest.raises(ConfigError, match=r"without srun.*srun --ntasks-per-node=4 --nodes=2"):
        check_world(SLURMEnvironment(), devices=4, num_nodes=2)


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2, GROUP_WORLD_SIZE=2, RANK=0, LOCAL_RANK=0)
    environment = TorchElasticEnvironment()
    assert resolve_environment(environment) is environment
    check_world(environment, devices=2, num_nodes=2)
    with pytest.raises(ConfigError, match=r"torchrun --nnodes=1 --nproc-per-node=8") as refused:
        check_world(environment, devices=8, num_nodes=1)
    assert "or ask for:     devices=2 num_nodes=2" in str(refused.value)


def test_submitit(monkeypatch: pytest.MonkeyPatch) -> None:
    give(
        monkeypatch,
        SUBMITIT_LOCAL_JOB_ID=123,
        SUBMITIT_LOCAL_NTASKS=2,
        SUBMITIT_LOCAL_GLOBALID=1,
        SUBMITIT_LOCAL_LOCALID=1,
        SUBMITIT_LOCAL_NODEID=0,
        SUBMITIT_LOCAL_JOB_NUM_NODES=1,
    )
    environment = resolve_environment(LightningEnvironment())
    assert isinstance(environment, SubmititEnvironment)
    assert (environment.world_size(), environment.global_rank(), environment.local_rank()) == (2, 1, 1)
    assert environment.main_port == SubmititEnvironment().main_port and 15000 <= environment.main_port < 30000
    check_world(environment, devices=2, num_nodes=1)
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.tasks_per_node=4"):
        check_world(environment, devices=4, num_nodes=1)
    give(monkeypatch, MASTER_PORT=2345)
    assert environment.main_port == 2345


def test_hand_started(monkeypatch: pytest.MonkeyPatch) -> None:
    check_world(LightningEnvironment(), devices=4, num_nodes=1)  # nobody said anything
    give(monkeypatch, LOCAL_RANK=0, WORLD_SIZE=2)
    check_world(LightningEnvironment(), devices=2, num_nodes=1)
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        check_world(LightningEnvironment(), devices=4, num_nodes=1)


def rows(layout: Layout, per_node: int) -> list[list[str]]:
    table = rank_table(layout, per_node)
    cells = [list(column.cells) for column in table.columns]
    return [[str(column.header) for column in table.columns], *map(list, zip(*cells, strict=True))]


def test_rank_table() -> None:
    assert rows(Layout(pipeline=2, tensor=2), per_node=2) == [
        ["rank", "data", "pipeline", "tensor", "node"],
        ["0", "0", "0", "0", "0"],
        ["1", "0", "0", "1", "0"],
        ["2", "0", "1", "0", "1"],
        ["3", "0", "1", "1", "1"],
    ]


def test_rank_table_of_many_ranks_has_a_row_per_node() -> None:
    shown = rows(Layout(pipeline=2, data=8, tensor=4), per_node=8)
    assert shown[0] == ["node", "ranks", "data", "pipeline", "tensor"]
    assert shown[1] == ["0", "0-7", "0-1", "0", "0-3"]
    assert shown[8] == ["7", "56-63", "6-7", "1", "0-3"]
    assert len(shown) == 9


def test_rank_table_is_printed_by_rank_zero(capsys: pytest.CaptureFixture[str]) -> None:
    print_rank_table(Layout(tensor=2), 2, rank=1)
    print_rank_table(Layout(), 1, rank=0)
    assert capsys.readouterr().out == ""
    print_rank_table(Layout(tensor=2), 2, rank=0)
    assert "2 ranks: tensor=2" in capsys.readouterr().out


def test_place() -> None:
    assert place_of(3, Layout(pipeline=2, tensor=2)) == "rank 3 (data 0, pipeline 1, tensor 1)"
    assert place_of(1, Layout(context=2)) == "rank 1 (data 0, pipeline 0, tensor 0, context 1)"


# --------------------------------------------------------------------- which launcher


def strategy(processes: int, nodes: int = 1) -> SimpleNamespace:
    return SimpleNamespace(cluster_environment=LightningEnvironment(), num_processes=processes, num_nodes=nodes)


def test_make_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(launchers.make_launcher(strategy(1)), launchers.ExternalLauncher)
    for reason, expected in (("", launchers.ForkInPlaceLauncher), ("a test", launchers.ReexecLauncher)):
        monkeypatch.setattr(launchers, "why_not_fork", lambda nodes, reason=reason: reason)
        assert isinstance(launchers.make_launcher(strategy(2)), expected)
    give(monkeypatch, LOCAL_RANK=0)
    assert isinstance(launchers.make_launcher(strategy(2)), launchers.ExternalLauncher)


def test_where_forking_is_unsafe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "cuda_in_use", lambda: False)
    monkeypatch.setattr(launchers.sys, "platform", "linux")
    assert launchers.why_not_fork() == ""
    assert "num_nodes=2" in launchers.why_not_fork(2)
    monkeypatch.setattr(launchers, "cuda_in_use", lambda: True)
    assert "CUDA is in use" in launchers.why_not_fork()
    monkeypatch.setattr(launchers.sys, "platform", "darwin")
    assert "macOS" in launchers.why_not_fork()
    monkeypatch.setattr(launchers.sys, "platform", "win32")
    monkeypatch.delattr(launchers.os, "fork", raising=False)
    assert "win32 has no fork" in launchers.why_not_fork()


def test_cuda_counts_as_used_only_after_the_driver_was_initialised() -> None:
    assert launchers.cuda_in_use() is False  # this suite touches no GPU in this process


# --------------------------------------------------------------------- reports


def report(rank: int, lost: bool = False, message: str = "m") -> Report:
    return Report(rank, f"rank {rank}", "set-up", "ValueError", message, f"trace\nValueError: {message}\n", 1.0, lost)


def test_slot_keeps_the_first_and_prefers_the_cause(tmp_path: Path) -> None:
    slot = FileSlot(tmp_path)
    assert slot.first() is None
    assert slot.claim(report(3, lost=True)) and not slot.claim(report(2, lost=True))
    assert slot.first() == report(3, lost=True)
    assert slot.claim(report(1)) and not slot.claim(report(0))
    assert slot.first() == report(1)
    assert report(1).text() == "rank 1 failed in set-up\n\ntrace\nValueError: m"


def test_slot_under_a_race(tmp_path: Path) -> None:
    """Sixteen processes claim at once: one wins, and nobody ever reads half a report."""
    winners = []
    slot, start = FileSlot(tmp_path), time.time() + 0.3
    for rank in range(16):
        if os.fork() == 0:
            time.sleep(max(0.0, start - time.time()))
            won = slot.claim(report(rank, message="x" * 100_000))
            seen = slot.first()
            os._exit(10 + won if seen is None or len(seen.message) == 100_000 else 1)
    for _ in range(16):
        winners.append(os.waitstatus_to_exitcode(os.wait()[1]))
    assert sorted(winners) == [10] * 15 + [11]


def test_what_counts_as_a_lost_peer() -> None:
    gloo = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
    assert lost_peer(gloo) and lost_peer(ConnectionResetError()) and lost_peer(dist.DistNetworkError("x"))
    assert not lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not lost_peer(ValueError("the gloo is half empty"))
    assert lost_peer(RuntimeError("Timeout waiting for key: default_pg/0//1 after 1000 ms"))
    assert lost_peer(
        RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 10ms for recv operation")
    )
    # A user's own words.
    assert not lost_peer(RuntimeError("socket timed out while downloading shard 3 from a peer"))
    try:
        try:
            raise gloo
        except RuntimeError as error:
            raise KeyError("while saving") from error
    except KeyError as wrapped:
        assert lost_peer(wrapped)


def test_leaving_is_no_failure() -> None:
    assert not is_failure(SystemExit(143)) and not is_failure(KeyboardInterrupt()) and is_failure(ValueError())
    slotless = FailureReporter()
    error = ValueError("one rank")
    assert slotless.report(error) is error and not slotless.failed


def test_a_guest_gets_its_own_exception_with_a_note(tmp_path: Path) -> None:
    reporter = FailureReporter(lambda rank: "rank 2 (data 1, pipeline 0, tensor 0)", lambda: "training step 7")
    reporter.arm(FileSlot(tmp_path), 2, "guest")
    error = ValueError("mine")
    assert reporter.report(error) is error and reporter.failed
    assert error.__notes__ == ["raised on rank 2 (data 1, pipeline 0, tensor 0) in training step 7"]
    again = RankFailedError("later")
    assert reporter.report(again) is again and not hasattr(again, "__notes__")
