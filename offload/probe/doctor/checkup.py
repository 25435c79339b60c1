"""All findings of this machine, in some ten seconds: a file of 128 MiB is written and read."""

import os
import platform
import shutil
import time
from pathlib import Path
from typing import Any

from offload.engine.host.limits import free_host_bytes
from offload.engine.host.nvml import Driver, find_driver
from offload.errors import MachineError
from offload.plan.machine.machine import Rate
from offload.probe.doctor import gpu, software, system
from offload.probe.doctor.finding import Finding
from offload.probe.doctor.software import TorchBuild
from offload.probe.memory import pinned_bytes

DISK_S, DISK_BYTES = 0.5, 128 * 2**20
NUM_COPIES, COPY_BYTES = 100, 64 * 2**20  # 0.1 s on the fastest link, some seconds on a slow one
RAMP_S = 0.05  # a card raises its link within some milliseconds


def check_up(folder: Path, *, root: Path = Path("/"), nvml: Any = None) -> tuple[Finding, ...]:
    """Inspect this machine, and test what cannot be read.

    Args:
        folder: Where stores of weights are kept; a file is written there and removed.
        root: Where /proc and /sys are found.
        nvml: As for `find_driver`.
    """
    of_system = system.system(root, kernel=platform.system(), processor=platform.machine())
    if of_system.status == "error":
        return (of_system,)
    driver = find_driver(nvml)  # before this process computes on a card itself
    gpus = driver.gpus if driver is not None else ()
    build = software.torch_build()
    has_torch = isinstance(build, TorchBuild)
    has_cuda = isinstance(build, TorchBuild) and build.sees_cuda
    loaded = _while_copying(driver, nvml) if has_cuda and driver is not None else None
    found = [
        of_system,
        system.wsl_memory(root),
        software.versions(
            software.installed_version, python=platform.python_version(), has_gpu=bool(gpus)
        ),
        software.torch_finding(build, driver),
        gpu.driver_finding(driver, root=root),
        *gpu.card_findings(gpus),
        *gpu.link_findings(loaded.gpus if loaded else gpus, are_busy=loaded is not None),
        _page_locks(root, has_cuda=has_cuda),
        system.processor(root, num_allowed=len(os.sched_getaffinity(0))),
        system.governor(root),
        system.memory(root),
        system.swap(root),
        system.disk(_disk_rate(folder), free_bytes=_room(folder)) if has_torch else None,
    ]
    return tuple(one for one in found if one is not None)


def _while_copying(driver: Driver, nvml: Any) -> Driver | None:
    """Read the GPUs again while copies to each of them run; None if that was not possible."""
    import torch

    if torch.cuda.device_count() != len(driver.gpus):
        return None
    try:
        events = [_copies_to(index) for index in range(len(driver.gpus))]
        time.sleep(RAMP_S)
        busy = find_driver(nvml)
        for event in events:
            event.synchronize()
    except RuntimeError:  # no memory, no page locks, or a GPU in exclusive use
        return None
    return busy


def _copies_to(index: int) -> Any:
    """Queue copies from page-locked memory to a device; return the event after the last."""
    import torch

    with torch.cuda.device(index):
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        for _ in range(NUM_COPIES):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return event


def _page_locks(root: Path, *, has_cuda: bool) -> Finding:
    import resource  # does not exist on Windows

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        free_bytes = free_host_bytes(root)
    except MachineError:
        free_bytes = 0
    return system.page_locks(
        None if soft == resource.RLIM_INFINITY else soft,
        lockable_bytes=pinned_bytes(free_bytes) if has_cuda else None,
        free_bytes=free_bytes,
        is_wsl=system.is_wsl(root),
    )


def _disk_rate(folder: Path) -> Rate | None:
    from offload.probe.host import disk_rate

    return disk_rate(folder, seconds=DISK_S, file_bytes=DISK_BYTES)


def _room(folder: Path) -> int:
    """Return the free bytes where a folder is, or will be."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return shutil.disk_usage(there).free
