"""What a rank really keeps while it runs a schedule, byte by byte, against what the simulator says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_megapar.config import SCHEDULES, Layout
from lightning_megapar.layers.deferral import Deferral
from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.pipeline import StageCosts, build_schedule, simulate
from lightning_megapar.pipeline.engine.exchange import LocalBoundaries
from lightning_megapar.pipeline.engine.runtime import PipelineRuntime
from lightning_megapar.pipeline.schedules import Schedule, forward_schedule, v_placement

ROWS, WIDTH = 4, 32
UNIT = ROWS * WIDTH * 4
"""Bytes of a tensor between the layers of a chunk."""
MICROBATCHES = 6


class Live:
    """Memory of tensors that somebody still holds; each storage counts once, however many tensors share it."""

    def __init__(self, without: list[Tensor]) -> None:
        self._without = {tensor.untyped_storage()._cdata for tensor in without}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.most = 0

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._without:
            self._seen[storage._cdata] = StorageWeakRef(storage), tensor.numel() * tensor.element_size()

    def sample(self) -> None:
        self._seen = {key: entry for key, entry in self._seen.items() if not entry[0].expired()}
        self.peak = max(self.peak, self.bytes)
        self.most = max(self.most, len(self._seen))

    @property
    def bytes(self) -> int:
        return sum(size for ref, size in self._seen.values() if not ref.expired())


class After(list[Any]):
    """Calls a function when an action is appended to a runtime's spans: when it has run."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__()
        self.function = function

    def append(self, _: Any) -> None:
        self.function()


class Watched(Deferral):
    """Shows the tensors that gradients which wait hold on to."""

    def __init__(self) -> None:
        super().__init__()
        self.live: Live

    def takes(self, parameter: Any, gradient: Callable[[], Tensor]) -> bool:
        taken = super().takes(parameter, gradient)
        for cell in (gradient.__closure__ or ()) if taken else ():
            if isinstance(cell.cell_contents, Tensor):
                self.live.add(cell.cell_contents)
        return taken


class Chunk(nn.Module):
    """Saves ``len(waves) + 1`` tensors of one size: the inputs of sines, and of a linear layer, neither of them the
    chunk's own input or output."""

    def __init__(self, waves: int, linears: int) -> None:
        super().__init__()
        self.waves = waves
        self.linears = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(linears)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for _ in range(self.waves):
            x = torch.sin(x)
        y: Tensor = self.linears(x)
        return y


CHUNKS = {"half waits": (3, 1), "as much waits": (1, 1), "more waits": (0, 2)}
"""Waves and linear layers: they save one tensor each, and two per linear layer wait (its input, its output's gradient):
2 of 4, 2 of 2 and 4 of 2."""


def peaks_of(rank: int, runtime: PipelineRuntime, schedule: Schedule, waves: int, linears: int) -> dict[str, int]:
    """Peaks of the second of two steps of this rank."""
    own = schedule.placement[rank]
    deferral = Watched()
    chunks = nn.ModuleList([Chunk(waves, linears) for _ in own])
    deferral.connect(chunks)
    x, target = torch.ones(ROWS, WIDTH, requires_grad=True), torch.rand(ROWS, WIDTH)
    constant = [x, target, *chunks.parameters()]
    last = schedule.num_virtual_stages - 1
    saved, boundaries = Live(constant), Live(constant)
    handed_on = LocalBoundaries.send

    def send(self: LocalBoundaries, nest: Any, microbatch: int) -> list[Tensor]:
        tensors = handed_on(self, nest, microbatch)
        boundaries.add(self._waiting[microbatch][0])
        boundaries.sample()
        return tensors

    def forward(chunk: int, microbatch: int, received: Any) -> tuple[bool, Any]:
        if received is not None:
            boundaries.add(received)
            boundaries.sample()
        output = chunks[chunk](x if received is None else received)
        if own[chunk] == last:
            return True, (output * target).sum()
        if schedule.is_training:  # else it is not kept, and what is received only while this runs
            boundaries.add(output)
        return False, output

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor)
        saved.sample()
        return tensor

    def after() -> None:
        saved.sample()
        boundaries.sample()

    LocalBoundaries.send = send  # type: ignore[method-assign]
    try:
        for _ in range(2):
            saved, boundaries = Live(constant), Live(constant)
            deferral.live = saved
            runtime.spans = After(after)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                runtime.run(schedule, forward, lambda _, loss: loss.backward(), postponed=deferral)
    finally:
        LocalBoundaries.send = handed_on  # type: ignore[method-assign]
    return {
        "saved": saved.peak,
        "saved after": saved.bytes,
        "boundaries": boundaries.most,
        "boundary bytes": boundaries.peak,
        "boundaries after": boundaries.bytes,
    }


def schedule_of(name: str, stages: int) -> Schedule:
    if name == "forward":
        return forward_schedule(v_placement(stages), MICROBATCHES)
    return build_schedule(name, stages, MICROBATCHES)


Figures = dict[tuple[str, str], dict[str, int]]
"""Of a rank: by schedule and kind of chunk."""


def all_peaks() -> Figures:
    rank, stages = dist.get_rank(), dist.get_world_size()
    runtimes: dict[Any, PipelineRuntime] = {}
    found = {}
    for name in (*SCHEDULES, "forward"):
        schedule = schedule_of(name, stages)
        if schedule.placement not in runtimes:
            mesh = ParallelMesh(Layout(pipeline=stages), rank, placement=schedule.placement)
            runtimes[schedule.placement] = PipelineRuntime(mesh, torch.device("cpu"))
        for kind, layers in CHUNKS.items():
            found[name, kind] = peaks_of(rank, runtimes[schedule.placement], schedule, *layers)
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def measured(pool: RankPool, request: pytest.FixtureRequest) -> Iterator[list[Figures]]:
    yield pool.run(all_peaks, request.param)


@pytest.mark.parametrize("name", SCHEDULES)
def test_activations(measured: list[Figures], name: str) -> None:
    schedule = schedule_of(name, len(measured))
    for kind, (waves, linears) in CHUNKS.items():
        size, share = (waves + linears) * UNIT, 2 * linears / (waves + linears)
        costs = StageCosts(activation=size * schedule.num_chunks, kept_for_weight=share)
        peaks = tuple(rank[name, kind]["saved"] for rank in measured)
        assert peaks == simulate(schedule, costs).peak_memory, kind
        if share == 1 or not schedule.splits_backward:
            assert peaks == tuple(pairs * size for pairs in simulate(schedule).peak_activations), kind
        assert [rank[name, kind]["saved after"] for rank in measured] == [0] * len(measured)


@pytest.mark.parametrize("name", (*SCHEDULES, "forward"))
def test_boundaries(measured: list[Figures], name: str) -> None:
    peaks = simulate(schedule_of(name, len(measured))).peak_boundaries
    for kind in CHUNKS:
        assert tuple(rank[name, kind]["boundaries"] for rank in measured) == peaks, kind
        assert tuple(rank[name, kind]["boundary bytes"] for rank in measured) == tuple(UNIT * n for n in peaks), kind
        assert [rank[name, kind]["boundaries after"] for rank in measured] == [0] * len(measured)
