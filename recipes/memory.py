"""What each rank holds during a training step: a table, measured beside predicted, and a picture over time.

    python recipes/memory.py parallel=pp2 out=memory.svg
    python recipes/memory.py parallel=dp2 parallel.zero_stage=3 model=gpt_small recompute=selective
    python recipes/memory.py parallel=tp2_pp2 schedule=zb_h1 at_step=4

It is recipes/pretrain.py with callbacks=memory, for a few steps; every group and setting can be given. Of its own:

    out         the picture: .svg, or .png (needs matplotlib); by default memory.svg in the run's directory
    at_step     the step that is measured, from 1 on (default: the first with optimizer state, and behind the plan of
                recompute=auto); the step before it is measured block by block

memory.json beside the picture has the numbers. Exit status as of recipes/pretrain.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

PLANNED = 8
"""Steps after which recompute=auto has made its plan and the two measured ones are over."""
DEFAULTS = {"callbacks": "memory", "trainer.max_steps": str(PLANNED), "trainer.limit_val_batches": "0"}


def translated(words: list[str]) -> list[str]:
    """The command line of ``recipes/pretrain.py`` for one of this recipe."""
    given = {word.partition("=")[0].lstrip("+") for word in words}
    defaults = {key: value for key, value in DEFAULTS.items() if key not in given}
    found = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key == "out":
            found.append(f"callbacks.memory_report.picture={Path(value).absolute()}")
        elif equals and key == "at_step":
            found.append(f"callbacks.memory_report.at_step={value}")
            if value.isdigit() and "trainer.max_steps" in defaults:
                defaults["trainer.max_steps"] = str(max(PLANNED, int(value) + 1))
        else:
            found.append(word)
    return [*(f"{key}={value}" for key, value in defaults.items()), *found]


def main() -> None:
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return
    sys.argv[1:] = translated(words)
    from pretrain import main as pretrain

    pretrain()


if __name__ == "__main__":
    main()
