"""Write a sharded checkpoint as one file that plain Lightning and ``torch.load(weights_only=True)`` open.

    python recipes/export.py runs/my_run/checkpoints/last.ckpt model.pt

One process, no GPU; it needs the memory of the whole checkpoint (of the weights alone with ``--model-only``).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 written, 1 the disk failed, 2 refused."""
    parser = argparse.ArgumentParser(
        prog="export.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT_DIR", help="the directory that training wrote")
    parser.add_argument("out", type=Path, metavar="OUT.pt", help="the file to write")
    parser.add_argument("--model-only", action="store_true", help="weights and hyper-parameters, no training state")
    parser.add_argument("--force", action="store_true", help="replace OUT.pt if it exists")
    options = parser.parse_args(arguments)

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from lightning_megapar.checkpoint import CheckpointError, read_manifest
    from lightning_megapar.checkpoint.errors import human_bytes
    from lightning_megapar.checkpoint.export import refuse_existing, to_lightning, write_single_file

    console = Console(stderr=True)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        refuse_existing(options.out.absolute(), options.force)
        manifest = read_manifest(options.checkpoint)
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("reading", total=None)
            checkpoint = to_lightning(
                options.checkpoint,
                model_only=options.model_only,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        size = write_single_file(checkpoint, options.out, replace=options.force)
    except CheckpointError as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    what = "weights" if options.model_only else "weights and training state"
    print(
        f"wrote {options.out} ({human_bytes(size)}): {what} of step {manifest.step}, "
        f"{len(checkpoint['state_dict'])} tensors in the state_dict"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
