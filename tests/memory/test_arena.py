"""Tensors from an arena: storages of their own, given back when they die, in planned places."""

from __future__ import annotations

import gc
import hashlib
import random
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megapar.config import ConfigError
from lightning_megapar.memory import ArenaStats, PoolArena, TensorArena, make_arena

KIB = 1 << 10


def allocated(arena: TensorArena) -> int:
    return arena.stats().allocated_bytes


@pytest.mark.parametrize("capacity", [None, 64 * KIB])
def test_tensors_are_as_torch_makes_them(capacity: int | None) -> None:
    arena = TensorArena(capacity)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        for shape in ((), (5,), (3, 4), (2, 0, 3), (1, 2, 3, 4)):
            made, usual = arena.empty(shape, dtype), torch.empty(shape, dtype=dtype)
            assert (made.shape, made.stride(), made.dtype) == (usual.shape, usual.stride(), usual.dtype)
            assert made.untyped_storage().nbytes() == usual.untyped_storage().nbytes()
            assert not made._is_view() and made.is_leaf and not made.requires_grad
            assert not made.numel() or made.data_ptr() % 64 == 0
    assert torch.equal(arena.zeros((3, 3), torch.int32), torch.zeros(3, 3, dtype=torch.int32))
    assert arena.empty((2,)).dtype == torch.get_default_dtype()
    del made
    assert allocated(arena) == 0


@pytest.mark.parametrize(
    "like",
    [
        torch.rand(4, 6),
        torch.rand(4, 6).t(),
        torch.rand(2, 3, 4).permute(2, 0, 1),
        torch.rand(4, 6)[:, ::2],
        torch.rand(1, 3).expand(4, 3),
        torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.rand(3, requires_grad=True),
        torch.nn.Parameter(torch.rand(3, 2)),
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
    ],
)
def test_like(like: Tensor) -> None:
    made, usual = TensorArena(64 * KIB).empty_like(like), torch.empty_like(like)
    assert (made.shape, made.dtype, made.layout, made.device) == (usual.shape, usual.dtype, usual.layout, usual.device)
    assert not made.requires_grad
    if made.layout == torch.strided:
        assert made.stride() == usual.stride()


def test_versions_are_their_own() -> None:
    arena = TensorArena(64 * KIB)
    one, other = arena.zeros((8,)), arena.zeros((8,))
    before = other._version
    one.add_(1)
    assert other._version == before and one.data_ptr() != other.data_ptr()
    assert torch.equal(other, torch.zeros(8))


def test_what_holds_a_storage_keeps_its_place() -> None:
    arena = TensorArena(64 * KIB)
    tensor = arena.zeros((4, 4))
    view = tensor[1:]
    del tensor
    assert allocated(arena) == 64
    del view
    assert allocated(arena) == 0

    weight = torch.ones(4, requires_grad=True)
    tensor = arena.zeros((4,))
    product = (weight * tensor).sum()
    del tensor
    assert allocated(arena) == 16  # the graph needs it
    product.backward()
    assert allocated(arena) == 0
    assert arena.stats().peak_bytes == 64


def test_given_back_by_the_collector_and_in_other_threads() -> None:
    arena = TensorArena(64 * KIB)
    ring: list[Any] = [arena.empty((100,))]
    ring.append(ring)
    del ring
    gc.collect()
    assert allocated(arena) == 0

    held = [arena.empty((100,))]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert allocated(arena) == 0


