"""EMA and SWA by Lightning's WeightAveraging: each rank averages what it holds, all together what one process would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import everyday
import pytest
import torch
from everyday import Net, slow
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from pool import RankError, RankPool
from strategy.hostile import differences
from torch import Tensor, nn

LAYOUTS = ("pp2", "tp2", slow("dp2_pp2"), slow("dp2_tp2"), slow("dp2_zero1"))


class Normed(Net):
    """With buffers that are averaged as well, and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_buffer("seen", torch.zeros(()))  # type: ignore[operator]
        self.head = nn.Linear(16, 5)
        self.alias = self.head

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for block in self.blocks:
            if "seen" in dict(block.named_buffers()):
                block.seen += 1 / 4 if self.trainer.strategy.__class__.__name__ == "MegaParStrategy" else 1
        return super().training_step(batch, batch_idx)


class Late(EMAWeightAveraging):
    """Starts after some steps, as its documentation shows."""

    def should_update(self, step_idx: Any = None, epoch_idx: Any = None) -> bool:
        return step_idx is not None and step_idx >= 3


def of_kind(kind: str) -> WeightAveraging:
    made = {
        "ema": lambda: EMAWeightAveraging(decay=0.7),
        "swa": WeightAveraging,
        "late": lambda: Late(decay=0.5, use_buffers=False),
        "own": lambda: WeightAveraging(avg_fn=lambda old, new, count: (old * 2 + new) / 3),
    }
    return made[kind]()


def layout_options(layout: str) -> dict[str, Any]:
    if layout == "dp2_zero1":
        return {"strategy_options": {"zero_stage": 1}}
    return {}


def average(layout: str, root: str, kinds: tuple[str, ...], module: type[Net] = Net) -> dict[str, Any]:
    """Per kind a run of two epochs with a checkpoint; the last one is gone on from, starting with other values."""
    results: dict[str, Any] = {}
    plain_layout = layout.replace("_zero1", "")
    for kind in kinds:
        directory = f"{root}/{kind}"
        saver = ModelCheckpoint(directory, "middle", every_n_train_steps=6, save_top_k=1)
        first = everyday.fit(
            plain_layout, module, callbacks=[of_kind(kind), saver], validate=True, enable_checkpointing=True,
            default_root_dir=root, **layout_options(layout),
        )  # fmt: skip
        results[kind] = first
    # Plain Lightning starts an interrupted epoch's data anew: its own run is not interrupted.
    interrupted = layout != everyday.PLAIN
    watch = everyday.Watch()
    trainer = everyday.make_trainer(plain_layout, [of_kind(kinds[-1]), watch], max_epochs=3, **layout_options(layout))
    torch.manual_seed(9 if interrupted else 0)
    trainer.fit(
        module().double(),
        everyday.loader(plain_layout),
        everyday.loader(plain_layout, 12, 4),
        ckpt_path=f"{root}/{kinds[-1]}/middle.ckpt" if interrupted else None,
    )
    results["resumed"] = {
        "steps": trainer.global_step,
        "validations": [(step, row["val_loss"]) for step, row in watch.validations if step > 6],
        "of_rank_0": {"weights": watch.weights, "gradients": watch.gradients[-6:]},
    }
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_averages_equal_plain_lightning_s(pool: RankPool, tmp_path: Path, layout: str) -> None:
    kinds = ("swa", "late", "ema") if layout in ("pp2", "tp2") else ("ema",)
    expected = average(everyday.PLAIN, str(tmp_path / "plain"), kinds)
    world = everyday.world(layout.replace("_zero1", ""))
    results = pool.run(average, world, layout, str(tmp_path / layout), kinds, mode="trainer")
    for name in (*kinds, "resumed"):
        everyday.agree([rank[name] for rank in results], expected[name])
    assert len(expected["resumed"]["validations"]) == 2 and expected["resumed"]["steps"] == 12

    # The exported file is what plain Lightning has saved, the trained weights beside the average.
    from lightning_megapar.checkpoint.export import to_lightning

    exported = to_lightning(tmp_path / layout / "ema" / "middle.ckpt")
    saved = torch.load(tmp_path / "plain" / "ema" / "middle.ckpt", weights_only=False)
    for key in ("state_dict", "current_model_state"):
        assert list(exported[key]) == list(saved[key])
        for name, value in saved[key].items():
            torch.testing.assert_close(exported[key][name], value, rtol=1e-9, atol=1e-9)
    assert int(exported["averaging_state"]["n_averaged"]) == 6


