"""Prove a layout with your own module: losses and every gradient against one process.

    python recipes/verify.py my_package.model:MyModule --data my_package.data:MyData --layout tp2_pp2
    python recipes/verify.py my_package.model:make_module --set tensor_parallel_size=4 --set sequence_parallel=true

MODULE is a LightningModule class or a function that returns one; DATA a LightningDataModule class, or a function that
returns a DataLoader or a batch. Without --data the module's own train_dataloader() is used. Exit status: 0 equal, 1
not equal (or the run failed), 2 refused.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

SIZES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="verify.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("module", metavar="MODULE", help="package.module:name")
    parser.add_argument("--arguments", default="{}", metavar="JSON", help="keyword arguments of MODULE")
    parser.add_argument("--data", metavar="DATA", help="package.module:name")
    parser.add_argument("--data-arguments", default="{}", metavar="JSON", help="keyword arguments of DATA")
    parser.add_argument("--layout", default="", help="such as tp2, pp2, dp2_tp2_pp2")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="argument of MegaParStrategy")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--precision", default="64-true", help="64-true (default) shows mistakes, 32-true rounding too")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--tolerance", type=float, default=None, help="default: 1e-9 in 64-true, else 1e-5")
    parser.add_argument("--rows", type=int, default=10, help="gradients to show, worst first")
    options = parser.parse_args(arguments)

    from lightning_megapar.config import ConfigError
    from lightning_megapar.pipeline.cutting.away import StageError

    try:
        return _verify(options)
    except (ConfigError, StageError) as error:
        refusal = str(error)
    except RuntimeError as error:
        report = getattr(error, "report", None)  # of a RankFailedError: what another rank raised
        if report is None or not report.kind.endswith(("ConfigError", "StageError")):
            raise
        refusal = report.message
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        print(f"verify: {refusal}", file=sys.stderr)
    return 2


def _verify(options: argparse.Namespace) -> int:
    from lightning.pytorch import LightningModule, seed_everything

    from lightning_megapar import MegaParStrategy
    from lightning_megapar.config import ConfigError
    from lightning_megapar.verify import print_report, verify

    settings = {**_sizes(options.layout), **dict(_setting(text) for text in options.set)}
    strategy = MegaParStrategy(**settings)
    seed_everything(0, verbose=False)
    module = _made("MODULE", options.module, "--arguments", options.arguments)
    if not isinstance(module, LightningModule):
        other = " of lightning.pytorch" if any(k.__name__ == "LightningModule" for k in type(module).__mro__) else ""
        raise ConfigError(f"{options.module} gave a {type(module).__name__}, not a LightningModule{other}")
    source = (
        module if options.data is None else _made("--data", options.data, "--data-arguments", options.data_arguments)
    )
    batch = _batch_of(source, options.data)
    devices = 1
    for key in SIZES.values():
        size = settings.get(key, 1)
        devices *= size if isinstance(size, int) else 1
    tolerance = options.tolerance
    if tolerance is None:
        tolerance = 1e-9 if options.precision.startswith("64") else 1e-5
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

    from lightning_megapar.config import ConfigError

    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: expected KEY=VALUE, such as tensor_parallel_size=2")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text}: {value!r} is no YAML value ({str(error).splitlines()[0]})") from None


def _made(what: str, path: str, option: str, text: str) -> Any:
    """What the class or function at ``path`` gives, called with keyword arguments in JSON."""
    from lightning_megapar.config import ConfigError

    make = _load(what, path)
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{option} {text!r}: expected a JSON object of keyword arguments, such as '{{\"width\": 8}}'")
    if not callable(make):
        raise ConfigError(f"{what} {path!r} is a {type(make).__name__}, expected a class or a function")
    try:
        taken = inspect.signature(make).parameters
    except (TypeError, ValueError):  # a class without a signature
        return make(**given)
    named = [n for n, p in taken.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [n for n, p in taken.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [] if any(p.kind is p.VAR_KEYWORD for p in taken.values()) else [n for n in given if n not in named]
    if unknown:
        near = get_close_matches(unknown[0], named, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f" (it takes: {', '.join(named) or 'none'})"
        raise ConfigError(f"{option}: {path!r} takes no argument {unknown[0]!r}{hint}")
    missing = [n for n in needed if n not in given]
    if missing:
        shown = ", ".join(f'"{n}": ...' for n in missing)
        raise ConfigError(
            f"{what} {path!r} needs {', '.join(map(repr, missing))}: give {option} '{{{shown}}}', or name a function "
            "without arguments that returns it"
        )
    return make(**given)


def _batch_of(source: Any, data: str | None) -> Any:
    """The first batch of a data module, a module's own loader, a loader, or the batch that was given."""
    from lightning.pytorch import LightningDataModule
    from lightning.pytorch.core.hooks import DataHooks
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
    from torch.utils._pytree import tree_leaves

    from lightning_megapar.config import ConfigError

    where = "MODULE" if data is None else f"--data {data!r}"
    if source is None:
        raise ConfigError(f"{where} gave None, expected a LightningDataModule, a DataLoader or a batch")
    if isinstance(source, LightningDataModule):
        source.prepare_data()
        source.setup("fit")
    is_loader = hasattr(source, "train_dataloader")
    if is_loader:
        kind = type(source).__name__
        if getattr(type(source), "train_dataloader", None) is DataHooks.train_dataloader:
            advice = "" if data is not None else "; name a data module, or a function that gives a batch, by --data"
            raise ConfigError(f"there is no batch: {kind} has no train_dataloader(){advice}")
        source = source.train_dataloader()
        where = f"{kind}.train_dataloader()"
    leaves = tree_leaves(source)
    if is_loader or any(hasattr(x, "dataset") or hasattr(x, "batch_sampler") for x in leaves):
        combined = CombinedLoader(source, "max_size_cycle")
        batches: Iterator[Any] = (batch for batch, _, _ in iter(combined))
    elif isinstance(source, Iterator):
        batches = source
    else:
        return source
    for batch in batches:
        return batch
    raise ConfigError(f"{where} gives no batch: it is empty")


def _load(what: str, path: str) -> Any:
    from lightning_megapar.config import ConfigError

    name, _, attribute = path.partition(":")
    if not name or not attribute:
        raise ConfigError(f"{what} {path!r}: expected package.module:name")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it: one's own modules in the current directory
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{what} {path!r} cannot be imported: {name} needs {error.name!r}, which is not there"
            ) from None
        package, _, last = error.name.rpartition(".")
        places = getattr(sys.modules.get(package), "__path__", None) if package else ["", *sys.path]
        near = _nearest(last, (found.name for found in pkgutil.iter_modules(places)) if places else ())
        hint = f"; did you mean {'.'.join(filter(None, (package, near)))!r}?" if near else ""
        raise ConfigError(f"{what} {path!r} cannot be imported: there is no module {error.name!r}{hint}") from None
    except ImportError as error:
        raise ConfigError(f"{what} {path!r} cannot be imported: {error}") from error
    if not hasattr(module, attribute):
        own = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        mine = [n for n in own if getattr(getattr(module, n), "__module__", name) == name]
        near = _nearest(attribute, own)
        hint = f"; did you mean {near!r}?" if near else f" (it has: {', '.join(mine[:8]) or 'nothing to call'})"
        raise ConfigError(f"{what} {path!r} cannot be imported: {name} has no {attribute!r}{hint}")
    return getattr(module, attribute)


def _nearest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(name, list(known), n=1)), None)


if __name__ == "__main__":
    sys.exit(main())
