"""The finetuning recipe as a command: a transformers model in, on any layout, a Hugging Face directory out."""

from __future__ import annotations

import csv
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from lightning_megapar.config import ConfigError

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "finetune.py"
DATA = ["data.max_bytes=300000", "data.validation_limit=16", "data.sequence_length=32", "seed=1"]
SMALL = [*DATA, "model.hidden_size=32", "model.intermediate_size=48", "trainer.log_every_n_steps=1"]


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


def command(place: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, str(RECIPE), *overrides],
        cwd=place, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def column(run: Path, name: str) -> list[float]:
    with open(run / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def test_from_nothing(typed: Path) -> None:
    import transformers

    done = command(typed, "parallel=tp2_pp2", "run_dir=runs/a", "trainer.max_steps=1", *SMALL, "callbacks=light")
    run, out = typed / "runs" / "a", typed / "runs" / "a" / "hugging_face"
    assert f"Hugging Face directory: {out}" in done.stdout
    assert [line for line in done.stderr.splitlines() if not line.startswith("layout:")] == []
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.config.hidden_size == 32 and model.lm_head.weight is model.model.embed_tokens.weight
    assert {path.name for path in run.iterdir()} == {
        "metrics.csv", "checkpoints", "config.yaml", "overrides.yaml", "run.json", "hugging_face"
    }  # fmt: skip


@pytest.mark.slow
def test_on_from_what_was_written(typed: Path) -> None:
    import transformers

    every = ["trainer.val_check_interval=2", "trainer.num_sanity_val_steps=0"]
    command(typed, "parallel=tp2_pp2", "run_dir=runs/a", "trainer.max_steps=2", *SMALL, *every)
    run, out = typed / "runs" / "a", typed / "runs" / "a" / "hugging_face"
    model = transformers.AutoModelForCausalLM.from_pretrained(out)

    # Its directory goes in on another layout: one tiny step leaves the validation loss where it was.
    (out / "tokenizer.json").write_text("{}")
    command(
        typed, "parallel=dp2", "run_dir=runs/b", f"model_path={out}", "trainer.max_steps=1", *DATA,
        "optimizer.lr=1e-9", "optimizer.warmup_steps=0",
        "trainer.val_check_interval=1", "trainer.num_sanity_val_steps=0",
    )  # fmt: skip
    assert column(typed / "runs" / "b", "val_loss")[-1] == pytest.approx(column(run, "val_loss")[-1], rel=1e-5)
    again = transformers.AutoModelForCausalLM.from_pretrained(typed / "runs" / "b" / "hugging_face").state_dict()
    for key, value in model.state_dict().items():
        assert float((again[key] - value).abs().max()) < 1e-6, key
    assert (typed / "runs" / "b" / "hugging_face" / "tokenizer.json").exists()

    # Going on in place keeps what was written before.
    command(typed, "resume=runs/a", "parallel=single", "trainer.max_steps=3")
    assert len(column(run, "train_loss")) == 3
    assert (run / "hugging_face_1" / "tokenizer.json").exists() and not (out / "tokenizer.json").exists()


def test_help_names_options_that_exist() -> None:
    template = yaml.safe_load((ROOT / "conf" / "hydra" / "help" / "finetune.yaml").read_text())["template"]
    groups = template.split("Groups")[1].split("Settings")[0].splitlines()[1:]
    listed = {line.split()[0]: line.split("  ")[-1].split() for line in groups if line.strip()}
    groups_of_pretrain = {"parallel", "data", "precision", "recompute", "schedule", "optimizer", "trainer", "callbacks"}
    assert set(listed) == {*groups_of_pretrain, "logger"}
    for group, options in listed.items():
        assert options and all((ROOT / "conf" / group / f"{option}.yaml").exists() for option in options), group


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["model.hidden_sze=8"],
            "unknown setting 'model.hidden_sze' (command line); did you mean 'model.hidden_size'?",
        ),
        (["modelpath=x"], "unknown setting 'modelpath' (command line); did you mean 'model_path'?"),
        (
            ["model_path=brokn"],
            "model_path=brokn is not a Hugging Face model directory: it does not exist; did you mean 'broken'?",
        ),
        (["model_path=broken"], "load_from: "),
        (["model_path=broken", "model.hidden_size=8"], "model.hidden_size=8 changes the small random model, but"),
        (["model.num_hidden_layers=1"], "pipeline_parallel_size"),
        (["model.vocab_size=100"], "the model's vocab_size=100 is below 257"),
        (["model.max_position_embeddings=16"], "is above the model's max_position_embeddings=16; nearest valid: 16"),
        (["data.global_batch_size=6"], "global_batch_size=6 is not divisible by"),
        (["trainer.strategy.load_fro=x"], "did you mean 'trainer.strategy.load_from'?"),
        (["resume=notes.txt"], "resume='notes.txt' is neither a run directory nor a checkpoint: it does not exist"),
    ],
)
def test_refusals_before_any_rank(
    typed: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    said: str,
) -> None:
    import transformers

    transformers.LlamaConfig(vocab_size=320).save_pretrained(typed / "broken")

    def fork() -> int:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(sys, "argv", [str(RECIPE), *DATA, *(f"+{o}" if "load_fro=" in o else o for o in overrides)])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(RECIPE), run_name="__main__")
    message = capfd.readouterr().err
    assert left.value.code == 2, message
    assert "Traceback" not in message and message.startswith("error: ")
    assert said in message
    assert not (typed / "runs").exists() or not any((typed / "runs").iterdir())


def test_paths_that_are_no_models(typed: Path) -> None:
    import transformers

    recipe = runpy.run_path(str(RECIPE), run_name="finetune_recipe")
    transformers.ViTConfig().save_pretrained(typed / "vision")
    (typed / "empty").mkdir()
    for path, said in {
        "vison": "it does not exist; did you mean 'vision'?",
        "some-org/some-model": "it does not exist (a model of a hub is downloaded first: hf download",
        "vision/config.json": "it is a file; did you mean 'vision'?",
        ".": "it has no config.json (it holds empty, vision); did you mean 'vision'?",
        "empty": "it has no config.json (it holds nothing)",
    }.items():
        with pytest.raises(ConfigError) as refused:
            recipe["refuse_no_model"](path)
        assert str(refused.value).startswith(f"model_path={path} is not a Hugging Face model directory: ")
        assert said in str(refused.value)
    recipe["refuse_no_model"]("vision")
    module = SimpleNamespace(config=transformers.AutoConfig.from_pretrained("vision"))
    with pytest.raises(ConfigError, match=r"model_path=vision is a 'vit' model, of which transformers has no causal"):
        recipe["check"](SimpleNamespace(model_path="vision"), module, None)
