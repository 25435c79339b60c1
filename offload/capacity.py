"""How much memory there is: free host memory within cgroups, page locks, a CUDA context."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from offload.errors import MachineError

MIB = 2**20
LEAST_REHEARSED_BYTES, MAX_REHEARSED_BYTES = 256 * MIB, 4096 * MIB
HOLD_CONTEXT = (
    "import sys, torch; torch.zeros(1, device='cuda'); print(flush=True); sys.stdin.read()"
)


def free_host_bytes(root: Path) -> int:
    """Return the memory that this process may still take: what is available, within its cgroups.

    Raises:
        MachineError: The kernel's account of its memory cannot be read.
    """
    return min([_available_bytes(root), *_cgroup_free_bytes(root)])


def load_per_cpu() -> float | None:
    """Return how many processes wanted each processor in the last minute; None if none tells."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return None


def _available_bytes(root: Path) -> int:
    path = root / "proc/meminfo"
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
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
    """Yield what is left under a limit, page cache that can be dropped not counted as used."""
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


def cuda_context_bytes() -> int:
    """Measure a CUDA context: start one in another process and see what it takes."""
    import torch

    torch.zeros(1, device="cuda")
    before_bytes, _ = torch.cuda.mem_get_info()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_CONTEXT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        is_ready = bool(other.stdout.readline())
        during_bytes, _ = torch.cuda.mem_get_info()
        other.communicate()
    if not is_ready:
        raise MachineError(
            f"a second process got no CUDA context (exit status {other.returncode})",
            limit="its size is measured by starting one",
            hint="look at `nvidia-smi`: the card may be in exclusive mode or full",
        )
    return max(0, before_bytes - during_bytes)


def pinned_bytes(ram_bytes: int) -> int:
    """Return what can be page-locked: rehearse some sizes; above them only memory limits it."""
    import torch

    from offload.engine.host.pagelock import largest_lockable, open_locker

    locker = open_locker(torch.device("cuda"), fd=None)
    assert locker is not None
    most_bytes = min(MAX_REHEARSED_BYTES, ram_bytes // 2)
    worked_bytes, _ = largest_lockable(most_bytes, LEAST_REHEARSED_BYTES, locker)
    return ram_bytes if worked_bytes == most_bytes else worked_bytes
