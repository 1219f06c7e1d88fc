"""``PipelineTrace`` on the ranks of a pipeline: every action once, in an order that the clocks bear out."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from hostile import Net
from lightning.pytorch import Callback
from pool import RankPool
from torch import Tensor, nn

from lightning_megapar.callbacks import PipelineTrace
from lightning_megapar.pipeline.engine.clocks import clock_offsets
from lightning_megapar.pipeline.planning.measured import schedule_of
from lightning_megapar.pipeline.planning.trace import TraceEvent, one_step, read_trace
from lightning_megapar.pipeline.schedules import Schedule, build_schedule

AHEAD = 1000.0
"""Seconds by which the second stage's clock is ahead in a test."""


class Tied(Net):
    """Both ends share a weight, so that stages sum its gradient; the run can end before its third step."""

    leaves = False

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head.weight = self.inp.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.inp(torch.cat([x, x], 1))))[:, :5]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.leaves and self.trainer.global_step == 2:
            raise SystemExit("planted")  # as after a signal; a failure would end the ranks' processes


class Leaving(Tied):
    leaves = True


class Observer(Callback):
    """In which steps something is recorded, and clocks that are apart."""

    def __init__(self) -> None:
        self.recorded: list[tuple[int, bool]] = []
        self.offsets: list[tuple[float, float]] = []

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        stepper = trainer.strategy.stepper
        self.recorded.append((trainer.global_step, stepper.runtime.spans is not None))

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.recorded.append((-1, trainer.strategy.stepper.runtime.spans is not None))

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        mesh = trainer.strategy.mesh
        skewed = AHEAD * mesh.coordinate("pipeline")
        found = clock_offsets(mesh, torch.device("cpu"), lambda: time.perf_counter() + skewed)
        self.offsets = [(offset.seconds, offset.error) for offset in found]


def train(root: str) -> dict[str, Any]:
    """Runs on this rank: a plain one, one with chunks, accumulation and validation, one that is left, a short one."""
    observer = Observer()
    options: dict[str, Any] = {"max_epochs": 1, "default_root_dir": root}
    trace = PipelineTrace([1, 2], "plain.json", picture="plain.svg")
    hostile.fit("pp2", Tied, callbacks=[trace, observer], gradient_clip_val=0.5, **options)
    hostile.fit(
        "pp2_zbv",
        Net,
        callbacks=[PipelineTrace((0, 1, 9), Path(root) / "deeper" / "zbv.json"), observer],
        validate=True,
        accumulate_grad_batches=2,
        val_check_interval=1,
        **options,
    )
    raised = ""
    try:
        hostile.fit("pp2", Leaving, callbacks=[PipelineTrace([1, 2, 3], "left.json")], **options)
    except SystemExit as error:
        raised = str(error)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        hostile.fit("pp2", Tied, callbacks=[PipelineTrace([7, 9], "late.json")], max_steps=2, **options)
    unwritten = [str(one.message) for one in told if "PipelineTrace" in str(one.message)]
    return {"recorded": observer.recorded, "offsets": observer.offsets, "raised": raised, "unwritten": unwritten}


def actions(events: Sequence[TraceEvent]) -> Counter[tuple[str, int, int, int]]:
    return Counter((e.kind, e.rank, e.microbatch, e.chunk) for e in events if e.is_work)


def planned(schedule: Schedule, batches: int = 1) -> Counter[tuple[str, int, int, int]]:
    return Counter(
        (a.kind, rank, batch * schedule.num_microbatches + a.microbatch, a.chunk)
        for batch in range(batches)
        for rank, row in enumerate(schedule.ranks)
        for a in row
    )


def check_order(events: Sequence[TraceEvent], schedule: Schedule, error: float) -> None:
    """What an action needs is over before it starts; on another rank, it has been sent before its span's end.

    That the end is not awaited there is no error of a clock: a rank that has sent may be put aside by a busy machine.
    """
    done = {}
    for event in events:
        if event.is_work:
            phase = {"forward": "F", "backward_weight": "W"}.get(event.kind, "B")
            done[phase, schedule.placement[event.rank][event.chunk], event.microbatch] = event
    last, near, far = schedule.num_virtual_stages - 1, 0, 0
    for event in (e for e in events if e.is_work):
        k, m = schedule.placement[event.rank][event.chunk], event.microbatch
        needed = {"forward": [("F", k - 1)], "backward_weight": [("B", k)]}.get(event.kind, [("F", k), ("B", k + 1)])
        for earlier in (done[phase, stage, m] for phase, stage in needed if 0 <= stage <= last):
            if earlier.rank == event.rank:
                near += 1
                assert event.start >= earlier.end, (event, earlier)
            else:
                far += 1
                assert event.start > earlier.start - error, (event, earlier)
    assert near > 0 and far > 0


