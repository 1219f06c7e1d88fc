"""Prove a layout with your own module: losses and every gradient against one process.

    python recipes/verify.py my_package.model:MyModule --data my_package.data:MyData --layout tp2_pp2
    python recipes/verify.py my_package.model:make_module --set tensor_parallel_size=4 --set sequence_parallel=true

MODULE is a LightningModule class or a function that returns one; DATA a LightningDataModule class, or a function that
returns a DataLoader or a batch. Without --data the module's own train_dataloader() is used. Exit status: 0 equal, 1
not equal, 2 refused.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from typing import Any

SIZES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="verify.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("module", metavar="MODULE", help="package.module:name")
    parser.add_argument("--arguments", type=json.loads, default={}, metavar="JSON", help="keyword arguments of MODULE")
    parser.add_argument("--data", metavar="DATA", help="package.module:name")
    parser.add_argument("--data-arguments", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--layout", default="", help="such as tp2, pp2, dp2_tp2_pp2")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="argument of MegaParStrategy")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--precision", default="64-true", help="64-true (default) shows mistakes, 32-true rounding too")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--tolerance", type=float, default=None, help="default: 1e-9 in 64-true, else 1e-5")
    parser.add_argument("--rows", type=int, default=10, help="gradients to show, worst first")
    options = parser.parse_args(arguments)

    from lightning_megapar.config import ConfigError

    try:
        return _verify(options)
    except ConfigError as error:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            print(f"verify: {error}", file=sys.stderr)
        return 2


def _verify(options: argparse.Namespace) -> int:
    from lightning.pytorch import LightningDataModule, LightningModule, seed_everything

    from lightning_megapar import MegaParStrategy
    from lightning_megapar.config import ConfigError
    from lightning_megapar.verify import print_report, verify

    settings = {**_sizes(options.layout), **dict(_setting(text) for text in options.set)}
    strategy = MegaParStrategy(**settings)
    seed_everything(0, verbose=False)
    module = _load("MODULE", options.module)(**options.arguments)
    if not isinstance(module, LightningModule):
        raise ConfigError(f"{options.module} gave a {type(module).__name__}, not a LightningModule")
    source = module if options.data is None else _load("--data", options.data)(**options.data_arguments)
    if isinstance(source, LightningDataModule):
        source.prepare_data()
        source.setup("fit")
    if hasattr(source, "train_dataloader"):
        source = source.train_dataloader()
    batch = next(iter(source)) if hasattr(source, "dataset") or hasattr(source, "batch_sampler") else source
    devices = 1
    for key in SIZES.values():
        size = settings.get(key, 1)
        devices *= size if isinstance(size, int) else 1
    tolerance = options.tolerance or (1e-9 if options.precision.startswith("64") else 1e-5)
    report = verify(
        module,
        batch,
        strategy,
        devices=devices,
        accelerator=options.accelerator,
        precision=options.precision,
        steps=options.steps,
        tolerance=tolerance,
    )
    if not report.layout:
        return 0  # another rank speaks
    print_report(report, options.rows)
    return 0 if report.ok else 1


def _sizes(layout: str) -> dict[str, int]:
    from lightning_megapar.config import ConfigError

    sizes: dict[str, int] = {}
    for part in filter(None, layout.split("_")):
        found = re.fullmatch(r"(tp|pp|dp)(\d+)", part)
        if found is None or SIZES[found[1]] in sizes:
            raise ConfigError(f"--layout {layout}: {part!r} is not one of tpN, ppN, dpN (such as dp2_tp2_pp2)")
        sizes[SIZES[found[1]]] = int(found[2])
    return sizes


def _setting(text: str) -> tuple[str, Any]:
    import yaml

    key, _, value = text.partition("=")
    return key.strip(), yaml.safe_load(value)


def _load(what: str, path: str) -> Any:
    from lightning_megapar.config import ConfigError

    name, _, attribute = path.partition(":")
    if not attribute:
        raise ConfigError(f"{what} {path!r}: expected package.module:name")
    sys.path.insert(0, "")  # as `python -m` has it: one's own modules in the current directory
    try:
        return getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what} {path!r} cannot be imported: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
