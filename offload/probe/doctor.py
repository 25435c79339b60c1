"""What on this machine prevents or slows training, with fixes; reports contain nothing private.

All findings take some ten seconds: a file of 128 MiB is written and read. All but the disk is read
from /proc and /sys below a root, so tests give a folder of their own.
"""

import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from offload.engine.host.limits import free_host_bytes
from offload.engine.host.nvml import Driver, Gpu, Link, find_driver
from offload.errors import MachineError
from offload.plan.machine.machine import GIB, Rate
from offload.probe.load import Watch
from offload.probe.machine import disk_rate, installed_version, pinned_bytes
from offload.probe.versions import untested


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something about this machine, and what to do about it."""

    name: str  # what was inspected
    value: str  # what was found, in words that may be shown to anyone
    # "error" is what makes training impossible; a "warning" may make it slow.
    status: Literal["ok", "warning", "error"] = "ok"
    hint: str = ""  # the fix; empty if there is nothing to fix


def finding(name: str, value: str, *, warning: str | None = None) -> Finding:
    """Return a finding, which is a warning if it has a fix."""
    if warning is None:
        return Finding(name=name, value=value)
    return Finding(name=name, value=value, status="warning", hint=warning)


# ---------------------------------------------------------------------------------------------
# The host: kernel, WSL2, processor, memory, swap, page locks and the cache disk.
#
# All but the disk is read from /proc and /sys below a root, so tests give a folder of their own.

MIN_FREE_FRAC = 0.5
MAX_SWAPPED_BYTES = 256 * 2**20
MIN_DISK_BYTES_PER_S = 1e9  # a SATA drive has half of it, an NVMe drive several times as much


def system(root: Path, *, kernel: str, processor: str) -> Finding:
    """Report the operating system.

    Args:
        root: The folder that has `proc`.
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


def processor(root: Path, *, num_allowed: int, others_frac: float | None) -> Finding:
    """Report the processor, and whether other programs take much of it.

    Args:
        root: The folder that has `proc`.
        num_allowed: Processors that this process may run on.
        others_frac: The share of their time that others take; None if it is little.
    """
    info = _text(root / "proc/cpuinfo")
    model = re.search(r"(?m)^model name\s*:\s*(.+)$", info)
    value = f"{model[1] if model else 'unknown'}, {num_allowed} CPUs"
    if others_frac is None:
        return finding("processor", value)
    return finding(
        "processor",
        f"{value}, of which other programs take {others_frac:.0%}",
        warning="close what else computes (`top`): rates are measured when a run starts",
    )


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


NVIDIA = "0x10de"  # the vendor's number on PCI
DISPLAY = ("0x0300", "0x0302")  # PCI classes of cards with and without a monitor's plug
# GB/s of one lane in one direction, by generation.
LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
MAX_USED_FRAC = 0.25

_ON_CPU = "training runs on the CPU, at a small part of a GPU's rate"
_PREDICTED = "`sluice plan RECIPE --machine rtx4090` predicts for a card without having it"


def driver_finding(driver: Driver | None, *, root: Path) -> Finding:
    """Report the driver, or the consequence of having none.

    Args:
        driver: From `find_driver`.
        root: Where /sys is found.
    """
    if driver is None:
        if has_nvidia_card(root):
            return finding(
                "GPU",
                f"no CUDA device: an NVIDIA card is there, and no driver answers, so {_ON_CPU}",
                warning="install NVIDIA's driver and restart; in a container `docker run --gpus"
                " all`",
            )
        return finding(
            "GPU",
            f"no CUDA device: there is no NVIDIA driver here, so {_ON_CPU}",
            warning=f"with an NVIDIA card, install its driver; {_PREDICTED}",
        )
    value = f"driver {driver.version}, for CUDA up to {'.'.join(map(str, driver.cuda))}"
    if not driver.gpus:
        return finding(
            "GPU",
            f"no CUDA device: {value}, with no card, so {_ON_CPU}",
            warning="look at `nvidia-smi`; in a container `docker run --gpus all`",
        )
    return finding("GPU", value)


def has_nvidia_card(root: Path) -> bool:
    """Return whether an NVIDIA card is on the PCI bus."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:  # hidden from a container
            continue
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            return True
    return False


def card_findings(gpus: Sequence[Gpu]) -> list[Finding]:
    """Report each card's memory, and who else uses it."""
    return [_card(gpu, number) for number, gpu in enumerate(gpus)]


def link_findings(gpus: Sequence[Gpu], *, are_busy: bool) -> list[Finding]:
    """Report each card's link against what card and slot can.

    Args:
        gpus: As they were read.
        are_busy: Whether they were read during copies: an idle card slows its link.
    """
    return [
        _link(gpu.link, number, is_busy=are_busy)
        for number, gpu in enumerate(gpus)
        if gpu.link is not None
    ]