def test_timeline_of_every_chosen_step(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(train, 2, str(tmp_path), mode="trainer")

    events = read_trace(tmp_path / "plain.json")
    notes = json.loads((tmp_path / "plain.json").read_text())["otherData"]
    error = max(notes["clock_error_seconds"])
    assert notes["schedule"] == "1f1b" and 0 < error < 1.0
    assert {e.step for e in events} == {1, 2} and min(e.start for e in events) == 0
    schedule = build_schedule("1f1b", 2, 4)
    for step in (1, 2):
        own = one_step(events, step)
        assert actions(own) == planned(schedule)
        assert schedule_of(own, "1f1b") == schedule
        check_order(own, schedule, error)
        for rank in (0, 1):
            done = {kind: [e for e in own if (e.kind, e.rank) == (kind, rank)] for kind in ("reduce", "optimizer")}
            assert [len(found) for found in done.values()] == [1, 1]
            (reduced,), (updated,) = done.values()
            assert max(e.end for e in own if e.is_work and e.rank == rank) <= reduced.start
            assert reduced.end <= updated.start < updated.end
    drawn = (tmp_path / "plain.svg").read_text()
    assert "measured, step 2" in drawn and "simulated with the medians" in drawn

    events = read_trace(tmp_path / "deeper" / "zbv.json")  # ends before step 9
    error = max(json.loads((tmp_path / "deeper" / "zbv.json").read_text())["otherData"]["clock_error_seconds"])
    assert {e.step for e in events} == {0, 1}
    schedule = build_schedule("zbv", 2, 4)
    for step in (0, 1):
        own = one_step(events, step)
        assert actions(own) == planned(schedule, batches=2)
        check_order(own, schedule, error)
        earlier = [e for e in own if e.microbatch < 4]
        assert schedule_of(earlier, "zbv") == schedule
        assert sum(e.kind == "optimizer" for e in own) == 2
        assert not any(e.kind == "reduce" for e in own)  # nothing is shared

    for rank in (first, second):
        assert rank["raised"] == "planted"
        trained = [(step, on) for step, on in rank["recorded"] if step >= 0]
        assert trained == [(0, False), (1, True), (2, True), (3, False), (0, True), (1, True)]
        assert [on for step, on in rank["recorded"] if step < 0] and not any(
            on for step, on in rank["recorded"] if step < 0
        )
    assert {e.step for e in read_trace(tmp_path / "left.json")} == {1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deeper", "left.json", "plain.json", "plain.svg"]

    (told,), silent = first["unwritten"], second["unwritten"]
    assert "steps=(7, 9): none of them ran, so that no late.json was written; steps 0 to 1 did" in told and not silent

    (_, (seconds, bound)), nothing = first["offsets"], second["offsets"]
    assert abs(seconds - AHEAD) <= bound + 1e-6 and 0 < bound < 1.0 and nothing == []


def with_replicas(root: str) -> None:
    trace = PipelineTrace(1, "replicas.json")
    hostile.fit("dp2_pp2", Net, callbacks=[trace], max_epochs=1, default_root_dir=root)


def test_one_replica_is_traced(pool: RankPool, tmp_path: Path) -> None:
    pool.run(with_replicas, 4, str(tmp_path), mode="trainer")
    events = read_trace(tmp_path / "replicas.json")
    assert actions(events) == planned(build_schedule("1f1b", 2, 4))
    assert sorted(e.rank for e in events if e.kind == "reduce") == [0, 1]  # over the replicas


def with_shards(root: str) -> None:
    for schedule in ("interleaved_1f1b", "zbv"):
        trace = PipelineTrace(1, f"{schedule}.json")
        options = {"pipeline_schedule": schedule}
        hostile.fit("dp2_pp2_zero1", Net, callbacks=[trace], max_epochs=1, default_root_dir=root, options=options)


@pytest.mark.slow
def test_reductions_behind_a_chunk_are_traced(pool: RankPool, tmp_path: Path) -> None:
    pool.run(with_shards, 4, str(tmp_path), mode="trainer")
    events = read_trace(tmp_path / "interleaved_1f1b.json")
    assert actions(events) == planned(build_schedule("interleaved_1f1b", 2, 4))
    assert not any(e.kind == "reduce" for e in events)  # inside the last backwards
    events = read_trace(tmp_path / "zbv.json")
    assert actions(events) == planned(build_schedule("zbv", 2, 4))
    for rank in (0, 1):
        reductions = [e for e in events if (e.kind, e.rank) == ("reduce", rank)]
        assert len(reductions) == 2
        for reduction in reductions:
            before = [e for e in events if e.is_work and e.rank == rank and e.end <= reduction.start]
            # One of the two chunks is complete: all of its three kinds of action have run for all four microbatches.
            assert max(Counter(e.chunk for e in before).values()) == 12
