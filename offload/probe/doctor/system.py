"""The host: kernel, WSL2, processor, memory, swap, page locks and the cache disk.

All but the disk is read from /proc and /sys below a root, so tests give a folder of their own.
"""

import re
from pathlib import Path

from offload.engine.host.limits import free_host_bytes
from offload.errors import MachineError
from offload.plan.machine.machine import GIB, Rate
from offload.probe.doctor.finding import Finding, finding

MAX_LOAD_PER_CPU = 0.5  # above it, other programs disturb measured rates
MIN_FREE_FRAC = 0.5
MAX_SWAPPED_BYTES = 256 * 2**20
MIN_DISK_BYTES_PER_S = 1e9  # a SATA drive has half of it, an NVMe drive several times as much


def system(root: Path, *, kernel: str, processor: str) -> Finding:
    """Report the operating system.

    Args:
        root: Where /proc is found.
        kernel: Its name, as `platform.system` gives it.
        processor: Its architecture.
    """
    if kernel != "Linux":
        return Finding(
            name="system",
            value=f"{kernel} on {processor}",
            status="error",
            hint="train on Linux or WSL2; `sluice plan RECIPE --machine rtx4090` works anywhere",
        )
    release = re.match(r"\d+(\.\d+)*", _text(root / "proc/sys/kernel/osrelease"))
    version = f"Linux {release[0]}" if release else "Linux"
    return finding("system", f"{version} on {processor}{', WSL2' if is_wsl(root) else ''}")


def is_wsl(root: Path) -> bool:
    """Return whether this Linux runs inside Windows."""
    return "microsoft" in _text(root / "proc/sys/kernel/osrelease").lower()


def wsl_memory(root: Path) -> Finding | None:
    """Report what Windows gives to WSL2; None elsewhere."""
    if not is_wsl(root):
        return None
    total = shown(_meminfo(root).get("MemTotal", 0))
    limits = [
        found[1]
        for file in sorted(root.glob("mnt/*/Users/*/.wslconfig"))
        if (found := re.search(r"(?im)^\s*memory\s*=\s*(\w+)", _text(file)))
    ]
    if limits:
        return finding("WSL2 memory", f"{total}; .wslconfig sets memory={limits[0]}")
    return finding(
        "WSL2 memory",
        f"{total}; no .wslconfig sets a limit, so Windows gives half of its memory",
        warning=r"`memory=...GB` below [wsl2] in %UserProfile%\.wslconfig, then `wsl --shutdown`",
    )


def processor(root: Path, *, num_allowed: int) -> Finding:
    """Report the processor, and whether other programs want it.

    Args:
        root: Where /proc is found.
        num_allowed: Processors that this process may run on.
    """
    info = _text(root / "proc/cpuinfo")
    model = re.search(r"(?m)^model name\s*:\s*(.+)$", info)
    value = f"{model[1] if model else 'unknown'}, {num_allowed} CPUs"
    load = re.match(r"\d+\.\d+", _text(root / "proc/loadavg"))
    if load is None:
        return finding("processor", value)
    value += f", load {load[0]} in the last minute"
    is_busy = float(load[0]) > MAX_LOAD_PER_CPU * num_allowed
    close = "close what else computes (`top`): rates are measured when a run starts"
    return finding("processor", value, warning=close if is_busy else None)


def governor(root: Path) -> Finding | None:
    """Report the CPU frequency governor; None if the system does not report it.

    Under intel_pstate and amd-pstate-epp `powersave` follows the load, under other drivers it keeps
    the lowest clock.
    Source: Linux, Documentation/admin-guide/pm/{cpufreq,intel_pstate,amd-pstate}.rst.
    """
    policy = root / "sys/devices/system/cpu/cpu0/cpufreq"
    name, driver = _text(policy / "scaling_governor"), _text(policy / "scaling_driver")
    if not name:
        return None
    is_slow = name == "powersave" and driver not in ("intel_pstate", "amd-pstate-epp")
    return finding(
        "CPU governor",
        f"{name} ({driver or 'unknown driver'})",
        warning="`sudo cpupower frequency-set -g performance`" if is_slow else None,
    )


