"""Write a sharded checkpoint as one file that plain Lightning and ``torch.load(weights_only=True)`` open.

    python recipes/export.py runs/my_run/checkpoints/last.ckpt model.pt
    python recipes/export.py runs/my_run model.pt
    python recipes/export.py runs/my_run/checkpoints/last.ckpt directory --hugging-face

Of a run directory the newest checkpoint is taken. The last form writes a directory for transformers'
``from_pretrained``; the model's configuration comes from the checkpoint (``recipes/finetune.py`` puts it there) or from
``--config``.

One process, no GPU; it needs the memory of the whole checkpoint (of the weights alone with ``--model-only``).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 written, 1 the disk failed, 2 refused."""
    parser = argparse.ArgumentParser(
        prog="export.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run directory")
    parser.add_argument("out", type=Path, metavar="OUT", help="the file (or, with --hugging-face, directory) to write")
    parser.add_argument("--model-only", action="store_true", help="weights and hyper-parameters, no training state")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists (a file only)")
    parser.add_argument("--hugging-face", action="store_true", help="write a directory for transformers")
    parser.add_argument("--config", type=Path, metavar="DIR", help="where config.json and tokenizer files are")
    parser.add_argument("--module", default="model", metavar="NAME", help="attribute that holds the model (model)")
    options = parser.parse_args(arguments)

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from lightning_megapar.checkpoint import CheckpointError, read_manifest
    from lightning_megapar.checkpoint.errors import human_bytes
    from lightning_megapar.checkpoint.export import refuse_existing, to_lightning, write_single_file
    from lightning_megapar.config import ConfigError

    console = Console(stderr=True)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    if (options.config is not None or options.module != "model") and not options.hugging_face:
        parser.error("--config and --module belong to --hugging-face")
    try:
        if not options.hugging_face:
            refuse_existing(options.out.absolute(), options.force)
        elif options.out.exists():
            raise CheckpointError(f"{options.out} exists; a directory is never written over, give another name")
        options.checkpoint = checkpoint_of(options.checkpoint)
        manifest = read_manifest(options.checkpoint)
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("reading", total=None)
            checkpoint = to_lightning(
                options.checkpoint,
                model_only=options.model_only or options.hugging_face,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        if options.hugging_face:
            size = write_directory(checkpoint, options)
        else:
            size = write_single_file(checkpoint, options.out, replace=options.force)
    except (CheckpointError, ConfigError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    what = "weights" if options.model_only or options.hugging_face else "weights and training state"
    print(
        f"wrote {options.out} ({human_bytes(size)}): {what} of step {manifest.step}, "
        f"{len(checkpoint['state_dict'])} tensors in the state_dict"
    )
    return 0


def checkpoint_of(path: Path) -> Path:
    """The newest checkpoint of a run directory; any other path as it is."""
    from lightning_megapar.checkpoint import CheckpointError, is_sharded_checkpoint
    from lightning_megapar.checkpoint.reader import newest_checkpoint, what_is
    from lightning_megapar.hydra_app.run_directory import CHECKPOINTS, CLAIM

    folder = path / CHECKPOINTS
    if is_sharded_checkpoint(path) or not (folder.is_dir() or (path / CLAIM).is_file()):
        return path
    found = newest_checkpoint(folder)
    if found is not None:
        print(f"export: {path} is a run directory; its newest checkpoint is {found[0].name}", file=sys.stderr)
        return found[0]
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    told = f"{folder} holds none"
    if entries:
        told = "; ".join(f"{entry.name}: {what_is(entry)}" for entry in entries[:4])
    raise CheckpointError(f"{path} is a run directory without a sharded checkpoint ({told})")


def write_directory(checkpoint: dict[str, Any], options: argparse.Namespace) -> int:
    """Write the model's part of the weights as a Hugging Face directory; returns the size of its weight files."""
    from lightning_megapar.checkpoint.hugging_face.saving import save_hugging_face_state
    from lightning_megapar.config import ConfigError

    try:
        import transformers
    except ImportError as error:
        raise ConfigError("--hugging-face needs transformers: pip install 'lightning_megapar[hf]'") from error
    transformers.logging.set_verbosity_error()
    stored = (checkpoint.get("hyper_parameters") or {}).get("config")
    try:
        if options.config is not None:
            config = transformers.AutoConfig.from_pretrained(options.config, local_files_only=True)
        elif isinstance(stored, dict) and "model_type" in stored:
            config = transformers.AutoConfig.for_model(**stored)
        else:
            raise ConfigError("the checkpoint does not hold the model's configuration; name a directory by --config")
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"no transformers configuration: {(str(error).splitlines() or [''])[0]}") from error
    written = save_hugging_face_state(
        options.out, checkpoint["state_dict"], config, options.module, tokenizer_from=options.config
    )
    return sum(file.stat().st_size for file in written.glob("*.safetensors"))


if __name__ == "__main__":
    sys.exit(main())
