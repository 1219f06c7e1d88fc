"""Whole runs as test cases, without paying eight seconds of imports for each of their ranks.

A server process imports torch, Lightning and the package once. For each case it forks a process that behaves like
``python case.py``: own session, own standard streams, the case's code executed at top level as ``__main__``, Python's
normal end. With ``peers=N`` that process acts as torchrun's agent instead: N ranks with torchrun's variables and a
store hosted outside them, SIGTERM to all when one fails. (Tests against the real torchrun exist beside these.)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]

PREAMBLE = '''
import os, pathlib, signal, sys, time
import torch, lightning.pytorch as L
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_megapar
OUT = pathlib.Path(os.environ["OUT"])

def note(name, text=""):
    """Leave a file for the test to read (complete or absent), whichever ranks write it at once."""
    part = OUT / f"{name}-{os.getpid()}.part"
    part.write_text(str(text))
    part.rename(OUT / name)

class Model(BoringModel):
    """Fails in one stage on one rank, with a message that stands nowhere in a source line."""
    stage, rank, pause = "", -1, 0.0
    def fail(self, stage):
        if stage == self.stage and self.global_rank == self.rank:
            note("raised", time.time())
            raise ValueError("-".join(["planted", stage, str(self.rank)]))
    def setup(self, stage):
        note(f"pid-{self.global_rank}", os.getpid())
        self.fail("setup")
    def training_step(self, batch, index):
        time.sleep(self.pause)
        if index == 2:
            self.fail("step")
        note(f"step-{self.global_rank}", index)
        return super().training_step(batch, index)
    def validation_step(self, batch, index):
        self.fail("validation")
        return super().validation_step(batch, index)
    def on_save_checkpoint(self, checkpoint):
        self.fail("save")

def trainer(devices, **settings):
    settings = {"max_steps": 4, "limit_val_batches": 0, "enable_checkpointing": False, "logger": False} | settings
    return L.Trainer(strategy="megapar", devices=devices, accelerator="cpu", enable_progress_bar=False,
                     enable_model_summary=False, default_root_dir=OUT, **settings)
'''

SERVER = r"""
import json, os, signal, sys, time
import importlib
import torch, lightning.pytorch, lightning_megapar
import torch.distributed as dist

for name in sys.argv[1:]:
    importlib.import_module(name)

def redirect(out):
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    streams = (os.devnull, os.O_RDONLY), (f"{out}/stdout", append), (f"{out}/stderr", append)
    for number, (name, mode) in enumerate(streams):
        handle = os.open(name, mode, 0o600)
        os.dup2(handle, number)
        os.close(handle)

def host_store():
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        os.close(writer)
        while os.getppid() != 1:
            time.sleep(0.1)
        os._exit(0)
    os.close(writer)
    return pid, os.read(reader, 20).decode()

def agent(case):
    host, port = host_store()
    ranks = {}
    for rank in range(case["peers"]):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case["peers"]), GROUP_RANK="0",
                LOCAL_WORLD_SIZE=str(case["peers"]), GROUP_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                TORCHELASTIC_RUN_ID="case", TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_USE_AGENT_STORE="True")
            return
        ranks[pid] = rank
    def forward(signum, frame):
        for pid in ranks:
            os.kill(pid, signum)
    signal.signal(signal.SIGTERM, forward)
    codes, told = [], None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            codes.append(os.waitstatus_to_exitcode(status))
            with open(os.environ["OUT"] + "/codes", "a") as file:
                file.write(f"{ranks.pop(pid)} {codes[-1]}\n")
            if codes[-1] != 0 and told is None:
                told = time.time()
                time.sleep(0.1)
                for other in ranks:
                    os.kill(other, signal.SIGTERM)
        elif told is not None and time.time() - told > 30:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
        time.sleep(0.02)
    os.kill(host, signal.SIGKILL)
    os._exit(1 if any(codes) else 0)

