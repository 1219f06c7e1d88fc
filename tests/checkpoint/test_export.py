"""A sharded checkpoint exported to one file is what plain Lightning would have written."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import parity
import pytest
import torch
from pool import RankPool
from recipe_module import load_recipe
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megapar.checkpoint import save_sharded
from lightning_megapar.checkpoint.training_state import named_optimizer_state, pack
from lightning_megapar.data_parallel.parameters import ModuleNames, collect_parameters

ROOT = Path(__file__).resolve().parents[2]


class Tied(pl.LightningModule):
    """Two layers that share a weight, a buffer, two parameter groups and a scheduler."""

    def __init__(self, width: int = 4, tags: tuple[str, ...] = ("a",)) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.second(self.norm(self.first(batch[0])).relu()).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        matrices = [p for p in named.values() if p.dim() > 1]
        others = [p for p in named.values() if p.dim() < 2]
        optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others}], lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def _trainer(directory: Path, epochs: int, **more: Any) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=epochs, accelerator="cpu", default_root_dir=directory, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **more,
    )  # fmt: skip


def _loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(48.0).reshape(12, 4).sin()), batch_size=4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A sharded checkpoint, what plain Lightning saves of the same state, and the weights after more steps."""
    directory = tmp_path_factory.mktemp("export")
    torch.manual_seed(0)
    module = Tied()
    trainer = _trainer(directory, 2)
    trainer.fit(module, _loader())
    trainer.save_checkpoint(directory / "plain.ckpt")
    plain = torch.load(directory / "plain.ckpt", weights_only=True)
    names = ModuleNames.record(module)
    records = collect_parameters(module, names, {}, set(), set())
    ours = {**plain, "optimizer_states": [named_optimizer_state(o, records) for o in trainer.optimizers]}
    tensors, rest = pack(ours, names, world_size=1)
    save_sharded(directory / "last.ckpt", tensors, rest, step=trainer.global_step)
    resumed = Tied()
    _trainer(directory, 4).fit(resumed, _loader(), ckpt_path=directory / "plain.ckpt")
    return directory, plain, copy.deepcopy(resumed.state_dict())


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


def _export(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The recipe as a user runs it."""
    command = [sys.executable, str(ROOT / "recipes" / "export.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def _main(*arguments: str | Path) -> int:
    """The recipe's function, without the seconds that a new process takes to import torch."""
    return load_recipe("export.py").main([str(a) for a in arguments])


def test_the_file_is_what_lightning_would_have_written(trained: Any) -> None:
    directory, plain, continued = trained
    out = directory / "model.pt"
    done = _export(directory / "last.ckpt", out)
    assert done.returncode == 0, done.stderr
    assert "weights and training state of step 6" in done.stdout
    assert [e for e in os.listdir(directory) if e.startswith(".")] == []
    exported = torch.load(out, weights_only=True)
    assert set(exported) == set(plain)
    for key in plain:
        assert _same(exported[key], plain[key]), key
    assert exported["hyper_parameters"] == {"width": 4, "tags": ("a",)}
    weights = exported["state_dict"]
    assert weights["second.weight"].untyped_storage().data_ptr() == weights["first.weight"].untyped_storage().data_ptr()
    # Plain Lightning opens it, both ways, and continues as from its own file.
    module = Tied.load_from_checkpoint(out)
    assert _same(dict(module.state_dict()), dict(plain["state_dict"])) and module.hparams.width == 4
    resumed = Tied()
    _trainer(directory, 4).fit(resumed, _loader(), ckpt_path=out)
    assert _same(dict(resumed.state_dict()), dict(continued))
    assert not _same(dict(resumed.state_dict()), dict(plain["state_dict"]))


def test_an_existing_file_is_replaced_only_when_asked(trained: Any, tmp_path: Path, capsys: Any) -> None:
    directory, _, _ = trained
    out = tmp_path / "model.pt"
    assert _main(directory / "last.ckpt", out) == 0
    size = out.stat().st_size
    assert _main(directory / "last.ckpt", out, "--model-only") == 2
    assert "--force" in capsys.readouterr().err and out.stat().st_size == size
    assert _main(directory / "last.ckpt", out, "--model-only", "--force") == 0
    assert out.stat().st_size < size
    assert set(torch.load(out, weights_only=True)) <= {
        "state_dict", "epoch", "global_step", "pytorch-lightning_version", "hyper_parameters", "hparams_name",
    }  # fmt: skip
    Tied.load_from_checkpoint(out)
    assert os.listdir(tmp_path) == ["model.pt"]


def test_other_paths_are_refused(trained: Any, tmp_path: Path, capsys: Any) -> None:
    directory, _, _ = trained
    out = tmp_path / "out.pt"
    done = _export(directory / "plain.ckpt", out)
    assert done.returncode == 2 and "a single file (torch.save)" in done.stderr and "Traceback" not in done.stderr
    for path, words in {
        directory / "missing.ckpt": "does not exist; beside it are last.ckpt",
        directory: "holds checkpoints; give one of them",
    }.items():
        assert _main(path, out) == 2
        assert words in capsys.readouterr().err
    assert _main(directory / "last.ckpt", tmp_path / "no" / "out.pt") == 2
    assert "does not exist" in capsys.readouterr().err
    assert _main(directory / "last.ckpt", tmp_path) == 2
    damaged = tmp_path / "damaged.ckpt"
    shutil.copytree(directory / "last.ckpt", damaged)
    with open(damaged / "__0_0.distcp", "r+b") as file:
        file.seek(900)
        file.write(b"damage")
    assert _main(damaged, out) == 2
    heard = capsys.readouterr().err
    assert "is damaged" in heard and "__0_0.distcp" in heard
    assert os.listdir(tmp_path) == ["damaged.ckpt"]


def test_of_a_run_directory_the_newest_checkpoint_is_taken(trained: Any, tmp_path: Path, capsys: Any) -> None:
    directory, _, _ = trained
    run = tmp_path / "run"
    saved = run / "checkpoints"
    saved.mkdir(parents=True)
    assert _main(run, tmp_path / "out.pt") == 2
    assert f"{run} is a run directory without a sharded checkpoint ({saved} holds none)" in capsys.readouterr().err
    shutil.copyfile(directory / "plain.ckpt", saved / "plain.ckpt")
    assert _main(run, tmp_path / "out.pt") == 2
    assert "(plain.ckpt: it is a single file (torch.save)" in capsys.readouterr().err
    tensors = {"model.first.bias": torch.ones(2)}
    for step, name in ((3, "step_3.ckpt"), (9, "step_9.ckpt"), (12, "damaged.ckpt")):
        save_sharded(saved / name, tensors, {}, step=step)
    (saved / "damaged.ckpt" / "manifest.json").write_text("{}")
    assert _main(run, tmp_path / "out.pt", "--model-only") == 0
    heard = capsys.readouterr()
    assert f"{run} is a run directory; its newest checkpoint is step_9.ckpt" in heard.err and "step 9" in heard.out


@pytest.mark.parametrize(("config", "said"), [(False, "does not hold the model's configuration"), (True, "no tensor")])
def test_a_module_without_a_transformers_model_is_no_hugging_face_directory(
    trained: Any, tmp_path: Path, capsys: Any, config: bool, said: str
) -> None:
    transformers = pytest.importorskip("transformers")
    more: list[Any] = ["--hugging-face"]
    if config:
        transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8).save_pretrained(tmp_path / "config")
        more += ["--config", tmp_path / "config"]
    assert _main(trained[0] / "last.ckpt", tmp_path / "out", *more) == 2
    heard = capsys.readouterr().err
    assert "Traceback" not in heard and said in heard and not (tmp_path / "out").exists()
    if config:
        assert (
            "the state holds no GPT2LMHeadModel under 'model': there is no tensor 'model.transformer.wte.weight'"
            in (heard)
        )
        assert "Its first names are first, norm, second" in heard


