from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launch.cases import CaseServer

HERE = Path(__file__).parent
PREAMBLE = f"import sys\nsys.path.insert(0, {str(HERE)!r})\nfrom user_script import *\n"
PRELOAD = (
    "lightning_megapar.models.language_model",
    "lightning_megapar.callbacks",
    "torch.distributed.tensor",
    "hydra",
)


@pytest.fixture(scope="session")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseServer]:
    """Scripts that begin with ``from user_script import *``, each a process of its own."""
    server = CaseServer(tmp_path_factory.mktemp("product"), preamble=PREAMBLE, preload=PRELOAD)
    server.open()
    yield server
    server.close()
