"""Boxes of safetensors files, and of tensors put together from others, against plain indexing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("safetensors")

from lightning_megapar.checkpoint import CheckpointError
from lightning_megapar.checkpoint.hugging_face import weight_files
from lightning_megapar.checkpoint.hugging_face.assembly import Assembly, NotMovedInBoxes
from lightning_megapar.checkpoint.hugging_face.reading import Reading
from lightning_megapar.checkpoint.hugging_face.weight_files import DTYPES, WeightFiles, read_header
from lightning_megapar.checkpoint.pieces import Box

MANY = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stored(path: Path, tensors: dict[str, Tensor]) -> WeightFiles:
    from safetensors.torch import save_file

    save_file(tensors, path)
    return WeightFiles.open(path)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(offsets, tuple(draw(st.integers(1, size - start)) for start, size in zip(offsets, shape)))


@MANY
@given(data=st.data())
def test_any_box_into_any_memory(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=0, max_size=4), label="shape"))
    value = torch.randn(shape, dtype=torch.float64)
    files = stored(tmp_path_factory.mktemp("x") / "x.safetensors", {"before": torch.ones(3), "x": value})
    box = data.draw(boxes(shape), label="box")
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]), label="dtype")
    wide = torch.zeros([2 * n for n in box.sizes], dtype=dtype)
    out = data.draw(
        st.sampled_from([torch.zeros(box.sizes, dtype=dtype), wide[tuple(slice(0, None, 2) for _ in shape)]])
    )
    staging = data.draw(st.sampled_from([8, 64, 1 << 20]), label="staging")
    before, weight_files.STAGING_BYTES = weight_files.STAGING_BYTES, staging
    try:
        files.read_box("x", box, out)
    finally:
        weight_files.STAGING_BYTES = before
        files.close()
    assert torch.equal(out, value[box.slices()].to(dtype))


@pytest.mark.parametrize("name", list(DTYPES))
def test_every_dtype(tmp_path: Path, name: str) -> None:
    value = torch.arange(6).reshape(2, 3).to(DTYPES[name])
    files = stored(tmp_path / "x.safetensors", {"x": value})
    assert files.tensors["x"].dtype == value.dtype
    assert torch.equal(files.read("x").view(torch.uint8), value.view(torch.uint8))


@MANY
@given(data=st.data())
def test_assemblies_follow_tensors_through_operations(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same random operations on tensors and on names; then any box of a result, read from the file."""
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    sources = {f"x{i}": torch.randn(rows, columns) for i in range(4)}
    files = stored(tmp_path_factory.mktemp("x") / "x.safetensors", sources)
    real: list[Any] = list(sources.values())
    named: list[Any] = [Assembly.of(name, value.shape, value.dtype) for name, value in sources.items()]
    for _ in range(data.draw(st.integers(1, 5))):
        operation = data.draw(st.sampled_from(["stack", "cat", "chunk", "transpose", "split", "unbind", "squeeze"]))
        dim = data.draw(st.integers(0, real[0].dim() - 1)) if real[0].dim() else 0
        if operation == "stack" and real[0].dim() < 4:
            real, named = [torch.stack(real, dim=dim)], [torch.stack(named, dim=dim)]
        elif operation == "cat":
            real, named = [torch.cat(real, dim=dim)], [torch.cat(named, dim=dim)]
        elif operation == "chunk":
            pieces = data.draw(st.integers(1, 3))
            real, named = list(torch.chunk(real[0], pieces, dim=dim)), list(torch.chunk(named[0], pieces, dim=dim))
            if len({value.shape for value in real}) > 1:
                real, named = real[:1], named[:1]
        elif operation == "split":
            first = data.draw(st.integers(0, real[0].shape[dim]))
            sizes = [first, real[0].shape[dim] - first]
            keep = 0 if first else 1
            real = [torch.split(real[0], sizes, dim=dim)[keep]]
            named = [torch.split(named[0], sizes, dim=dim)[keep]]
        elif operation == "transpose" and real[0].dim() > 1:
            other = data.draw(st.integers(0, real[0].dim() - 1))
            real = [torch.transpose(value, dim0=dim, dim1=other) for value in real]
            named = [torch.transpose(value, dim0=dim, dim1=other).contiguous() for value in named]
        elif operation == "unbind" and real[0].dim() > 1:
            real, named = list(torch.unbind(real[0], dim=dim)), list(torch.unbind(named[0], dim=dim))
        elif operation == "squeeze" and real[0].dim() > 1:
            real, named = [v.squeeze(dim) for v in real], [v.squeeze(dim) for v in named]
    for value, assembly in zip(real, named):
        assert assembly.shape == tuple(value.shape) == tuple(assembly.size()) and assembly.numel() == value.numel()
        box = data.draw(boxes(tuple(value.shape)))
        out = torch.full(box.sizes, float("nan"))
        reading = Reading(files, {}, [], [], frozenset(), None)
        for part, common in assembly.overlaps(box):
            reading._copy(part, common, out[common.slices(box.offsets)])
        assert torch.equal(out, value[box.slices()])
    files.close()


def test_operations_that_compute_say_so() -> None:
    x = Assembly.of("x", (4, 2), torch.float32)
    for operation in (
        lambda: x.reshape(8),
        lambda: torch.add(x, x),
        lambda: x.flatten(),
        lambda: x[0],
        lambda: x.view(8),
    ):  # type: ignore[arg-type]
        with pytest.raises(NotMovedInBoxes):
            operation()
    with pytest.raises(ValueError, match="cannot stack"):
        torch.stack([x, Assembly.of("y", (2, 4), torch.float32)])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty, so it is no safetensors file"),
        (b"\x00" * 4, "it is truncated"),
        (b"\xff" * 20, "it is truncated"),
        (b"\x04" + b"\x00" * 7 + b"xxxx", "its safetensors header is not JSON"),
        (b"\x02" + b"\x00" * 7 + b"[]", "its safetensors header has another form"),
        (b"PK\x03\x04" + b"\x00" * 30, "it is truncated"),
    ],
)
def test_files_of_other_kinds(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        read_header(tmp_path / "x.safetensors")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}, "cannot have 12 bytes"),
        ({"dtype": "F32", "shape": [40], "data_offsets": [0, 160]}, "is truncated: it has"),
        ({"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}, "has the dtype F4, which is not supported"),
        ({"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}, "is damaged"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}, "is damaged"),
        ({"dtype": "F32", "shape": [4]}, "another form"),
        ({"dtype": "F32", "shape": ["4"], "data_offsets": [0, 16]}, "another form"),
    ],
)
def test_headers_that_lie(tmp_path: Path, entry: dict[str, Any], said: str) -> None:
    import json

    header = json.dumps({"x": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError) as refused:
        read_header(tmp_path / "x.safetensors")
    assert said in str(refused.value)
