"""K microbatches, accumulation and data ranks with ragged masks are one big batch, however the counts are told."""

from __future__ import annotations

from functools import partial
from typing import Any

import hostile
import pytest
import torch
from hostile import Net
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megapar.config import ConfigError
from lightning_megapar.step.outcome import StepContractError
from lightning_megapar.step.tokens import LabelCount, given_token_counter, tokens_in

ROWS, LENGTH = 24, 6


class Masked(Net):
    """Its loss is the mean over the labels that are not masked; it knows nothing of counts."""

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    found = []
    for row in range(ROWS):
        labels = torch.randint(0, 5, (LENGTH,), generator=generator)
        labels[: (row * 5) % (LENGTH + 1)] = -100  # some rows are masked from end to end
        x = torch.randn(LENGTH, 8, generator=generator, dtype=torch.float64)
        found.append({"x": x, "labels": labels, "count": (labels != -100).sum()})
    return found


def batches(size: int, counts: bool) -> DataLoader[Any]:
    names = {"x": "x", "labels": "labels", **({"num_valid_tokens": "count"} if counts else {})}
    return DataLoader([{new: row[old] for new, old in names.items()} for row in rows()], batch_size=size)  # type: ignore[arg-type]


def fit(layout: str, told: str) -> dict[str, Any]:
    """Windows of twelve rows: at once, or in two batches of three microbatches on each of two data ranks."""
    counter: Any = {"labels": "labels", "mapping": {"labels": "labels", "ignore_index": -100}}.get(told)
    if told == "function":
        counter = partial(_count, key="labels")
    plain = layout == hostile.PLAIN
    ranks = hostile.data_size(layout)
    size = 12 if plain else 12 // ranks // 2
    return hostile.fit(
        layout,
        Masked,
        train=batches(size, told == "batch"),
        validate=batches(size, told == "batch"),
        max_epochs=1,
        accumulate_grad_batches=1 if plain else 2,
        options={} if plain else {"num_microbatches": 3, "count_tokens": counter},
    )


def _count(piece: Any, key: str) -> int:
    return int((piece[key] != -100).sum())


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return fit(hostile.PLAIN, "")["weights"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("layout", "world", "told"),
    [
        ("dp2", 2, "labels"),
        ("pp2", 2, "batch"),
        pytest.param("dp2", 2, "batch", marks=pytest.mark.slow),
        pytest.param("dp2", 2, "mapping", marks=pytest.mark.slow),
        pytest.param("dp2_pp2_zero1", 4, "function", marks=pytest.mark.slow),
        pytest.param("single", 1, "labels", marks=pytest.mark.slow),
    ],
)
def test_one_big_batch(pool: RankPool, expected: dict[str, Tensor], layout: str, world: int, told: str) -> None:
    found = pool.run(fit, world, layout, told, mode="trainer")[0]
    assert hostile.differences(found["weights"], expected) == []
    # Some microbatches are masked from end to end: they count for nothing, in what is logged as well.
    module = Masked().double()
    module.load_state_dict(found["weights"])
    whole = module.loss({key: torch.stack([row[key] for row in rows()]) for key in ("x", "labels")})
    assert found["epochs"][-1]["val_loss"] == pytest.approx(float(whole), rel=1e-9)


def test_without_a_count_it_is_the_mean_of_microbatches(pool: RankPool, expected: dict[str, Tensor]) -> None:
    """What the counts are for: with them away the weights are others."""
    found = pool.run(fit, 2, "dp2", "", mode="trainer")[0]
    assert hostile.differences(found["weights"], expected, tolerance=1e-3) != []


def test_counting() -> None:
    labels = torch.tensor([[1, -100, 2], [-100, 4, 5]])
    assert int(LabelCount()({"labels": labels})) == 4
    assert int(LabelCount(shift=True)({"labels": labels})) == 3
    assert int(LabelCount(1, ignore_index=4)((None, labels))) == 5
    assert tokens_in({"num_valid_tokens": torch.tensor([2, 2])}, 2, None) == 4
    assert tokens_in({"x": labels}, 2, None) is None and tokens_in(labels, 2, None) is None
    assert given_token_counter(None) is None
    assert given_token_counter({"labels": "y", "shift": True}) == LabelCount("y", shift=True)
    for wrong in (torch.tensor(4), torch.tensor([1, 2, 3])):
        with pytest.raises(StepContractError, match="one count for each of its 2 samples"):
            tokens_in({"num_valid_tokens": wrong}, 2, None)
    with pytest.raises(StepContractError, match=r"has no tensor 'labels' \(it has the keys x, y\)"):
        LabelCount()({"x": 1, "y": 2})
    for value, says in (
        ({"label": "y"}, "unknown argument 'label'; did you mean 'labels'"),
        ({"labels": None}, "labels=None: expected the key"),
        ({"shift": 1}, "shift=1: expected true or false"),
        ({"ignore_index": 0.5}, "ignore_index=0.5: expected an integer"),
        ("", "labels='': expected the key"),
        (-1, "labels=-1: expected the key"),
        (0.5, "count_tokens=0.5: expected the key of the labels"),
    ):
        with pytest.raises(ConfigError, match=says):
            given_token_counter(value)
