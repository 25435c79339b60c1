"""How much memory this process uses and may still allocate, within its cgroups."""

import os
from collections.abc import Iterator
from pathlib import Path

from offload.errors import MachineError


def free_host_bytes(root: Path) -> int:
    """Return the memory that this process may still allocate, within its cgroups.

    Raises:
        MachineError: The kernel's memory statistics cannot be read.
    """
    return min([_meminfo_bytes(root, "MemAvailable"), *_cgroup_free_bytes(root)])


def others_host_bytes(root: Path) -> int:
    """Return the memory that the system and other programs have; 0 where a cgroup is the limit.

    Raises:
        MachineError: The kernel's memory statistics cannot be read.
    """
    available_bytes = _meminfo_bytes(root, "MemAvailable")
    if free_host_bytes(root) < available_bytes:
        return 0
    return max(0, _meminfo_bytes(root, "MemTotal") - available_bytes - resident_bytes())


def _meminfo_bytes(root: Path, name: str) -> int:
    path = root / "proc/meminfo"
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise MachineError(
        f"{path} does not tell the available memory",
        limit="Linux or WSL2 is needed",
        hint="plan with a named machine: `--machine rtx4090`",
    )


def _cgroup_free_bytes(root: Path) -> Iterator[int]:
    """Yield limit minus use of each memory cgroup around this process, of version 2 and 1."""
    path = root / "proc/self/cgroup"
    for line in path.read_text().splitlines() if path.exists() else ():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif controllers == "memory":
            base = root / "sys/fs/cgroup/memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / name.lstrip("/")
        for place in (group, *group.parents):
            if place.is_relative_to(base) and (place / limit).exists():
                yield from _limit_less_use(place, limit, usage)


def _limit_less_use(group: Path, limit: str, usage: str) -> Iterator[int]:
    """Yield what is left under a limit; page cache that can be dropped does not count as used."""
    text = (group / limit).read_text().strip()
    if text == "max" or not (group / usage).exists():
        return
    stat = (group / "memory.stat").read_text() if (group / "memory.stat").exists() else ""
    counts = dict(line.split() for line in stat.splitlines())
    cache = int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
    yield max(0, int(text) - int((group / usage).read_text()) + cache)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
