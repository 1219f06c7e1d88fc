"""Ranks for tests: processes forked from one server that has imported everything, a fresh set for each task.

``pool.run(function, world_size, *args, mode="group"|"trainer")`` calls ``function(*args)`` on ranks ``0..world_size-1``
and returns their results in rank order. ``function`` must be importable (module level); results must be picklable.

* ``mode="group"``: the default process group (gloo, FileStore) is up during the call, and destroyed after it.
* ``mode="trainer"``: the environment looks as torchrun leaves it (RANK, WORLD_SIZE, MASTER_PORT, ...), so that a
  ``Trainer(strategy="megapar", devices=world_size)`` makes its own group.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = 180.0


class RankError(AssertionError):
    """A rank of the pool raised; the message holds each failing rank's traceback."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _serve(connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    task = connection.recv()
    if task is None:
        return
    function, args, kwargs, rank, world, mode, token, port = task
    try:
        if mode == "group" and world > 1:
            store = dist.FileStore(os.path.join(tempfile.gettempdir(), f"megapar-test-{token}"), world)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=30)
            )
        elif mode == "trainer":
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world),
                LOCAL_WORLD_SIZE=str(world),
                GROUP_RANK="0",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                TORCHELASTIC_RUN_ID=token,
                TORCHELASTIC_RESTART_COUNT="0",
            )
        result = ("ok", function(*args, **kwargs))
    except BaseException:
        result = ("error", traceback.format_exc())
    try:
        connection.send(result)
    except Exception:
        result = ("error", traceback.format_exc())
        connection.send(result)
    if result[0] == "ok":
        # Peers may still need this rank's sockets and store. After an error they wait for this rank, and only its end
        # tells them.
        try:
            connection.recv()
        except EOFError:
            pass
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


class RankPool:
    """Rank processes, one task each: gloo's threads outlive their groups and spin, so that old ranks grow slow.

    Args:
        compare_collectives: ranks compare kind and shapes before each collective, at the price of a third of their
            time: two that do not fit are said at once instead of running out of time.
    """

    def __init__(self, compare_collectives: bool = False) -> None:
        if compare_collectives:  # read when torch is imported, which the server does once for all ranks
            os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
        # Forked from a process that has imported everything and computed nothing: a rank costs milliseconds.
        self._context = mp.get_context("forkserver")
        # What is not installed is left out.
        models = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "mixtral")]
        self._context.set_forkserver_preload(
            ["lightning.pytorch", "torch.distributed.fsdp", "lightning_megapar", *models]
        )
        self._workers: list[tuple[Any, Connection]] = []

    def _ensure(self, count: int) -> None:
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        mode: str = "group",
        timeout: float = TIMEOUT,
        **kwargs: Any,
    ) -> list[Any]:
        self._ensure(world_size)
        token, port = uuid.uuid4().hex, free_port()
        workers = self._workers[:world_size]
        for rank, (_, connection) in enumerate(workers):
            connection.send((function, args, kwargs, rank, world_size, mode, token, port))
        pending = {connection: rank for rank, (_, connection) in enumerate(workers)}
        results: list[Any] = [None] * world_size
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                stuck = sorted(pending.values())
                self.close(kill=True)
                raise RankError(f"ranks {stuck} did not answer within {timeout} s\n" + _report(errors))
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    status, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    status, value = "error", "the process died"
                if status == "ok":
                    results[rank] = value
                else:
                    errors[rank] = value
                    # A rank that failed alone leaves its peers waiting: give them a moment, then give up on them.
                    deadline = min(deadline, time.monotonic() + 40)
        self.close()
        if errors:
            raise RankError(_report(errors))
        return results

    def close(self, kill: bool = False) -> None:
        for process, connection in self._workers:
            if kill:
                process.kill()
            else:
                try:
                    connection.send(None)
                except OSError:
                    pass
        for process, _ in self._workers:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []


def _report(errors: dict[int, str]) -> str:
    return "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items()))
