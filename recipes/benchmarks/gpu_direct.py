"""Checks of ``gpu_check.py`` on a chain of blocks, without a Trainer: what is planned, moved, compressed, pooled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from budgets import points
from chains import Chain, mib
from gpu_cases import Size
from kept_otherwise import AS_IT_IS, HOST, measure_ways

from lightning_megapar.memory import GradientStash, make_arena
from lightning_megapar.memory.blocks import ALL, OPTIONS
from lightning_megapar.memory.codecs import CODECS
from lightning_megapar.memory.compression_options import GRADIENT_COSINES

Check = Callable[[Size, torch.device], dict[str, Any]]
AGAIN = "all, once more"
LAYERS = 4
ROUNDS = 3


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside, kernels add up in one order, where there are such kernels."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def check_peaks(size: Size, device: torch.device) -> dict[str, Any]:
    """Planned peaks beside measured ones (on CUDA those of torch's allocator)."""
    torch.manual_seed(0)
    chain = Chain(size.chain(2 * LAYERS), device, torch.bfloat16)
    found = points(chain, chain.costs(), (0.0, 0.3, 0.6, 1.0))
    ratios = [one["measured_bytes"] / one["planned_bytes"] for one in found]
    said = ", ".join(
        f"{mib(one['measured_bytes'])} of planned {mib(one['planned_bytes'])} in {mib(one['budget_bytes'])}"
        for one in found
    )
    return {
        "is_ok": all(one["is_within"] and one["is_close"] for one in found),
        "note": f"MiB: {said}; measured to planned {min(ratios):.3f} to {max(ratios):.3f}",
        "points": found,
    }


def check_options(size: Size, device: torch.device) -> dict[str, Any]:
    """Gradients of each option, dropout included, to the last bit."""
    chain = Chain(size.chain(LAYERS, dropout=0.1), device, torch.bfloat16)
    found: dict[str, bool] = {}
    exact: list[torch.Tensor] = []
    with deterministic():
        for name in (ALL, AGAIN, *OPTIONS[1:]):
            option = ALL if name == AGAIN else name
            chain.choose([option] * LAYERS)
            torch.manual_seed(1)
            gradients = chain.gradients()
            exact = exact or gradients
            found[name] = all(map(torch.equal, gradients, exact))
    unlike = [option for option in OPTIONS if not found[option]]
    note = f"{'not ' * bool(unlike)}bit-equal to keeping all: {', '.join(unlike or OPTIONS[1:])}"
    if not found[AGAIN]:
        note += "; nor are two runs that keep all: kernels here add up in any order"
    return {"is_ok": not unlike or not found[AGAIN], "note": note, "equal": found}


def check_offload(size: Size, device: torch.device) -> dict[str, Any]:
    """Saved tensors on the host and back."""
    torch.manual_seed(0)
    chain = Chain(size.chain(LAYERS), device, torch.bfloat16)
    with deterministic():
        ways = measure_ways(chain, (HOST,), ROUNDS)
    here, there = ways[AS_IT_IS], ways[HOST]
    is_equal = there["gradients_are_equal"]
    said = "bit-equal" if is_equal else "DIFFER" if here["gradients_are_equal"] else "differ, as those of two runs do"
    return {
        "is_ok": (is_equal or not here["gradients_are_equal"]) and there["host_bytes"] > 0,
        "note": f"gradients {said}; {mib(there['host_bytes'])} MiB moved, peak "
        f"{mib(there['peak_bytes'])} for {mib(here['peak_bytes'])}, step {there['step']['wall']:.2f}",
        "ways": ways,
    }


def check_compression(size: Size, device: torch.device) -> dict[str, Any]:
    """Lossy codecs: bytes, and how far gradients turn."""
    torch.manual_seed(0)
    chain = Chain(size.chain(LAYERS), device, torch.bfloat16)
    with deterministic():
        ways = measure_ways(chain, tuple(CODECS), ROUNDS)
    full = ways[AS_IT_IS]["kept_bytes"]
    said = ", ".join(
        f"{name} {ways[name]['kept_bytes'] / full:.2f} of the bytes, cosine {ways[name]['cosine']:.5f}, "
        f"step {ways[name]['step']['wall']:.2f}"
        for name in CODECS
    )
    is_ok = all(ways[name]["cosine"] >= GRADIENT_COSINES[name][0] for name in CODECS)
    return {"is_ok": is_ok, "note": said, "ways": ways}


def check_arena(size: Size, device: torch.device) -> dict[str, Any]:
    """Gradients in an arena of the device (on CUDA a pool of torch's allocator), and what is left of them.

    The last one: on a GPU it lets the segments of the whole process expand.
    """
    torch.manual_seed(0)
    chain = Chain(size.chain(LAYERS), device, torch.bfloat16)
    arena = make_arena(device)
    if arena is None:
        return {"is_ok": True, "note": f"a {device.type} device has no arena"}
    stash = GradientStash(arena)
    parameters = list(chain.blocks.parameters())
    chain.choose([ALL] * LAYERS)

    def clear() -> None:
        for parameter in parameters:
            parameter.grad = None

    with deterministic():
        clear()
        chain.step()
        exact = [parameter.grad for parameter in parameters]
        is_equal = True
        for _ in range(4):
            clear()
            with stash.step(parameters):
                chain.step()
            is_equal &= all(torch.equal(p.grad, g) for p, g in zip(parameters, exact))  # type: ignore[arg-type]
    inside = arena.stats()
    strided = arena.empty((3, 5), torch.float32, (1, 3))
    is_usable = strided.stride() == (1, 3) and torch.equal(arena.clone(strided.zero_()), torch.zeros_like(strided))
    del strided
    clear()
    left = arena.stats()
    return {
        "is_ok": is_equal and is_usable and inside.allocated_bytes > 0 and left.allocated_bytes == 0,
        "note": f"{type(arena).__name__}: gradients {'bit-equal' if is_equal else 'DIFFER'}; "
        f"{mib(inside.allocated_bytes)} MiB of {mib(inside.capacity)}, {mib(left.allocated_bytes)} left behind, "
        f"overflow {mib(inside.overflow_bytes)}",
        "stats": vars(inside),
    }


CHECKS: dict[str, Check] = {
    "planned and measured peaks": check_peaks,
    "gradients of every option": check_options,
    "offload to the host": check_offload,
    "compressed activations": check_compression,
    "arena of gradients": check_arena,
}
