"""The recipe as a command: what a run leaves, resuming, sweeps, exit codes, refusals before any rank."""

from __future__ import annotations

import csv
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "pretrain.py"
SMALL = [
    "model=gpt_tiny",
    "data.max_bytes=300000",
    "data.validation_limit=16",
    "data.sequence_length=32",
    "trainer.log_every_n_steps=1",
    "callbacks.sample_text.length=16",
    "seed=1",
]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command is typed: far from the repository."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # the cache of tokenised text
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    place = tmp_path / "typed here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def command(place: Path, *overrides: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, str(RECIPE), *overrides],
        cwd=place, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


def rows(run: Path) -> list[dict[str, str]]:
    with open(run / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_and_its_continuation_on_another_layout(typed: Path) -> None:
    every = ["trainer.max_steps=4", "trainer.val_check_interval=2"]
    done = command(typed, "parallel=tp2_pp2", "run_dir=runs/a", *SMALL, *every)
    run = typed / "runs" / "a"
    assert {path.name for path in run.iterdir()} == {
        "metrics.csv", "checkpoints", "config.yaml", "overrides.yaml", "run.json"
    }  # fmt: skip
    assert {path.name for path in typed.iterdir()} == {"runs"}, "nothing else is written where the command was typed"
    assert json.loads((run / "run.json").read_text())["state"] == "finished"
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["trainer"]["strategy"]["pipeline_parallel_size"] == 2 and settings["run_dir"] == str(run)
    assert [row["step"] for row in rows(run)] == ["1", "2", "3", "4"]
    assert "micro batch 4 x 4 microbatches = batch 16 per data rank" in done.stdout
    assert f"run directory: {run}" in done.stdout
    # Nothing of third parties, no hint that does not apply, nothing once per rank.
    assert [line for line in done.stderr.splitlines() if not line.startswith("layout:")] == []
    assert done.stdout.count("step 4/4") == 1

    done = command(typed, "resume=runs/a", "parallel=dp2", "trainer.max_steps=6")
    assert "at step 4, in the same directory" in done.stdout
    assert [line for line in done.stderr.splitlines() if not line.startswith("layout:")] == []
    assert [row["step"] for row in rows(run)] == ["1", "2", "3", "4", "5", "6"]
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["model"]["hidden_size"] == 64, "the run's own settings"
    assert settings["trainer"]["strategy"]["data_parallel_size"] == 2, "changed by this command"
    assert (run / "config_1.yaml").exists()

    # From its checkpoint, a new run; its own directory is claimed, and the old one is not touched.
    before = (run / "metrics.csv").read_bytes()
    command(typed, f"resume={run}/checkpoints/last.ckpt", "parallel=single", "trainer.max_steps=7")
    [new] = [path for path in (typed / "runs").iterdir() if path.name != "a"]
    assert [(row["step"], row["consumed_samples"]) for row in rows(new)] == [("7", str(7 * 16))]
    assert (run / "metrics.csv").read_bytes() == before


def test_a_sweep_runs_each_job_once_in_a_folder_of_its_own(typed: Path) -> None:
    quick = [
        "callbacks=light",
        "trainer.enable_checkpointing=false",
        "trainer.max_steps=2",
        "trainer.limit_val_batches=1",
    ]
    quick += [entry for entry in SMALL if not entry.startswith("callbacks")]
    done = command(typed, "-m", "parallel=dp2,single,tp2", *quick)
    [sweep] = (typed / "runs").iterdir()
    assert {path.name for path in sweep.iterdir()} == {"0", "1", "2", "multirun.yaml"}
    losses = [[row["train_loss"] for row in rows(sweep / job)] for job in "012"]
    assert [len(column) for column in losses] == [2, 2, 2]
    assert float(losses[0][0]) == pytest.approx(float(losses[1][0]), rel=1e-5)
    assert done.stdout.count("step 2/2") == 3


def refused(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *overrides: str) -> str:
    """Run the recipe in this process; it must leave with exit code 2, one message and no traceback."""
    monkeypatch.setattr(sys, "argv", [str(RECIPE), *overrides])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(RECIPE), run_name="__main__")
    said = capfd.readouterr().err
    assert left.value.code == 2, said
    assert "Traceback" not in said and said.startswith("error: ")
    return said


