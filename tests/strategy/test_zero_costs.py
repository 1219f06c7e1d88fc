"""What ZeRO costs, counted and weighed on running ranks, is what the formulas say."""

from __future__ import annotations

import gc
from typing import Any

import hostile
import pytest
import torch
from hostile import Net
from lightning.pytorch import Callback, Trainer
from pool import RankPool
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_megapar.data_parallel.formulas import Collectives, collectives, state_bytes

MICROBATCHES = 4
SMALL = 400
"""Elements: what is logged travels in less, a shard of any unit here is more."""


class Wide(Net):
    """Parameters outweigh everything else by far; all of them are trained, and none stands outside of a unit."""

    width = 192

    def __init__(self) -> None:
        super().__init__()
        w = self.width
        self.inp, self.head = nn.Linear(8, w), nn.Linear(w, 5)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(w, w), nn.Tanh(), nn.Linear(w, w)) for _ in range(4)])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Tied(Wide):
    """Its input and output layers are one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(8, self.width, bias=False), nn.Linear(8, self.width, bias=False)
        self.head.weight = self.inp.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.inp(x)) @ self.head.weight[:, :5] + self.head(x).sum() * 0


class Counter(Callback):
    """FSDP2's collectives of every batch, by their sizes."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.batches: list[list[str]] = []
        self.mode: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        seen: list[str] = []
        shards, group = self.ranks, trainer.strategy.mesh.sharding_mesh()  # type: ignore[attr-defined]
        replicas = group.get_group(0).group_name if group.ndim == 2 else None

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                name = func._schema.name
                for kind, part in (("gathers", "c10d::_allgather_base"), ("reductions", "c10d::_reduce_scatter_base")):
                    if name.startswith(part):
                        sizes = sorted(t.numel() for t in args[:2])
                        is_state = sizes[0] > SMALL and args[0].is_floating_point()
                        if is_state and sizes[1] == shards * sizes[0]:
                            seen.append(kind)
                if name.startswith("c10d::allreduce_") and ProcessGroup.unbox(args[1]).group_name == replicas:
                    seen.append("sums")
                return func(*args, **(kwargs or {}))

        self.batches.append(seen)
        self.mode = Mode()
        self.mode.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.mode.__exit__(None, None, None)

    def window(self, start: int, stop: int) -> Collectives:
        seen = [kind for batch in self.batches[start:stop] for kind in batch]
        return Collectives(seen.count("gathers"), seen.count("reductions"), seen.count("sums"))


