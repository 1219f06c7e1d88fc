"""Forking in place: one script, every rank goes on in it."""

from __future__ import annotations

import os

import pytest
from cases import CaseServer

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

LIFE = """
import atexit, tempfile
atexit.register(lambda: note(f"parent-atexit-{os.getpid()}"))
kept = tempfile.TemporaryDirectory()
torch.set_num_threads(2)  # the parent's OpenMP pool has run, forwards and backwards, before the fork
weight = torch.randn(600, 600, requires_grad=True)
(weight @ weight).sum().backward()

class Life(Model):
    def on_train_start(self):
        rank = self.global_rank
        note(f"{self.part}-{rank}", f"{os.getpid()} {self.layer.weight.sum().item()!r} {torch.get_num_threads()}")
    def on_validation_start(self):
        note(f"{self.part}-{self.global_rank}", f"{os.getpid()}")

model = Life()
model.part = "first"
early = trainer(3, limit_val_batches=1, num_sanity_val_steps=0)  # built before any fork, used after it
trainer(3).fit(model)
inside = os.environ.get("LOCAL_RANK")
model.part = "again"
early.validate(model, verbose=False)
if early.global_rank == 1:
    note("kept-exists", os.path.isdir(kept.name))

other = Life()
other.part = "pair"
trainer(2).fit(other)

alone = Life()
alone.part = "alone"
trainer(1).fit(alone)
names = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
note(f"end-{os.getpid()}", f"{inside} {[os.environ.get(name) for name in names]} {torch.get_num_threads()}")
print("the end", flush=True)
sys.exit(3)
"""


def test_ranks_of_a_script(cases: CaseServer) -> None:
    """One process becomes three, stays three for the next launch, becomes two, becomes one."""
    running = cases.start(LIFE)
    result = running.wait()
    assert result.code == 3, result.text
    first = [result.read(f"first-{rank}").split() for rank in range(3)]
    assert len({pid for pid, _, _ in first}) == 3
    assert first[0][0] == str(running.pid)  # rank 0 is the process that was started
    assert len({weight for _, weight, _ in first}) == 1  # unseeded, and yet the same
    assert [threads for _, _, threads in first] == ["1", "1", "1"]
    assert [result.read(f"again-{rank}") for rank in range(3)] == [pid for pid, _, _ in first]
    pair = [result.read(f"pair-{rank}").split()[0] for rank in range(2)]
    assert pair[0] == str(running.pid) and pair[1] not in {pid for pid, _, _ in first}
    assert result.read("alone-0").split()[0] == str(running.pid)
    # The two dismissed children of the trio, the one of the pair: all gone before the script's end.
    assert [p.name for p in result.directory.glob("end-*")] == [f"end-{running.pid}"]
    assert result.read(f"end-{running.pid}") == "0 [None, None, None, None, None] 2"
    assert [p.name for p in result.directory.glob("parent-atexit-*")] == [f"parent-atexit-{running.pid}"]
    assert result.read("kept-exists") == "True"
    assert result.out.count("the end") == 1
    result.assert_nobody_left()


AFTERWARDS = """
model = Model()
trainer(3).fit(model)
who = int(os.environ["LOCAL_RANK"])
kind = sys.argv[1]
message = "-".join(["afterwards", kind])
if kind == "quiet":
    print(f"rank {who} prints\\n", end="", flush=True)  # one write, which other ranks' cannot fall into
if kind == "one" and who == 2 or kind == "all":
    raise ValueError(message)
if kind == "exit" and who == 1:
    sys.exit(7)
if kind == "slow" and who == 2:
    time.sleep(1.5)
    note("slow-done")
"""


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [("quiet", 0, None), ("one", 1, "afterwards-one"), ("all", 1, "afterwards-all"), ("exit", 1, "exit code 7")],
)
def test_end_of_the_script(cases: CaseServer, kind: str, code: int, said: str | None) -> None:
    """A child's failure after the launch fails the run and is said once; exit codes are the script's own."""
    result = cases.run(AFTERWARDS, kind)
    assert result.code == code, result.text
    if said is None:
        assert sorted(result.out.splitlines())[-3:] == [f"rank {rank} prints" for rank in range(3)]
        assert "Traceback" not in result.err
    else:
        assert result.err.count(said) == 1, result.err
    result.assert_nobody_left()


def test_rank_zero_waits_for_a_slower_child(cases: CaseServer) -> None:
    result = cases.run(AFTERWARDS, "slow")
    assert result.code == 0, result.text
    assert (result.directory / "slow-done").exists()


def test_warnings_are_shown_by_one_rank(cases: CaseServer) -> None:
    code = """
class Warns(Model):
    def on_train_start(self):
        import warnings
        warnings.warn("said by " + "somebody")
trainer(3).fit(Warns())
"""
    result = cases.run(code)
    assert result.code == 0, result.text
    assert result.err.count("said by somebody") == 1, result.err


SWEEP = """
import hydra
@hydra.main(version_base=None, config_path=None, config_name=None)
def main(cfg):
    from hydra.core.hydra_config import HydraConfig
    out, job = HydraConfig.get().runtime.output_dir, HydraConfig.get().job.get("num") if cfg.lr < 13 else 0
    class Run(Model):
        def on_train_start(self):
            note(f"job-{job}-rank-{self.global_rank}-{os.getpid()}", f"{out} {cfg.lr}")
    trainer(2).fit(Run())
    if cfg.lr == 13 and os.environ["LOCAL_RANK"] == "1":
        raise ValueError("-".join(["unlucky", "job"]))
main()
"""


