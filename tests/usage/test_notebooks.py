"""Notebooks and prompts: each call starts ranks of its own and gives the whole, trained module back."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from launch.cases import CaseServer
from pool import RankPool
from strategy.hostile import differences

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

CELLS = """
from lightning.pytorch.callbacks import ModelCheckpoint
from torchmetrics import MeanMetric
from lightning_megapar import MegaParStrategy
sys.ps1 = ">>> "  # what an interactive session has; ddp is refused in one
layouts = sys.argv[1].split(",")
plain = layouts == ["plain"]

class Rotary(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.linspace(0.5, 1.5, 16), persistent=False)
    def forward(self, x):
        return x * self.angles

class Notebook(everyday.Net):
    def __init__(self):
        super().__init__()
        self.rotary, self.average, self.seen = Rotary(), MeanMetric(), []
        for block in self.blocks:
            block.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            block.calls = 0
        self.blocks[3].mlp.down.bias = self.blocks[0].mlp.down.bias  # tied over the stages
    def forward(self, x):
        return self.head(self.blocks(self.rotary(self.inp(x))))
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.average(loss)
        self.log("average", self.average)
        return loss
    def on_train_epoch_end(self):
        self.seen.append(self.current_epoch)
    def on_train_end(self):
        for block in self.blocks:
            if hasattr(block, "steps"):
                block.steps += self.trainer.global_step

def trainer(layout, **more):
    return everyday.make_trainer(layout, enable_checkpointing=True, default_root_dir=OUT, **more)

torch.manual_seed(0)
model = Notebook()  # float32: the run makes it float64, as plain Lightning does
rows = everyday.rows(6, 4).tensors[0].double()
found = {}
for number, layout in enumerate(layouts * 2 if len(layouts) == 1 else layouts):
    with torch.no_grad():
        before = model(rows.to(model.head.weight.dtype)).double()
    best = ModelCheckpoint(OUT / f"best{number}", monitor="val_loss")
    fit = trainer(layout, callbacks=[best], )
    fit.fit(model, everyday.loader(layout), everyday.loader(layout, 16, 4))
    model.eval()
    with torch.no_grad():
        after = model(rows)  # the very next cell
    assert not torch.equal(before, after)
    assert not any(type(m).__module__.startswith("lightning_megapar.pipeline") for m in model.modules())
    assert not any(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())
    found[f"{number} output"] = after
    found[f"{number} weights"] = {k: v.clone() for k, v in model.state_dict().items()}
    found[f"{number} full"] = everyday.whole(fit, model)
    found[f"{number} metrics"] = {k: float(v) for k, v in fit.callback_metrics.items()}
    found[f"{number} validated"] = fit.validate(model, everyday.loader(layout, 16, 4), verbose=False)
    found[f"{number} tested"] = fit.test(model, everyday.loader(layout, 16, 4), ckpt_path="best", verbose=False)
    model.load_state_dict(found[f"{number} weights"])  # the test has loaded the best ones
    if "dp2" not in layout:  # each data rank predicts its own samples
        found[f"{number} predicted"] = fit.predict(model, everyday.loader(layout, 12, 4))
found["seen"], found["pids"] = model.seen, os.getpid()
loss = model.loss((rows, torch.zeros(6, dtype=torch.int64)))
loss.backward()  # and it can be trained on by hand
found["gradients"] = {n: p.grad for n, p in model.named_parameters()}
del found["pids"]
torch.save(found, OUT / "found.pt")
print("cell done", flush=True)
"""


def run(scripts: CaseServer, layouts: str) -> Any:
    result = scripts.run(CELLS, layouts)
    assert result.code == 0, result.text
    assert result.out.count("cell done") == 1
    return torch.load(result.directory / "found.pt", weights_only=False)


@pytest.fixture(scope="module")
def plain(scripts: CaseServer) -> Any:
    return run(scripts, "plain")


@pytest.mark.parametrize("layouts", ["pp2,tp2", pytest.param("dp2_pp2,dp2", marks=pytest.mark.slow)])
def test_the_module_is_whole_and_trained_after_each_call(scripts: CaseServer, plain: Any, layouts: str) -> None:
    found = run(scripts, layouts)
    expected = {k: v for k, v in plain.items() if k in found}
    assert set(found) == set(expected)
    assert differences(found, expected, tolerance=1e-6) == []  # the metric's state is float32
    exact = [k for k in found if not k.endswith("metrics")]
    assert differences({k: found[k] for k in exact}, {k: expected[k] for k in exact}, tolerance=1e-9) == []
    assert found["seen"] == [0, 1, 0, 1]


LAZY = """
sys.ps1 = ">>> "
class Lazy(everyday.Net):
    def __init__(self):
        super(everyday.Net, self).__init__()
        self.inp = None
    def configure_model(self):
        if self.inp is None:
            made = everyday.PlainNet() if "cut" in sys.argv else everyday.Net()
            self.inp, self.blocks, self.head = made.inp, made.blocks, made.head
            self.aux = torch.nn.ModuleList([torch.nn.Identity()])
