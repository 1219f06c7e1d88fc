"""Which kernels torch's attention may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def attention_kernels() -> tuple[bool, ...]:
    """Whether each kernel is allowed now, as ``torch.nn.attention.sdpa_kernel`` says for its body."""
    flags = torch.backends.cuda
    return (
        flags.flash_sdp_enabled(),
        flags.mem_efficient_sdp_enabled(),
        flags.math_sdp_enabled(),
        flags.cudnn_sdp_enabled(),
    )


@contextmanager
def allowed_kernels(allowed: tuple[bool, ...]) -> Iterator[None]:
    """Inside, those kernels that :func:`attention_kernels` found allowed before."""
    outside = attention_kernels()
    if outside == allowed:
        yield
        return
    _choose(allowed)
    try:
        yield
    finally:
        _choose(outside)


def _choose(allowed: tuple[bool, ...]) -> None:
    flags = torch.backends.cuda
    choices = (flags.enable_flash_sdp, flags.enable_mem_efficient_sdp, flags.enable_math_sdp, flags.enable_cudnn_sdp)
    for choose, allow in zip(choices, allowed, strict=True):
        choose(allow)