def test_hydra_sweep_runs_each_job_once(cases: CaseServer) -> None:
    """Two jobs, two output directories, each job once per rank, on the same ranks; the console lines once."""
    running = cases.start(SWEEP, "-m", "+lr=1,2", f"hydra.sweep.dir={cases.root}/sweep")
    result = running.wait()
    assert result.code == 0, result.text
    seen = sorted(p.name.split("-") for p in result.directory.glob("job-*"))
    assert [(job, rank) for _, job, _, rank, _ in seen] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert len({pid for *_, pid in seen}) == 2
    for _, job, _, rank, pid in seen:
        assert result.read(f"job-{job}-rank-{rank}-{pid}") == f"{cases.root}/sweep/{job} {int(job) + 1}"
    assert sorted(p.name for p in (cases.root / "sweep").iterdir()) == ["0", "1", "multirun.yaml"]
    assert result.out.count("#1 : +lr=2") == 1, result.out
    result.assert_nobody_left()


def test_a_child_that_fails_under_hydra_is_said_once(cases: CaseServer) -> None:
    result = cases.run(SWEEP, "+lr=13", f"hydra.run.dir={cases.root}/single")
    assert result.code == 1, result.text
    assert result.err.count("unlucky-job") == 1, result.err
    assert result.err.count("Error executing job") == 1
    result.assert_nobody_left()


PYTEST_FILE = """
import os, pytest, torch
import lightning.pytorch as L
from lightning.pytorch.demos.boring_classes import BoringModel

class Fails(BoringModel):
    def training_step(self, batch, index):
        if self.global_rank == 1 and index == 1:
            raise ValueError("-".join(["inside", "pytest"]))
        return super().training_step(batch, index)

def trainer():
    return L.Trainer(strategy="megapar", devices=2, accelerator="cpu", max_steps=3, limit_val_batches=0, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)

def test_trains():
    pid, model = os.getpid(), BoringModel()
    before = model.layer.weight.detach().clone()
    trainer().fit(model)
    assert os.getpid() == pid and not torch.equal(before, model.layer.weight)
    assert "LOCAL_RANK" not in os.environ and not torch.distributed.is_initialized()

def test_fails():
    with pytest.raises(RuntimeError, match="rank 1 .*failed in training step 1") as caught:
        trainer().fit(Fails())
    assert str(caught.value).count("inside-pytest") == 1

def test_trains_again():
    trainer().fit(BoringModel())
"""


def test_under_pytest_children_run_the_launched_function_only(cases: CaseServer) -> None:
    """No child returns into the test runner: three tests, each counted once."""
    code = f"""
import pytest
path = OUT / "test_inside.py"
path.write_text({PYTEST_FILE!r})
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(OUT), str(path)]))
"""
    result = cases.run(code)
    assert result.code == 0, result.text
    assert result.out.count("3 passed") == 1, result.out


def test_interactive_sessions_get_the_same(cases: CaseServer) -> None:
    """With a prompt (``sys.ps1``) the function returns once, in this process, with the training done."""
    code = """
sys.ps1 = ">>> "
model = Model()
before = model.layer.weight.detach().clone()
trainer(2).fit(model)
print("back in", os.getpid(), not torch.equal(before, model.layer.weight), flush=True)
"""
    running = cases.start(code)
    result = running.wait()
    assert result.code == 0, result.text
    assert [line for line in result.out.splitlines() if "back" in line] == [f"back in {running.pid} True"]
    result.assert_nobody_left()


RETRY = """
class Deep(Model):
    def __init__(self):
        super().__init__()
        head = self.layer
        del self.layer
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
        self.layer = head
    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return self.layer(hidden)
from lightning_megapar import ConfigError, MegaParStrategy
def staged():
    strategy = MegaParStrategy(pipeline_parallel_size=2, num_microbatches=1)
    return L.Trainer(strategy=strategy, devices=2, accelerator="cpu", max_steps=4, limit_val_batches=0, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
model = Deep()
model.stage, model.rank = "step", 1
try:
    staged().fit(model)
except RuntimeError as error:
    note("first", error)
model.rank = -1
try:
    staged().fit(model)
except ConfigError as error:
    note("second", error)
staged().fit(Deep())
"""


def test_shards_that_ended_with_their_rank_are_missed(cases: CaseServer) -> None:
    """A pipelined module cannot be retried on fresh ranks: stage 1 has gone, and a copy of stage 0 is not it."""
    result = cases.run(RETRY)
    assert result.code == 0, result.text
    assert "rank 1 (data 0, pipeline 1, tensor 0) failed in training step 2" in result.read("first")
    assert "was cut for pipeline=2" in result.read("second")
    result.assert_nobody_left()


def test_launching_from_a_thread(cases: CaseServer) -> None:
    code = """
import threading
thread = threading.Thread(target=lambda: trainer(2).fit(Model()))
thread.start()
thread.join()
time.sleep(0.3)
print("after", os.getpid(), flush=True)
"""
    running = cases.start(code)
    result = running.wait()
    assert result.code == 0, result.text
    assert [line for line in result.out.splitlines() if "after" in line] == [f"after {running.pid}"]
    assert len(result.pids()) == 2
    result.assert_nobody_left()
