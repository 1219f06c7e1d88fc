from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launch.cases import CaseServer

HERE = Path(__file__).parent
PREAMBLE = f"""
import os, pathlib, sys
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]
import torch
import lightning.pytorch as L
import everyday
OUT = pathlib.Path(os.environ["OUT"])
"""


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseServer]:
    """Scripts of a user's, each a process of its own."""
    preload = ("torch.distributed.tensor", "lightning.pytorch.cli", "lightning.pytorch.loggers", "jsonargparse")
    server = CaseServer(tmp_path_factory.mktemp("scripts"), preamble=PREAMBLE, preload=preload)
    server.open()
    yield server
    server.close()