def test_averages_of_parameters_that_a_plan_has_cut(pool: RankPool, tmp_path: Path) -> None:
    expected = average(everyday.PLAIN, str(tmp_path / "plain"), ("ema",), everyday.PlainNet)
    root = str(tmp_path / "tp2")
    results = pool.run(average, 2, "tp2", root, ("ema",), everyday.PlainNet, mode="trainer")
    for name in ("ema", "resumed"):
        everyday.agree([rank[name] for rank in results], expected[name])


def resume_plain(layout: str, path: str) -> dict[str, Any]:
    watch = everyday.Watch()
    trainer = everyday.make_trainer(layout, [of_kind("ema"), watch], max_epochs=3)
    trainer.fit(Net().double(), everyday.loader(layout), everyday.loader(layout, 12, 4), ckpt_path=path)
    return {"validations": watch.validations, "of_rank_0": {"weights": watch.weights}}


def test_the_file_of_plain_lightning_goes_on_under_a_layout(pool: RankPool, tmp_path: Path) -> None:
    average(everyday.PLAIN, str(tmp_path), ("ema",))
    everyday.compare(pool, resume_plain, "pp2", str(tmp_path / "ema" / "middle.ckpt"))


class Lazy(Net):
    """Builds its layers in ``configure_model``, which the callback calls on its own."""

    def __init__(self) -> None:
        super(Net, self).__init__()
        self.inp: Any = None

    def configure_model(self) -> None:
        if self.inp is None:
            torch.manual_seed(3)
            built = Net().double()
            self.inp, self.blocks, self.head = built.inp, built.blocks, built.head


def twice(layout: str, module: str) -> dict[str, Any]:
    """Two trainers, one after the other, on one module."""
    torch.manual_seed(0)
    made = {"Lazy": Lazy, "Normed": Normed}[module]().double()
    watches = []
    for _ in range(2):
        watches.append(everyday.Watch())
        trainer = everyday.make_trainer(layout, [of_kind("ema"), watches[-1]], max_epochs=1)
        trainer.fit(made, everyday.loader(layout), everyday.loader(layout, 12, 4))
    weights: list[dict[str, Tensor]] = [watch.weights for watch in watches]
    return {"validations": [w.validations for w in watches], "of_rank_0": {"weights": weights}}


@pytest.mark.parametrize(("layout", "module"), [("pp2", "Lazy"), slow("tp2", "Lazy"), slow("pp2", "Normed")])
def test_lazy_layers_and_a_second_trainer(pool: RankPool, layout: str, module: str) -> None:
    everyday.compare(pool, twice, layout, module, tolerance=1e-9)


def from_nothing(layout: str) -> list[dict[str, Any]]:
    """With and without the callback, layers made on the meta device: the same values by name."""
    options = {"strategy_options": {"empty_init": True, "seed": 4}, "max_epochs": 1}
    return [everyday.fit(layout, Lazy, callbacks=more, **options) for more in ([], [of_kind("ema")])]


@pytest.mark.parametrize("layout", ["pp2", slow("tp2")])
def test_layers_made_on_the_meta_device(pool: RankPool, layout: str) -> None:
    without, averaged = pool.run(from_nothing, 2, layout, mode="trainer")[0]
    for name in ("losses", "batches"):
        assert differences(averaged[name], without[name]) == []
    assert differences(averaged["of_rank_0"]["gradients"], without["of_rank_0"]["gradients"]) == []
    assert differences(averaged["of_rank_0"]["weights"], without["of_rank_0"]["weights"]) != []


def elsewhere(layout: str) -> None:
    everyday.fit(layout, callbacks=[EMAWeightAveraging(device="meta")])


def test_an_average_elsewhere_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"EMAWeightAveraging\(device='meta'\): a rank's share is averaged where it is"):
        pool.run(elsewhere, 2, "pp2", mode="trainer", timeout=60)
