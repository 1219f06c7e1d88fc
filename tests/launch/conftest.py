from __future__ import annotations

from collections.abc import Iterator

import pytest
from cases import CaseServer


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseServer]:
    server = CaseServer(tmp_path_factory.mktemp("cases"))
    server.open()
    yield server
    server.close()