def count(layout: str, module: type[Net], accumulate: int, options: dict[str, Any]) -> tuple[int, int, Collectives]:
    """Units and tied units of this rank, and the collectives of the second window."""
    world = hostile.LAYOUTS[layout][0]
    replicas = int(options.get("data_parallel_replicas", 1))
    seen = Counter(hostile.data_size(layout) // replicas)
    trainer = hostile.trainer_for(
        layout, [seen], max_epochs=1, accumulate_grad_batches=accumulate, options={**options, "num_microbatches": 4}
    )
    batches = DataLoader(hostile.data(16 * accumulate * world), batch_size=8)
    trainer.fit(module().double(), batches)
    units = trainer.strategy.prepared.zero.units  # type: ignore[attr-defined]
    tied = sum(type(unit).__name__.endswith("Together") for unit in units)
    return len(units) - tied, tied, seen.window(accumulate, 2 * accumulate)


CASES: list[tuple[str, int, type[Net], int, dict[str, Any]]] = [
    *(("dp2", 2, Wide, 2, {"zero_stage": stage}) for stage in (1, 2, 3)),
    ("dp2", 2, Tied, 1, {"zero_stage": 3}),
    ("dp2_pp2", 4, Wide, 1, {"zero_stage": 2}),
    ("dp2_pp2", 4, Wide, 2, {"zero_stage": 3}),
    ("dp2_pp2", 4, Wide, 1, {"zero_stage": 2, "pipeline_schedule": "zb_h1"}),
    ("dp4", 4, Wide, 1, {"zero_stage": 1, "data_parallel_replicas": 2}),
    ("dp4", 4, Wide, 1, {"zero_stage": 3, "data_parallel_replicas": 2}),
]


@pytest.mark.parametrize(
    ("layout", "world", "module", "accumulate", "options"),
    [
        pytest.param(*case, marks=() if number in (0, 1, 2, 3, 5) else pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
)
def test_collectives(
    pool: RankPool, layout: str, world: int, module: type[Net], accumulate: int, options: dict[str, Any]
) -> None:
    for units, tied, seen in pool.run(count, world, layout, module, accumulate, options, mode="trainer"):
        assert units + tied == {"dp2_pp2": 3}.get(layout, 5 if module is Tied else 6)
        assert seen == collectives(
            options["zero_stage"],
            units=units,
            tied=tied,
            microbatches=MICROBATCHES,
            accumulate=accumulate,
            replicas=options.get("data_parallel_replicas", 1),
        )


def test_formulas() -> None:
    assert collectives(3, units=10, tied=1, microbatches=4, accumulate=3) == Collectives(2 * 12 * 10 + 3, 11 * 12)
    assert collectives(2, units=10, microbatches=4, replicas=2) == Collectives(10, 40, 40)
    for stage in (0, 4):
        with pytest.raises(ValueError, match=f"stage {stage} is none"):
            collectives(stage, units=1)
    # Rajbhandari et al., figure 1: 7.5 billion parameters, 64 ranks, mixed precision (there gradients have 2 bytes).
    mixed = [state_bytes(stage, 7.5e9, 64, compute_width=2) for stage in range(4)]
    assert [round(one.optimizer / 1e9, 2) for one in mixed] == [60.0, 0.94, 0.94, 0.94]
    assert [round(one.total / 1e9, 1) for one in mixed[1:]] == [46.4, 16.9, 1.9]
    with pytest.raises(ValueError, match="stage 5 is none of ZeRO's"):
        state_bytes(5, 1, 1)


def live_bytes() -> int:
    """Of all storages that a tensor refers to."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and type(thing) in (Tensor, nn.Parameter) and not thing.is_meta:
            # A gradient that no Python code has asked for is known to its parameter alone.
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if type(tensor) in (Tensor, nn.Parameter):
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


class Weigh(Callback):
    """Live bytes of the second step, between the last two microbatches' backwards."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        stepper: Any = trainer.strategy.stepper  # type: ignore[attr-defined]
        inner = stepper.runtime.run

        def run(schedule: Any, forward: Any, backward: Any = None, **kwargs: Any) -> None:
            before = kwargs.get("before_backward")
            if before is None:  # a rehearsal
                return inner(schedule, forward, backward, **kwargs)

            def weigh(microbatch: int) -> None:
                if microbatch == MICROBATCHES - 1:
                    self.bytes.append(live_bytes())
                before(microbatch)

            return inner(schedule, forward, backward, **{**kwargs, "before_backward": weigh})

        stepper.runtime.run = run


def weigh(layout: str, module: type[Wide], options: dict[str, Any]) -> tuple[int, int, int]:
    """Parameters of this rank (whole), those that are tied, and live bytes."""
    watch = Weigh()
    options = {**options, "num_microbatches": MICROBATCHES}
    trainer = hostile.trainer_for(layout, [watch], max_epochs=1, precision="32-true", options=options)
    torch.manual_seed(0)
    rows = MICROBATCHES * hostile.data_size(layout)
    trainer.fit(module(), DataLoader(hostile.data(2 * rows), batch_size=MICROBATCHES))
    prepared = trainer.strategy.prepared  # type: ignore[attr-defined]
    number = sum(record.parameter.numel() for record in prepared.parameters)
    tied = module.width * 8 if module is Tied else 0
    return number, tied, watch.bytes[1]


@pytest.mark.parametrize("module", [Wide, Tied])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes(pool: RankPool, stage: int, module: type[Wide]) -> None:
    """Activations and the data are a few per cent of what is weighed."""
    for number, tied, found in pool.run(weigh, 2, "dp2", module, {"zero_stage": stage}, mode="trainer"):
        expected = state_bytes(stage, number, 2, tied=tied)
        assert abs(found / expected.total - 1) < 0.05, (found, expected)


def test_bytes_of_replicas_and_stages(pool: RankPool) -> None:
    for number, _, found in pool.run(
        weigh, 4, "dp4", Wide, {"zero_stage": 3, "data_parallel_replicas": 2}, mode="trainer"
    ):
        assert abs(found / state_bytes(3, number, 2, replicas=2).total - 1) < 0.05
    block = 2 * (Wide.width + 1) * Wide.width
    weighed = pool.run(weigh, 4, "dp2_pp2", Wide, {"zero_stage": 2}, mode="trainer")
    for rank, (number, _, found) in enumerate(weighed):
        expected = state_bytes(2, number, 2, last_unit=block if rank >= 2 else 0)  # the first stage begins with `inp`
        assert abs(found / expected.total - 1) < 0.05, (rank, found, expected)