def test_threads_at_once() -> None:
    arena = TensorArena(32 * KIB)
    wrong: list[int] = []

    def work(number: int) -> None:
        draw, held = random.Random(number), []
        for _ in range(400):
            held.append(arena.empty((draw.randrange(1, 200),)).fill_(number))
            if len(held) > 8:
                gone = held.pop(draw.randrange(len(held)))
                wrong.extend(x for x in gone.tolist() if x != number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and allocated(arena) == 0


def test_a_full_arena_falls_back_to_torch() -> None:
    arena = TensorArena(4 * KIB)
    held = [arena.empty((KIB,), torch.uint8) for _ in range(6)]
    stats = arena.stats()
    assert (stats.capacity, stats.allocated_bytes) == (4 * KIB, 6 * KIB)
    assert (stats.overflow_bytes, stats.overflow_buffers) == (2 * KIB, 2)
    del held
    assert allocated(arena) == 0
    again = arena.empty((4 * KIB,), torch.uint8)
    assert arena.stats().overflow_buffers == 2 and again.numel() == 4 * KIB


def test_tensors_may_outlive_their_arena() -> None:
    arena = TensorArena(4 * KIB)
    tensor = arena.zeros((8,))
    del arena
    gc.collect()
    assert torch.equal(tensor + 1, torch.ones(8))


def step(arena: TensorArena, sizes: list[int]) -> list[int]:
    """Four buffers at most are alive; where each of them lay."""
    arena.begin_step()
    held: list[Tensor] = []
    places = []
    for number, size in enumerate(sizes):
        held = [*held[-2:], arena.empty((size,), torch.uint8).fill_(number % 200)]
        places.append(held[-1].data_ptr())
    assert all(int(tensor.max()) == int(tensor.min()) for tensor in held)
    held.clear()
    arena.end_step()
    return places


def test_learns_from_its_first_step() -> None:
    arena = TensorArena()
    sizes = [KIB * (1 + number % 7) for number in range(40)]
    arena.begin_step()
    arena.end_step()  # one without buffers teaches nothing
    step(arena, sizes)
    assert arena.stats().capacity == arena.stats().overflow_bytes == 0
    places = step(arena, sizes)
    stats = arena.stats()
    assert 22 * KIB <= stats.capacity == stats.planned_bytes <= 1.1 * 22 * KIB  # 4 + 5 + 6 + 7
    assert step(arena, sizes) == places == step(arena, sizes)
    assert arena.stats().overflow_bytes == 0 and allocated(arena) == 0


def test_learns_again_from_larger_steps_and_never_shrinks() -> None:
    arena = TensorArena()
    small, large = [KIB] * 10, [3 * KIB] * 10
    step(arena, small)
    step(arena, small)
    assert arena.stats().capacity == 4 * KIB
    step(arena, large)
    over = arena.stats().overflow_buffers
    assert over > 0
    for sizes in (large, small, large, small[:3], large):
        step(arena, sizes)
    stats = arena.stats()
    assert (stats.capacity, stats.overflow_buffers, stats.allocated_bytes) == (12 * KIB, over, 0)


def test_waits_until_its_memory_is_free() -> None:
    arena = TensorArena()
    step(arena, [KIB] * 5)
    arena.begin_step()
    kept = arena.empty((KIB,), torch.uint8)
    arena.end_step()
    step(arena, [2 * KIB] * 5)
    step(arena, [2 * KIB] * 5)
    assert arena.stats().capacity == 4 * KIB
    del kept
    step(arena, [2 * KIB] * 5)
    assert arena.stats().capacity == 8 * KIB


def test_steps_of_random_shapes() -> None:
    draw = random.Random(5)
    arena = TensorArena()
    for _ in range(30):
        step(arena, [draw.randrange(1, 5000) for _ in range(draw.randrange(1, 60))])
    last = arena.stats().overflow_buffers
    assert arena.stats().capacity <= 40_000
    step(arena, [100] * 20)
    assert arena.stats().overflow_buffers == last


def checksum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def test_defragmenting_preserves_every_byte() -> None:
    draw = random.Random(1)
    arena = TensorArena(256 * KIB)
    held = [arena.empty((draw.randrange(1, 400),), torch.int64).random_() for _ in range(120)]
    held += [arena.empty((6, 8), strides=(1, 6)).normal_() for _ in range(4)]
    draw.shuffle(held)
    del held[60:]
    view, part = held[0][1:], held[1].detach()
    for number, tensor in enumerate(held):
        if number % 4:
            arena.movable(tensor)
    before = arena.stats()
    sums, versions = [checksum(t) for t in held], [t._version for t in held]
    places = [t.data_ptr() for t in held]
    assert before.fragmentation > 0
    assert arena.defragment() > 0
    after = arena.stats()
    assert [checksum(t) for t in held] == sums and [t._version for t in held] == versions
    assert after.fragmentation < before.fragmentation and after.allocated_bytes == before.allocated_bytes
    assert all(t.data_ptr() == place for number, (t, place) in enumerate(zip(held, places)) if number % 4 == 0)
    # A tensor that shares its storage stays.
    assert held[1].data_ptr() == places[1] == part.data_ptr() and torch.equal(view, held[0][1:])
    assert any(t.data_ptr() != place for t, place in zip(held, places))
    # The places that were left can be used, and those that were taken are given back.
    more = [arena.empty((100,), torch.uint8).fill_(255) for _ in range(100)]
    assert [checksum(t) for t in held] == sums
    del held[:], more, view, part, tensor
    assert allocated(arena) == 0
    assert arena.stats().fragmentation == 0


def test_a_tensor_that_autograd_holds_may_move() -> None:
    arena = TensorArena(64 * KIB)
    first, second = arena.zeros((64,)), arena.zeros((64,)).fill_(3)
    weight = torch.ones(64, requires_grad=True)
    loss = (weight * second).sum()
    arena.movable(second)
    del first
    assert arena.defragment() > 0
    loss.backward()
    assert torch.equal(weight.grad, torch.full((64,), 3.0))


def test_defragmenting_behind_a_layout() -> None:
    arena = TensorArena()
    assert arena.defragment() == 0
    step(arena, [KIB] * 3)
    step(arena, [2 * KIB] * 9)  # does not fit
    arena.begin_step()
    tensors = [arena.zeros((KIB,), torch.uint8) for _ in range(3)]
    arena.movable(tensors[2])
    arena.movable(torch.zeros(3))
    arena.defragment()
    assert all(torch.equal(t, torch.zeros(KIB, dtype=torch.uint8)) for t in tensors)


def test_values_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="alignment=24"):
        TensorArena(KIB, alignment=24)
    with pytest.raises(ConfigError, match="capacity=3"):
        TensorArena(3)