def _card(gpu: Gpu, number: int) -> Finding:
    value = (
        f"{gpu.name}, sm_{gpu.capability[0]}{gpu.capability[1]},"
        f" {shown(gpu.memory_bytes - gpu.used_bytes)} free of {shown(gpu.memory_bytes)}"
    )
    if gpu.num_processes:
        value += f", {gpu.num_processes} other processes compute on it"
    is_shared = bool(gpu.num_processes) or gpu.used_bytes > MAX_USED_FRAC * gpu.memory_bytes
    fix = "`nvidia-smi` names what uses the card; end it, for a plan counts on what is free"
    return finding(f"GPU {number}", value, warning=fix if is_shared else None)


def _link(link: Link, number: int, *, is_busy: bool) -> Finding:
    name = f"GPU {number} link"
    best = f"{link.max_generation}.0 x{link.max_width}"
    value = f"PCIe {link.generation}.0 x{link.width}"
    is_narrow, is_slow = link.width < link.max_width, link.generation < link.max_generation
    if not is_narrow and not is_slow:
        return finding(name, f"{value}, all that card and slot can{_rate(link)}")
    if not is_narrow and not is_busy:
        return finding(
            name, f"{value} while idle, of {best}: a card raises it once something is copied"
        )
    lanes = (
        "move the card to the slot next to the processor, or whatever shares its lanes (an M.2"
        " drive, a second card) elsewhere; a riser must be made for the generation"
    )
    bios = (
        "set the slot's PCIe generation to Auto in the BIOS, reseat the card, try without a riser"
    )
    return finding(
        name,
        f"{value} of {best}{_rate(link)}: copies take longer in proportion",
        warning=lanes if is_narrow else bios,
    )


def _rate(link: Link) -> str:
    """Return a link's rate in words; empty for an unknown generation."""
    gb_per_s = LANE_GB_PER_S.get(link.generation)
    return "" if gb_per_s is None else f", at most {gb_per_s * link.width:.1f} GB/s each way"


PACKAGE = "sluice-finetune"
NEEDED = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "datasets", "numpy")
OPTIONAL = ("triton",)


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild:
    """What torch was built for."""

    version: str  # the version of torch
    cuda: str | None  # the CUDA version that it was built with; None for a build for CPUs
    sees_cuda: bool  # whether it finds a device
    # What its kernels were compiled for: sm_90, or compute_90 for any later one.
    architectures: tuple[str, ...]


def torch_build() -> TorchBuild | str:
    """Import torch, and return its build, or why it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:  # it is missing, or one of its libraries is
        return without_paths(f"{type(error).__name__}: {error}", home=Path.home())
    sees_cuda = torch.cuda.is_available()
    return TorchBuild(
        version=torch.__version__,
        cuda=torch.version.cuda,
        sees_cuda=sees_cuda,
        architectures=tuple(torch.cuda.get_arch_list()) if sees_cuda else (),
    )


def torch_finding(build: TorchBuild | str, driver: Driver | None) -> Finding:
    """Report whether torch can compute on this machine's GPUs.

    Args:
        build: From `torch_build`.
        driver: From `find_driver`; None where there is none.
    """
    name = "torch"
    if isinstance(build, str):
        return Finding(
            name=name,
            value=f"cannot be imported: {build}",
            status="error",
            hint="`pip install --force-reinstall torch`, as https://pytorch.org/get-started says",
        )
    made_for = "for CPUs" if build.cuda is None else f"for CUDA {build.cuda}"
    value = f"{build.version}, built {made_for}"
    gpus = driver.gpus if driver is not None else ()
    if driver is None or not gpus:
        return finding(name, value)
    if build.cuda is None:
        return finding(
            name,
            f"{value}, so the GPU is not used",
            warning="install a CUDA build: https://pytorch.org/get-started",
        )
    if not build.sees_cuda:
        newest = ".".join(map(str, driver.cuda))
        return finding(
            name,
            f"{value}, and sees no CUDA device; the driver runs CUDA up to {newest}",
            warning="update the driver, or install a torch that was built for its CUDA;"
            " `unset CUDA_VISIBLE_DEVICES` if that hides the card",
        )
    unfit = [gpu for gpu in gpus if not fits(gpu.capability, build.architectures)]
    if unfit:
        return Finding(
            name=name,
            value=f"{value}, without kernels for {unfit[0].name} ({_sm(unfit[0])}); it has"
            f" {', '.join(build.architectures)}",
            status="error",
            hint="install a torch that was built for this card: https://pytorch.org/get-started",
        )
    return finding(name, f"{value}, with kernels for {', '.join(sorted({*map(_sm, gpus)}))}")


def fits(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return whether a card runs kernels that were compiled for these architectures.

    sm_86 runs on 8.6 and 8.9, and not on 9.0; compute_86 is compiled for any card from 8.6 on when
    it is loaded.
    Source: CUDA C++ programming guide, binary and PTX compatibility.
    """
    for architecture in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if found is None:
            continue
        made_for = int(found[2]), int(found[3])
        if found[4] == "a":
            if capability == made_for:
                return True
        elif capability >= made_for and (found[1] == "compute" or capability[0] == made_for[0]):
            return True
    return False


