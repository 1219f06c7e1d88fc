"""SIGTERM in training, validation and saving: one step boundary, exit code 143, and nothing lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from end_to_end.conftest import PREAMBLE
from launch.cases import CaseServer, Result, Running, clean_environment, patience

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

RUN = """
layout, stop, hook, checkpoint = sys.argv[1], int(sys.argv[2]), sys.argv[3], (sys.argv[4:] or [None])[0]
model = make_model()
model.pauses = {} if hook == "none" else {hook: 0.1}
# Validation after every third step, so that epochs of five steps end elsewhere; a checkpoint after each of them.
checkpoints = ModelCheckpoint(OUT / "checkpoints", monitor="val_loss", save_top_k=1)
fit = make_trainer(layout, max_steps=stop, val_check_interval=3, callbacks=[checkpoints, Losses()])
try:
    fit.fit(model, ckpt_path=checkpoint)
finally:
    note(f"left-{fit.global_rank}", fit.global_step)
"""
HOOKS = ("training_step", "validation_step", "on_save_checkpoint")


def losses(directory: Path) -> dict[int, float]:
    lines = (directory / "losses").read_text().splitlines()
    return {int(step): float(loss) for step, loss in map(str.split, lines)}


@pytest.fixture(scope="module")
def uninterrupted(product: CaseServer) -> dict[int, float]:
    result = product.run(RUN, "single", 60, "none")
    assert result.code == 0, result.text
    return losses(result.directory)


def send(running: Running, target: str) -> None:
    if target == "group":
        os.killpg(running.pid, signal.SIGTERM)
    else:
        os.kill(running.pid if target == "agent" else running.pid_of(int(target)), signal.SIGTERM)


def check(result: Result, began: float, seconds: float = 5.0) -> Path:
    """All left together after one save; returns the checkpoint."""
    steps = {(result.directory / f"left-{rank}").read_text() for rank in range(4)}
    assert len(steps) == 1, f"ranks left at {steps}"
    of_ranks = result.err.partition('Traceback (most recent call last):\n  File "<frozen runpy>"')[
        0
    ]  # then torchrun's own
    assert "Traceback" not in of_ranks, result.err
    [saved] = result.directory.rglob("preempted-*.ckpt")
    assert f"stopped by a signal at step {steps.pop()}; saved {saved}" in result.err
    assert result.err.count("stopped by a signal") == 1
    assert result.ended - began < patience(seconds)
    result.assert_nobody_left()
    return saved


def resume(product: CaseServer, layout: str, saved: Path, uninterrupted: dict[int, float]) -> None:
    step = int(saved.stem.split("=")[1])
    resumed = product.run(RUN, layout, step + 5, "none", saved)
    assert resumed.code == 0, resumed.text
    assert losses(resumed.directory) == pytest.approx(
        {s: uninterrupted[s] for s in range(step + 1, step + 6)}, rel=1e-5
    )


def interrupt(product: CaseServer, target: str, hook: str, peers: int) -> Path:
    running = product.start(RUN, "tp2_pp2", 60, hook, peers=peers)
    running.until(*(f"at-{hook}-{rank}" for rank in range(4)))
    send(running, target)
    began = time.time()
    result = running.wait()
    if peers:
        codes = [line.split()[1] for line in result.read("codes").splitlines()]
        assert codes == ["143"] * 4, (codes, result.text)
    else:
        assert result.code == 143, result.text
    return check(result, began)


@pytest.mark.parametrize(
    ("target", "hook", "layout"),
    [("0", "training_step", "dp2_pp2"), ("3", "validation_step", "single"), ("group", "on_save_checkpoint", "dp2")],
)
def test_under_our_launcher(
    product: CaseServer, uninterrupted: dict[int, float], target: str, hook: str, layout: str
) -> None:
    resume(product, layout, interrupt(product, target, hook, 0), uninterrupted)


@pytest.mark.parametrize(("target", "hook"), [("agent", "validation_step")])
def test_under_an_agent(product: CaseServer, uninterrupted: dict[int, float], target: str, hook: str) -> None:
    resume(product, "tp2", interrupt(product, target, hook, 4), uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(("target", "peers"), [("0", 0), ("3", 0), ("group", 0), ("2", 4), ("group", 4), ("agent", 4)])
def test_every_target(product: CaseServer, uninterrupted: dict[int, float], target: str, hook: str, peers: int) -> None:
    resume(product, "single", interrupt(product, target, hook, peers), uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "hook"), [("agent", "training_step"), ("1", "validation_step")])
def test_under_torchrun(
    product: CaseServer, uninterrupted: dict[int, float], tmp_path: Path, target: str, hook: str
) -> None:
    path = tmp_path / "case.py"
    path.write_text(PREAMBLE + RUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(path)]
    with open(tmp_path / "stdout", "w") as out, open(tmp_path / "stderr", "w") as err:
        process = subprocess.Popen(
            [*command, "tp2_pp2", "60", hook], env=clean_environment(OUT=str(tmp_path)), stdout=out, stderr=err
        )
    running = Running(process.pid, tmp_path, product)
    try:
        running.until(*(f"at-{hook}-{rank}" for rank in range(4)), seconds=120)
        send(running, target)
        began = time.time()
        code = process.wait(patience(60))
    finally:
        process.kill()
    result = Result(code, time.time(), *((tmp_path / name).read_text() for name in ("stdout", "stderr")), tmp_path)
    assert code != 0
    assert "exitcode  : -" not in result.err, "every rank left by itself"
    # The agent reaps its ranks within seconds, and says in its own summary how they left.
    resume(product, "single", check(result, began, seconds=8.0), uninterrupted)
