"""Whole scripts under our launcher: several runs in one, Lightning's callbacks and loggers, export."""

from __future__ import annotations

import csv
import os

import pytest
from launch.cases import ROOT, CaseServer

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

ALL_FOUR = """
model = make_model()
fit = make_trainer(num_sanity_val_steps=1, callbacks=[Losses()], enable_checkpointing=False)
fit.fit(model)
first = os.getpid()
[validated] = fit.validate(model, verbose=False)
[tested] = fit.test(model, verbose=False)
predicted = torch.cat(fit.predict(model))
note(f"tp2_pp2-{fit.global_rank}", (first, validated["val_loss"], tested["test_loss"], predicted.sum().item()))
full = fit.strategy.full_state_dict()

# The same run on another layout, in the same script, with ranks of its own; then on one process.
for layout in ("dp2", "single"):
    model = make_model()
    fit = make_trainer(layout, callbacks=[Losses(f"losses-{layout}")], enable_checkpointing=False)
    fit.fit(model)
    [validated] = fit.validate(model, verbose=False)
    [tested] = fit.test(model, verbose=False)
    predicted = torch.cat(fit.predict(model))
    losses = validated["val_loss"], tested["test_loss"]
    note(f"{layout}-{fit.global_rank}", (os.getpid(), *losses, predicted.sum().item()))
    if layout == "single":
        for name, value in model.state_dict().items():
            torch.testing.assert_close(full[name], value, rtol=0, atol=1e-3)  # AdamW: 0.01 in each step
        assert full.keys() == model.state_dict().keys()
        assert len(predicted) == 16
print("the script's end", flush=True)
"""


def test_fit_validate_test_predict_and_other_layouts(product: CaseServer) -> None:
    result = product.run(ALL_FOUR, seconds=120)
    assert result.code == 0, result.text
    assert result.out.count("the script's end") == 1
    notes = {path.name: eval(path.read_text()) for path in result.directory.glob("*-[0-9]") if "pid" not in path.name}
    assert {name for name in notes if not name.startswith("at-")} == {
        "tp2_pp2-0", "tp2_pp2-1", "tp2_pp2-2", "tp2_pp2-3", "dp2-0", "dp2-1", "single-0"
    }  # fmt: skip
    expected = notes["single-0"]
    for name, (_, validated, tested, predicted) in notes.items():
        assert validated == pytest.approx(expected[1], rel=1e-5), name
        assert tested == pytest.approx(expected[2], rel=1e-5), name
        if name.startswith("tp2_pp2"):
            assert predicted == expected[3], name
    assert notes["dp2-0"][3] + notes["dp2-1"][3] == expected[3], "each data rank predicts its own samples"
    assert notes["tp2_pp2-0"][0] == notes["single-0"][0], "rank 0 is the process that was started, throughout"
    assert "sync_dist" not in result.text, "an advice that does not apply"
    losses = [(result.directory / name).read_text().split() for name in ("losses", "losses-dp2", "losses-single")]
    for other in losses[:2]:
        assert list(map(float, other)) == pytest.approx(list(map(float, losses[2])), rel=1e-5)
    result.assert_nobody_left()


AUTO = """
model = make_model()
fit = L.Trainer(strategy="megapar", devices=2, accelerator="cpu", max_steps=2, limit_val_batches=1, logger=False,
                enable_progress_bar=False, enable_model_summary=False, default_root_dir=OUT)
fit.fit(model)
note(f"layout-{fit.global_rank}", fit.strategy.layout.describe())
"""


def test_by_name_in_a_plain_script(product: CaseServer) -> None:
    result = product.run(AUTO)
    assert result.code == 0, result.text
    layouts = {result.read(f"layout-{rank}") for rank in range(2)}
    assert layouts == {"data=2"}
    assert result.text.count("layout: data=2") == 1, result.text
    assert "auto" in next(line for line in result.text.splitlines() if line.startswith("layout: ")), result.text