def versions(version_of: Callable[[str], str | None], *, python: str, has_gpu: bool) -> Finding:
    """Report the versions of Python and the packages in use.

    Args:
        version_of: Of an installed package; None for one that is not.
        python: Of Python.
        has_gpu: Whether experts may be computed by Triton.
    """
    found = {name: version_of(name) for name in (PACKAGE, *NEEDED, *OPTIONAL)}
    value = f"python {python}, sluice {found.pop(PACKAGE) or '(a checkout)'}, {_listed(found)}"
    missing = [name for name in NEEDED if found[name] is None]
    if missing:
        return Finding(
            name="versions",
            value=value,
            status="error",
            hint=f"`pip install {' '.join(missing)}`",
        )
    lacks_triton = has_gpu and found["triton"] is None
    warning = "`pip install triton`" if lacks_triton else untested(found["transformers"])
    return finding("versions", value, warning=warning)


def without_paths(text: str, *, home: Path) -> str:
    """Return a message with only the last part of each path: folders may name a user."""
    text = text.replace(str(home), "~")
    return re.sub(r"(?:~|[\w.-]*)/(?:[^\s:'\"/]+/)*([^\s:'\"/]*)", r"\1", text)


def _listed(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())


def _sm(gpu: Gpu) -> str:
    return "sm_{}{}".format(*gpu.capability)


DISK_S, DISK_BYTES = 0.5, 128 * 2**20
NUM_COPIES, COPY_BYTES = 100, 64 * 2**20  # 0.1 s on the fastest link, some seconds on a slow one
RAMP_S = 0.05  # a card raises its link within some milliseconds


def check_up(
    folder: Path, *, root: Path = Path("/"), find: Callable[[], Driver | None] = find_driver
) -> tuple[Finding, ...]:
    """Inspect this machine, and test what cannot be read.

    Args:
        folder: Where stores of weights are kept; a file is written there and removed.
        root: The folder that has `proc` and `sys`.
        find: Returns the driver and its GPUs.
    """
    of_system = system(root, kernel=platform.system(), processor=platform.machine())
    if of_system.status == "error":
        return (of_system,)
    watch = Watch(root)
    driver = find()  # before this process computes on a card itself
    gpus = driver.gpus if driver is not None else ()
    build = torch_build()
    has_torch = isinstance(build, TorchBuild)
    has_cuda = isinstance(build, TorchBuild) and build.sees_cuda
    loaded = _while_copying(driver, find) if has_cuda and driver is not None else None
    rate = disk_rate(folder, seconds=DISK_S, file_bytes=DISK_BYTES) if has_torch else None
    there = next(place for place in (folder, *folder.parents) if place.exists())
    found = [
        of_system,
        wsl_memory(root),
        versions(installed_version, python=platform.python_version(), has_gpu=bool(gpus)),
        torch_finding(build, driver),
        driver_finding(driver, root=root),
        *card_findings(gpus),
        *link_findings(loaded.gpus if loaded else gpus, are_busy=loaded is not None),
        _page_locks(root, has_cuda=has_cuda),
        processor(
            root,
            num_allowed=len(os.sched_getaffinity(0)),
            others_frac=watch.others_frac(),
        ),
        governor(root),
        memory(root),
        swap(root),
        disk(rate, free_bytes=shutil.disk_usage(there).free) if has_torch else None,
    ]
    return tuple(one for one in found if one is not None)


def _while_copying(driver: Driver, find: Callable[[], Driver | None]) -> Driver | None:
    """Read the GPUs again while copies to each of them run; None if that was not possible."""
    import torch

    if torch.cuda.device_count() != len(driver.gpus):
        return None
    try:
        events = [_copies_to(index) for index in range(len(driver.gpus))]
        time.sleep(RAMP_S)
        busy = find()
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
    return page_locks(
        None if soft == resource.RLIM_INFINITY else soft,
        lockable_bytes=pinned_bytes(free_bytes) if has_cuda else None,
        free_bytes=free_bytes,
        is_wsl=is_wsl(root),
    )
