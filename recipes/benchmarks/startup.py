"""From the command to the end of the first training step: forking in place against Lightning's re-executing ``ddp``.

    python recipes/benchmarks/startup.py --ranks 4 --repeats 3 --out startup.json

Both start the same script, alternately, on the same machine. The time runs from just before the command is started to
the moment when the last rank has finished its first optimizer step. Printed: each run, the medians, and their ratio
(megapar / ddp; the aim is at most 0.5). CPU ranks, one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import lightning.pytorch as L
{imports}

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    def training_step(self, batch, index):
        return self.layers(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
    def on_train_batch_end(self, outputs, batch, index):
        if index == 0:
            Path({directory!r}, f"first-{{self.global_rank}}").write_text(repr(time.time()))

data = torch.utils.data.DataLoader(torch.randn(256, 64), batch_size=8)
trainer = L.Trainer(strategy={strategy!r}, devices={ranks}, accelerator="cpu", max_steps=2, logger=False,
                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Net(), data)
"""


def measure(strategy: str, ranks: int, timeout: float) -> dict[str, Any]:
    """One run of the script.

    Returns:
        ``first_step`` (seconds until the last rank's first step), ``total`` (seconds until the process ended).
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "train.py")
        imports = "import lightning_megapar" if strategy == "megapar" else ""
        path.write_text(SCRIPT.format(imports=imports, directory=directory, strategy=strategy, ranks=ranks))
        environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "MASTER_PORT", "WORLD_SIZE")}
        environment |= {"OMP_NUM_THREADS": "1"}
        began = time.time()
        done = subprocess.run([sys.executable, str(path)], capture_output=True, timeout=timeout, env=environment)
        ended = time.time()
        if done.returncode:
            raise SystemExit(f"{strategy} failed with exit code {done.returncode}:\n{done.stderr.decode()}")
        steps = [float(Path(directory, f"first-{rank}").read_text()) for rank in range(ranks)]
    return {"strategy": strategy, "first_step": max(steps) - began, "total": ended - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one run")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()

    runs: list[dict[str, Any]] = []
    for _ in range(arguments.repeats):
        for strategy in ("megapar", "ddp"):
            runs.append(measure(strategy, arguments.ranks, arguments.timeout))
            last = runs[-1]
            print(
                f"{strategy:>8}: first step {last['first_step']:6.2f} s, whole run {last['total']:6.2f} s", flush=True
            )
    medians = {
        name: statistics.median(run["first_step"] for run in runs if run["strategy"] == name)
        for name in ("megapar", "ddp")
    }
    ratio = medians["megapar"] / medians["ddp"]
    print(f"  median: megapar {medians['megapar']:.2f} s, ddp {medians['ddp']:.2f} s, ratio {ratio:.2f} (aim: 0.5)")
    if arguments.out:
        summary = {"ranks": arguments.ranks, "runs": runs, "median_seconds": medians, "ratio": ratio, "aim": 0.5}
        arguments.out.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
