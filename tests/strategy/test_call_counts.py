"""Steps that go by the number of their own calls cannot be cut, and are told so: what differs, where, what to do."""

from __future__ import annotations

from typing import Any

import hostile
import pytest
from hostile import Net
from pool import RankError, RankPool
from torch import Tensor, nn


class Auxiliary(Net):
    """Some calls use a second head on what the first layer returned."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(16, 5)

    def is_due(self) -> bool:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        first = self.inp(x)
        out = self.head(self.blocks(first))
        return out + self.extra(first) if self.is_due() else out


def counter() -> Any:
    calls = [0]

    def count() -> int:
        calls[0] += 1
        return calls[0]

    return count


class Closure(Auxiliary):
    """The count lies in a closure: it survives the rehearsal."""

    def __init__(self) -> None:
        super().__init__()
        self.count = counter()

    def is_due(self) -> bool:
        return bool(self.count() > 2)  # the trial run and the rehearsal come first


class Attribute(Auxiliary):
    """The count is the module's own, put back after the rehearsal; it goes up with every microbatch."""

    calls = 0

    def is_due(self) -> bool:
        self.calls += 1
        return self.calls % 2 == 0


@pytest.mark.parametrize("kind", [Closure, Attribute], ids=lambda k: k.__name__)
def test_a_step_that_goes_by_its_calls(pool: RankPool, kind: type[Net]) -> None:
    with pytest.raises(RankError) as error:
        pool.run(hostile.fit, 2, "pp2", kind, mode="trainer", timeout=90)
    said = str(error.value)
    assert "this call of the step needs what 'inp' returned on a later pipeline stage. The rehearsal before" in said
    assert "the step differs from call to call (by what it counts, by batch_idx" in said
    assert "Use the same results in every call" in said and "pipeline_keep={'inp': 'all'}" in said
    repeats = "training_step does not do the same each time that it is called: it was rehearsed on this very microbatch"
    assert (repeats in said) == (kind is Closure)
    if kind is Closure:
        assert "a count of calls in a closure or a global" in said