def test_unknown_settings_come_in_one_list(
    typed: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(capfd, monkeypatch, "model.num_layrs=8", "parallel=tp3", "+trainer.max_time=3", "sed=3")
    assert said.splitlines()[0] == "error: 3 settings are wrong:"
    assert "unknown setting 'model.num_layrs' (command line); did you mean 'model.num_layers'?" in said
    assert "unknown option 'parallel=tp3' (command line); did you mean 'parallel=tp2'?" in said
    assert "unknown setting 'sed' (command line); did you mean 'seed'?" in said
    assert "use +" not in said
    assert not (typed / "runs").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.num_heads=1", "num_heads=1 is not divisible by tensor_parallel_size=2"),
        ("model.num_layers=1", "num_layers=1 is less than pipeline_parallel_size=2"),
        ("data.global_batch_size=6", "global_batch_size=6 is not divisible by"),
        ("parallel.devices=3", "multiply to 4 but devices x num_nodes = 3. Nearest valid layouts for 3:"),
        ("+trainer.strategy.tensor_size=2", "did you mean 'trainer.strategy.tensor_parallel_size'?"),
        ("data.source=/no/such/place", "data source '/no/such/place': no such file or folder"),
        ("resume=notes.txt", "resume='notes.txt' is neither a run directory nor a checkpoint: it does not exist"),
        ("model.hidden_size=0", "model: hidden_size=0: expected a positive integer"),
        ("model.position=rotary", "model: position='rotary' is not one of"),
        ("~model.num_layers", "model: "),
        ("parallel.zero_stage=4", "zero_stage=4 is none of ZeRO's; valid values: 0, 1, 2, 3"),
        ("trainer.precision=17", "'trainer.precision' is 17; expected 64 or 32 or 16 or"),
        ("trainer.accelerator=tpuu", "trainer: You selected an invalid accelerator name"),
        ("run_dir=taken", "run_dir=taken: it holds other files"),
    ],
)
def test_refusals_before_any_rank(
    typed: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, override: str, said: str
) -> None:
    (typed / "taken").mkdir()
    (typed / "taken" / "diary.txt").write_text("mine")

    def fork() -> int:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(os, "fork", fork)
    assert said in refused(capfd, monkeypatch, *SMALL, override)
    assert not (typed / "runs").exists() or not any((typed / "runs").iterdir())


def test_fp16_says_its_scale_and_skipped_steps(typed: Path) -> None:
    """On a CPU as well, where Lightning's own flag would quietly become bfloat16."""
    scale = ["precision=fp16", "precision.loss_scale.initial=1048576", "precision.loss_scale.hysteresis=1"]
    done = command(typed, "parallel=pp2", "run_dir=runs/a", "trainer.max_steps=4", *scale, *SMALL)
    assert "bfloat16" not in done.stdout + done.stderr
    table = rows(typed / "runs" / "a")
    scales = [float(row["loss_scale"]) for row in table]
    skipped = [float(row["skipped_steps"]) for row in table]
    assert scales[0] == 2.0**20 and skipped[-1] > 0  # a loss of 5.5 times 2^20 gives gradients beyond 65504
    overflowed = [now > before for before, now in zip([0.0, *skipped], skipped)]
    assert scales[1:] == [scale / 2 if over else scale for scale, over in zip(scales, overflowed)][:-1]


def test_a_ramp_by_schedule_is_told_by_the_file_and_the_line(typed: Path) -> None:
    ramp = ["callbacks=batch_ramp", "callbacks.batch_ramp.schedule=[[0,16],[32,32]]"]
    ramp += ["callbacks.batch_ramp.noise_ratio=null", "callbacks.batch_ramp.max_batch_size=null"]
    small = [entry for entry in SMALL if not entry.startswith("callbacks")]
    quick = ["trainer.max_steps=4", "trainer.enable_checkpointing=false", "trainer.limit_val_batches=1"]
    done = command(typed, "parallel=dp2", "run_dir=runs/a", *ramp, *quick, *small)
    table = rows(typed / "runs" / "a")
    assert [float(row["batch_size"]) for row in table] == [16, 16, 32, 32]
    assert [int(row["consumed_samples"]) for row in table] == [16, 32, 64, 96]
    for name in ("noise_scale/grad_sq", "noise_scale/trace", "lr_factor"):
        assert all(row[name] for row in table), name
    said = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert ["batch_size 32" in line for line in said] == [False, False, True, True]
    assert ["noise_scale " in line for line in said] == [bool(row["noise_scale"]) for row in table]


@pytest.mark.parametrize(
    ("overrides", "points"),
    [
        (["schedule=[[0,16],[32,32]]", "noise_ratio=null", "max_batch_size=null"], ((0, 16), (32, 32))),
        (["rampup=[16,16,32]", "noise_ratio=null", "max_batch_size=48"], ((0, 16), (16, 32), (32, 48))),
        ([], None),
    ],
)
def test_each_way_to_ramp_can_be_set(overrides: list[str], points: tuple[tuple[int, int], ...] | None) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.utils import instantiate

    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        settings = [f"callbacks.batch_ramp.{entry}" for entry in overrides]
        node = compose("pretrain", ["callbacks=batch_ramp", *settings]).callbacks.batch_ramp
    plan = instantiate(node).plan
    assert (None if plan is None else plan.points) == points