def serve():
    print("ready", flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        if "wait" in case:
            deadline = time.monotonic() + case["seconds"]
            while True:
                pid, status = os.waitpid(case["wait"], os.WNOHANG)
                if pid or time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            print(json.dumps([os.waitstatus_to_exitcode(status), time.time()] if pid else None), flush=True)
            continue
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        os.setsid()
        os.environ.update(case["env"], OUT=case["out"])
        redirect(case["out"])
        sys.argv = [case["path"], *case["argv"]]
        torch.manual_seed(time.time_ns() % 2**31)
        if case["peers"]:
            agent(case)
        return case["path"]

path = serve()
if path:
    exec(compile(open(path).read(), path, "exec"), {"__name__": "__main__", "__file__": path})
"""


@dataclass
class Result:
    """How a case ended."""

    code: int
    ended: float
    out: str
    err: str
    directory: Path

    @property
    def text(self) -> str:
        return self.out + self.err

    def read(self, name: str) -> str:
        return (self.directory / name).read_text()

    @property
    def seconds_after_raise(self) -> float:
        """From the planted exception to the end of the process."""
        return self.ended - float(self.read("raised"))

    def pids(self) -> list[int]:
        return [int(p.read_text()) for p in self.directory.glob("pid-*") if p.suffix != ".part"]

    def assert_in_time(self, seconds: float = 5.0) -> None:
        """The run ended soon after the planted exception (more time where many other processes compete)."""
        assert self.seconds_after_raise < patience(seconds), self.text

    def assert_nobody_left(self) -> None:
        deadline = time.monotonic() + 2.0  # a killed process is a zombie until somebody reaps it
        while any(_runs(pid) for pid in self.pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in self.pids() if _runs(pid)] == []


def patience(seconds: float) -> float:
    """More than ``seconds`` where many other processes compete for the cores."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 2)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class Running:
    """A case that has been started."""

    pid: int
    directory: Path
    server: CaseServer

    def until(self, *names: str, seconds: float = 60.0) -> None:
        """Wait until the case has left these notes."""
        deadline = time.monotonic() + patience(seconds)
        while not all((self.directory / name).exists() for name in names):
            assert time.monotonic() < deadline, f"no {names} in {seconds} s:\n" + self._streams()
            time.sleep(0.02)

    def pid_of(self, rank: int) -> int:
        return int((self.directory / f"pid-{rank}").read_text())

    def _streams(self) -> str:
        return "\n".join((self.directory / name).read_text() for name in ("stdout", "stderr"))

    def wait(self, seconds: float = 60.0) -> Result:
        seconds = patience(seconds)
        answer = self.server.ask({"wait": self.pid, "seconds": seconds})
        if answer is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.server.ask({"wait": self.pid, "seconds": 10})
            raise AssertionError(f"the case did not end within {seconds} s:\n{self._streams()}")
        out, err = ((self.directory / name).read_text() for name in ("stdout", "stderr"))
        return Result(answer[0], answer[1], out, err, self.directory)


@dataclass
class CaseServer:
    """See the module's text.

    Args:
        root: a folder for each case is made in it.
        preamble: stands before each case's code.
        preload: modules that the server imports for its cases.
    """

    root: Path
    preamble: str = PREAMBLE
    preload: tuple[str, ...] = ()
    count: int = 0
    process: Any = field(default=None, repr=False)

    def open(self) -> None:
        path = self.root / "server.py"
        path.write_text(SERVER)
        self.process = subprocess.Popen(
            [sys.executable, str(path), *self.preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        assert self.process.stdout.readline().strip() == "ready"

    def close(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait(20)

    def ask(self, question: dict[str, Any]) -> Any:
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, code: str, *argv: Any, peers: int = 0, env: dict[str, str] | None = None) -> Running:
        self.count += 1
        directory = self.root / f"case-{self.count}"
        directory.mkdir()
        path = directory / "case.py"
        path.write_text(self.preamble + code)
        case = {
            "path": str(path),
            "argv": [str(a) for a in argv],
            "out": str(directory),
            "peers": peers,
            "env": env or {},
        }
        return Running(self.ask(case), directory, self)

    def run(self, code: str, *argv: Any, seconds: float = 60.0, **settings: Any) -> Result:
        return self.start(code, *argv, **settings).wait(seconds)


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment of a plain shell: nothing of a launcher in it."""
    prefixes = ("SLURM", "SUBMITIT", "TORCHELASTIC", "MEGAPAR", "PL_")
    names = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GLOO_SOCKET_IFNAME")
    kept = {k: v for k, v in os.environ.items() if k not in names and not k.startswith(prefixes)}
    path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **extra}
