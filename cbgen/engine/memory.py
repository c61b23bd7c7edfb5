"""How much memory is free: on a GPU the driver knows, on a CPU RAM and cgroup do."""

from __future__ import annotations

from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
_FALLBACK_BYTES = 4 * 1024**3
"""Assumed free memory where the system does not tell."""


def free_bytes(device: torch.device) -> int:
    """Return the bytes that new tensors may take on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _available_ram()
    limits = [left for left in map(_cgroup_left, _CGROUP_FILES) if left is not None]
    return min([available, *limits])


def _available_ram() -> int:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return _FALLBACK_BYTES
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return _FALLBACK_BYTES


def _cgroup_left(files: tuple[str, str]) -> int | None:
    limit_file, usage_file = files
    try:
        limit = Path(limit_file).read_text().strip()
        usage = int(Path(usage_file).read_text())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - usage)
