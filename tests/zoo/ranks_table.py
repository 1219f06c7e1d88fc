"""Every causal-LM class of transformers on real ranks, as a table: ``--help`` says how.

Each outcome is recorded at once as a line of ``outcomes.jsonl``; what stands there is not run again, so that an
interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from pool import RankPool
from zoo.architectures import architectures
from zoo.on_ranks import LAYOUTS, Outcome, outcomes

HIDDEN = (32, 64)
PATIENCE = 400.0
"""Seconds for one class: more than a collective may take, so that the ranks' own message comes first."""
Key = tuple[str, int, str]
"""Layout, hidden size, model type."""
KINDS_OF_OUTCOME = ("exact", "alone", "refused", "crash", "wrong")
HEAD = """# The zoo on real ranks

Every entry of transformers' causal-LM mapping as a tiny random model (four blocks), trained one step by
`Trainer(strategy=MegaParStrategy(...))` on gloo ranks with the plan that the strategy takes by itself. The loss and
every gathered gradient are compared with one process: in float64 where the class runs in it (many compute their loss,
norms or routers in float32 all the same), else in float32. A difference is relative to the gradient's largest entry;
exact means at most 1e-5. The percentage is the largest share of the parameters that a rank holds.

Written by `python tests/zoo/ranks_table.py --record DIR --write tests/zoo/RESULTS.md`, which runs what `DIR` does not
hold yet; no test writes it. Versions: {versions}.

## Counts
"""


def read(path: Path) -> dict[Key, Outcome]:
    """The last outcome of each trial."""
    found: dict[Key, Outcome] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        one = json.loads(line)
        key = one.pop("layout"), one.pop("hidden"), one.pop("name")
        found[key] = Outcome(**one)
    return found


def run(
    pool: RankPool,
    path: Path,
    layouts: Sequence[str],
    hidden: Sequence[int],
    names: Sequence[str],
    again: Sequence[str] = (),
) -> Iterator[tuple[Key, Outcome]]:
    """Run what is not recorded yet, or was recorded as one of ``again``; append and give each outcome."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {key for key, outcome in read(path).items() if outcome.kind not in again}
    for size in hidden:
        for layout in layouts:
            for name in names:
                key = layout, size, name
                if key in done:
                    continue
                outcome = outcomes(pool, [name], size, layout, PATIENCE)[name]
                with path.open("a") as file:
                    file.write(json.dumps({"layout": layout, "hidden": size, "name": name} | outcome.to_dict()) + "\n")
                yield key, outcome


def markdown(found: dict[Key, Outcome], versions: str) -> str:
    """Counts, reasons, then a line per class with each layout's worst outcome over the hidden sizes."""
    layouts = [layout for layout in LAYOUTS if any(key[0] == layout for key in found)]
    sizes = sorted({size for _, size, _ in found})
    names = [name for name in architectures() if any(key[2] == name for key in found)]
    lines = [HEAD.format(versions=versions)]
    lines += ["| layout | hidden size | exact | refused | one process fails | wrong | crash | largest difference |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for layout in layouts:
        for size in sizes:
            here = [one for (where, width, _), one in found.items() if (where, width) == (layout, size)]
            if here:
                counts = Counter(one.kind for one in here)
                shown = " | ".join(str(counts[kind]) for kind in ("exact", "refused", "alone", "wrong", "crash"))
                worst = max((one.error for one in here if one.kind == "exact"), default=0.0)
                lines.append(f"| {layout} | {size} | {shown} | {worst:.0e} |")
    for title, kinds in (("Refused", ("refused",)), ("Failed", ("wrong", "crash")), ("One process fails", ("alone",))):
        rows = _reasons(found, kinds)
        if rows:
            lines += ["", f"## {title}", "", "| model type | layout | reason |", "|---|---|---|", *rows]
    lines += ["", "## Every class", ""]
    lines += [f"| class | model type | {' | '.join(layouts)} |", "|---|---" + "|---" * len(layouts) + "|"]
    every = architectures()
    for name in names:
        cells = [
            _cell([one for (where, _, what), one in found.items() if (where, what) == (layout, name)])
            for layout in layouts
        ]
        lines.append(f"| {every[name].class_name} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _reasons(found: dict[Key, Outcome], kinds: Sequence[str]) -> list[str]:
    """One row per class and reason, with the layouts (and hidden sizes, unless it is all of them) that it is of."""
    where: dict[tuple[str, str], list[str]] = {}
    for (layout, _, name), one in found.items():
        if one.kind in kinds:
            reason = f"{one.kind}, " * (len(kinds) > 1) + " ".join(one.reason.split()).replace("|", "\\|")[-400:]
            places = where.setdefault((name, reason), [])
            if layout not in places:
                places.append(layout)
    return [f"| {name} | {', '.join(places)} | {reason} |" for (name, reason), places in where.items()]


def _cell(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "not run"
    worst = max(outcomes, key=lambda one: (KINDS_OF_OUTCOME.index(one.kind), one.error))
    if worst.kind == "exact":
        return f"exact ({worst.error:.0e}), {max(one.held for one in outcomes):.0%}"
    if worst.kind == "wrong":
        return f"wrong ({worst.error:.0e})"
    return {"alone": "one process fails"}.get(worst.kind, worst.kind)


def versions() -> str:
    import lightning
    import torch
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__}, Lightning {lightning.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(description="every causal-LM class of transformers on real ranks")
    parser.add_argument("--record", type=Path, required=True, help="directory of outcomes.jsonl")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--hidden", default=",".join(map(str, HIDDEN)))
    parser.add_argument("--only", help="model types, separated by commas")
    parser.add_argument("--write", type=Path, help="write the table of all that is recorded to this file at the end")
    parser.add_argument("--no-run", action="store_true", help="only write")
    parser.add_argument("--again", default="", help="kinds of outcomes to run again, separated by commas")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(architectures())
    path = options.record / "outcomes.jsonl"
    pool = RankPool()
    if options.no_run:
        names = []
    sizes = [int(size) for size in options.hidden.split(",")]
    for (layout, size, name), outcome in run(
        pool, path, options.layouts.split(","), sizes, names, options.again.split(",")
    ):
        shown = " ".join(outcome.reason.split())[-200:]
        print(f"{layout} {size} {name}: {outcome.kind} {outcome.error:.1e} {outcome.seconds:.1f} s {shown}", flush=True)
    found = read(path)
    if options.write:
        options.write.write_text(markdown(found, versions()))
    return int(any(one.kind in ("wrong", "crash") for one in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
