"""``@hydra_main``: Hydra's decorator plus what a training recipe owes its user.

* Unknown settings are refused in one list before the task starts (:mod:`lightning_megapar.hydra_app.settings`).
* Exit codes: 0 finished, 1 failed (traceback), 2 a wrong setting (one message, no traceback), 143 left after SIGTERM.
* Each job of a sweep (``-m``) has ranks of its own: those that it forked end with it.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.errors import CompactHydraException, InstantiationException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_megapar.config import ConfigError
from lightning_megapar.hydra_app.quiet import quiet
from lightning_megapar.hydra_app.run_directory import is_first_process
from lightning_megapar.hydra_app.settings import OVERLAYS, SettingsCheck, UnknownSettings, refuse_unknown_settings

WRONG_SETTING = 2
FAILED = 1
_PATIENCE = 5.0
"""Seconds that ranks other than 0 wait before they repeat a refusal."""
Task = Callable[[DictConfig], Any]


def hydra_main(
    config_path: str,
    config_name: str,
    schema: type | None = None,
    overlays: Sequence[str] = OVERLAYS,
    version_base: str = "1.3",
) -> Callable[[Task], Callable[[], None]]:
    """Decorate a task as ``hydra.main`` does; see the module for what is added.

    Args:
        config_path: relative to the decorated function's file, absolute, or ``pkg://...``.
        config_name: the primary configuration.
        schema: a dataclass that describes its root, or ``None``: then what the files define is known.
        overlays: groups that may only change what other files define.
        version_base: Hydra's.
    """

    def decorate(task: Task) -> Callable[[], None]:
        @functools.wraps(task)
        def guarded(cfg: DictConfig) -> Any:
            return _run_task(task, cfg, schema, overlays)

        run = hydra.main(version_base=version_base, config_path=config_path, config_name=config_name)(guarded)

        @functools.wraps(task)
        def main() -> None:
            arguments = get_args_parser().parse_args()
            found = _check_command(arguments, task, config_path, config_name, schema, overlays)
            if found is not None:
                _refuse(found)
            run()

        return main

    return decorate


def _check_command(
    arguments: argparse.Namespace,
    task: Task,
    config_path: str,
    config_name: str,
    schema: type | None,
    overlays: Sequence[str],
) -> UnknownSettings | None:
    """What is wrong with the command line and the files that it composes."""
    if arguments.help or arguments.hydra_help or arguments.shell_completion or arguments.experimental_rerun:
        return None
    in_module = task.__module__ not in (None, "__main__")
    search_path = create_automatic_config_search_path(
        None if in_module else inspect.getfile(task),
        task.__module__ if in_module else None,
        arguments.config_path if arguments.config_path is not None else config_path,
    )
    if arguments.config_dir is not None:
        directory = os.path.abspath(arguments.config_dir)
        if not os.path.isdir(directory):
            _refuse(ConfigError(f"--config-dir {arguments.config_dir!r} is not a directory"))
        search_path.prepend(
            provider="command-line", path=f"file://{directory}", anchor=SearchPathQuery(provider="schema")
        )
    # To print the configuration (--cfg, --info) no class need be imported; what Hydra composes is checked all the same.
    runs = arguments.cfg is None and arguments.info is None
    check = SettingsCheck(search_path, arguments.config_name or config_name, schema, overlays, import_targets=runs)
    found = check.run(arguments.overrides, multirun=arguments.multirun)
    return UnknownSettings(found) if found else None


def _run_task(task: Task, cfg: DictConfig, schema: type | None, overlays: Sequence[str]) -> Any:
    """Run one job: refusals and failures become exit codes, forked ranks end with it."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    quiet()
    code = 0
    try:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            refuse_unknown_settings(cfg, schema, overlays)  # a sweeper made this job: its overrides are new
        result = task(cfg)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else FAILED
        raise
    except KeyboardInterrupt:
        code = 130
        raise
    except Exception as error:
        refusal = _wrong_setting(error)
        code = WRONG_SETTING if refusal is not None else FAILED
        if refusal is not None:
            _refuse(refusal)
        if type(error).__name__ == "RankFailedError":
            print(f"\n{error}", file=sys.stderr, flush=True)  # it holds the failing rank's own traceback
        else:
            traceback.print_exc()
        raise SystemExit(FAILED) from None
    finally:
        _end_ranks(code)
    return result


def _wrong_setting(error: BaseException) -> Exception | None:
    """The error to show without a traceback, when a setting is the cause."""
    if isinstance(error, InstantiationException):
        cause = error.__cause__
        where = next((line for line in str(error).splitlines() if line.startswith("full_key:")), "")
        key = where.partition(":")[2].strip()
        called_wrongly = isinstance(cause, TypeError) and "argument" in str(cause)
        if called_wrongly or isinstance(cause, ValueError) or type(cause).__name__ == "MisconfigurationException":
            return ConfigError(f"{key}: {cause}" if key else str(cause))
        return error if cause is None else None
    if isinstance(error, (ConfigError, OmegaConfBaseException, CompactHydraException)):
        return error
    report = getattr(error, "report", None)  # of a RankFailedError: what another rank raised
    if report is not None and report.kind.endswith("ConfigError"):
        return ConfigError(report.message)
    return None


def _refuse(error: Exception) -> NoReturn:
    """Say what is wrong and leave with exit code 2.

    Ranks that torchrun or srun started find the same at the same moment: rank 0 speaks, and its end ends the others.
    One of them speaks only when it is still there after a while: the fault is its own (a path missing on its node).
    """
    if not is_first_process():
        time.sleep(_PATIENCE)
    lines = str(error).splitlines() or [type(error).__name__]
    head = f"{len(lines)} settings are wrong:\n  " if isinstance(error, UnknownSettings) and len(lines) > 1 else ""
    print(f"error: {head}" + "\n  ".join(lines), file=sys.stderr, flush=True)
    raise SystemExit(WRONG_SETTING)


def _end_ranks(code: int) -> None:
    """A forked rank leaves here, its job being over; rank 0 waits for them, so that the next job starts clean."""
    launched = sys.modules.get("lightning_megapar.launch.ranks")
    ranks = launched.current_ranks() if launched is not None else None
    if ranks is None or ranks.scoped:
        return
    if ranks.rank != 0:
        ranks.leave(code)
    if code == 0:
        from lightning_megapar.launch.hygiene import discard_process_group

        discard_process_group()
        ranks.close(seconds=60.0)
