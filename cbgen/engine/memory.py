"""How much memory is free: on a GPU the driver knows, on a CPU RAM and control groups do.

A control group bounds the processes in it and in the groups below, so the tightest of all groups
from the process's own up to the root counts. Files that were read and can be dropped again are
charged to a group; they count as free here, as they do in the system's MemAvailable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

_FALLBACK_BYTES = 4 * 1024**3
"""Assumed free memory where the system does not tell."""


class _Controller(NamedTuple):
    """Names of one version of control groups."""

    mount: str
    """Below the root of control groups."""
    limits: tuple[str, ...]
    usage: str
    droppable: str
    """Key of memory.stat: bytes of files that nobody used lately."""


_V2 = _Controller("", ("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1 = _Controller(
    "memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that new tensors may take on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_ram()


def free_ram(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of RAM that this process may still take.

    Args:
        proc: where the system tells about memory and processes.
        cgroups: root of the control groups.
    """
    left = [_available(proc / "meminfo"), *_left_in_groups(proc / "self" / "cgroup", cgroups)]
    return min(left)


def _available(meminfo: Path) -> int:
    """Return MemAvailable: what can be had without swapping."""
    available = _number(meminfo, "MemAvailable:")
    return _FALLBACK_BYTES if available is None else available * 1024


def _left_in_groups(own_groups: Path, root: Path) -> Iterator[int]:
    for controller, group in _groups_of_process(own_groups):
        mount = root / controller.mount
        # Inside a container the path may be that of the host: what is not there is passed over.
        parts = [part for part in Path(group).parts if part not in ("/", "..")]
        for depth in range(len(parts) + 1):
            left = _left_in_group(mount.joinpath(*parts[:depth]), controller)
            if left is not None:
                yield left


def _groups_of_process(own_groups: Path) -> Iterator[tuple[_Controller, str]]:
    """Yield the groups that bound this process's memory: lines `number:controllers:path`."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        lines = ["0::/", "1:memory:/"]
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield _V2, path
        elif "memory" in controllers.split(","):
            yield _V1, path


def _left_in_group(folder: Path, controller: _Controller) -> int | None:
    limits = [_number(folder / name) for name in controller.limits]
    given = [limit for limit in limits if limit is not None]
    usage = _number(folder / controller.usage)
    if not given or usage is None:
        return None
    droppable = _number(folder / "memory.stat", controller.droppable) or 0
    return max(0, min(given) - max(0, usage - droppable))


def _number(path: Path, name: str = "") -> int | None:
    """Return the number that a file holds, or that of its line `name`; None if there is none."""
    try:
        text = path.read_text()
    except OSError:
        return None
    found = re.search(rf"^{name}\s*(\d+)\b", text, re.MULTILINE)
    return None if found is None else int(found[1])
