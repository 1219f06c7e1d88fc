"""How much memory a device has left for a rank."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_megapar.config import ConfigError


def begin_watch(device: torch.device) -> None:
    """Forget the most memory that this process has had so far, as far as the system lets it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # another system, or not allowed: the peak so far counts on
        pass


def spare_bytes(device: torch.device, ranks: int, reserve: float) -> int:
    """Bytes that this rank could use beyond the most that it has had since :func:`begin_watch`.

    On CUDA what the device has beyond the peak of torch's allocator and what others hold there; elsewhere this rank's
    part of what the machine has left, within the limits of its control group.

    Args:
        device: of this rank.
        ranks: that share it, or the machine's memory.
        reserve: share of the whole that is left alone.

    Raises:
        ConfigError: the system does not tell.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        return max(0, int(total * (1 - reserve)) - others - torch.cuda.max_memory_reserved(device))
    total, available = machine()
    held, most = process()
    return max(0, int((available - total * reserve) / ranks) - (most - held))


def machine() -> tuple[int, int]:
    """Bytes of memory that there is, and that is available, within the limits of the control group.

    Raises:
        ConfigError: the system does not tell.
    """
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        raise ConfigError(
            "recompute='auto': this system does not tell how much memory is left; give a budget, such as "
            "recompute={mode: auto, budget_bytes: 4e9}"
        ) from None
    total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit, used = (_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit is not None and used is not None:
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def process() -> tuple[int, int]:
    """Resident bytes of this process, now and at most."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    held, most = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return held, most