# -- from the strategy itself ----------------------------------------------------------------------------------------


def _train_and_save(world: int, options: dict[str, Any], path: str) -> dict[str, Tensor]:
    """Two steps under the strategy, a sharded checkpoint; rank 0 returns the gathered state dict."""
    from lightning_megapar import MegaParStrategy

    strategy = MegaParStrategy(**options)
    trainer = _trainer(Path(path).parent, -1, max_steps=2, strategy=strategy, devices=world, precision="64-true")
    data = strategy.config.resolve(world)[0].data
    loader = DataLoader(parity.Tokens(16, 16, 61), batch_size=8 // data, shuffle=False)
    trainer.fit(parity.Model(parity.style("gpt2"), "adamw"), loader)
    trainer.save_checkpoint(path)
    return strategy.full_state_dict()


def test_training_on_four_ranks_continues_in_plain_lightning(pool: RankPool, tmp_path: Path) -> None:
    four = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    gathered = pool.run(_train_and_save, 4, 4, four, str(tmp_path / "four.ckpt"), mode="trainer")[0]
    pool.run(_train_and_save, 1, 1, {}, str(tmp_path / "one.ckpt"), mode="trainer")
    files = {}
    for name in ("four", "one"):
        assert _main(tmp_path / f"{name}.ckpt", tmp_path / f"{name}.pt") == 0
        files[name] = torch.load(tmp_path / f"{name}.pt", weights_only=True)
    assert _same(files["four"]["state_dict"], gathered)
    # Same keys, shapes and dtypes as from one process, and the same values up to rounding.
    torch.testing.assert_close(files["four"]["state_dict"], files["one"]["state_dict"], rtol=1e-9, atol=1e-12)
    mine, reference = (files[name]["optimizer_states"][0] for name in ("four", "one"))
    torch.testing.assert_close(mine["state"], reference["state"], rtol=1e-9, atol=1e-12)
    assert mine["param_groups"] == reference["param_groups"]
    model = parity.Model(parity.style("gpt2"), "adamw")
    trainer = _trainer(tmp_path, -1, max_steps=4, precision="64-true")
    trainer.fit(model, DataLoader(parity.Tokens(16, 16, 61), batch_size=8), ckpt_path=tmp_path / "four.pt")
    assert trainer.global_step == 4
    steps = {float(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert steps == {4.0}