model = Lazy()
layout = sys.argv[1]
zero = {"zero_stage": 1} if layout == "dp2" else {}
more = {"strategy_options": {"empty_init": True, "seed": 5, **zero}, "precision": "32-true"}
fit = everyday.make_trainer(layout, **more)
fit.fit(model, everyday.loader(layout))
assert not any(p.is_meta for p in model.parameters()) and len(list(model.parameters())) == 28
full = everyday.whole(fit, model)
out = model(everyday.rows(3).tensors[0])
again = everyday.make_trainer(layout, **more)
again.fit(model, everyday.loader(layout))
torch.save({"out": out.detach(), "again": {k: v for k, v in model.state_dict().items()}}, OUT / "found.pt")
try:
    again.save_checkpoint(OUT / "late.ckpt")
except RuntimeError as error:
    print("refused:", error, flush=True)
"""


@pytest.mark.slow
def test_layers_made_on_the_meta_device_come_back_real(scripts: CaseServer) -> None:
    found = {}
    for layout in ("pp2", "tp2", "dp2"):
        result = scripts.run(LAZY, layout)
        assert result.code == 0, result.text
        assert "refused: the module is prepared in the strategy's setup" in result.out
        found[layout] = torch.load(result.directory / "found.pt")
    for layout in ("tp2", "dp2"):  # the seed's values, whatever the layout
        assert differences(found[layout], found["pp2"], tolerance=1e-5) == []


def test_parameters_that_a_plan_has_cut_come_back_whole(scripts: CaseServer) -> None:
    results = [scripts.run(LAZY, layout, "cut") for layout in ("pp2", "tp2")]
    assert [r.code for r in results] == [0, 0], results[-1].text
    assert "colwise" in results[1].out  # the table of the plan
    one, other = (torch.load(r.directory / "found.pt") for r in results)
    assert differences(other, one, tolerance=1e-5) == []


FAILS = """
sys.ps1 = ">>> "
class Fails(everyday.Net):
    def on_train_epoch_end(self):
        if self.global_rank == 1:
            raise ValueError("-".join(["a", "mistake"]))
model = Fails().double()
try:
    everyday.make_trainer("pp2").fit(model, everyday.loader("pp2"))
except RuntimeError as error:
    print("said:", str(error).count("a-mistake"), flush=True)
try:
    everyday.make_trainer("pp2").fit(model, everyday.loader("pp2"))
except Exception as error:
    print("then:", error, flush=True)
everyday.make_trainer("pp2").fit(everyday.Net().double(), everyday.loader("pp2"))
print("goes on", flush=True)
"""


def test_after_a_failed_cell_the_session_goes_on(scripts: CaseServer) -> None:
    result = scripts.run(FAILS)
    assert result.code == 0, result.text
    assert "said: 1" in result.out and "goes on" in result.out
    assert "then: Fails was cut for pipeline=2" in result.out and "build the module anew" in result.out


def holders() -> tuple[bool, bool]:
    """Groups that only a dictionary or a tuple holds: a forked child must keep them too."""
    import torch.distributed as dist

    from lightning_megapar.launch.hygiene import process_groups_alive

    class Holder:
        in_dict = {"data": dist.new_group([0, 1])}  # noqa: RUF012
        in_tuple = (dist.new_group([0, 1]),)

    dist.destroy_process_group()  # torch itself refers to them no longer
    found = {id(group) for group in process_groups_alive()}
    return id(Holder.in_dict["data"]) in found, id(Holder.in_tuple[0]) in found


def test_a_fork_keeps_the_groups_of_an_earlier_call(pool: RankPool) -> None:
    assert pool.run(holders, 2) == [(True, True)] * 2
