"""Lossy codecs of activations: 8 or 4 bits an element, and the largest magnitude of each row.

What is stored of a row is its largest magnitude ``top``, in the tensor's own dtype, and each element's part of it. Zero
and ``+-top`` therefore come back exactly: a dropout mask of zeros and one value loses nothing. A row with a value that
is not finite comes back with values that are not finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megapar.config import ConfigError, nearest_name


@dataclass(frozen=True)
class Encoded:
    """Rows in fewer bytes.

    Args:
        codes: int8, fp8 or uint8.
        tops: (rows, 1), the largest magnitude of each row.
        shape: (rows, row length).
    """

    codes: Tensor
    tops: Tensor
    shape: tuple[int, int]

    @property
    def bytes(self) -> int:
        return self.codes.nbytes + self.tops.nbytes


class Codec(Protocol):
    """A lossy way of storing a matrix."""

    bits: int
    """Per element, without the rows' magnitudes."""

    def encode(self, rows: Tensor) -> Encoded:
        """(rows, row length), floating -> codes."""

    def decode(self, encoded: Encoded) -> Tensor:
        """Codes -> (rows, row length), in the dtype of ``tops``."""


def _relative(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Elements over the largest magnitude of their row, in 32 bits at least; and those magnitudes."""
    tops = rows.abs().amax(-1, keepdim=True)
    wide = rows.double() if rows.dtype == torch.float64 else rows.float()
    return wide / torch.where(tops == 0, 1, tops).to(wide.dtype), tops


def _absolute(relative: Tensor, tops: Tensor) -> Tensor:
    return relative.mul_(tops.to(relative.dtype)).to(tops.dtype)


def _work_dtype(tops: Tensor) -> torch.dtype:
    return torch.float64 if tops.dtype == torch.float64 else torch.float32


class Int8:
    """LOSSY. Whole numbers from -127 to 127, evenly spaced in each row: an error of at most top / 254."""

    bits = 8

    def encode(self, rows: Tensor) -> Encoded:
        relative, tops = _relative(rows)
        return Encoded(relative.mul_(127).round_().to(torch.int8), tops, (rows.shape[0], rows.shape[1]))

    def decode(self, encoded: Encoded) -> Tensor:
        # The quotient first: 127 / 127 is exactly one.
        return _absolute(encoded.codes.to(_work_dtype(encoded.tops)).div_(127), encoded.tops)


class Fp8:
    """LOSSY. Eight-bit floats (e4m3) over the row's largest magnitude: an error of at most 1/16 of each element."""

    bits = 8

    def encode(self, rows: Tensor) -> Encoded:
        relative, tops = _relative(rows)
        return Encoded(relative.mul_(448).to(torch.float8_e4m3fn), tops, (rows.shape[0], rows.shape[1]))

    def decode(self, encoded: Encoded) -> Tensor:
        return _absolute(encoded.codes.to(_work_dtype(encoded.tops)).div_(448), encoded.tops)


class Int4:
    """LOSSY. Whole numbers from -7 to 7, two to a byte: an error of at most top / 14."""

    bits = 4

    def encode(self, rows: Tensor) -> Encoded:
        relative, tops = _relative(rows)
        codes = relative.mul_(7).round_().add_(8).to(torch.uint8).flatten()
        if codes.numel() % 2:
            codes = F.pad(codes, (0, 1))
        return Encoded(codes[0::2] | (codes[1::2] << 4), tops, (rows.shape[0], rows.shape[1]))

    def decode(self, encoded: Encoded) -> Tensor:
        codes = torch.stack((encoded.codes & 15, encoded.codes >> 4), -1).flatten()
        count = encoded.shape[0] * encoded.shape[1]
        relative = codes[:count].view(encoded.shape).to(_work_dtype(encoded.tops)).sub_(8).div_(7)
        return _absolute(relative, encoded.tops)


CODECS: dict[str, Codec] = {"int8": Int8(), "fp8": Fp8(), "int4": Int4()}
"""By name. All of them are lossy."""


def codec_named(name: str) -> Codec:
    """A codec.

    Raises:
        ConfigError: none of :data:`CODECS`.
    """
    if name not in CODECS:
        near = nearest_name(str(name).lower(), tuple(CODECS))
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"codec={name!r} is not one of {', '.join(CODECS)} (all of them lossy), or none{hint}")
    return CODECS[name]
