"""Host memory in pieces, and the streams and events of copies on CUDA, with fake ones."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from lightning_megapar.config import ConfigError
from lightning_megapar.memory.copiers import CudaCopier, HostCopier, HostStore, copier_for
from lightning_megapar.memory.offload import OffloadSaved


def test_the_host_store_grows_and_uses_its_room_again() -> None:
    store = HostStore(4096)
    held = [store.allocate(1500) for _ in range(3)]  # 1536 each: two to a piece
    assert (store.held_bytes, store.reserved_bytes) == (3 * 1536, 2 * 4096)
    for number, buffer in enumerate(held):
        store.bytes_of(buffer).fill_(number)
    assert [int(store.bytes_of(buffer).sum()) for buffer in held] == [0, 1500, 3000]
    big = store.allocate(10_000)
    assert store.reserved_bytes == 2 * 4096 + 10_240 and store.bytes_of(big).numel() == 10_000
    for buffer in (*held, big):
        store.free(buffer)
    assert store.held_bytes == 0
    store.allocate(9_000)
    assert store.reserved_bytes == 2 * 4096 + 10_240


def test_devices() -> None:
    with pytest.raises(ConfigError, match="piece_bytes=3"):
        HostStore(3)
    assert isinstance(copier_for(torch.device("cpu")), HostCopier)
    with pytest.raises(ConfigError, match="a 'meta' device cannot"):
        copier_for(torch.device("meta"))


class FakeCuda:
    """Streams and events that tell what they are asked; copies end when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.is_done = False
        names = iter(("out", "back"))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(self, next(names)))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(self, "compute"))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(
            Tensor, "record_stream", lambda tensor, stream: self.log.append(f"memory is used by {stream.name}")
        )


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(f"{self.name} waits for a copy on {event.name}")

    def record_event(self) -> FakeEvent:
        self.cuda.log.append(f"copy on {self.name}")
        return FakeEvent(self.cuda, self.name)


class FakeEvent:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def query(self) -> bool:
        return self.cuda.is_done


def test_streams_and_events_of_the_cuda_copier(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    copier = CudaCopier(HostStore(1 << 20))
    offload = OffloadSaved(minimum_bytes=1024, copier=copier)
    x = torch.ones(1000, requires_grad=True)
    with offload.block(0):
        y = (x * 2).sin()
    stored = ["out waits for compute", "copy on out", "memory is used by out"]
    assert cuda.log == stored
    y.sum().backward()
    fetched = ["back waits for a copy on out", "copy on back", "compute waits for a copy on back"]
    assert cuda.log == [*stored, *fetched, "memory is used by compute"]
    assert x.grad is not None and torch.equal(x.grad, 2 * (x * 2).cos())
    assert copier.host.held_bytes == 4096  # the copy back may still be reading
    cuda.is_done = True
    with offload.block(0):
        y = (x * 2).sin()
    assert copier.host.held_bytes == 4096
    del y
    assert copier.host.held_bytes == 0
