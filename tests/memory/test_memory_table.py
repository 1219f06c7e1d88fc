"""The table of a memory report, and its way through a file."""

from __future__ import annotations

import io
import json

from rich.console import Console

from lightning_megapar.memory.arena import ArenaStats
from lightning_megapar.memory.report import DeviceBytes, RankMemory, device_bytes, mib, pair, shown_ranks, table
from lightning_megapar.memory.timeline import Timeline

MIB = 2**20
LINE = Timeline((0.0, 0.5), ((1, 2, 3, 4, 5, 6),) * 2, {"a": 4}, (("forward", 0.0, 1.0),), {"gradients": 1}, {}, 0.5, 1)


def rank(number: int, stage: int = 0, peak: int = 10, **options: object) -> RankMemory:
    return RankMemory(
        rank=number,
        place=f"pipeline {stage}",
        stage=stage,
        step=7,
        measured={"parameters": 2 * MIB, "activations": 5 * MIB},
        measured_peak=peak * MIB,
        **options,  # type: ignore[arg-type]
    )


def rows(ranks: list[RankMemory]) -> dict[str, list[str]]:
    out = io.StringIO()
    Console(file=out, width=200).print(table(ranks))
    assert "memory of training step 7" in out.getvalue()
    found = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines()]
    return {cells[0]: cells[1:] for cells in found if cells}


def test_cells() -> None:
    assert pair(3 * MIB, None) == "3.00 / ?" and pair(None, MIB // 2) == "? / 0.50" and pair(None, None) == ""
    assert mib(1234 * MIB) == "1,234" and mib(int(12.34 * MIB)) == "12.3" and mib(None) == ""


def test_a_row_for_what_is_known() -> None:
    arena = ArenaStats(9 * MIB, 0, 8 * MIB, 0.0, 0, 0, 0)
    device = DeviceBytes(100 * MIB, 40 * MIB, 20 * MIB, 30 * MIB, 6 * MIB)
    first = rank(
        0,
        predicted={"parameters": 2 * MIB},
        predicted_peak=11 * MIB,
        layers={"blocks.0": 4 * MIB, "": MIB},
        predicted_layers={"blocks.0": 3 * MIB},
        microbatches=(2, 1),
        device=device,
        arena=arena,
    )
    found = rows([first, rank(1, 1)])
    assert found["parameters"] == ["2.00 / 2.00", "2.00 / ?"]
    assert found["blocks.0"] == ["4.00 / 3.00", ""] and found["outside of blocks"] == ["1.00 / ?", ""]
    assert found["all together, at the peak"] == ["10.0 / 11.0", "10.0 / ?"]
    assert found["microbatches in flight"] == ["2 + 1", "1"]
    assert found["arena, in use at most"] == ["8.00", ""] and found["arena, capacity"] == ["9.00", ""]
    assert found["allocator, reserved"] == ["30.0", ""] and found["allocator, fragmented"] == ["6.00", ""]
    assert found["device, in all"] == ["100", ""] and "process, resident" not in found


def test_many_layers_and_many_ranks_come_together() -> None:
    layers = {f"blocks.{number}": MIB for number in range(40)}
    assert rows([rank(0, layers=layers)])["in 40 blocks"] == ["40.0 / ?"]
    ranks = [rank(number, number // 8, peak=number % 8 + 1) for number in range(16)]
    assert [one.rank for one in shown_ranks(ranks)] == [7, 15]
    assert [one.rank for one in shown_ranks(ranks[:8])] == list(range(8))


def test_a_report_comes_back_from_a_file() -> None:
    given = rank(3, device=DeviceBytes(1, 2), arena=ArenaStats(1, 2, 3, 0.5, 4, 5, 6), timeline=LINE)
    assert RankMemory.from_json(json.loads(json.dumps(given.to_json()))) == given
    assert RankMemory.from_json(json.loads(json.dumps(rank(0).to_json()))) == rank(0)


def test_what_the_machine_says() -> None:
    import torch

    found = device_bytes(torch.device("cpu"))
    assert found.reserved is None
    assert found.total is None or ((found.free or 0) < found.total and (found.resident or 0) > MIB)
