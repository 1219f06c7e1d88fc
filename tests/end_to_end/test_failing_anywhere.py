"""An exception in any hook, on any rank of a pipelined tensor-parallel run: said once, soon, with its place."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from end_to_end.conftest import PREAMBLE
from launch.cases import CaseServer, Result, clean_environment

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

FAILING = """
if sys.argv[1] == "writing":
    from lightning_megapar.checkpoint import sharded

    class Broken(sharded.CheckedFile):
        def save(self, values):
            if rank_of_this() == int(sys.argv[2]):
                note("raised", time.time())
                raise ValueError("-".join(["planted", *sys.argv[1:]]))
            super().save(values)

    sharded.CheckedFile = Broken
model = make_model()
model.stage, model.rank = sys.argv[1], int(sys.argv[2])
make_trainer().fit(model)
"""

SAID = {
    "configure_model": "in set-up (configure_model)",
    "setup": "in set-up (setup)",
    "on_train_batch_start": "in training step 2 (on_train_batch_start)",
    "training_step": "in training step 2\n",
    "on_before_optimizer_step": "in training step 2 (on_before_optimizer_step)",
    "validation_step": "in validation step 0\n",
    "on_validation_epoch_end": "in on_validation_epoch_end",
    "on_train_epoch_end": "in on_train_epoch_end",
    "on_save_checkpoint": "in checkpoint save",
    "writing": "in checkpoint save",
    "teardown": "in teardown",
}
ISSUE = ("configure_model", "setup", "training_step", "validation_step", "on_save_checkpoint", "writing")


def check(result: Result, hook: str, rank: int, seconds: float = 5.0) -> None:
    """Exit code 1, the message once on the terminal with rank and stage, in time, nobody left."""
    assert result.code == 1, result.text
    assert result.text.count(f"planted-{hook}-{rank}") == 1, result.text
    place = f"rank {rank} (data 0, pipeline {rank // 2}, tensor {rank % 2})"
    assert f"{place} {SAID[hook]}" in result.err.replace(" failed in", " in"), result.err
    result.assert_in_time(seconds)
    result.assert_nobody_left()


# One rank of each hook, so that each rank stands for some of them; all of them below.
ONE_EACH = [(hook, number % 4) for number, hook in enumerate(SAID)]
ALL = [(hook, rank) for hook in ISSUE for rank in range(4)]


@pytest.mark.parametrize(("hook", "rank"), ONE_EACH)
def test_under_our_launcher(product: CaseServer, hook: str, rank: int) -> None:
    check(product.run(FAILING, hook, rank), hook, rank)


@pytest.mark.slow
@pytest.mark.parametrize("peers", [0, 4])
@pytest.mark.parametrize(("hook", "rank"), ALL)
def test_every_rank(product: CaseServer, hook: str, rank: int, peers: int) -> None:
    check(product.run(FAILING, hook, rank, peers=peers), hook, rank)


@pytest.mark.parametrize(("hook", "rank"), [("setup", 3), ("training_step", 0), ("writing", 1)])
def test_under_an_agent(product: CaseServer, hook: str, rank: int) -> None:
    check(product.run(FAILING, hook, rank, peers=4), hook, rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "rank"),
    [(hook, (number + 1) % 4) for number, hook in enumerate(ISSUE)],
)
def test_under_torchrun(tmp_path: Path, hook: str, rank: int) -> None:
    path = tmp_path / "case.py"
    path.write_text(PREAMBLE + FAILING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(path)]
    done = subprocess.run(
        [*command, hook, str(rank)],
        env=clean_environment(OUT=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    # The agent's own summary and shutdown take a second or two beyond the ranks' end.
    check(Result(done.returncode, time.time(), done.stdout, done.stderr, tmp_path), hook, rank, seconds=7.0)
