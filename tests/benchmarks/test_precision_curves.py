from __future__ import annotations

import pytest
from recipe_module import load_recipe

bench = load_recipe("benchmarks/precision_curves.py")


def test_curves_are_compared_by_means_over_a_window() -> None:
    assert bench.smoothed([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 4.0, 6.0]
    reference = [4.0, 4.0, 2.0, 2.0]
    assert bench.compared(reference, reference, 2) == {"largest": 0.0, "last": 0.0}
    found = bench.compared([4.0, 4.4, 2.0, 1.9], reference, 2)
    assert found == pytest.approx({"largest": 0.4 / 6, "last": -0.025})


@pytest.mark.parametrize("losses", [[1.0, 1.0], [1.0] * 4])
def test_curves_of_other_lengths_are_refused(losses: list[float]) -> None:
    with pytest.raises(ValueError, match="curves of"):
        bench.compared(losses, [1.0] * 3, 3)
