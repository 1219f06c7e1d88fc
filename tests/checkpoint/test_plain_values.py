"""What is no tensor: converted to plain values, or refused by the name of its key."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from lightning_megapar.checkpoint import (
    CheckpointError,
    load_sharded,
    save_sharded,
)
from lightning_megapar.checkpoint.plain_values import encode_plain, plain


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Config:
    width: int
    where: Path


Point = namedtuple("Point", "x y")


def test_plain_values_come_back(tmp_path: Path) -> None:
    given = {
        "hyper_parameters": {
            "model": Config(4, Path("/data")),
            "colour": Colour.RED,
            "conf": OmegaConf.create({"a": [1]}),
        },
        "counts": defaultdict(int, a=1),
        "point": Point(1, 2.5),
        "frozen": frozenset([1]),
        "numpy": {"scalar": numpy.float64(2.5), "flag": numpy.bool_(True), "array": numpy.arange(3)},
        "ordered": OrderedDict(b=1, a=2),
        "keys": {(0, 1): None, 5: b"bytes", True: 2**70},
        "best": nn.Parameter(torch.tensor(0.5)),
        "dtype": torch.bfloat16,
    }
    save_sharded(tmp_path / "a.ckpt", {}, given, step=0)
    back = load_sharded(tmp_path / "a.ckpt", {})
    assert back["hyper_parameters"] == {"model": {"width": 4, "where": "/data"}, "colour": "red", "conf": {"a": [1]}}
    assert (back["counts"], back["point"], back["frozen"]) == ({"a": 1}, (1, 2.5), {1})
    assert type(back["counts"]) is dict and type(back["point"]) is tuple
    assert back["numpy"]["scalar"] == 2.5 and back["numpy"]["flag"] is True
    assert torch.equal(back["numpy"]["array"], torch.arange(3))
    assert list(back["ordered"]) == ["b", "a"] and back["keys"] == given["keys"]
    assert type(back["best"]) is Tensor and back["dtype"] is torch.bfloat16
    torch.load(tmp_path / "a.ckpt" / "rest.pt", weights_only=True)


def test_the_class_of_omegaconf_hyper_parameters_is_kept_by_name(tmp_path: Path) -> None:
    conf = OmegaConf.create({"width": 3})
    save_sharded(tmp_path / "a.ckpt", {}, {"hyper_parameters": conf, "hparams_type": type(conf)}, step=0)
    back = load_sharded(tmp_path / "a.ckpt", {})
    assert back == {"hyper_parameters": {"width": 3}, "hparams_type": "omegaconf.dictconfig.DictConfig"}


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Custom(), r"rest\['callbacks'\]\['mine'\]\[1\] is of type .*Custom"),
        (lambda: 0, "is of type builtins.function"),
        (Custom, "is of type builtins.type"),
        (torch.empty(1, device="meta"), "meta device"),
        (numpy.array([object()]), "numpy.ndarray"),
    ],
)
def test_other_values_are_refused_by_name(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encode_plain({"callbacks": {"mine": [0, value]}}, "rest")
    with pytest.raises(CheckpointError, match="mine"):
        save_sharded(tmp_path / "a.ckpt", {}, {"callbacks": {"mine": [0, value]}}, step=0)
    assert os.listdir(tmp_path) == []


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="does it contain itself"):
        plain(loop, "rest")
