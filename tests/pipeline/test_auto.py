"""``pipeline_schedule="auto"`` and schedules of one's own, without ranks: what is chosen, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_megapar import ConfigError, MegaParStrategy
from lightning_megapar.config import Layout, ParallelConfig
from lightning_megapar.hydra_app.plan import plan_run
from lightning_megapar.hydra_app.schema import ScheduleSettings
from lightning_megapar.hydra_app.signatures import mismatch
from lightning_megapar.layers.deferral import Deferral, can_defer
from lightning_megapar.pipeline import StageCosts, build_schedule, choose_schedule, load_schedule, save_schedule
from lightning_megapar.pipeline.auto import (
    Given,
    choose_for,
    given_to,
    refuse_memory_limit,
    refuse_too_much,
    settled,
)
from lightning_megapar.pipeline.schedules import Schedule, forward_schedule, loop_placement
from lightning_megapar.planner.cluster import Cluster, Link
from lightning_megapar.strategy.prepare import check_module

LITTLE = {"pipeline_parallel_size": 2, "pipeline_schedule": "auto", "pipeline_memory_limit": 0.5}


class Stack(nn.Module):
    """Equal blocks, a table before them and nothing behind."""

    def __init__(self, blocks: int = 8, make: Any = None, table: int = 0) -> None:
        super().__init__()
        self.table = nn.Embedding(table, 8) if table else nn.Identity()
        self.blocks = nn.ModuleList([(make or (lambda: nn.Linear(8, 8)))() for _ in range(blocks)])

    def forward(self, x: Any) -> Any:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return x


def auto(**options: Any) -> ParallelConfig:
    return ParallelConfig(**{"pipeline_parallel_size": 4, "pipeline_schedule": "auto", **options})


def taken(module: nn.Module, config: ParallelConfig, **more: Any) -> tuple[str, int]:
    stages = config.pipeline_parallel_size
    choice = choose_for(module, config, Layout(pipeline=stages), **more)
    assert max(choice.timeline.peak_memory) <= max(choice.memory_limit) + 1e-9
    assert settled(config, choice.name, choice.num_chunks).chunks == choice.num_chunks
    return choice.name, choice.num_chunks


def test_no_more_memory_than_1f1b_unless_it_is_allowed() -> None:
    assert taken(Stack(), auto()) == ("zbv", 2)
    assert taken(Stack(), auto(pipeline_memory_limit=[4, 3, 2, 1])) == ("1f1b", 1)


def test_as_many_chunks_as_there_are_blocks_for() -> None:
    assert taken(Stack(7), auto()) == ("zb_h1", 1)  # eight virtual stages need eight blocks
    choice = choose_for(Stack(7), auto(), Layout(pipeline=4))
    reasons = {one.name: one.reason for one in choice.candidates}
    assert "the stack has only 7 blocks" in reasons["zbv"] and reasons["zb_h1"] == "taken"
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=4 but the stack has only 3 blocks"):
        choose_for(Stack(3), auto(), Layout(pipeline=4))


def test_only_what_the_other_settings_allow() -> None:
    assert taken(Stack(), auto(zero_stage=1)) == taken(Stack(), auto())  # it goes with all of them
    assert taken(Stack(), auto(pipeline_chunks=2, pipeline_memory_limit=8)) != ("zb_h1", 1)
    assert taken(Stack(), auto(pipeline_split=(2, 2, 2, 2))) == ("zb_h1", 1)
    assert taken(Stack(), auto(pipeline_split=(1,) * 8)) == ("zbv", 2)
    with pytest.raises(ConfigError, match=r"names 6 stages but pipeline_parallel_size=4"):
        auto(pipeline_split=(1,) * 6)


def test_weight_gradients_that_cannot_wait_and_tables_do_not_count() -> None:
    """Nothing is gained by splitting a backward that does everything in its first half."""
    own = Stack(make=lambda: nn.Conv1d(8, 8, 1))
    choice = choose_for(own, auto(pipeline_chunks=1), Layout(pipeline=4))
    assert choice.name == "1f1b"
    assert {c.reason for c in choice.candidates if c.name == "zb_h1"} == {"as fast, not with less memory"}
    # A million rows that are looked up are no work: stages are as fast as without them, once the blocks are cut alike.
    split = auto(pipeline_split=(2, 2, 2, 2))
    with_table = choose_for(Stack(table=1_000_000), split, Layout(pipeline=4)).timeline.makespan
    assert with_table == choose_for(Stack(), split, Layout(pipeline=4)).timeline.makespan


def test_what_can_be_deferred_is_what_is_connected() -> None:
    layers = [nn.Linear(2, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.Conv1d(2, 2, 1)]
    for layer, expected in zip(layers, (True, False, False)):
        assert can_defer(layer) is expected
        Deferral().connect(layer)
        assert ("deferral" in vars(layer)) is expected


def test_seconds_from_a_cluster() -> None:
    """A slow link makes messages dear, and a V has twice as many."""
    module, config = Stack(), auto()
    link = Link(latency=0.0, bandwidth=1e9)
    fast = Cluster(4, 1, 1e9, 1e12, link, link)
    slow = replace(fast, intra_node=Link(latency=1e-5, bandwidth=1e9))
    given = Given(tokens=16, nbytes=512)
    assert taken(module, config, cluster=fast, given=given) == ("zbv", 2)
    assert taken(module, config, cluster=slow, given=given)[1] == 1
    # More microbatches on the way hide it, where there is room for what zb_h2 keeps at most, 2 S - 1.
    for limit, name in ((6.9, "zb_h1"), (7, "zb_h2")):
        assert taken(module, auto(pipeline_memory_limit=limit), cluster=slow, given=given) == (name, 1)
    chosen = choose_for(module, config, Layout(pipeline=4), cluster=slow, given=given).timeline
    assert chosen.costs.forward[0] == pytest.approx((2 * 2 * 72 * 16 / 1e9,))  # two blocks of 72 parameters
    assert chosen.costs.communication == pytest.approx(1e-5 + 512 / 1e9)


def test_what_the_first_block_is_given() -> None:
    module = Stack()
    found = given_to(module, lambda m: m(torch.zeros(3, 5, 8, device="meta")), "blocks.0", lambda m: m)
    assert found == Given(tokens=15, nbytes=3 * 5 * 8 * 4)
    assert not module.blocks[0]._forward_pre_hooks
    assert given_to(module, lambda m: None, "blocks.0", lambda m: m) is None


def test_no_choice_without_room() -> None:
    layout = Layout(pipeline=4)
    with pytest.raises(ConfigError, match=r"pipeline_memory_limit=1: no schedule fits; the smallest need is 4 "):
        refuse_memory_limit(auto(pipeline_memory_limit=1), layout)
    with pytest.raises(ConfigError, match=r"pipeline_memory_limit=2: the schedule 'gpipe', for which .* needs 8"):
        refuse_too_much(auto(pipeline_memory_limit=2), layout, "gpipe", 1)
    refuse_too_much(auto(), layout, "zbv", 2)
    # What a message says is enough, although it says six digits.
    three = auto(pipeline_chunks=3)
    with pytest.raises(ConfigError, match="the smallest need is 5 ") as error:
        refuse_memory_limit(replace(three, pipeline_memory_limit=0.1), layout)
    assert "interleaved_1f1b" in str(error.value)
    refuse_memory_limit(replace(auto(pipeline_chunks=3, num_microbatches=5), pipeline_memory_limit=5.66667), layout)


def test_costs_of_each_candidate() -> None:
    def costs(schedule: Schedule) -> StageCosts:
        if schedule.num_chunks == 2:
            raise ConfigError("no two chunks here")
        return StageCosts(forward=[[3.0], [1.0]])

    choice = choose_schedule(2, 4, costs, candidates=["1f1b", "zbv"])
    assert choice.name == "1f1b" and choice.candidates[1].reason == "cannot: no two chunks here"


# -- schedules of one's own ------------------------------------------------------------------------------------------


def test_a_file_fills_what_is_auto(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    save_schedule(build_schedule("zbv", 2, 6), path)
    for given in (str(path), path, load_schedule(path)):
        config = MegaParStrategy(pipeline_schedule=given).config
        assert (config.pipeline_parallel_size, config.num_microbatches, config.chunks) == (2, 6, 2)
        assert config.splits_backward and config.schedule_name == "mine"
        layout, _ = config.resolve(4)
        assert (layout.pipeline, layout.data) == (2, 2) and config.microbatches(layout) == 6
    plan = plan_run({"pipeline_schedule": str(path), "devices": 4}, global_batch_size=24, accelerator="cpu")
    assert plan.layout.pipeline == 2 and plan.parallel.schedule_name == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 4}, "pipeline_parallel_size=4, but pipeline_schedule='mine' is for 2 stages"),
        ({"num_microbatches": 4}, "num_microbatches=4, but pipeline_schedule='mine' is for 6 microbatches"),
        ({"pipeline_chunks": 3}, "pipeline_chunks=3 is none that pipeline_schedule='mine' can have; valid values: 2"),
        ({"pipeline_split": (2, 2)}, "names 2 stages but pipeline_parallel_size=2 of 2 chunks"),
        ({"pipeline_memory_limit": 4}, "is for the choice of a schedule, but pipeline_schedule='mine' is given"),
    ],
)
def test_a_file_against_other_settings(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = tmp_path / "mine.csv"
    save_schedule(build_schedule("zbv", 2, 6), path)
    with pytest.raises(ConfigError) as error:
        MegaParStrategy(pipeline_schedule=str(path), **options)
    assert message in str(error.value)


def test_files_that_are_no_schedule_for_training(tmp_path: Path) -> None:
    def refused(setting: Any, **options: Any) -> str:
        with pytest.raises(ConfigError) as error:
            MegaParStrategy(pipeline_schedule=setting, **options)
        return str(error.value)

    save_schedule(build_schedule("zb_h1", 2, 4), tmp_path / "zb_h1_mine.csv")
    missing = refused(str(tmp_path / "zb_h1_mine2.csv"))
    assert "auto, nor the path of a .csv file that exists" in missing and "zb_h1_mine.csv'?" in missing
    assert "did you mean 'zb_h1'?" in refused("zb_h1.csv")
    assert "did you mean 'zb_h2'?" in refused("zb-h2") and ".csv" in refused("zb-h2")
    assert "did you mean 'auto'?" in refused("autos")
    assert "a Schedule" in refused(7)
    (tmp_path / "broken.csv").write_text("0F0,0B0\n1F0,1X0\n")
    assert "schedule 'broken', line 2, column 2: '1X0' is no action" in refused(str(tmp_path / "broken.csv"))
    (tmp_path / "waits.csv").write_text("0F0,0F1,0B1,0B0\n1F1,1B1,1F0\n")
    assert "misses the backward of microbatch 0" in refused(str(tmp_path / "waits.csv"))
    assert "'forward' has no backward" in refused(forward_schedule(loop_placement(2, 1), 4))
    assert "is for one stage" in refused(build_schedule("gpipe", 1, 4))


@pytest.mark.parametrize("limit", [0, -1, True, "much", [1, 2], [], [1, 0, 1, 1]])
def test_bad_limits(limit: Any) -> None:
    with pytest.raises(ConfigError, match="expected a positive number of microbatches, or one for each stage"):
        auto(pipeline_memory_limit=limit)


def test_refused_before_ranks_exist() -> None:
    with pytest.raises(ConfigError, match=r"pipeline_memory_limit=0\.5: no schedule fits; the smallest need is 2 "):
        Trainer(strategy=MegaParStrategy(**LITTLE), accelerator="cpu", devices=2, logger=False)
    # What a recipe asks before it starts: the choice is made for the stack that is there.
    check_module(Stack(8), Layout(pipeline=4), auto())
    with pytest.raises(ConfigError, match="the stack has only 3 blocks"):
        check_module(Stack(3), Layout(pipeline=4), auto())
    with pytest.raises(ConfigError, match="the stack has only 3 blocks"):
        check_module(
            Stack(3), Layout(pipeline=2), MegaParStrategy(pipeline_schedule=build_schedule("zbv", 2, 4)).config
        )


def test_a_configuration_file_may_name_a_file() -> None:
    annotation = get_type_hints(ScheduleSettings)["name"]
    for name in ("1f1b", "auto", "orders/mine.csv", "/a/B.CSV"):
        assert mismatch(name, annotation) is None
    for name in ("zero_bubble", "mine.txt", 4):
        assert str(mismatch(name, annotation)).endswith("or 'auto' or the path of a .csv file")
