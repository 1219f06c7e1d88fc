"""The pipeline cut over every causal-LM class of transformers, as a table in markdown.

    python tests/zoo/pipeline_table.py [--out FILE] [--stages N] [--hidden H] [--only llama,gpt2]

All stages play in one process. Exit code 1 when a class gives wrong numbers or breaks.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from zoo.architectures import Architecture, CannotRunAlone, architectures, loss_of, reference, tokens
from zoo.trial import Verdict, judge

SINGLE = {"blt"}
"""Two stages hold its encoder and differentiate it separately, through norms that compute in float32."""


def trial(architecture: Architecture, *, hidden: int = 32, stages: int = 2) -> Verdict:
    """One class cut into stages: 1e-9 where it runs in float64, else 1e-5; ``alone`` where it has no reference."""
    ids = tokens()
    try:
        expected = reference(architecture, hidden=hidden, ids=ids)
    except CannotRunAlone as error:
        return Verdict("alone", str(error))
    exact = expected.dtype is torch.float64 and architecture.name not in SINGLE
    tolerance = 1e-9 if exact else 1e-5
    return judge(
        expected.model,
        lambda model: loss_of(model, ids.to(next(model.parameters()).device)),
        expected.loss,
        expected.gradients,
        stages=stages,
        tolerance=tolerance,
    )


def verdicts(names: Iterable[str] | None = None, *, hidden: int = 32, stages: int = 2) -> dict[str, Verdict]:
    every = architectures()
    return {name: trial(every[name], hidden=hidden, stages=stages) for name in names or every}


def markdown(found: dict[str, Verdict]) -> str:
    """Counts, then a row per class; what travels besides the hidden state, or the reason."""
    counts = Counter(verdict.kind for verdict in found.values())
    lines = [
        ", ".join(f"{kind}: {count}" for kind, count in sorted(counts.items())),
        "",
        "| model type | class | result | largest error | also travels, or why not |",
        "|---|---|---|---|---|",
    ]
    every = architectures()
    for name, verdict in found.items():
        note = verdict.reason or ", ".join(verdict.carried)
        shown = " ".join(note.split()).replace("|", "\\|")[:300]
        error = f"{verdict.error:.1e}" if verdict.kind in ("exact", "wrong") else ""
        lines.append(f"| {name} | {every[name].class_name} | {verdict.kind} | {error} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="pipeline cut over transformers' causal-LM classes")
    parser.add_argument("--out", type=Path, help="write the table here instead of printing it")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--only", help="model types, separated by commas")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    names = options.only.split(",") if options.only else None
    found = verdicts(names, hidden=options.hidden, stages=options.stages)
    table = markdown(found)
    if options.out:
        options.out.write_text(table)
        print(table.splitlines()[0])
    else:
        print(table)
    return int(any(verdict.kind in ("wrong", "crash") for verdict in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
