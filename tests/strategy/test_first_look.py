"""What set-up looks at before the first step: a user's loaders are made once for it, its plan is told of all stages."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from pool import RankPool
from usage import everyday

from lightning_megapar.sharding.plan import ShardingPlan, resolve


class Counting(everyday.PlainNet):
    """Its loaders are hooks that count their calls."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.made: list[str] = []

    def train_dataloader(self) -> Any:
        self.made.append("train")
        return everyday.loader(self.layout, 16)

    def val_dataloader(self) -> Any:
        self.made.append("val")
        return everyday.loader(self.layout, 8)


def look(layout: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Counting(layout).double()
    trainer = everyday.make_trainer(layout, max_epochs=2)
    said = io.StringIO()
    with redirect_stdout(said):
        trainer.fit(module)
    strategy: Any = trainer.strategy
    return {
        "made": {name: module.made.count(name) for name in ("train", "val")},
        "printed": said.getvalue(),
        "plan": getattr(strategy, "chosen_sharding_plan", {}),
        "rows": [r.name for r in strategy.prepared.parameters] if layout != everyday.PLAIN else [],
    }


def table(printed: str) -> list[list[str]]:
    """Cells of the plan's table, without its lines."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    return [row for row in rows if len(row) >= 5]


@pytest.fixture(scope="module")
def seen(pool: RankPool) -> dict[str, list[dict[str, Any]]]:
    layouts = ("tp2", "pp2", "tp2_pp2")
    return {layout: pool.run(look, everyday.world(layout), layout, mode="trainer") for layout in layouts}


def test_loaders_of_a_hook_are_made_at_most_once_more(seen: dict[str, list[dict[str, Any]]]) -> None:
    alone = look(everyday.PLAIN)["made"]
    for layout, ranks in seen.items():
        for rank in ranks:
            assert rank["made"]["val"] == alone["val"], layout
            assert alone["train"] <= rank["made"]["train"] <= alone["train"] + 1, layout


def test_table_and_plan_cover_every_stage(seen: dict[str, list[dict[str, Any]]]) -> None:
    one, two = table(seen["tp2"][0]["printed"]), table(seen["tp2_pp2"][0]["printed"])
    assert len(one) >= 2 and [row[:4] + row[5:] for row in two] == one  # the same numbers and shares, with a stage
    stages = {row[0]: row[4] for row in two}
    assert stages["blocks.*.mlp.0"] == stages["blocks.*.mlp.2"] == "0-1"
    assert [rank["printed"] for rank in seen["tp2_pp2"][1:]] == [""] * 3
    # What is saved is the plan of the whole module, the same on every rank, and is taken back as it is.
    plans = [rank["plan"] for rank in (*seen["tp2"], *seen["tp2_pp2"])]
    assert all(plan == plans[0] for plan in plans)
    named = {one.path for one in resolve(ShardingPlan.from_mapping(plans[0]), everyday.PlainNet(), strict=True)}
    assert {f"blocks.{index}.mlp.{part}" for index in range(4) for part in (0, 2)} <= named