def memory(root: Path) -> Finding:
    """Report the memory that is free, within the process's cgroups."""
    info = _meminfo(root)
    try:
        free_bytes = free_host_bytes(root)
    except MachineError:
        return finding("memory", "the kernel does not report it", warning="use Linux or WSL2")
    total_bytes = info.get("MemTotal", 0)
    value = f"{shown(free_bytes)} free of {shown(total_bytes)}"
    fix = "close other programs: layers wait in this memory"
    if free_bytes < info.get("MemAvailable", 0) * 0.99:  # both change while they are read
        value += ", as much as the container's limit leaves"
        fix = "raise the container's limit: `docker run --memory ...`, `--mem` in Slurm"
    is_little = free_bytes < MIN_FREE_FRAC * total_bytes
    return finding("memory", value, warning=fix if is_little else None)


def swap(root: Path) -> Finding:
    """Report how much is swapped out."""
    info = _meminfo(root)
    used_bytes = info.get("SwapTotal", 0) - info.get("SwapFree", 0)
    is_used = used_bytes > MAX_SWAPPED_BYTES
    return finding(
        "swap",
        f"{shown(used_bytes)} in use of {shown(info.get('SwapTotal', 0))}",
        warning="close other programs, then `sudo swapoff -a && sudo swapon -a`: what is swapped"
        " out is read from the disk at each step"
        if is_used
        else None,
    )


def page_locks(
    limit_bytes: int | None, *, lockable_bytes: int | None, free_bytes: int, is_wsl: bool
) -> Finding:
    """Report how much memory may be page-locked, which copies to a GPU need.

    Args:
        limit_bytes: Of `ulimit -l`; None for no limit.
        lockable_bytes: Bytes that CUDA could lock in a trial; None without CUDA.
        free_bytes: Memory that could be locked.
        is_wsl: Whether Windows sets the limit.
    """
    limit = "unlimited" if limit_bytes is None else shown(limit_bytes)
    value = f"`ulimit -l` is {limit}"
    if lockable_bytes is None:
        return finding("page locks", f"{value}; it matters with a GPU only")
    if lockable_bytes >= free_bytes:
        return finding("page locks", f"all free memory can be locked; {value}")
    raised = "`ulimit -l unlimited`, in Docker `--ulimit memlock=-1`"
    return finding(
        "page locks",
        f"{shown(lockable_bytes)} can be locked; {value}",
        warning="Windows sets the limit, native Linux has none; layers go through a small locked"
        " ring"
        if is_wsl
        else raised,
    )


def disk(rate: Rate | None, *, free_bytes: int) -> Finding:
    """Report how fast the cache disk is read, where stores of weights are.

    Args:
        rate: Measured rate, bypassing the page cache; None if it could not be measured.
        free_bytes: Room on that disk.
    """
    room = f"{shown(free_bytes)} free"
    if rate is None:
        return finding(
            "cache disk",
            f"not measured: it takes 256 MiB of room and reads past the page cache; {room}",
            warning="free some space, or set XDG_CACHE_HOME to a folder on a local drive",
        )
    is_slow = rate.value < MIN_DISK_BYTES_PER_S
    return finding(
        "cache disk",
        f"reads at {rate.value / 1e9:.2f} GB/s; {room}",
        warning="set XDG_CACHE_HOME to a folder on an NVMe drive: encoded weights, and layers with"
        " `offload.tier: disk`, are read from there"
        if is_slow
        else None,
    )


def shown(num_bytes: int) -> str:
    """Write bytes in GiB, or in MiB where that would be nearly 0."""
    if num_bytes < GIB // 10:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / GIB:.1f} GiB"


def _meminfo(root: Path) -> dict[str, int]:
    """Return the kernel's memory statistics, in bytes."""
    found = re.findall(r"(?m)^(\w+):\s+(\d+) kB$", _text(root / "proc/meminfo"))
    return {name: 1024 * int(number) for name, number in found}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # missing, or hidden from a container
        return ""