class FakeTorch:
    """What a pool needs of torch, on a CPU."""

    def __init__(self, settings: str = "", knows_settings: bool = True) -> None:
        self.inside, self.set = 0, []
        pool = SimpleNamespace(snapshot=lambda: self.segments)
        self.segments: list[dict[str, Any]] = []
        self.cuda = SimpleNamespace(MemPool=lambda: pool, use_mem_pool=self.use)
        self._C = SimpleNamespace()
        if knows_settings:
            self._C = SimpleNamespace(
                _accelerator_getAllocatorSettings=lambda: settings, _accelerator_setAllocatorSettings=self.set.append
            )

    @contextmanager
    def use(self, pool: Any, device: torch.device) -> Any:
        assert device == torch.device("cuda", 1)
        self.inside += 1
        yield
        self.inside -= 1

    def empty(self, shape: tuple[int, ...], dtype: Any, device: torch.device) -> Tensor:
        assert self.inside == 1 and device == torch.device("cuda", 1)
        return torch.empty(shape, dtype=dtype)

    def empty_strided(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, device: Any) -> Tensor:
        assert self.inside == 1
        return torch.empty_strided(shape, strides, dtype=dtype)


def test_a_pool_of_a_gpu() -> None:
    fake = FakeTorch()
    arena = PoolArena(torch.device("cuda", 1), api=fake)
    assert fake.set == ["expandable_segments:True"]
    arena.begin_step()
    assert arena.empty((2, 3), torch.int32).shape == (2, 3)
    assert arena.empty((2, 3), strides=(1, 2)).stride() == (1, 2)
    assert torch.equal(arena.zeros((2,)), torch.zeros(2)) and fake.inside == 0
    assert arena.stats() == ArenaStats(0, 0, 0, 0.0, 0, 0, 0)
    free = [{"size": 300, "state": "inactive"}, {"size": 100, "state": "inactive"}, {"size": 9, "state": "active"}]
    fake.segments = [{"total_size": 409, "allocated_size": 9, "blocks": free}]
    arena.end_step()
    fake.segments = []
    assert arena.stats() == ArenaStats(0, 0, 9, 0.0, 0, 0, 0)
    assert arena.defragment() == 0


def test_settings_of_torch_are_kept() -> None:
    device = torch.device("cuda", 1)
    for settings, said in (
        ("max_split_size_mb:64", ["max_split_size_mb:64,expandable_segments:True"]),
        ("expandable_segments:False", []),
    ):
        fake = FakeTorch(settings)
        PoolArena(device, api=fake)
        assert fake.set == said
    fake = FakeTorch()
    PoolArena(device, expandable_segments=False, api=fake)
    PoolArena(device, api=FakeTorch(knows_settings=False))
    assert fake.set == []


def test_the_arena_of_a_device() -> None:
    arena = make_arena(torch.device("cpu"), 4 * KIB)
    assert isinstance(arena, TensorArena) and arena.stats().capacity == 4 * KIB
    assert make_arena(torch.device("meta")) is None
