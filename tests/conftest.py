from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from pool import RankPool
from second_cases import SECOND_CASES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        file, _, case = item.nodeid.rpartition("/")[2].partition("::")
        if case in SECOND_CASES.get(file, ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    ranks = RankPool(compare_collectives="slow" in request.config.option.markexpr.replace("not slow", ""))
    yield ranks
    ranks.close()