WATCHED = """
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

class Worse(Model):
    def validation_step(self, batch, batch_idx):
        loss = self.model(batch["tokens"], batch["labels"])
        # Better until step 8, then worse: so that something is best, and something stops early.
        self.log("val_loss", loss + 0.1 * max(0, self.trainer.global_step - 8), batch_size=len(batch["tokens"]))
        return loss

layout = sys.argv[1]
best = ModelCheckpoint(OUT / "best", monitor="val_loss", save_top_k=2, save_last=True, filename="{step}")
stopper = EarlyStopping("val_loss", patience=2)
loggers = [CSVLogger(OUT, "csv", ""), TensorBoardLogger(OUT, "tensorboard", "")]
fit = make_trainer(layout, max_steps=60, val_check_interval=4, log_every_n_steps=1, logger=loggers,
                   enable_progress_bar=True, callbacks=[best, stopper, LearningRateMonitor(), RichProgressBar()])
fit.fit(make_model(Worse))
state = (fit.global_step, stopper.stopped_epoch, stopper.best_score.item(), best.best_model_score.item(),
         pathlib.Path(best.best_model_path).name, sorted(pathlib.Path(p).name for p in best.best_k_models))
note(f"state-{fit.global_rank}", state)
"""


def test_callbacks_and_loggers_as_in_plain_lightning(product: CaseServer) -> None:
    """The same numbers, files and decisions on four processes as on one."""
    seen = {}
    for layout in ("tp2_pp2", "single"):
        result = product.run(WATCHED, layout, seconds=120)
        assert result.code == 0, result.text
        states = [eval(path.read_text()) for path in sorted(result.directory.glob("state-?"))]
        assert states == [states[0]] * len(states), "the same on every rank"
        assert len(states) == (4 if layout == "tp2_pp2" else 1)
        kept = {path.name for path in (result.directory / "best").iterdir()}
        assert kept == {*states[0][5], "last.ckpt"} and len(states[0][5]) == 2
        with open(result.directory / "csv" / "metrics.csv", newline="") as file:
            table = list(csv.DictReader(file))
        assert len(list((result.directory / "tensorboard").glob("events.*"))) == 1, "written by one rank"
        assert "Traceback" not in result.text and "Error" not in result.err, result.err
        seen[layout] = (states[0], table, result)
    (state, table, four), (expected, plain, _) = seen["tp2_pp2"], seen["single"]
    assert expected[0] < 60, "stopped early"
    assert (state[0], state[1], *state[4:]) == (expected[0], expected[1], *expected[4:])
    assert state[2:4] == pytest.approx(expected[2:4], rel=1e-5)
    assert [row.keys() for row in table] == [row.keys() for row in plain]
    for mine, other in zip(table, plain, strict=True):
        for name, value in other.items():
            assert (mine[name] == "") == (value == ""), name
            assert value == "" or float(mine[name]) == pytest.approx(float(value), rel=1e-4), name
    assert any(name.startswith("lr-") and row[name] for row in table for name in row), "LearningRateMonitor"
    assert "Epoch" in four.out and "train_loss" in four.out, "RichProgressBar"
    four.assert_nobody_left()


EXPORTED = """
import importlib.util
spec = importlib.util.spec_from_file_location("export", sys.argv[1])
export = importlib.util.module_from_spec(spec)
spec.loader.exec_module(export)

fit = make_trainer(enable_checkpointing=False)
model = make_model()
fit.fit(model)
[validated] = fit.validate(model, verbose=False)
fit.save_checkpoint(OUT / "sharded.ckpt")
if fit.global_rank == 0:
    assert export.main([str(OUT / "sharded.ckpt"), str(OUT / "whole.pt")]) == 0
    loaded = torch.load(OUT / "whole.pt", weights_only=True)
    assert loaded["global_step"] == 4
note(f"val_loss-{fit.global_rank}", validated["val_loss"])
"""

PLAIN = """
plain = LanguageModel.load_from_checkpoint(sys.argv[1], weights_only=True)
fit = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
[again] = fit.validate(plain, DataLoader(Tokens(16), batch_size=8), verbose=False)
note("val_loss", again["val_loss"])
# And the training goes on there, from the optimizer's state.
fit = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
                enable_checkpointing=False, max_steps=6, limit_val_batches=0)
fit.fit(plain, DataLoader(Tokens(16), batch_size=8), ckpt_path=sys.argv[1], weights_only=True)
note("step", fit.global_step)
"""


def test_export_opens_in_plain_lightning(product: CaseServer) -> None:
    trained = product.run(EXPORTED, ROOT / "recipes" / "export.py")
    assert trained.code == 0, trained.text
    assert "wrote" in trained.out
    plain = product.run(PLAIN, trained.directory / "whole.pt")
    assert plain.code == 0, plain.text
    assert float(plain.read("val_loss")) == pytest.approx(float(trained.read("val_loss-0")), rel=1e-6)
    assert plain.read("step") == "6"
